// One AdamW step, and its correction to another gradient scale. The step has the order of operations of torch's
// single-tensor AdamW (torch/optim/adam.py) and of the ATen kernels below it: lerp and addcmul end in a fused
// multiply-add there, addcdiv does not. The textbook form m = b1 m + (1 - b1) g is thousands of ulp away from it where
// the terms cancel.
// Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, https://arxiv.org/abs/1711.05101.

#include "update.inl"

// What a step adds to the weights for its new moments.
template <class Lane, template <class> class Scalars>
inline typename Lane::Vec change(const Scalars<Lane>& c, typename Lane::Vec m, typename Lane::Vec v) {
  const typename Lane::Vec denom = Lane::add(Lane::div(Lane::sqrt(v), c.sqrt_correction2), c.eps);
  return Lane::div(Lane::mul(c.neg_step_size, m), denom);
}

template <class Lane>
struct AdamwStep {
  using Vec = typename Lane::Vec;
  static constexpr int kNumMoments = 2;
  Vec grad_scale, decay, lerp_coefficient, beta2, one_minus_beta2, sqrt_correction2, eps, neg_step_size;
  bool lerp_from_start;

  explicit AdamwStep(const AdamwScalars& s)
      : grad_scale(Lane::set(s.grad_scale)),
        decay(Lane::set(s.decay)),
        lerp_coefficient(Lane::set(s.lerp_weight < 0.5f ? s.lerp_weight : s.lerp_weight - 1.0f)),
        beta2(Lane::set(s.beta2)),
        one_minus_beta2(Lane::set(s.one_minus_beta2)),
        sqrt_correction2(Lane::set(s.sqrt_correction2)),
        eps(Lane::set(s.eps)),
        neg_step_size(Lane::set(s.neg_step_size)),
        lerp_from_start(s.lerp_weight < 0.5f) {}

  void update_moments(Vec* moments, Vec gradient) const {
    const Vec grad = Lane::mul(gradient, grad_scale);
    const Vec m = Lane::fma(lerp_coefficient, Lane::sub(grad, moments[0]), lerp_from_start ? moments[0] : grad);
    const Vec v = Lane::fma(Lane::mul(one_minus_beta2, grad), grad, Lane::mul(moments[1], beta2));
    moments[0] = m;
    moments[1] = v;
  }
  Vec operator()(Vec weight, Vec* moments, Vec gradient) const {
    update_moments(moments, gradient);
    return Lane::add(Lane::mul(weight, decay), change<Lane>(*this, moments[0], moments[1]));
  }
};

// The same for moments that will be rounded, where nobody compares the weights with torch's bits: without the division
// by the correction, and with decay in a fused multiply-add.
template <class Lane>
struct AdamwShortStep : AdamwStep<Lane> {
  using Vec = typename Lane::Vec;
  Vec corrected_eps, corrected_step_size;

  explicit AdamwShortStep(const AdamwScalars& s)
      : AdamwStep<Lane>(s),
        corrected_eps(Lane::set(s.eps * s.sqrt_correction2)),
        corrected_step_size(Lane::set(s.neg_step_size * s.sqrt_correction2)) {}

  Vec operator()(Vec weight, Vec* moments, Vec gradient) const {
    this->update_moments(moments, gradient);
    const Vec denom = Lane::add(Lane::sqrt(moments[1]), corrected_eps);
    return Lane::fma(weight, this->decay, Lane::div(Lane::mul(corrected_step_size, moments[0]), denom));
  }
};

// The same for a step that has been done with applied_scale: takes out what the gradient put into the moments and puts
// in what it should have, with the roundings that the step made, so that only the last of each moment is not undone.
// An m that is nothing but this gradient's part goes back to zero, where it came from or is too near to tell; such a v
// to the least that can have come with the rest of m. So fresh moments, as in a first step, get the bits that
// grad_scale would have given them, and a v whose past was rounded away makes no step larger than AdamW's can be.
template <class Lane>
struct AdamwCorrection {
  using Vec = typename Lane::Vec;
  static constexpr int kNumMoments = 2;
  Vec applied_scale, grad_scale, lerp_weight, one_minus_beta2, least_v_per_m2, sqrt_correction2, eps, neg_step_size;

  explicit AdamwCorrection(const CorrectionScalars& s)
      : applied_scale(Lane::set(s.applied_scale)),
        grad_scale(Lane::set(s.grad_scale)),
        lerp_weight(Lane::set(s.lerp_weight)),
        one_minus_beta2(Lane::set(s.one_minus_beta2)),
        least_v_per_m2(Lane::set(s.least_v_per_m2)),
        sqrt_correction2(Lane::set(s.sqrt_correction2)),
        eps(Lane::set(s.eps)),
        neg_step_size(Lane::set(s.neg_step_size)) {}

  Vec operator()(Vec weight, Vec* moments, Vec raw) const {
    const Vec applied = Lane::mul(raw, applied_scale);
    const Vec grad = Lane::mul(raw, grad_scale);
    const Vec old_m = moments[0];
    const Vec old_v = moments[1];

    const Vec m_part = Lane::mul(lerp_weight, applied);
    const Vec m_rest = Lane::if_equal(old_m, m_part, Lane::set(0), Lane::fnma(lerp_weight, applied, old_m));
    moments[0] = Lane::fma(lerp_weight, grad, m_rest);
    const Vec v_factor = Lane::mul(one_minus_beta2, applied);
    const Vec v_part = Lane::mul(v_factor, applied);
    const Vec v_least = Lane::mul(Lane::mul(least_v_per_m2, m_rest), m_rest);
    const Vec v_rest = Lane::if_at_most(old_v, v_part, v_least, Lane::fnma(v_factor, applied, old_v));  // never below 0
    moments[1] = Lane::fma(Lane::mul(one_minus_beta2, grad), grad, v_rest);

    const Vec difference = Lane::sub(change<Lane>(*this, moments[0], moments[1]), change<Lane>(*this, old_m, old_v));
    return Lane::add(weight, difference);
  }
};

int64_t adamw_chunk(const UpdateArrays& a, const AdamwScalars& s, int64_t begin, int64_t end) {
  return a.moments.states == States::fp32 ? update_chunk<AdamwStep>(a, s, begin, end)
                                          : update_chunk<AdamwShortStep>(a, s, begin, end);
}

int64_t correct_adamw_chunk(const UpdateArrays& a, const CorrectionScalars& s, int64_t begin, int64_t end) {
  return with_arrays(a, [&](const auto& master, const auto* grad) {
    if (s.applied_scale != s.grad_scale) {
      return update_range<AdamwCorrection, Fp32Moments<2>>(s, master, a.moments, grad, begin, end);
    }
    int64_t num_nonfinite = 0, i = begin;  // multiplying by this correction's zeros would turn -0 to 0 and inf to NaN
    for (; i + Wide::kWidth <= end; i += Wide::kWidth) {
      num_nonfinite += Wide::count_nonfinite(master.template load<Wide>(i));
    }
    for (; i < end; ++i) num_nonfinite += Narrow::count_nonfinite(master.template load<Narrow>(i));
    return num_nonfinite;
  });
}
