// Elementwise operations over [begin, end).

template <class Body>
inline void for_range(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + Wide::kWidth <= end; i += Wide::kWidth) body(Wide{}, i);
  for (; i < end; ++i) body(Narrow{}, i);
}

void split_range(const float* from, uint16_t* hi, int16_t* lo, int64_t begin, int64_t end) {
  for_range(begin, end, [=](auto lane, int64_t i) { lane.split(hi + i, lo + i, lane.load(from + i)); });
}

void join_range(const uint16_t* hi, const int16_t* lo, float* to, int64_t begin, int64_t end) {
  for_range(begin, end, [=](auto lane, int64_t i) { lane.store(to + i, lane.join(hi + i, lo + i)); });
}

void round_bf16_range(float* x, int64_t begin, int64_t end) {
  for_range(begin, end, [=](auto lane, int64_t i) { lane.store(x + i, lane.round_bf16(lane.load(x + i))); });
}

void accumulate_range(float* sum, const float* x, int64_t begin, int64_t end) {
  for_range(begin, end, [=](auto lane, int64_t i) { lane.store(sum + i, lane.add(lane.load(sum + i), lane.load(x + i))); });
}

void accumulate_range(float* sum, const uint16_t* x, int64_t begin, int64_t end) {
  for_range(begin, end,
            [=](auto lane, int64_t i) { lane.store(sum + i, lane.add(lane.load(sum + i), lane.load_bf16(x + i))); });
}

void accumulate_range(float* sum, const Half* x, int64_t begin, int64_t end) {
  for_range(begin, end,
            [=](auto lane, int64_t i) { lane.store(sum + i, lane.add(lane.load(sum + i), lane.load_fp16(x + i))); });
}
