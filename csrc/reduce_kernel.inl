// The sum of squares of one block, in an order that neither the instruction set nor the number of threads can change:
// element i goes to running sum i modulo 32, and a fixed tree adds the 32 together. In double the square of a float is
// exact, so only the additions round.
// Calls visit(i) with the index of every whole group of 32 elements, in turn, just before it is added.
template <class T, class Visit>
double sum_squares_block(const T* x, int64_t n, const Visit& visit) {
  typename Wide::Squares squares;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    visit(i);
    squares.add(x + i);
  }
  double sum[32];
  squares.get(sum);
  if (i < n) {  // a last group padded with zeros adds +0 to sums that are never -0
    T group[32] = {};
    for (int64_t k = i; k < n; ++k) group[k - i] = x[k];
    typename Narrow::Squares last;
    memcpy(last.sum, sum, sizeof sum);
    last.add(group);
    last.get(sum);
  }
  for (int half = 16; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
  }
  return sum[0];
}

template <class T>
double sum_squares_block(const T* x, int64_t n) {
  return sum_squares_block(x, n, [](int64_t) {});
}

// Copies the block on the way. Stores go to whole lines of `out`, which may begin anywhere in a line: with each group of
// 32 elements that is added, the 32 that lie `head` further on are copied.
template <bool kStream, class T>
double copy_sum_squares_block(const T* x, T* out, int64_t n) {
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % 64 / sizeof(T));
  if (head > n) head = n;
  memcpy(out, x, head * sizeof(T));
  const double sum = sum_squares_block(x, n, [=](int64_t i) {
    if (head + i + 32 > n) return;
    auto* to = reinterpret_cast<char*>(out + head + i);
    auto* from = reinterpret_cast<const char*>(x + head + i);
    for (size_t byte = 0; byte < 32 * sizeof(T); byte += 64) {
      if (kStream) Wide::stream_line(to + byte, from + byte);
      else Wide::copy_line(to + byte, from + byte);
    }
  });
  const int64_t rest = head + (n - head) / 32 * 32;
  memcpy(out + rest, x + rest, (n - rest) * sizeof(T));
  if (kStream) Wide::fence();
  return sum;
}
