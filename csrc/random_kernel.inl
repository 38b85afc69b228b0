// Random words of a range of elements.

#include "philox.inl"

void draw_range(uint32_t* out, const Draws& draws, uint64_t element, int64_t begin, int64_t end) {
  const Keys keys(draws.key);
  for (int64_t i = begin; i < end; i += kDrawn) {
    uint32_t words[kDrawn];
    draw_words(words, draws, keys, (element + static_cast<uint64_t>(i)) / kDrawn);
    memcpy(out + i, words, sizeof(uint32_t) * static_cast<size_t>(end - i < kDrawn ? end - i : kDrawn));
  }
}
