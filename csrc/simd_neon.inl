// NEON of aarch64, which every such processor has: 4 floats. See simd_scalar.inl for what each operation means.

struct Wide {
  using Vec = float32x4_t;
  using Int = int32x4_t;
  static constexpr int64_t kWidth = 4;

  static Vec set(float x) { return vdupq_n_f32(x); }
  static Vec load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Vec x) { vst1q_f32(p, x); }
  static Vec load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  static Vec load_fp16(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
  static void store_fp16(Half* p, Vec x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

  static uint32x4_t unsigned_bits(Vec x) { return vreinterpretq_u32_f32(x); }
  static uint16x4_t or_nan(uint16x4_t rounded, Vec x) {
    return vbsl_u16(vmovn_u32(vceqq_f32(x, x)), rounded, vdup_n_u16(0x7FC0));
  }
  static uint16x4_t round_bits(Vec x) {
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(unsigned_bits(x), 16), vdupq_n_u32(1));
    return or_nan(vaddhn_u32(unsigned_bits(x), vaddq_u32(odd, vdupq_n_u32(0x7FFF))), x);
  }
  static void store_bf16(uint16_t* p, Vec x) { vst1_u16(p, round_bits(x)); }
  static Vec round_bf16(Vec x) { return vreinterpretq_f32_u32(vshll_n_u16(round_bits(x), 16)); }

  static void split(uint16_t* hi, int16_t* lo, Vec x) {
    vst1_u16(hi, vaddhn_u32(unsigned_bits(x), vdupq_n_u32(0x8000)));
    vst1_s16(lo, vmovn_s32(bits(x)));
  }
  static Vec join(const uint16_t* hi, const int16_t* lo) {
    const int32x4_t high = vreinterpretq_s32_u32(vshll_n_u16(vld1_u16(hi), 16));
    return vreinterpretq_f32_s32(vaddw_s16(high, vld1_s16(lo)));
  }

  static void store_bf16_between(uint16_t* p, Vec x, Int random) {
    vst1_u16(p, or_nan(vaddhn_u32(unsigned_bits(x), vreinterpretq_u32_s32(random)), x));
  }

  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  static Vec fnma(Vec a, Vec b, Vec c) { return vfmsq_f32(c, a, b); }
  static Vec sqrt(Vec a) { return vsqrtq_f32(a); }
  static Vec if_equal(Vec a, Vec b, Vec yes, Vec no) { return vbslq_f32(vceqq_f32(a, b), yes, no); }
  static Vec if_at_most(Vec a, Vec b, Vec yes, Vec no) { return vbslq_f32(vcleq_f32(a, b), yes, no); }
  static int64_t count_nonfinite(Vec x) {
    const uint32x4_t exponent = vdupq_n_u32(0x7F800000);
    const uint32x4_t found = vceqq_u32(vandq_u32(unsigned_bits(x), exponent), exponent);
    return vaddvq_u32(vshrq_n_u32(found, 31));
  }

  static Vec magnitude(Vec x) { return vabsq_f32(x); }
  static Vec at_most(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }  // vminq would keep a's NaN

  static Int set_int(int32_t x) { return vdupq_n_s32(x); }
  static Int load_int(const uint32_t* p) { return vreinterpretq_s32_u32(vld1q_u32(p)); }
  static void store_int(uint32_t* p, Int x) { vst1q_u32(p, vreinterpretq_u32_s32(x)); }
  template <class T>
  static uint8x8_t load_bytes(const uint8_t* p) {  // as many as a T has, again and again
    T bytes;
    memcpy(&bytes, p, sizeof bytes);
    if constexpr (sizeof bytes == 2) return vreinterpret_u8_u16(vdup_n_u16(bytes));
    else return vreinterpret_u8_u32(vdup_n_u32(bytes));
  }
  static Int load_code(const uint8_t* p) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_bytes<uint32_t>(p)))));
  }
  static Int load_signed_code(const uint8_t* p) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes<uint32_t>(p)))));
  }
  static Int load_nibbles(const uint8_t* p, int64_t i) {
    const uint16x8_t bytes = vmovl_u8(load_bytes<uint16_t>(p + i / 2));
    const uint64x2_t pairs = vmovl_u32(vget_low_u32(vmovl_u16(vget_low_u16(bytes))));
    return vreinterpretq_s32_u64(vsliq_n_u64(vshrq_n_u64(pairs, 4), pairs, 32));
  }
  static constexpr int kPacked = 4;
  static void store_codes(uint8_t* p, const Int* x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x[0]), vmovn_s32(x[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(x[2]), vmovn_s32(x[3]));
    vst1q_u8(p, vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(low), vmovn_s16(high))));
  }
  static void store_signed_codes(uint8_t* p, const Int* x) {  // 127 - x is x ^ 127 in a byte, after saturation to -128 ... 127
    const int16x8_t low = vcombine_s16(vmovn_s32(x[0]), vmovn_s32(x[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(x[2]), vmovn_s32(x[3]));
    const int8x16_t bytes = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
    vst1q_u8(p, vreinterpretq_u8_s8(veorq_s8(bytes, vdupq_n_s8(127))));
  }
  static Int add_int(Int a, Int b) { return vaddq_s32(a, b); }
  static Int max_int(Int a, Int b) { return vmaxq_s32(a, b); }
  static Int and_int(Int a, Int b) { return vandq_s32(a, b); }
  static Int low_half(Int a) { return vandq_s32(a, vdupq_n_s32(0xFFFF)); }
  template <int kBits>
  static Int shift_right(Int a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), kBits)); }
  static int32_t largest(Int a) { return vmaxvq_s32(a); }
  static Int bits(Vec x) { return vreinterpretq_s32_f32(x); }
  static Vec to_float(Int a) { return vcvtq_f32_s32(a); }
  static Int truncate(Vec x) { return vcvtq_s32_f32(x); }
  static uint32x4_t sign() { return vdupq_n_u32(0x80000000); }
  static Vec flip_by_sign(Vec x, Vec of) {
    return vreinterpretq_f32_u32(veorq_u32(unsigned_bits(x), vandq_u32(unsigned_bits(of), sign())));
  }
  static Vec with_other_sign(Vec x, Vec of) {
    return vreinterpretq_f32_u32(vorrq_u32(unsigned_bits(x), vbicq_u32(sign(), unsigned_bits(of))));
  }
  static Int increment_if_at_least(Int a, Vec x, Vec y) {
    return vsubq_s32(a, vreinterpretq_s32_u32(vcgeq_f32(x, y)));
  }

  // Tables are picked from by bytes: entry i of floats has bytes 4 i ... 4 i + 3.
  static uint8x16_t bytes_of(Int index, uint32_t last) {
    const uint32x4_t entry = vandq_u32(vreinterpretq_u32_s32(index), vdupq_n_u32(last));
    return vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100), entry, 0x04040404));
  }
  static uint8x16_t bytes_at(const float* p) { return vreinterpretq_u8_f32(load(p)); }
  using Table = uint8x16x2_t;
  static Vec pick(const float* table, Int index) { return pick(Table{{bytes_at(table), bytes_at(table + 4)}}, index); }
  static Table scaled(const float* table, float scale) {
    const Vec low = mul(load(table), set(scale)), high = mul(load(table + 4), set(scale));
    return {{vreinterpretq_u8_f32(low), vreinterpretq_u8_f32(high)}};
  }
  static Vec pick(Table table, Int index) { return vreinterpretq_f32_u8(vqtbl2q_u8(table, bytes_of(index, 7))); }
  static Vec pick16(const float* table, Int index) {
    const uint8x16x4_t entries = {{bytes_at(table), bytes_at(table + 4), bytes_at(table + 8), bytes_at(table + 12)}};
    return vreinterpretq_f32_u8(vqtbl4q_u8(entries, bytes_of(index, 15)));
  }

  using Long = uint64x2_t;
  static constexpr int64_t kLongs = 2;
  static Long set_long(uint64_t x) { return vdupq_n_u64(x); }
  static Long count_by_two(uint64_t first) { return vcombine_u64(vcreate_u64(first), vcreate_u64(first + 2)); }
  static Long add_long(Long a, Long b) { return vaddq_u64(a, b); }
  static Long xor_long(Long a, Long b, Long c) { return veorq_u64(veorq_u64(a, b), c); }
  static Long multiply(Long a, Long b) { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }
  static Long upper(Long a) { return vshrq_n_u64(a, 32); }
  static void store_zipped(uint32_t* p, Long a, Long b) { vst1q_u32(p, vreinterpretq_u32_u64(vsliq_n_u64(a, b, 32))); }

  static void copy_line(void* to, const void* from) {
    for (int k = 0; k < 4; ++k) vst1q_u8(static_cast<uint8_t*>(to) + 16 * k, vld1q_u8(static_cast<const uint8_t*>(from) + 16 * k));
  }
  // Cores see by themselves that whole lines are written one after the other, and then let them pass the caches.
  static void stream_line(void* to, const void* from) { copy_line(to, from); }
  static void fence() {}

  struct Squares {
    float64x2_t sum[16] = {};
    void add4(int k, Vec x) {
      const float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
      sum[k] = vfmaq_f64(sum[k], low, low);  // squares of floats are exact in double: fused or not is the same
      sum[k + 1] = vfmaq_f64(sum[k + 1], high, high);
    }
    void add(const float* p) {
      for (int k = 0; k < 8; ++k) add4(2 * k, load(p + 4 * k));
    }
    void add(const uint16_t* p) {
      for (int k = 0; k < 8; ++k) add4(2 * k, load_bf16(p + 4 * k));
    }
    void add(const Half* p) {
      for (int k = 0; k < 8; ++k) add4(2 * k, load_fp16(p + 4 * k));
    }
    void get(double* out) const {
      for (int k = 0; k < 16; ++k) vst1q_f64(out + 2 * k, sum[k]);
    }
  };
};
