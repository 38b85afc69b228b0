// The reads and writes of an update with almost no arithmetic: the memory bound. kAhead is how many elements
// ahead of the loop it prefetches, 0 for leaving that to the hardware.

template <int64_t kAhead>
inline void touch(char* p, int64_t bytes, int64_t i, int64_t count) {
  char* const from = p + i * bytes;
  for (int64_t k = 0; k < count * bytes; k += 64) {
    if constexpr (kAhead > 0) __builtin_prefetch(from + kAhead * bytes + k);
    for (int64_t w = k; w < k + 64; w += 4 * Wide::kWidth) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(from + w);
      Wide::store_int(words, Wide::add_int(Wide::load_int(words), Wide::set_int(1)));
    }
  }
}

template <int64_t kAhead>
inline void look(const char* p, int64_t bytes, int64_t i, int64_t count, typename Wide::Int& sum) {
  const char* const from = p + i * bytes;
  for (int64_t k = 0; k < count * bytes; k += 64) {
    if constexpr (kAhead > 0) __builtin_prefetch(from + kAhead * bytes + k);
    for (int64_t w = k; w < k + 64; w += 4 * Wide::kWidth) {
      sum = Wide::add_int(sum, Wide::load_int(reinterpret_cast<const uint32_t*>(from + w)));
    }
  }
}

// Returns a value that depends on the reads, so the compiler keeps them.
template <int64_t kAhead>
int64_t roofline_range(const RooflineArrays& a, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 64;  // a cache line of the smallest elements
  auto sum = Wide::set_int(0);
  for (int64_t i = begin; i + kBlock <= end; i += kBlock) {
    look<kAhead>(static_cast<const char*>(a.read), a.read_bytes, i, kBlock, sum);
    for (int k = 0; k < a.num_written; ++k) touch<kAhead>(static_cast<char*>(a.written[k]), a.bytes[k], i, kBlock);
  }
  return Wide::largest(sum);
}
