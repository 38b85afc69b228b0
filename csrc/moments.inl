// How moments are stored: in fp32, in bf16 rounded at random, or as a byte each with a scale for 128 of them. A rule's
// kernel loads and stores them between open() and close() of a block of neighbours, whatever they are stored as, and
// settles each place of a closed block once, before it closes the next one.

#include "philox.inl"

template <int kNum>
struct Fp32Moments {
  static constexpr int64_t kBlock = 64;
  float* p[kNum ? kNum : 1];

  explicit Fp32Moments(const Moments& m) {
    for (int which = 0; which < kNum; ++which) p[which] = static_cast<float*>(m.values[which]);
  }
  void prefetch(int64_t i) const {
    for (int which = 0; which < kNum; ++which) prefetch_block<kBlock>(p[which] + i);
  }

  template <class Lane>
  struct Block {
    float* p[kNum ? kNum : 1];
    typename Lane::Vec load(int which, int64_t k) const { return Lane::load(p[which] + k); }
    void store(int which, int64_t k, typename Lane::Vec x) { Lane::store(p[which] + k, x); }
  };
  template <class Lane>
  Block<Lane> open(int64_t i) const {
    Block<Lane> block;
    for (int which = 0; which < kNum; ++which) block.p[which] = p[which] + i;
    return block;
  }
  template <class Lane>
  void close(const Block<Lane>&, int64_t) {}
  template <class Lane>
  void settle(int64_t) {}
};

// Both moments of an element are rounded by the same 16 bits: each is as unbiased as it would be by bits of its own, for
// half the price.
template <int kNum>
struct Bf16Moments {
  static constexpr int64_t kBlock = kHalves;
  uint16_t* p[kNum];
  Draws draws;
  Keys keys;
  uint64_t element;
  alignas(64) uint32_t words[kDrawn];

  explicit Bf16Moments(const Moments& m) : draws(m.draws), keys(m.draws.key), element(m.element) {
    for (int which = 0; which < kNum; ++which) p[which] = static_cast<uint16_t*>(m.values[which]);
  }
  void prefetch(int64_t i) const {
    for (int which = 0; which < kNum; ++which) prefetch_block<kBlock>(p[which] + i);
  }

  template <class Lane>
  struct Block {
    uint16_t* p[kNum];
    const uint32_t* words;
    typename Lane::Vec load(int which, int64_t k) const { return Lane::load_bf16(p[which] + k); }
    void store(int which, int64_t k, typename Lane::Vec x) {
      Lane::store_bf16_between(p[which] + k, x, random_half<Lane>(words, k));
    }
  };
  template <class Lane>
  OFFLOAD_INLINE Block<Lane> open(int64_t i) {
    draw_words(words, draws, keys, (element + static_cast<uint64_t>(i)) / kBlock);
    Block<Lane> block;
    for (int which = 0; which < kNum; ++which) block.p[which] = p[which] + i;
    block.words = words;
    return block;
  }
  template <class Lane>
  void close(const Block<Lane>&, int64_t) {}
  template <class Lane>
  void settle(int64_t) {}
};

// The dynamic map of Dettmers et al., "8-bit optimizers via block-wise quantization" (section 2), arXiv:2110.02861: seven
// levels, each ten times the one before, in which numbers lie at equal distances: 1, 2, 4 ... 64 of them and as many below
// zero, or, without a sign, twice as many; then 0 and 1. So within a level a number is linear in its code, and the code in
// the number. Tables of eight entries are there twice: pick() takes an index modulo 16, of AVX2 modulo 8, so that the two
// ends may share one.
struct MapTables {
  alignas(64) float by[16], from[16];  // by the exponent of the rank's float: number = by * rank + from
  alignas(64) float border[16];        // by the upper exponent bits of a size: the one threshold between levels there, in
                                       // whose lowest three bits is the level below it
  alignas(64) float slope[16], start[16], last[16];  // by level: place = slope * size + start, at most last
};

// Sizes are magnitudes plus this: whatever is too small to matter then has one exponent.
constexpr float kLeastSize = 0x1p-23f;

// Returns the largest float of at most x, above 0, whose lowest three bits are those of a number. (No cast does that in a
// constant expression.)
constexpr float marked(double x, int number) {
  double unit = 0x1p-23;  // of the last bit
  while (x < 0x1p23 * unit) unit /= 2;
  int64_t mantissa = static_cast<int64_t>(x / unit);
  while (mantissa % 8 != number) --mantissa;
  return static_cast<float>(static_cast<double>(mantissa) * unit);
}

// A place is how far a code lies from that of 0. A rank is what a number is linear in so that its float's exponent tells
// the level: without a sign place + 1, else twice the place with its sign, where 0 can go with the lone number of level 0.
template <bool kIsSigned>
constexpr MapTables make_map() {
  constexpr double kUnits[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  const double most = kIsSigned ? 128 : 255;
  MapTables map{};
  map.by[7] = static_cast<float>(1 / (kIsSigned ? 256.0 : 255.0));
  map.from[7] = kIsSigned ? 0 : -map.by[7];
  map.slope[0] = map.last[0] = static_cast<float>(most + 0.5);
  double before = 0;
  double thresholds[8] = {};
  for (int level = 0; level < 7; ++level) {
    const double unit = kUnits[level], count = (kIsSigned ? 1 : 2) << level;
    const double first = unit * (0.1 + 0.45 / count), place = kIsSigned ? count : count - 1;  // of the first number
    thresholds[level] = (before + first) / 2 + kLeastSize;
    before = unit * (1 - 0.45 / count);
    const double step = unit * 0.9 / count;
    map.by[level] = static_cast<float>(kIsSigned ? step / 2 : step);
    map.from[level] = static_cast<float>(first - count * step);
    if (kIsSigned && level == 0) map.by[0] = static_cast<float>(first / 2), map.from[0] = 0;
    map.slope[level + 1] = static_cast<float>(1 / step);
    map.start[level + 1] = static_cast<float>(place - count / 9 - kLeastSize / step);
    map.last[level + 1] = static_cast<float>(place + count - 0.5);
  }
  thresholds[7] = (before + 1) / 2 + kLeastSize;
  for (int k = 0; k < 8; ++k) {
    map.by[8 + k] = map.by[k], map.from[8 + k] = map.from[k];
    map.slope[8 + k] = map.slope[k], map.start[8 + k] = map.start[k], map.last[8 + k] = map.last[k];
  }
  double least = 0.5;  // of what has the upper exponent bits 15
  for (int k = 15; k >= 0; --k, least /= 4) {
    int level = 0;
    while (level < 7 && thresholds[level] <= least) ++level;
    map.border[k] = marked(thresholds[level], level);
  }
  return map;
}

template <bool kIsSigned>
constexpr MapTables kMap = make_map<kIsSigned>();

// A block is quantised while the next one is updated: alone, each would wait for its own results most of the time.
template <bool kIsSigned>
struct ByteMoment {
  static constexpr int64_t kBlock = 128;
  uint8_t* codes;
  float* scales;
  alignas(64) float buffers[2][kBlock] = {};
  uint8_t nothing[kBlock];
  float* fresh = buffers[0];  // where the new numbers of the open block go
  // The closed block that is to be quantised: its numbers, where its codes go, and the inverse of its scale.
  const float* waiting = buffers[1];
  uint8_t* to = nothing;
  float inverse = 0;

  ByteMoment(void* codes, float* scales) : codes(static_cast<uint8_t*>(codes)), scales(scales) {}
  ByteMoment(const ByteMoment&) = delete;

  void prefetch(int64_t i) const {
    prefetch_block<kBlock>(codes + i);
    __builtin_prefetch(scales + (i + kPrefetchAhead) / kBlock);
  }

  template <class Lane>
  struct Block {
    const uint8_t* codes;
    float* fresh;
    typename Lane::Table by, from;  // of the numbers times the block's scale
    typename Lane::Int largest;     // bits of magnitudes, which have their order, with what is not finite above all

    OFFLOAD_INLINE typename Lane::Vec load(int64_t k) const {
      const auto code = Lane::to_float(Lane::load_code(codes + k));
      const auto rank = kIsSigned ? Lane::fma(code, Lane::set(2), Lane::set(-254)) : Lane::add(code, Lane::set(1));
      const auto exponent = Lane::template shift_right<23>(Lane::bits(rank));
      const auto begin = Lane::pick(from, exponent);
      return Lane::fma(Lane::pick(by, exponent), rank, kIsSigned ? Lane::flip_by_sign(begin, rank) : begin);
    }
    OFFLOAD_INLINE void store(int64_t k, typename Lane::Vec x) {
      Lane::store(fresh + k, x);
      largest = Lane::max_int(largest, Lane::bits(Lane::magnitude(x)));
    }
  };

  template <class Lane>
  OFFLOAD_INLINE Block<Lane> open(int64_t i) const {
    const float scale = scales[i / kBlock];
    return {codes + i, fresh, Lane::scaled(kMap<kIsSigned>.by, scale), Lane::scaled(kMap<kIsSigned>.from, scale),
            Lane::set_int(0)};
  }

  // Returns the scale for the bits of the largest magnitude, which it is, and lets `inverse` be one over it. Where that is
  // no normal number, all are 0; where one is not finite, all are NaN. Either has an inverse of 0.
  static float scale_of(int32_t most, float& inverse) {
    const float scale = float_of(static_cast<uint32_t>(most));
    inverse = 1.0f / scale;
    if (most >= 0x00800000 && most < 0x7F800000) return scale;
    inverse = 0;
    return most < 0x00800000 ? 0.0f : float_of(0x7FC00000);
  }

  template <class Lane>
  OFFLOAD_INLINE void close(const Block<Lane>& block, int64_t i) {
    scales[i / kBlock] = scale_of(Lane::largest(block.largest), inverse);
    for (int64_t k = 0; k < kBlock && inverse == 0; ++k) fresh[k] = 0;  // 0 times what is not finite is no number
    to = codes + i;
    waiting = fresh;
    fresh = fresh == buffers[0] ? buffers[1] : buffers[0];
  }

  // Stores the codes of the numbers nearest to those that wait; of two equally near that of the one farther from 0.
  template <class Lane>
  OFFLOAD_INLINE void quantise(int64_t k) const {
    typename Lane::Int places[Lane::kPacked];
    for (int j = 0; j < Lane::kPacked; ++j) {
      places[j] = place<Lane>(Lane::load(waiting + k + j * Lane::kWidth), inverse);
    }
    if constexpr (kIsSigned) Lane::store_signed_codes(to + k, places);
    else Lane::store_codes(to + k, places);
  }

  template <class Lane>
  OFFLOAD_INLINE static typename Lane::Int place(typename Lane::Vec x, float inverse) {
    const auto& map = kMap<kIsSigned>;
    const auto size = Lane::fma(kIsSigned ? Lane::magnitude(x) : x, Lane::set(inverse), Lane::set(kLeastSize));
    const auto border = Lane::pick16(map.border, Lane::template shift_right<24>(Lane::bits(size)));
    const auto level = Lane::increment_if_at_least(Lane::bits(border), size, border);
    const auto place = Lane::at_most(Lane::fma(Lane::pick(map.slope, level), size, Lane::pick(map.start, level)),
                                     Lane::pick(map.last, level));
    return Lane::truncate(kIsSigned ? Lane::with_other_sign(place, x) : place);
  }
};

template <int kNum>
struct Int8Moments {
  static constexpr int64_t kBlock = 128;
  ByteMoment<true> first;
  ByteMoment<false> second;

  explicit Int8Moments(const Moments& m) : first(m.values[0], m.scales[0]), second(m.values[1], m.scales[1]) {}
  void prefetch(int64_t i) const {
    first.prefetch(i);
    if constexpr (kNum > 1) second.prefetch(i);
  }

  template <class Lane>
  struct Block {
    ByteMoment<true>::Block<Lane> first;
    ByteMoment<false>::Block<Lane> second;
    OFFLOAD_INLINE typename Lane::Vec load(int which, int64_t k) const { return which ? second.load(k) : first.load(k); }
    OFFLOAD_INLINE void store(int which, int64_t k, typename Lane::Vec x) {
      if (which) second.store(k, x);
      else first.store(k, x);
    }
  };
  template <class Lane>
  OFFLOAD_INLINE Block<Lane> open(int64_t i) const {
    Block<Lane> block;
    block.first = first.template open<Lane>(i);
    if constexpr (kNum > 1) block.second = second.template open<Lane>(i);
    return block;
  }
  template <class Lane>
  OFFLOAD_INLINE void close(const Block<Lane>& block, int64_t i) {
    first.close(block.first, i);
    if constexpr (kNum > 1) second.close(block.second, i);
  }
  template <class Lane>
  OFFLOAD_INLINE void settle(int64_t k) const {
    first.template quantise<Lane>(k);
    if constexpr (kNum > 1) second.template quantise<Lane>(k);
  }
};
