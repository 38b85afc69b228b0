// Shared parts of the update kernels: master weights, gradients, the prefetch distance, and the single pass over all of
// them. A rule is a class of a Lane, made from its scalars, that has kNumMoments and turns a weight
// and its moments into new ones: Vec operator()(Vec weight, Vec* moments, Vec gradient).

// Far enough ahead to keep memory busy while a block is computed, near enough to be still in the L1 cache when its turn
// comes. 256 and 1024 measured 4 to 7 % slower with a split master; addresses beyond the end are never touched.
constexpr int64_t kPrefetchAhead = 512;

template <int64_t kBlock, class T>
inline void prefetch_block(const T* p) {
  for (int64_t k = 0; k < kBlock; k += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + kPrefetchAhead + k);
}

// Where the master weights live: one fp32 array, two half-width planes, or one fp32 array with a copy in fp16.
struct WholeMaster {
  explicit WholeMaster(const UpdateArrays& a) : p(static_cast<float*>(a.master)) {}
  float* p;
  template <class Lane>
  typename Lane::Vec load(int64_t i) const { return Lane::load(p + i); }
  template <class Lane>
  void store(int64_t i, typename Lane::Vec x) const { Lane::store(p + i, x); }
  template <int64_t kBlock>
  void prefetch(int64_t i) const { prefetch_block<kBlock>(p + i); }
};

struct SplitMaster {
  explicit SplitMaster(const UpdateArrays& a) : hi(static_cast<uint16_t*>(a.master)), lo(static_cast<int16_t*>(a.lo)) {}
  uint16_t* hi;
  int16_t* lo;
  template <class Lane>
  typename Lane::Vec load(int64_t i) const { return Lane::join(hi + i, lo + i); }
  template <class Lane>
  void store(int64_t i, typename Lane::Vec x) const { Lane::split(hi + i, lo + i, x); }
  template <int64_t kBlock>
  void prefetch(int64_t i) const { prefetch_block<kBlock>(hi + i), prefetch_block<kBlock>(lo + i); }
};

struct CopiedMaster {
  explicit CopiedMaster(const UpdateArrays& a) : p(static_cast<float*>(a.lo)), copy(static_cast<Half*>(a.master)) {}
  float* p;
  Half* copy;
  template <class Lane>
  typename Lane::Vec load(int64_t i) const { return Lane::load(p + i); }
  template <class Lane>
  void store(int64_t i, typename Lane::Vec x) const { Lane::store(p + i, x), Lane::store_fp16(copy + i, x); }
  template <int64_t kBlock>
  void prefetch(int64_t i) const { prefetch_block<kBlock>(p + i), prefetch_block<kBlock>(copy + i); }
};

template <class Lane>
inline typename Lane::Vec load_grad(const float* g) { return Lane::load(g); }
template <class Lane>
inline typename Lane::Vec load_grad(const uint16_t* g) { return Lane::load_bf16(g); }
template <class Lane>
inline typename Lane::Vec load_grad(const Half* g) { return Lane::load_fp16(g); }

#include "moments.inl"

// Updates a block of neighbours from i on, or, where Lane is Narrow, the first `count` of one; returns how many of the
// new weights are not finite.
template <class Lane, template <class> class Rule, class Master, class Stored, class Grad>
OFFLOAD_INLINE inline int64_t update_block(const Rule<Lane>& rule, const Master& master, Stored& stored, const Grad* g,
                                           int64_t i, int64_t count) {
  constexpr int64_t kTurn = Lane::kPacked * Lane::kWidth;
  auto block = stored.template open<Lane>(i);
  auto nothing = Lane::set(0);  // 0 times a weight, or NaN
  for (int64_t k = 0; k < count; k += kTurn) {
    for (int64_t j = k; j < k + kTurn; j += Lane::kWidth) {
      typename Lane::Vec moments[Rule<Lane>::kNumMoments + 1];  // no array is empty
      for (int which = 0; which < Rule<Lane>::kNumMoments; ++which) moments[which] = block.load(which, j);
      const auto weight = rule(master.template load<Lane>(i + j), moments, load_grad<Lane>(g + i + j));
      for (int which = 0; which < Rule<Lane>::kNumMoments; ++which) block.store(which, j, moments[which]);
      master.template store<Lane>(i + j, weight);
      nothing = Lane::fma(weight, Lane::set(0), nothing);
    }
    if (count == Stored::kBlock) stored.template settle<Lane>(k);  // of the block before
  }
  stored.close(block, i);
  int64_t num_nonfinite = 0;
  if (Lane::count_nonfinite(nothing)) {
    for (int64_t k = 0; k < count; k += Lane::kWidth) {
      num_nonfinite += Lane::count_nonfinite(master.template load<Lane>(i + k));
    }
  }
  return num_nonfinite;
}

template <template <class> class Rule, class Stored, class Scalars, class Master, class Grad>
int64_t update_range(const Scalars& scalars, const Master master, const Moments& moments, const Grad* g, int64_t begin,
                     int64_t end) {  // master by value: by reference its pointers were loaded anew after every store
  constexpr int64_t kBlock = Stored::kBlock;
  Stored stored(moments);
  const Rule<Wide> wide(scalars);
  int64_t num_nonfinite = 0;
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    master.template prefetch<kBlock>(i), stored.prefetch(i), prefetch_block<kBlock>(g + i);
    num_nonfinite += update_block<Wide>(wide, master, stored, g, i, kBlock);
  }
  for (int64_t k = 0; k < kBlock && i > begin; k += Wide::kPacked * Wide::kWidth) stored.template settle<Wide>(k);
  if (i == end) return num_nonfinite;
  num_nonfinite += update_block<Narrow>(Rule<Narrow>(scalars), master, stored, g, i, end - i);
  for (int64_t k = 0; k < end - i; ++k) stored.template settle<Narrow>(k);
  return num_nonfinite;
}

// Calls body(master, gradient) with the types of the rule's arrays. Beside a master in 16 bits are gradients in these, or
// in fp32.
template <class Body>
int64_t with_arrays(const UpdateArrays& a, const Body& body) {
  const auto* in_fp32 = static_cast<const float*>(a.grad);
  const auto* in_bf16 = static_cast<const uint16_t*>(a.grad);
  const auto* in_fp16 = static_cast<const Half*>(a.grad);
  if (a.is_copied) {
    return a.grad_type == Element::fp16 ? body(CopiedMaster(a), in_fp16) : body(CopiedMaster(a), in_fp32);
  }
  if (a.lo) return a.grad_type == Element::bf16 ? body(SplitMaster(a), in_bf16) : body(SplitMaster(a), in_fp32);
  switch (a.grad_type) {
    case Element::fp16: return body(WholeMaster(a), in_fp16);
    case Element::bf16: return body(WholeMaster(a), in_bf16);
    default: return body(WholeMaster(a), in_fp32);
  }
}

template <template <class> class Rule, class Scalars>
int64_t update_chunk(const UpdateArrays& a, const Scalars& scalars, int64_t begin, int64_t end) {
  constexpr int kNum = Rule<Wide>::kNumMoments;
  return with_arrays(a, [&](const auto& master, const auto* grad) {
    switch (a.moments.states) {
      case States::bf16: return update_range<Rule, Bf16Moments<kNum>>(scalars, master, a.moments, grad, begin, end);
      case States::int8: return update_range<Rule, Int8Moments<kNum>>(scalars, master, a.moments, grad, begin, end);
      default: return update_range<Rule, Fp32Moments<kNum>>(scalars, master, a.moments, grad, begin, end);
    }
  });
}
