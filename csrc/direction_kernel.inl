// Random directions of zeroth-order training (SPSA; MeZO, arXiv:2305.17333), made where they are used and never stored.
//
// z of an element is made of one word of Philox, in integers: with the 24 upper bits' number of ones p and the lower byte
// u it is (512 p + 2 u - 6399) / sqrt(1594709), a binomial number that a uniform one spreads evenly. Its mean is 0, and
// its variance 1, up to the rounding of that one division; it is symmetric, its kurtosis is 2.92 and it is at most 5.07.
// No result depends on fused operations: each is rounded by itself, as torch's are on any device.

#include "philox.inl"

template <class Lane>
OFFLOAD_INLINE inline typename Lane::Int masked(typename Lane::Int x, int32_t mask) {
  return Lane::and_int(x, Lane::set_int(mask));
}

template <class Lane>
OFFLOAD_INLINE inline typename Lane::Vec normal(typename Lane::Int word) {
  auto x = Lane::template shift_right<8>(word);
  x = Lane::add_int(masked<Lane>(x, 0x555555), masked<Lane>(Lane::template shift_right<1>(x), 0x555555));
  x = Lane::add_int(masked<Lane>(x, 0x333333), masked<Lane>(Lane::template shift_right<2>(x), 0x333333));
  x = Lane::add_int(masked<Lane>(x, 0x0F0F0F), masked<Lane>(Lane::template shift_right<4>(x), 0x0F0F0F));
  x = Lane::add_int(Lane::add_int(masked<Lane>(x, 0xFF), masked<Lane>(Lane::template shift_right<8>(x), 0xFF)),
                    Lane::template shift_right<16>(x));
  const auto spread = Lane::sub(Lane::mul(Lane::to_float(masked<Lane>(word, 0xFF)), Lane::set(2)), Lane::set(6399));
  const auto whole = Lane::add(Lane::mul(Lane::to_float(x), Lane::set(512)), spread);  // exact up to here
  return Lane::mul(whole, Lane::set(kDirectionScale));
}

// Weights as the device uses them: decisions by magnitude must be equal on device and host.
template <class Lane>
inline typename Lane::Vec load_used(const float* p) { return Lane::load(p); }
template <class Lane>
inline typename Lane::Vec load_used(const uint16_t* p) { return Lane::load_bf16(p); }
template <class Lane>
inline void store_used(float* p, typename Lane::Vec x) { Lane::store(p, x); }
template <class Lane>
inline void store_used(uint16_t* p, typename Lane::Vec x) { Lane::store_bf16(p, x); }

// z where a weight is at most that large, else 0.
template <class Lane, class T>
inline typename Lane::Vec direction(const uint32_t* words, const T* used, float threshold) {
  const auto z = normal<Lane>(Lane::load_int(words));
  return Lane::if_at_most(Lane::magnitude(load_used<Lane>(used)), Lane::set(threshold), z, Lane::set(0));
}

// Calls body(lane, k) for every k < count, a vector's width at a time.
template <class Body>
OFFLOAD_INLINE inline void for_count(int64_t count, const Body& body) {
  int64_t k = 0;
  for (; k + Wide::kWidth <= count; k += Wide::kWidth) body(Wide{}, k);
  for (; k < count; ++k) body(Narrow{}, k);
}

template <class T>
void perturb_range(const PerturbArrays<T>& a, const Directions& d, float eps, int64_t begin, int64_t end) {
  const Keys keys(d.key);
  for (int64_t i = begin; i < end; i += kDrawn) {
    uint32_t words[kDrawn];
    draw_words(words, {d.key, d.step, d.first_purpose}, keys, (d.element + static_cast<uint64_t>(i)) / kDrawn);
    for_count(end - i < kDrawn ? end - i : kDrawn, [&](auto lane, int64_t k) {
      using Lane = decltype(lane);
      const auto weight = load_used<Lane>(a.weights + i + k);
      const auto moved = Lane::mul(direction<Lane>(words + k, a.weights + i + k, d.threshold), Lane::set(eps));
      store_used<Lane>(a.plus + i + k, Lane::add(weight, moved));
      store_used<Lane>(a.minus + i + k, Lane::sub(weight, moved));
    });
  }
}

// Takes the step against the weighted sum of directions, and returns the number of non-finite new weights. Used is the
// part of the Master on the device: all, or the upper half.
template <class Master, class Used>
int64_t descend_range(Master master, const Used* used, const Directions& d, const DescendScalars& s, int64_t begin,
                      int64_t end) {
  const Keys keys(d.key);
  int64_t num_nonfinite = 0;
  for (int64_t i = begin; i < end; i += kDrawn) {
    const int64_t length = end - i < kDrawn ? end - i : kDrawn;
    float sum[kDrawn];
    master.open(keys, i);
    for (int which = 0; which < s.num_coefficients; ++which) {
      uint32_t words[kDrawn];
      const uint32_t purpose = d.first_purpose + (static_cast<uint32_t>(which) << 16);
      draw_words(words, {d.key, d.step, purpose}, keys, (d.element + static_cast<uint64_t>(i)) / kDrawn);
      for_count(length, [&](auto lane, int64_t k) {
        using Lane = decltype(lane);
        auto term = Lane::mul(direction<Lane>(words + k, used + i + k, d.threshold), Lane::set(s.coefficients[which]));
        if (which) term = Lane::add(Lane::load(sum + k), term);
        Lane::store(sum + k, term);
      });
    }
    for_count(length, [&](auto lane, int64_t k) {
      using Lane = decltype(lane);
      const auto weight = master.template load<Lane>(i + k);
      const auto slope = Lane::add(Lane::load(sum + k), Lane::mul(weight, Lane::set(s.weight_decay)));
      const auto updated = Lane::sub(weight, Lane::mul(slope, Lane::set(s.lr)));
      num_nonfinite += Lane::count_nonfinite(master.template store<Lane>(i + k, updated));
    });
  }
  return num_nonfinite;
}

// The storage of a parameter's weights. open() precedes the store of 64 weights; store() returns the stored value.
struct WholeWeights {
  float* p;
  void open(const Keys&, int64_t) const {}
  template <class Lane>
  typename Lane::Vec load(int64_t i) const { return Lane::load(p + i); }
  template <class Lane>
  typename Lane::Vec store(int64_t i, typename Lane::Vec x) const {
    Lane::store(p + i, x);
    return x;
  }
};

struct SplitWeights {
  uint16_t* hi;
  int16_t* lo;
  void open(const Keys&, int64_t) const {}
  template <class Lane>
  typename Lane::Vec load(int64_t i) const { return Lane::join(hi + i, lo + i); }
  template <class Lane>
  typename Lane::Vec store(int64_t i, typename Lane::Vec x) const {
    Lane::split(hi + i, lo + i, x);
    return x;
  }
};

// In bf16 alone, with stochastic rounding: a step is mostly smaller than the distance of two bf16 numbers.
struct ShortWeights {
  uint16_t* p;
  Draws draws;
  uint64_t element;
  uint32_t words[kDrawn];

  ShortWeights(uint16_t* p, const Draws& draws, uint64_t element) : p(p), draws(draws), element(element) {}
  OFFLOAD_INLINE void open(const Keys& keys, int64_t i) {
    if (i % kHalves == 0) draw_words(words, draws, keys, (element + static_cast<uint64_t>(i)) / kHalves);
  }
  template <class Lane>
  typename Lane::Vec load(int64_t i) const { return Lane::load_bf16(p + i); }
  template <class Lane>
  OFFLOAD_INLINE typename Lane::Vec store(int64_t i, typename Lane::Vec x) const {
    Lane::store_bf16_between(p + i, x, random_half<Lane>(words, i % kHalves));
    return Lane::load_bf16(p + i);
  }
};

int64_t descend_chunk(const DescendArrays& a, const Directions& d, const DescendScalars& s, int64_t begin, int64_t end) {
  auto* p = static_cast<uint16_t*>(a.master);
  if (a.lo) return descend_range(SplitWeights{p, a.lo}, p, d, s, begin, end);
  if (a.is_bf16) return descend_range(ShortWeights(p, {d.key, d.step, s.rounding}, d.element), p, d, s, begin, end);
  auto* whole = static_cast<float*>(a.master);
  return descend_range(WholeWeights{whole}, whole, d, s, begin, end);
}
