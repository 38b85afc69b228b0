// One AdamW step over a range, and its correction to another gradient scale. The step has the order of operations of
// torch's single-tensor AdamW (torch/optim/adam.py) and of the ATen kernels below it: lerp and addcmul end in a fused
// multiply-add there, addcdiv does not. The textbook form m = b1 m + (1 - b1) g is thousands of ulp away from it where
// the terms cancel.
// Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, https://arxiv.org/abs/1711.05101.

#include "master.inl"

template <class Lane>
struct Coefficients {
  typename Lane::Vec grad_scale, decay, lerp_coefficient, beta2, one_minus_beta2, sqrt_correction2, eps, neg_step_size;
  bool lerp_from_start;

  explicit Coefficients(const AdamwScalars& s)
      : grad_scale(Lane::set(s.grad_scale)),
        decay(Lane::set(s.decay)),
        lerp_coefficient(Lane::set(s.lerp_weight < 0.5f ? s.lerp_weight : s.lerp_weight - 1.0f)),
        beta2(Lane::set(s.beta2)),
        one_minus_beta2(Lane::set(s.one_minus_beta2)),
        sqrt_correction2(Lane::set(s.sqrt_correction2)),
        eps(Lane::set(s.eps)),
        neg_step_size(Lane::set(s.neg_step_size)),
        lerp_from_start(s.lerp_weight < 0.5f) {}
};

template <class Lane>
struct Corrections {
  typename Lane::Vec applied_scale, grad_scale, lerp_weight, one_minus_beta2, least_v_per_m2, sqrt_correction2, eps,
      neg_step_size;

  explicit Corrections(const CorrectionScalars& s)
      : applied_scale(Lane::set(s.applied_scale)),
        grad_scale(Lane::set(s.grad_scale)),
        lerp_weight(Lane::set(s.lerp_weight)),
        one_minus_beta2(Lane::set(s.one_minus_beta2)),
        least_v_per_m2(Lane::set(s.least_v_per_m2)),
        sqrt_correction2(Lane::set(s.sqrt_correction2)),
        eps(Lane::set(s.eps)),
        neg_step_size(Lane::set(s.neg_step_size)) {}
};

template <class Lane>
struct Untouched {  // the correction from a scale to itself: multiplying by its zeros would turn -0 to 0 and inf to NaN
  explicit Untouched(const CorrectionScalars&) {}
};

// What a step adds to the weights for its new moments.
template <class Lane, template <class> class Scalars>
inline typename Lane::Vec change(const Scalars<Lane>& c, typename Lane::Vec m, typename Lane::Vec v) {
  const typename Lane::Vec denom = Lane::add(Lane::div(Lane::sqrt(v), c.sqrt_correction2), c.eps);
  return Lane::div(Lane::mul(c.neg_step_size, m), denom);
}

// Updates the Lane::kWidth elements from i on; returns how many of the new weights are not finite.
template <class Lane, class Master, class Grad>
inline int64_t update(const Coefficients<Lane>& c, const Master& master, float* m, float* v, const Grad* g, int64_t i) {
  using Vec = typename Lane::Vec;
  const Vec grad = Lane::mul(load_grad<Lane>(g + i), c.grad_scale);
  const Vec old_m = Lane::load(m + i);
  const Vec new_m = Lane::fma(c.lerp_coefficient, Lane::sub(grad, old_m), c.lerp_from_start ? old_m : grad);
  const Vec new_v = Lane::fma(Lane::mul(c.one_minus_beta2, grad), grad, Lane::mul(Lane::load(v + i), c.beta2));
  const Vec decayed = Lane::mul(master.template load<Lane>(i), c.decay);
  const Vec weight = Lane::add(decayed, change<Lane>(c, new_m, new_v));
  Lane::store(m + i, new_m);
  Lane::store(v + i, new_v);
  master.template store<Lane>(i, weight);
  return Lane::count_nonfinite(weight);
}

// The same for a step that has been done with applied_scale: takes out what the gradient put into the moments and puts
// in what it should have, with the roundings that the step made, so that only the last of each moment is not undone.
// An m that is nothing but this gradient's part goes back to zero, where it came from or is too near to tell; such a v
// to the least that can have come with the rest of m. So fresh moments, as in a first step, get the bits that
// grad_scale would have given them, and a v whose past was rounded away makes no step larger than AdamW's can be.
template <class Lane, class Master, class Grad>
inline int64_t update(const Corrections<Lane>& c, const Master& master, float* m, float* v, const Grad* g, int64_t i) {
  using Vec = typename Lane::Vec;
  const Vec raw = load_grad<Lane>(g + i);
  const Vec applied = Lane::mul(raw, c.applied_scale);
  const Vec grad = Lane::mul(raw, c.grad_scale);
  const Vec old_m = Lane::load(m + i);
  const Vec old_v = Lane::load(v + i);

  const Vec m_part = Lane::mul(c.lerp_weight, applied);
  const Vec m_rest = Lane::if_equal(old_m, m_part, Lane::set(0), Lane::fnma(c.lerp_weight, applied, old_m));
  const Vec new_m = Lane::fma(c.lerp_weight, grad, m_rest);
  const Vec v_factor = Lane::mul(c.one_minus_beta2, applied);
  const Vec v_part = Lane::mul(v_factor, applied);
  const Vec v_least = Lane::mul(Lane::mul(c.least_v_per_m2, m_rest), m_rest);
  const Vec v_rest = Lane::if_at_most(old_v, v_part, v_least, Lane::fnma(v_factor, applied, old_v));  // never below 0
  const Vec new_v = Lane::fma(Lane::mul(c.one_minus_beta2, grad), grad, v_rest);

  const Vec difference = Lane::sub(change<Lane>(c, new_m, new_v), change<Lane>(c, old_m, old_v));
  const Vec weight = Lane::add(master.template load<Lane>(i), difference);
  Lane::store(m + i, new_m);
  Lane::store(v + i, new_v);
  master.template store<Lane>(i, weight);
  return Lane::count_nonfinite(weight);
}

template <class Lane, class Master, class Grad>
inline int64_t update(const Untouched<Lane>&, const Master& master, float*, float*, const Grad*, int64_t i) {
  return Lane::count_nonfinite(master.template load<Lane>(i));
}

template <template <class> class Update, class Scalars, class Master, class Grad>
int64_t update_range(const Scalars& scalars, const Master master, float* m, float* v, const Grad* g, int64_t begin,
                     int64_t end) {  // master by value: by reference its pointers were loaded anew after every store
  const Update<Wide> wide(scalars);
  int64_t num_nonfinite = 0;
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    master.prefetch(i), prefetch_block(m + i), prefetch_block(v + i), prefetch_block(g + i);
    for (int64_t k = i; k < i + kBlock; k += Wide::kWidth) num_nonfinite += update<Wide>(wide, master, m, v, g, k);
  }
  for (; i + Wide::kWidth <= end; i += Wide::kWidth) num_nonfinite += update<Wide>(wide, master, m, v, g, i);
  const Update<Narrow> narrow(scalars);
  for (; i < end; ++i) num_nonfinite += update<Narrow>(narrow, master, m, v, g, i);
  return num_nonfinite;
}

template <template <class> class Update, class Scalars>
int64_t update_chunk(const AdamwArrays& a, const Scalars& s, int64_t begin, int64_t end) {
  const auto run = [&](const auto& master) {
    const auto with = [&](const auto* grad) {
      return update_range<Update>(s, master, a.exp_avg, a.exp_avg_sq, grad, begin, end);
    };
    return a.grad_is_bf16 ? with(static_cast<const uint16_t*>(a.grad)) : with(static_cast<const float*>(a.grad));
  };
  if (a.lo) return run(SplitMaster{static_cast<uint16_t*>(a.master), a.lo});
  return run(WholeMaster{static_cast<float*>(a.master)});
}

int64_t adamw_chunk(const AdamwArrays& a, const AdamwScalars& s, int64_t begin, int64_t end) {
  return update_chunk<Coefficients>(a, s, begin, end);
}

int64_t correct_adamw_chunk(const AdamwArrays& a, const CorrectionScalars& s, int64_t begin, int64_t end) {
  return s.applied_scale == s.grad_scale ? update_chunk<Untouched>(a, s, begin, end)
                                         : update_chunk<Corrections>(a, s, begin, end);
}
