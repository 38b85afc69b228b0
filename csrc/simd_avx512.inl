// AVX-512 (F, BW, DQ, VL): 16 floats. See simd_scalar.inl for what each operation means.

struct Wide {
  using Vec = __m512;
  using Int = __m512i;
  static constexpr int64_t kWidth = 16;

  static Vec set(float x) { return _mm512_set1_ps(x); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
  static Vec load_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static Vec load_fp16(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_fp16(Half* p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static void store_low(void* p, __m512i x) {  // the low 16 bits of each lane
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static __m512i round_bits(Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7FC0));
  }
  static void store_bf16(uint16_t* p, Vec x) { store_low(p, round_bits(x)); }
  static Vec round_bf16(Vec x) { return _mm512_castsi512_ps(_mm512_slli_epi32(round_bits(x), 16)); }

  static void split(uint16_t* hi, int16_t* lo, Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    store_low(hi, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16));
    store_low(lo, bits);
  }
  static Vec join(const uint16_t* hi, const int16_t* lo) {
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi)));
    const __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 16), low));
  }

  static void store_bf16_between(uint16_t* p, Vec x, Int random) {
    const __m512i sum = _mm512_srli_epi32(_mm512_add_epi32(bits(x), random), 16);
    store_low(p, _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0)));
  }

  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
  static Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
  static Vec if_equal(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), yes);
  }
  static Vec if_at_most(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ), yes);
  }
  static int64_t count_nonfinite(Vec x) {
    constexpr int kQuietNan = 0x01, kPlusInf = 0x08, kMinusInf = 0x10, kSignalingNan = 0x80;
    return __builtin_popcount(_mm512_fpclass_ps_mask(x, kQuietNan | kPlusInf | kMinusInf | kSignalingNan));
  }

  static Vec magnitude(Vec x) { return _mm512_abs_ps(x); }
  static Vec at_most(Vec a, Vec b) { return _mm512_min_ps(a, b); }

  static Int set_int(int32_t x) { return _mm512_set1_epi32(x); }
  static Int load_int(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store_int(uint32_t* p, Int x) { _mm512_storeu_si512(p, x); }
  static Int load_code(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Int load_signed_code(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Int load_nibbles(const uint8_t* p, int64_t i) {
    const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i / 2)));
    return _mm512_or_si512(_mm512_srli_epi64(pairs, 4), _mm512_slli_epi64(pairs, 32));
  }
  static constexpr int kPacked = 4;
  static void store_codes(uint8_t* p, const Int* x) {
    const __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    _mm512_storeu_si512(p, in_order(bytes));
  }
  static void store_signed_codes(uint8_t* p, const Int* x) {  // 127 - x is x ^ 127 in a byte, after saturation to -128 ... 127
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    _mm512_storeu_si512(p, in_order(_mm512_xor_si512(bytes, _mm512_set1_epi8(127))));
  }
  static __m512i in_order(__m512i packed) {  // packing takes by turns four of each vector
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
  }
  static Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int max_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
  static Int and_int(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int low_half(Int a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xFFFF)); }
  template <int kBits>
  static Int shift_right(Int a) { return _mm512_srli_epi32(a, kBits); }
  static int32_t largest(Int a) { return _mm512_reduce_max_epi32(a); }
  static Int bits(Vec x) { return _mm512_castps_si512(x); }
  static Vec to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  static Int truncate(Vec x) { return _mm512_cvttps_epi32(x); }
  static Vec flip_by_sign(Vec x, Vec of) {  // (of & the sign bit) ^ x
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits(of), _mm512_set1_epi32(INT32_MIN), bits(x), 0x6A));
  }
  static Vec with_other_sign(Vec x, Vec of) {  // (~of & the sign bit) | x
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits(of), _mm512_set1_epi32(INT32_MIN), bits(x), 0xAE));
  }
  static Int increment_if_at_least(Int a, Vec x, Vec y) {
    return _mm512_mask_add_epi32(a, _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ), a, _mm512_set1_epi32(1));
  }
  static Vec pick(const float* table, Int index) { return _mm512_permutexvar_ps(index, _mm512_load_ps(table)); }
  using Table = Vec;
  static Table scaled(const float* table, float scale) { return mul(_mm512_load_ps(table), set(scale)); }
  static Vec pick(Table table, Int index) { return _mm512_permutexvar_ps(index, table); }

  static Vec pick16(const float* table, Int index) { return pick(table, index); }

  using Long = __m512i;
  static constexpr int64_t kLongs = 8;
  static Long set_long(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  static Long count_by_two(uint64_t first) {
    return _mm512_add_epi64(set_long(first), _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14));
  }
  static Long add_long(Long a, Long b) { return _mm512_add_epi64(a, b); }
  static Long xor_long(Long a, Long b, Long c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  static Long multiply(Long a, Long b) { return _mm512_mul_epu32(a, b); }
  static Long upper(Long a) { return _mm512_srli_epi64(a, 32); }
  static void store_zipped(uint32_t* p, Long a, Long b) {
    _mm512_storeu_si512(p, _mm512_mask_mov_epi32(a, 0xAAAA, _mm512_slli_epi64(b, 32)));
  }

  static void copy_line(void* to, const void* from) { _mm512_store_si512(to, _mm512_loadu_si512(from)); }
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void fence() { _mm_sfence(); }

  struct Squares {
    __m512d sum[4] = {};
    void add16(int k, Vec x) {
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
      sum[k] = _mm512_fmadd_pd(low, low, sum[k]);  // squares of floats are exact in double: fused or not is the same
      sum[k + 1] = _mm512_fmadd_pd(high, high, sum[k + 1]);
    }
    void add(const float* p) {
      add16(0, load(p));
      add16(2, load(p + 16));
    }
    void add(const uint16_t* p) {
      add16(0, load_bf16(p));
      add16(2, load_bf16(p + 16));
    }
    void add(const Half* p) {
      add16(0, load_fp16(p));
      add16(2, load_fp16(p + 16));
    }
    void get(double* out) const {
      for (int k = 0; k < 4; ++k) _mm512_storeu_pd(out + 8 * k, sum[k]);
    }
  };
};
