// The reads and writes of the AdamW kernels with next to no arithmetic: what memory alone allows. One loop per mix;
// kAhead is how many elements ahead of the loop it prefetches, 0 for leaving that to the hardware.

template <int64_t kAhead>
inline void prefetch(const void* p) {
  if constexpr (kAhead > 0) __builtin_prefetch(static_cast<const char*>(p));
}

template <int64_t kAhead>
void roofline_fp32_range(float* p, float* m, float* v, const float* g, int64_t begin, int64_t end) {
  for (int64_t i = begin; i + 16 <= end; i += 16) {  // 16 floats are a cache line
    prefetch<kAhead>(p + i + kAhead), prefetch<kAhead>(m + i + kAhead);
    prefetch<kAhead>(v + i + kAhead), prefetch<kAhead>(g + i + kAhead);
    for (int64_t k = i; k < i + 16; k += Wide::kWidth) {
      const auto grad = Wide::load(g + k);
      Wide::store(p + k, Wide::add(Wide::load(p + k), grad));
      Wide::store(m + k, Wide::add(Wide::load(m + k), grad));
      Wide::store(v + k, Wide::add(Wide::load(v + k), grad));
    }
  }
}

template <int64_t kAhead>
void roofline_split_range(uint16_t* hi, int16_t* lo, float* m, float* v, const uint16_t* g, int64_t begin, int64_t end) {
  for (int64_t i = begin; i + 32 <= end; i += 32) {  // 32 halves are a cache line
    prefetch<kAhead>(hi + i + kAhead), prefetch<kAhead>(lo + i + kAhead), prefetch<kAhead>(g + i + kAhead);
    prefetch<kAhead>(m + i + kAhead), prefetch<kAhead>(m + i + 16 + kAhead);
    prefetch<kAhead>(v + i + kAhead), prefetch<kAhead>(v + i + 16 + kAhead);
    for (int64_t k = i; k < i + 32; k += Wide::kWidth) {
      const auto grad = Wide::load_bf16(g + k);
      Wide::split(hi + k, lo + k, Wide::add(Wide::join(hi + k, lo + k), grad));
      Wide::store(m + k, Wide::add(Wide::load(m + k), grad));
      Wide::store(v + k, Wide::add(Wide::load(v + k), grad));
    }
  }
}
