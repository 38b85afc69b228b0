// One float at a time: the tails of every instruction set, and all of the work where there is no other.
// The wide versions offer the same operations with the same results, bit for bit; bfloat16 travels as uint16_t, fp16 as Half.

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Exponents of mxfp4 as powers of two, halved: the factor keeps the greatest one finite. Doubled numbers of fp4 make up
// for it.
inline float half_power(uint8_t exponent) {
  const auto bits = static_cast<uint32_t>(exponent);
  return float_of(exponent > 1 ? (bits - 1) << 23 : 0x200000u << bits);
}

struct Narrow {
  using Vec = float;
  using Int = int32_t;
  static constexpr int64_t kWidth = 1;

  static Vec set(float x) { return x; }
  static Vec load(const float* p) { return *p; }
  static void store(float* p, Vec x) { *p = x; }
  static Vec load_bf16(const uint16_t* p) { return float_of(static_cast<uint32_t>(*p) << 16); }
  static Vec load_fp16(const Half* p) {
    const uint32_t sign = static_cast<uint32_t>(p->bits & 0x8000) << 16, magnitude = p->bits & 0x7FFF;
    if (magnitude > 0x7C00) return float_of(sign | 0x7FC00000 | magnitude << 13);  // a quiet NaN, as the processors do
    if (magnitude == 0x7C00) return float_of(sign | 0x7F800000);
    if (magnitude >= 0x400) return float_of(sign | ((magnitude << 13) + (112u << 23)));
    return float_of(sign | bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f));
  }

  // Nearest, ties to even, as torch rounds; a NaN stays a NaN (the addition alone would carry 0x7FFFFFFF into -0).
  static uint16_t round_bits(Vec x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  static void store_bf16(uint16_t* p, Vec x) { *p = round_bits(x); }
  // Nearest, ties to even, and infinity from 65520 on, as torch rounds; a NaN stays one.
  static void store_fp16(Half* p, Vec x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, magnitude = bits_of(x) & 0x7FFFFFFF;
    uint32_t bits = 0x7C00;
    if (magnitude > 0x7F800000) {
      bits = 0x7E00 | (magnitude >> 13 & 0x1FF);
    } else if (magnitude < 0x38800000) {  // below 2^-14: the sum with 1/2 rounds at 2^-24, the step there
      bits = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    } else if (magnitude < 0x477FF000) {
      bits = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    }
    p->bits = static_cast<uint16_t>(sign | bits);
  }
  static Vec round_bf16(Vec x) { return float_of(static_cast<uint32_t>(round_bits(x)) << 16); }

  // The split master: hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16), which are the low 16 bits read as signed.
  static void split(uint16_t* hi, int16_t* lo, Vec x) {
    const uint32_t bits = bits_of(x);
    *hi = static_cast<uint16_t>((bits + 0x8000) >> 16);
    *lo = static_cast<int16_t>(static_cast<uint16_t>(bits));
  }
  static Vec join(const uint16_t* hi, const int16_t* lo) {
    return float_of((static_cast<uint32_t>(*hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(*lo)));
  }

  // Rounds to one of both neighbours, up in magnitude where the dropped bits and 16 random ones carry: with the probability
  // of its distance to the other one. A NaN stays a NaN.
  static void store_bf16_between(uint16_t* p, Vec x, Int random) {
    const uint32_t bits = bits_of(x);
    *p = x == x ? static_cast<uint16_t>((bits + static_cast<uint32_t>(random)) >> 16) : 0x7FC0;
  }

  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec div(Vec a, Vec b) { return a / b; }
  static Vec fma(Vec a, Vec b, Vec c) { return __builtin_fmaf(a, b, c); }  // a * b + c, rounded once
  static Vec fnma(Vec a, Vec b, Vec c) { return __builtin_fmaf(-a, b, c); }  // c - a * b, rounded once
  static Vec sqrt(Vec a) { return __builtin_sqrtf(a); }
  static Vec if_equal(Vec a, Vec b, Vec yes, Vec no) { return a == b ? yes : no; }  // `no` where a or b is NaN
  static Vec if_at_most(Vec a, Vec b, Vec yes, Vec no) { return a <= b ? yes : no; }
  static int64_t count_nonfinite(Vec x) { return (bits_of(x) & 0x7F800000) == 0x7F800000; }

  static Vec magnitude(Vec x) { return float_of(bits_of(x) & 0x7FFFFFFF); }
  static Vec at_most(Vec a, Vec b) { return a < b ? a : b; }

  static Int set_int(int32_t x) { return x; }
  static Int load_int(const uint32_t* p) { return static_cast<int32_t>(*p); }
  static void store_int(uint32_t* p, Int x) { *p = static_cast<uint32_t>(x); }
  static Int load_code(const uint8_t* p) { return *p; }
  static Int load_signed_code(const uint8_t* p) { return static_cast<int8_t>(*p); }
  // Codes of four bits from number i on, a multiple of kWidth, the first of a byte in its upper half; above them lies anything.
  static Int load_nibbles(const uint8_t* p, int64_t i) { return i % 2 ? p[i / 2] : p[i / 2] >> 4; }
  static constexpr int kPacked = 1;  // vectors whose codes are stored at once
  static void store_codes(uint8_t* p, const Int* x) { *p = static_cast<uint8_t>(*x); }  // of 0 to 255
  static void store_signed_codes(uint8_t* p, const Int* x) {  // 127 - x, of -128 to 128
    *p = static_cast<uint8_t>(*x > 127 ? 0 : 127 - *x);
  }
  static Int add_int(Int a, Int b) { return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
  static Int max_int(Int a, Int b) { return a > b ? a : b; }
  static Int and_int(Int a, Int b) { return a & b; }
  static Int low_half(Int a) { return a & 0xFFFF; }
  template <int kBits>
  static Int shift_right(Int a) { return static_cast<int32_t>(static_cast<uint32_t>(a) >> kBits); }
  static int32_t largest(Int a) { return a; }  // of all lanes
  static Int bits(Vec x) { return static_cast<int32_t>(bits_of(x)); }
  static Vec to_float(Int a) { return static_cast<float>(a); }  // nearest, ties to even
  static Int truncate(Vec x) { return static_cast<int32_t>(x); }
  static Vec flip_by_sign(Vec x, Vec of) { return bits(of) < 0 ? -x : x; }
  static Vec with_other_sign(Vec x, Vec of) { return bits(of) < 0 ? x : -x; }  // of an x that is not negative
  static Int increment_if_at_least(Int a, Vec x, Vec y) { return a + (x >= y); }
  static Vec pick(const float* table, Int index) { return table[index & 7]; }  // of 8 entries that are there twice
  struct Table {
    const float* entries;
    float scale;
  };
  static Table scaled(const float* table, float scale) { return {table, scale}; }  // times a scale
  static Vec pick(Table table, Int index) { return pick(table.entries, index) * table.scale; }
  static Vec pick16(const float* table, Int index) { return table[index & 15]; }

  // 64-bit lanes. multiply is that of the lower halves; store_zipped writes the lower halves of a and b by turns.
  using Long = uint64_t;
  static constexpr int64_t kLongs = 1;
  static Long set_long(uint64_t x) { return x; }
  static Long count_by_two(uint64_t first) { return first; }  // first, first + 2, ...
  static Long add_long(Long a, Long b) { return a + b; }
  static Long xor_long(Long a, Long b, Long c) { return a ^ b ^ c; }
  static Long multiply(Long a, Long b) { return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF); }
  static Long upper(Long a) { return a >> 32; }
  static void store_zipped(uint32_t* p, Long a, Long b) {
    p[0] = static_cast<uint32_t>(a);
    p[1] = static_cast<uint32_t>(b);
  }

  // 64 bytes to an address that is a multiple of 64. stream_line passes the caches by where the processor can; fence
  // must follow before another thread may read.
  static void copy_line(void* to, const void* from) { memcpy(to, from, 64); }
  static void stream_line(void* to, const void* from) { copy_line(to, from); }
  static void fence() {}

  // 32 running sums of squares in double, of which number k takes the elements whose index is k modulo 32.
  struct Squares {
    double sum[32] = {};
    void add(const float* p) {
      for (int k = 0; k < 32; ++k) sum[k] += static_cast<double>(p[k]) * p[k];
    }
    void add(const uint16_t* p) {
      for (int k = 0; k < 32; ++k) {
        const double x = load_bf16(p + k);
        sum[k] += x * x;
      }
    }
    void add(const Half* p) {
      for (int k = 0; k < 32; ++k) {
        const double x = load_fp16(p + k);
        sum[k] += x * x;
      }
    }
    void get(double* out) const { memcpy(out, sum, sizeof sum); }
  };
};
