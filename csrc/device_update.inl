// The update rules as GPU kernels: OFFLOAD_KERNEL is one of the host's rule files. Compiled by
// offload/native/device_update.py.
#include "device.inl"

namespace offload {
namespace {

#include OFFLOAD_KERNEL

// 16 threads share a block of 128 elements: thread c has elements c, 16 + c ... 112 + c. Neighbours read neighbours, all
// elements of a thread have their random bits from one counter, and the scale of a block is found within a warp.
constexpr int kLanes = 16, kEach = 8;

template <template <class> class Rule, class Scalars, class Master, States kStates, class Grad>
struct Thread {
  static constexpr int kNum = Rule<Wide>::kNumMoments;
  static constexpr int64_t kBlock = kLanes * kEach;
  const UpdateArrays& a;
  const int64_t block;
  const int lane;
  float moments[kEach][kNum + 1];  // before the update, then after it
  int32_t most[2] = {0, 0};        // the bits of the largest magnitudes after it
  int64_t num_nonfinite = 0;

  Thread(const UpdateArrays& a, int64_t number)
      : a(a), block(number / kLanes), lane(static_cast<int>(number % kLanes)) {}
  int64_t place(int j) const { return block * kBlock + j * kLanes + lane; }

  Counters<Wide> draw() const {
    const uint64_t number = (a.moments.element / kBlock + static_cast<uint64_t>(block)) * kLanes + static_cast<uint64_t>(lane);
    Counters<Wide> drawn;
    drawn.words[0] = static_cast<uint32_t>(number);
    drawn.words[1] = number >> 32;
    drawn.words[2] = a.moments.draws.step;
    drawn.words[3] = a.moments.draws.purpose;
    for (const auto& key : Keys(a.moments.draws.key).of_round) drawn.round(key[0], key[1]);
    return drawn;
  }

  template <bool kIsSigned>
  float load_code(int which, int64_t i) const {
    const float scale = a.moments.scales[which][i / kBlock];
    const auto& map = kMap<kIsSigned>;
    using Block = typename ByteMoment<kIsSigned>::template Block<Wide>;
    const auto* codes = static_cast<const uint8_t*>(a.moments.values[which]);
    return Block{codes, nullptr, Wide::scaled(map.by, scale), Wide::scaled(map.from, scale), 0}.load(i);
  }
  float load(int which, int64_t i) const {
    if constexpr (kStates == States::int8) return which ? load_code<false>(which, i) : load_code<true>(which, i);
    if constexpr (kStates == States::bf16) return Wide::load_bf16(static_cast<uint16_t*>(a.moments.values[which]) + i);
    return static_cast<float*>(a.moments.values[which])[i];
  }

  void update(const Scalars& scalars, Master master) {
    const Rule<Wide> rule(scalars);
    Counters<Wide> drawn;
    if constexpr (kStates == States::bf16) drawn = draw();
    // All loads before the first store, which may alias them, so the loads would wait for it.
    float gradients[kEach], weights[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = place(j);
      if (i >= a.n) continue;  // a break would leave the loop as it is, and the arrays in memory
      for (int which = 0; which < kNum; ++which) moments[j][which] = load(which, i);
      gradients[j] = load_grad<Wide>(static_cast<const Grad*>(a.grad) + i);
      weights[j] = master.template load<Wide>(i);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = place(j);
      if (i >= a.n) continue;
      const float weight = rule(weights[j], moments[j], gradients[j]);
      master.template store<Wide>(i, weight);
      num_nonfinite += Wide::count_nonfinite(weight);
      for (int which = 0; which < kNum; ++which) {
        if constexpr (kStates == States::int8) {
          most[which] = Wide::max_int(most[which], Wide::bits(Wide::magnitude(moments[j][which])));
        } else if constexpr (kStates == States::bf16) {
          const auto word = static_cast<int32_t>(drawn.words[j / 2]);
          const auto random = j % 2 ? Wide::shift_right<16>(word) : Wide::low_half(word);
          Wide::store_bf16_between(static_cast<uint16_t*>(a.moments.values[which]) + i, moments[j][which], random);
        } else {
          static_cast<float*>(a.moments.values[which])[i] = moments[j][which];
        }
      }
    }
  }

  // With the largest magnitude of all the block's threads in `most`.
  template <bool kIsSigned>
  void quantise(int which) const {
    float inverse;
    const float scale = ByteMoment<kIsSigned>::scale_of(most[which], inverse);
    if (lane == 0 && place(0) < a.n) a.moments.scales[which][block] = scale;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (place(j) >= a.n) continue;
      const float x = inverse == 0 ? 0.0f : moments[j][which];
      const int32_t code = ByteMoment<kIsSigned>::template place<Wide>(x, inverse);
      auto* to = static_cast<uint8_t*>(a.moments.values[which]) + place(j);
      kIsSigned ? Wide::store_signed_codes(to, &code) : Wide::store_codes(to, &code);
    }
  }
};

}  // namespace

// Numbers have the types of a launch from Python: ints and doubles. Each double is a member of Scalars. `size`, `key`
// and `element` are two halves each, the lower one first. Adds to `num_nonfinite`.
template <template <class> class Rule, class Scalars, class Master, States kStates, class Grad>
__global__ void update(void* master, void* lo, void* moments0, void* moments1, float* scales0, float* scales1,
                       const void* grad, unsigned long long* num_nonfinite, uint32_t size0, uint32_t size1, uint32_t key0,
                       uint32_t key1, uint32_t step, uint32_t element0, uint32_t element1, double s0, double s1, double s2,
                       double s3, double s4, double s5, double s6, double s7) {
  const auto whole = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  const double given[] = {s0, s1, s2, s3, s4, s5, s6, s7};
  float rounded[sizeof(Scalars) / sizeof(float)];
  for (size_t k = 0; k < sizeof(Scalars) / sizeof(float); ++k) rounded[k] = static_cast<float>(given[k]);
  Scalars scalars;
  memcpy(&scalars, rounded, sizeof scalars);
  const Moments moments{kStates, {moments0, moments1}, {scales0, scales1}, {whole(key0, key1), step, 0},
                        whole(element0, element1)};
  // Master and Grad have the types.
  const UpdateArrays arrays{master, lo, false, moments, grad, Element::fp32, static_cast<int64_t>(whole(size0, size1))};

  Thread<Rule, Scalars, Master, kStates, Grad> thread(arrays, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  thread.update(scalars, Master(arrays));
  if constexpr (kStates == States::int8) {
#pragma unroll
    for (int which = 0; which < Thread<Rule, Scalars, Master, kStates, Grad>::kNum; ++which) {
      for (int other = kLanes / 2; other; other /= 2) {
        const int32_t theirs = __shfl_xor_sync(0xFFFFFFFFu, thread.most[which], other, kLanes);
        thread.most[which] = Wide::max_int(thread.most[which], theirs);
      }
      if (which) thread.template quantise<false>(which);
      else thread.template quantise<true>(which);
    }
  }
  if (thread.num_nonfinite) atomicAdd(num_nonfinite, static_cast<unsigned long long>(thread.num_nonfinite));
}

}  // namespace offload
