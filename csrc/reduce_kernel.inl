// The sum of squares of one block, in an order that neither the instruction set nor the number of threads can change:
// element i goes to running sum i modulo 32, and a fixed tree adds the 32 together. In double the square of a float is
// exact, so only the additions round.

template <class T>
double sum_squares_block(const T* x, int64_t n) {
  typename Wide::Squares squares;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) squares.add(x + i);
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
