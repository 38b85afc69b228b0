// One step of gradient descent, with the order of operations of torch's single-tensor SGD (torch/optim/sgd.py), whose
// additions of a multiple are fused multiply-adds.

#include "update.inl"

template <class Lane>
struct SgdStep {
  using Vec = typename Lane::Vec;
  static constexpr int kNumMoments = 0;
  Vec grad_scale, weight_decay, neg_lr, momentum;

  explicit SgdStep(const SgdScalars& s)
      : grad_scale(Lane::set(s.grad_scale)),
        weight_decay(Lane::set(s.weight_decay)),
        neg_lr(Lane::set(-s.lr)),
        momentum(Lane::set(s.momentum)) {}

  Vec decayed(Vec weight, Vec gradient) const {
    return Lane::fma(weight, weight_decay, Lane::mul(gradient, grad_scale));
  }
  Vec operator()(Vec weight, Vec*, Vec gradient) const { return Lane::fma(decayed(weight, gradient), neg_lr, weight); }
};

template <class Lane>
struct SgdMomentumStep : SgdStep<Lane> {
  using Vec = typename Lane::Vec;
  static constexpr int kNumMoments = 1;
  using SgdStep<Lane>::SgdStep;

  Vec operator()(Vec weight, Vec* moments, Vec gradient) const {
    moments[0] = Lane::add(Lane::mul(moments[0], this->momentum), this->decayed(weight, gradient));
    return Lane::fma(moments[0], this->neg_lr, weight);
  }
};

int64_t sgd_chunk(const UpdateArrays& a, const SgdScalars& s, int64_t begin, int64_t end) {
  return with_arrays(a, [&](const auto& master, const auto* grad) {
    if (!a.moments.values[0]) return update_range<SgdStep, Fp32Moments<0>>(s, master, a.moments, grad, begin, end);
    return update_range<SgdMomentumStep, Fp32Moments<1>>(s, master, a.moments, grad, begin, end);
  });
}
