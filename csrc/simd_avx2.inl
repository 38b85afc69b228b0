// AVX2 with FMA and F16C: 8 floats. See simd_scalar.inl for what each operation means.

struct Wide {
  using Vec = __m256;
  using Int = __m256i;
  static constexpr int64_t kWidth = 8;

  static Vec set(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
  static Vec load_bf16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static Vec load_fp16(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_fp16(Half* p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }

  // Writes the low 16 bits of each lane, whose high 16 bits must be zero (packus saturates).
  static void store_low(void* p, __m256i x) {
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128(static_cast<__m128i*>(p), packed);
  }
  static __m256i round_bits(Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7FC0), nan);
  }
  static void store_bf16(uint16_t* p, Vec x) { store_low(p, round_bits(x)); }
  static Vec round_bf16(Vec x) { return _mm256_castsi256_ps(_mm256_slli_epi32(round_bits(x), 16)); }

  static void split(uint16_t* hi, int16_t* lo, Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    store_low(hi, _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16));
    store_low(lo, _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF)));
  }
  static Vec join(const uint16_t* hi, const int16_t* lo) {
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(hi)));
    const __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lo)));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 16), low));
  }

  static void store_bf16_between(uint16_t* p, Vec x, Int random) {
    const __m256i sum = _mm256_srli_epi32(_mm256_add_epi32(bits(x), random), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    store_low(p, _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7FC0), nan));
  }

  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
  static Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
  static Vec if_equal(Vec a, Vec b, Vec yes, Vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
  }
  static Vec if_at_most(Vec a, Vec b, Vec yes, Vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LE_OQ));
  }
  static int64_t count_nonfinite(Vec x) {
    const __m256i exponent = _mm256_set1_epi32(0x7F800000);
    const __m256i found = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(x), exponent), exponent);
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(found))));
  }

  static Vec magnitude(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  static Vec at_most(Vec a, Vec b) { return _mm256_min_ps(a, b); }

  static Int set_int(int32_t x) { return _mm256_set1_epi32(x); }
  static Int load_int(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_int(uint32_t* p, Int x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static Int load_code(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static Int load_signed_code(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static Int load_nibbles(const uint8_t* p, int64_t i) {
    int32_t bytes;
    memcpy(&bytes, p + i / 2, sizeof bytes);
    const __m256i pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    return _mm256_or_si256(_mm256_srli_epi64(pairs, 4), _mm256_slli_epi64(pairs, 32));
  }
  static constexpr int kPacked = 4;
  static void store_codes(uint8_t* p, const Int* x) {
    const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order(bytes));
  }
  static void store_signed_codes(uint8_t* p, const Int* x) {
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order(_mm256_xor_si256(bytes, _mm256_set1_epi8(127))));
  }
  static __m256i in_order(__m256i packed) {  // packing takes by turns four of each vector
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int max_int(Int a, Int b) { return _mm256_max_epi32(a, b); }
  static Int and_int(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int low_half(Int a) { return _mm256_and_si256(a, _mm256_set1_epi32(0xFFFF)); }
  template <int kBits>
  static Int shift_right(Int a) { return _mm256_srli_epi32(a, kBits); }
  static int32_t largest(Int a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1)));
  }
  static Int bits(Vec x) { return _mm256_castps_si256(x); }
  static Vec to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  static Int truncate(Vec x) { return _mm256_cvttps_epi32(x); }
  static Vec flip_by_sign(Vec x, Vec of) { return _mm256_xor_ps(x, _mm256_and_ps(of, _mm256_set1_ps(-0.0f))); }
  static Vec with_other_sign(Vec x, Vec of) { return _mm256_or_ps(x, _mm256_andnot_ps(of, _mm256_set1_ps(-0.0f))); }
  static Int increment_if_at_least(Int a, Vec x, Vec y) {
    return _mm256_sub_epi32(a, _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_GE_OQ)));
  }
  static Vec pick(const float* table, Int index) { return _mm256_permutevar8x32_ps(_mm256_load_ps(table), index); }
  using Table = Vec;
  static Table scaled(const float* table, float scale) { return mul(_mm256_load_ps(table), set(scale)); }
  static Vec pick(Table table, Int index) { return _mm256_permutevar8x32_ps(table, index); }

  static Vec pick16(const float* table, Int index) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // bit 3 at the sign
    return _mm256_blendv_ps(pick(table, index), pick(table + 8, index), upper);
  }

  using Long = __m256i;
  static constexpr int64_t kLongs = 4;
  static Long set_long(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  static Long count_by_two(uint64_t first) { return _mm256_add_epi64(set_long(first), _mm256_setr_epi64x(0, 2, 4, 6)); }
  static Long add_long(Long a, Long b) { return _mm256_add_epi64(a, b); }
  static Long xor_long(Long a, Long b, Long c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  static Long multiply(Long a, Long b) { return _mm256_mul_epu32(a, b); }
  static Long upper(Long a) { return _mm256_srli_epi64(a, 32); }
  static void store_zipped(uint32_t* p, Long a, Long b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA));
  }

  static void copy_line(void* to, const void* from) {
    for (int k = 0; k < 2; ++k) {
      _mm256_store_si256(static_cast<__m256i*>(to) + k, _mm256_loadu_si256(static_cast<const __m256i*>(from) + k));
    }
  }
  static void stream_line(void* to, const void* from) {
    for (int k = 0; k < 2; ++k) {
      _mm256_stream_si256(static_cast<__m256i*>(to) + k, _mm256_loadu_si256(static_cast<const __m256i*>(from) + k));
    }
  }
  static void fence() { _mm_sfence(); }

  struct Squares {
    __m256d sum[8] = {};
    void add8(int k, Vec x) {
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
      sum[k] = _mm256_fmadd_pd(low, low, sum[k]);  // squares of floats are exact in double: fused or not is the same
      sum[k + 1] = _mm256_fmadd_pd(high, high, sum[k + 1]);
    }
    void add(const float* p) {
      for (int k = 0; k < 4; ++k) add8(2 * k, load(p + 8 * k));
    }
    void add(const uint16_t* p) {
      for (int k = 0; k < 4; ++k) add8(2 * k, load_bf16(p + 8 * k));
    }
    void add(const Half* p) {
      for (int k = 0; k < 4; ++k) add8(2 * k, load_fp16(p + 8 * k));
    }
    void get(double* out) const {
      for (int k = 0; k < 8; ++k) _mm256_storeu_pd(out + 4 * k, sum[k]);
    }
  };
};
