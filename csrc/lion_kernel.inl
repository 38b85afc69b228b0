// One Lion step. The order of operations is that of the authors' own (google/automl, lion_pytorch.py), with each sum of
// two products ending in a fused multiply-add.
// Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2, https://arxiv.org/abs/2302.06675.

#include "update.inl"

template <class Lane>
struct LionStep {
  using Vec = typename Lane::Vec;
  static constexpr int kNumMoments = 1;
  Vec grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr, neg_lr, zero;

  explicit LionStep(const LionScalars& s)
      : grad_scale(Lane::set(s.grad_scale)),
        decay(Lane::set(s.decay)),
        beta1(Lane::set(s.beta1)),
        one_minus_beta1(Lane::set(s.one_minus_beta1)),
        beta2(Lane::set(s.beta2)),
        one_minus_beta2(Lane::set(s.one_minus_beta2)),
        lr(Lane::set(s.lr)),
        neg_lr(Lane::set(-s.lr)),
        zero(Lane::set(0)) {}

  Vec operator()(Vec weight, Vec* moments, Vec gradient) const {
    const Vec grad = Lane::mul(gradient, grad_scale);
    const Vec mix = Lane::fma(one_minus_beta1, grad, Lane::mul(moments[0], beta1));
    moments[0] = Lane::fma(one_minus_beta2, grad, Lane::mul(moments[0], beta2));
    const Vec step = Lane::if_equal(mix, zero, zero, Lane::if_at_most(mix, zero, neg_lr, lr));
    // A sign hides what is not finite; mix - mix does not, and is zero elsewhere. Taking +0 away leaves -0 what it is.
    return Lane::sub(Lane::mul(weight, decay), Lane::add(step, Lane::sub(mix, mix)));
  }
};

int64_t lion_chunk(const UpdateArrays& a, const LionScalars& s, int64_t begin, int64_t end) {
  return update_chunk<LionStep>(a, s, begin, end);
}
