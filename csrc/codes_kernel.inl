// Encoding and decoding of weights in records of codes and scales. A record is copied before the weights are written,
// because they may overlap the record.

template <class Lane = Wide>
inline void store_as(float* p, typename Lane::Vec x) { Lane::store(p, x); }
template <class Lane = Wide>
inline void store_as(uint16_t* p, typename Lane::Vec x) { Lane::store_bf16(p, x); }
template <class Lane = Wide>
inline void store_as(Half* p, typename Lane::Vec x) { Lane::store_fp16(p, x); }

// The largest magnitude of kBlock weights; NaN where one is.
template <int64_t kBlock>
inline float most_of(const float* weights) {
  auto most = Wide::set_int(0);
  for (int64_t i = 0; i < kBlock; i += Wide::kWidth) {
    most = Wide::max_int(most, Wide::bits(Wide::magnitude(Wide::load(weights + i))));
  }
  return float_of(static_cast<uint32_t>(Wide::largest(most)));
}

inline float at_least(float x, float least) { return x < least ? least : x; }  // a NaN stays

template <int kBits, class T>
void decode_whole_range(const uint8_t* records, T* out, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    uint8_t record[whole_record(kBits)];
    memcpy(record, records + k * whole_record(kBits), sizeof record);
    float scale;
    memcpy(&scale, record + kInt8Block * kBits / 8, sizeof scale);
    for (int64_t i = 0; i < kInt8Block; i += Wide::kWidth) {
      auto code = Wide::set(0);
      if (kBits == 4) {
        const auto above = Wide::and_int(Wide::load_nibbles(record, i), Wide::set_int(15));
        code = Wide::sub(Wide::to_float(above), Wide::set(8));
      } else {
        code = Wide::to_float(Wide::load_signed_code(record + i));
      }
      store_as(out + k * kInt8Block + i, Wide::mul(code, Wide::set(scale)));
    }
  }
}

template <class T>
void decode_nf4_range(const uint8_t* records, const Nf4Tables& tables, T* out, int64_t begin, int64_t end) {
  alignas(64) float levels[16];
  memcpy(levels, tables.levels, sizeof levels);
  for (int64_t k = begin; k < end; ++k) {
    uint8_t record[kNf4Record];
    memcpy(record, records + k * kNf4Record, sizeof record);
    float scales[2];  // the largest of the magnitudes, and the mean that was taken off
    memcpy(scales, record + kNf4Record - sizeof scales, sizeof scales);
    for (int64_t part = 0; part < kNf4Block / 64; ++part) {
      const float size = tables.numbers[record[kNf4Block / 2 + part]] * scales[0] + scales[1];
      for (int64_t i = 0; i < 64; i += Wide::kWidth) {
        const auto level = Wide::pick16(levels, Wide::load_nibbles(record + 32 * part, i));
        store_as(out + k * kNf4Block + 64 * part + i, Wide::mul(level, Wide::set(size)));
      }
    }
  }
}

// Decodes blocks [begin, end) of 32 rows into the rows of the matrix. The record has them column by column, so kColumns
// are decoded together: byte b of each has the codes of rows 2 b, in its lower half, and 2 b + 1.
template <class Lane, int64_t kColumns, class T>
inline void decode_mxfp4_columns(const Mxfp4Matrix& matrix, int64_t column, T* out, int64_t begin, int64_t end) {
  alignas(64) const float levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
  const int64_t blocks = matrix.rows / kMxfp4Block;
  for (int64_t block = begin; block < end; ++block) {
    alignas(64) float sizes[kColumns];
    alignas(64) uint8_t pairs[kMxfp4Block / 2][kColumns];
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t place = (column + c) * blocks + block;
      sizes[c] = half_power(matrix.exponents[place]);
      for (int64_t b = 0; b < kMxfp4Block / 2; ++b) pairs[b][c] = matrix.codes[place * kMxfp4Block / 2 + b];
    }
    for (int64_t b = 0; b < kMxfp4Block / 2; ++b) {
      T* const row = out + (block * kMxfp4Block + 2 * b) * matrix.columns + column;
      for (int64_t c = 0; c < kColumns; c += Lane::kWidth) {
        const auto code = Lane::load_code(pairs[b] + c);
        const auto size = Lane::load(sizes + c);
        const auto low = Lane::and_int(code, Lane::set_int(15));
        const auto high = Lane::template shift_right<4>(code);
        store_as<Lane>(row + c, Lane::mul(Lane::pick16(levels, low), size));
        store_as<Lane>(row + matrix.columns + c, Lane::mul(Lane::pick16(levels, high), size));
      }
    }
  }
}

template <class T>
void decode_mxfp4_range(const Mxfp4Matrix& matrix, T* out, int64_t begin, int64_t end) {
  constexpr int64_t kTogether = 32;
  int64_t column = 0;
  for (; column + kTogether <= matrix.columns; column += kTogether) {
    decode_mxfp4_columns<Wide, kTogether>(matrix, column, out, begin, end);
  }
  for (; column < matrix.columns; ++column) decode_mxfp4_columns<Narrow, 1>(matrix, column, out, begin, end);
}

// Writes the record of 128 numbers: whole ones of kBits, and the scale. With `error` the decoded record is
// subtracted, and the rest is written there in bf16; 0 where the scale is not finite.
template <int kBits>
inline void encode_block(const float* from, uint8_t* record, uint16_t* error) {
  constexpr int kMost = (1 << (kBits - 1)) - 1;
  // The added constant rounds a small number to an integer, ties to even, in the lowest byte. With four bits the byte
  // is 8 more than the number.
  const auto rounds = Wide::set(kBits == 4 ? 0x1.8p23f + 8 : 0x1.8p23f);
  const float scale = most_of<kInt8Block>(from) / kMost;
  const auto divisor = Wide::set(at_least(scale, kLeastScale));
  const auto unit = Wide::set(scale);
  const bool is_finite = scale <= FLT_MAX;
  uint8_t whole[kInt8Block];
  for (int64_t i = 0; i < kInt8Block; i += Wide::kPacked * Wide::kWidth) {
    Wide::Int codes[Wide::kPacked];
    for (int64_t j = 0; j < Wide::kPacked; ++j) {
      const auto value = Wide::load(from + i + j * Wide::kWidth);
      const auto rounded = Wide::add(Wide::div(value, divisor), rounds);
      codes[j] = Wide::and_int(Wide::bits(rounded), Wide::set_int(kBits == 4 ? 15 : 255));
      if (error) {
        const auto rest = Wide::sub(value, Wide::mul(Wide::sub(rounded, rounds), unit));
        Wide::store_bf16(error + i + j * Wide::kWidth, is_finite ? rest : Wide::set(0));
      }
    }
    Wide::store_codes(whole + i, codes);
  }
  if (kBits == 4) {
    for (int64_t i = 0; i < kInt8Block / 2; ++i) record[i] = static_cast<uint8_t>(whole[2 * i] << 4 | whole[2 * i + 1]);
  } else {
    memcpy(record, whole, sizeof whole);
  }
  memcpy(record + kInt8Block * kBits / 8, &scale, sizeof scale);
}

// Zeros follow the n weights; load(lane, i) loads from i on.
template <class Load>
void encode_int8_blocks(const Load& load, int64_t n, uint8_t* records, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    alignas(64) float from[kInt8Block] = {};
    const int64_t left = n - k * kInt8Block, length = left < kInt8Block ? left : kInt8Block;
    int64_t loaded = 0;
    for (; loaded + Wide::kWidth <= length; loaded += Wide::kWidth) {
      Wide::store(from + loaded, load(Wide{}, k * kInt8Block + loaded));
    }
    for (; loaded < length; ++loaded) Narrow::store(from + loaded, load(Narrow{}, k * kInt8Block + loaded));
    encode_block<8>(from, records + k * kInt8Record, nullptr);
  }
}

inline Wide::Vec load_as(const float* p) { return Wide::load(p); }
inline Wide::Vec load_as(const uint16_t* p) { return Wide::load_bf16(p); }

template <int kBits, class T>
void encode_rest_range(const T* values, uint16_t* error, uint8_t* records, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    alignas(64) float alone[kInt8Block], both[kInt8Block];
    uint16_t* const rest = error + k * kInt8Block;
    for (int64_t i = 0; i < kInt8Block; i += Wide::kWidth) {
      const auto value = load_as(values + k * kInt8Block + i);
      Wide::store(alone + i, value);
      Wide::store(both + i, Wide::add(value, Wide::load_bf16(rest + i)));
    }
    const bool is_zero = most_of<kInt8Block>(alone) == 0;  // then the error waits
    encode_block<kBits>(is_zero ? alone : both, records + k * whole_record(kBits), is_zero ? nullptr : rest);
  }
}

void encode_int8_range(const MasterWeights& a, int64_t n, uint8_t* records, int64_t begin, int64_t end) {
  const auto run = [=](const auto& load) { encode_int8_blocks(load, n, records, begin, end); };
  const auto *whole = static_cast<const float*>(a.p);
  const auto* hi = static_cast<const uint16_t*>(a.p);
  const auto* lo = a.lo;
  if (lo) run([=](auto lane, int64_t i) { return lane.join(hi + i, lo + i); });
  else if (a.is_bf16) run([=](auto lane, int64_t i) { return lane.load_bf16(hi + i); });
  else run([=](auto lane, int64_t i) { return lane.load(whole + i); });
}

// A block that is not whole is divided by its largest magnitude, and the others are multiplied with the inverse.
void encode_nf4_range(const float* weights, int64_t n, const float* borders, uint8_t* pairs, float* sizes,
                      int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    const int64_t length = n - k * 64 < 64 ? n - k * 64 : 64;
    alignas(64) float scaled[64] = {};
    memcpy(scaled, weights + k * 64, static_cast<size_t>(length) * sizeof(float));
    const float most = most_of<64>(scaled), divisor = at_least(most, kLeastScale);
    sizes[k] = length == 64 ? most : divisor;
    if (length == 64) {
      const auto factor = Wide::set(1 / divisor);
      for (int64_t i = 0; i < 64; i += Wide::kWidth) Wide::store(scaled + i, Wide::mul(Wide::load(scaled + i), factor));
    } else {
      for (int64_t i = 0; i < length; ++i) scaled[i] /= divisor;
    }
    uint8_t codes[64];  // 15 less the code: how many borders are not below
    for (int64_t i = 0; i < 64; i += Wide::kPacked * Wide::kWidth) {
      Wide::Int above[Wide::kPacked];
      for (int64_t j = 0; j < Wide::kPacked; ++j) {
        const auto x = Wide::load(scaled + i + j * Wide::kWidth);
        above[j] = Wide::set_int(0);
        for (int border = 0; border < 15; ++border) {
          above[j] = Wide::increment_if_at_least(above[j], Wide::set(borders[border]), x);
        }
      }
      Wide::store_codes(codes + i, above);
    }
    uint8_t found[32];
    for (int64_t i = 0; i < 32; ++i) found[i] = static_cast<uint8_t>(~(codes[2 * i] << 4 | codes[2 * i + 1]));
    memcpy(pairs + k * 32, found, static_cast<size_t>((length + 1) / 2));
  }
}
