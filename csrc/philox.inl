// Philox4x32-7, the generator of everything that is drawn at random: docs/design.md, "Randomness", says what is drawn
// from which counter. Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011: seven rounds
// are the fewest that pass all tests of BigCrush.
// offload/native/moments.py has the same in torch.

constexpr int64_t kDrawn = 64;  // elements that have their words from one call: 16 counters of 4 words each

// A vector of counters whose words lie in 64-bit lanes of their own: a product then needs no shuffle, and what is left
// in the upper halves is ignored by the next one.
template <class Lane>
struct Counters {
  typename Lane::Long words[4];

  OFFLOAD_INLINE void round(uint64_t key0, uint64_t key1) {
    const auto first = Lane::multiply(words[0], Lane::set_long(0xD2511F53));
    const auto second = Lane::multiply(words[2], Lane::set_long(0xCD9E8D57));
    words[0] = Lane::xor_long(Lane::upper(second), words[1], Lane::set_long(key0));
    words[2] = Lane::xor_long(Lane::upper(first), words[3], Lane::set_long(key1));
    words[1] = second;
    words[3] = first;
  }
};

constexpr int kRounds = 7;

struct Keys {
  uint64_t of_round[kRounds][2];

  explicit Keys(uint64_t key) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      of_round[round][0] = static_cast<uint32_t>(static_cast<uint32_t>(key) + round * 0x9E3779B9);
      of_round[round][1] = static_cast<uint32_t>(static_cast<uint32_t>(key >> 32) + round * 0xBB67AE85);
    }
  }
};

// Writes the words of the elements 64 * block ... 64 * block + 63.
OFFLOAD_INLINE inline void draw_words(uint32_t* out, const Draws& draws, const Keys& keys, uint64_t block) {
  const uint64_t first = block * 16;  // the counters differ in the lowest four bits alone
  for (int64_t j = 0; j < 8; j += Wide::kLongs) {
    Counters<Wide> even, odd;
    even.words[0] = Wide::add_long(Wide::set_long(static_cast<uint32_t>(first)), Wide::count_by_two(2 * j));
    odd.words[0] = Wide::add_long(even.words[0], Wide::set_long(1));
    even.words[1] = odd.words[1] = Wide::set_long(first >> 32);
    even.words[2] = odd.words[2] = Wide::set_long(draws.step);
    even.words[3] = odd.words[3] = Wide::set_long(draws.purpose);
    for (const auto& key : keys.of_round) {
      even.round(key[0], key[1]);
      odd.round(key[0], key[1]);
    }
    for (int k = 0; k < 4; ++k) Wide::store_zipped(out + 16 * k + 2 * j, even.words[k], odd.words[k]);
  }
}

// 16 bits for each of the elements k, k + 1 ... of 128 that share 64 words: 32 j ... 32 j + 15 have the low halves of words
// 16 j ... 16 j + 15, the next 16 elements the high ones.
constexpr int64_t kHalves = 2 * kDrawn;
template <class Lane>
OFFLOAD_INLINE inline typename Lane::Int random_half(const uint32_t* words, int64_t k) {
  const auto word = Lane::load_int(words + k / 32 * 16 + k % 16);
  return k % 32 < 16 ? Lane::low_half(word) : Lane::template shift_right<16>(word);
}
