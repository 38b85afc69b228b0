// One Lion step over a range. The order of operations is that of the authors' own (google/automl, lion_pytorch.py),
// with each sum of two products ending in a fused multiply-add.
// Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2, https://arxiv.org/abs/2302.06675.

#include "master.inl"

template <class Lane>
struct LionCoefficients {
  typename Lane::Vec grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr, neg_lr, zero;

  explicit LionCoefficients(const LionScalars& s)
      : grad_scale(Lane::set(s.grad_scale)),
        decay(Lane::set(s.decay)),
        beta1(Lane::set(s.beta1)),
        one_minus_beta1(Lane::set(s.one_minus_beta1)),
        beta2(Lane::set(s.beta2)),
        one_minus_beta2(Lane::set(s.one_minus_beta2)),
        lr(Lane::set(s.lr)),
        neg_lr(Lane::set(-s.lr)),
        zero(Lane::set(0)) {}
};

// Updates the Lane::kWidth elements from i on; returns how many of the new weights are not finite.
template <class Lane, class Master, class Grad>
inline int64_t update(const LionCoefficients<Lane>& c, const Master& master, float* m, const Grad* g, int64_t i) {
  using Vec = typename Lane::Vec;
  const Vec grad = Lane::mul(load_grad<Lane>(g + i), c.grad_scale);
  const Vec old_m = Lane::load(m + i);
  const Vec mix = Lane::fma(c.one_minus_beta1, grad, Lane::mul(old_m, c.beta1));
  const Vec new_m = Lane::fma(c.one_minus_beta2, grad, Lane::mul(old_m, c.beta2));
  const Vec step = Lane::if_equal(mix, c.zero, c.zero, Lane::if_at_most(mix, c.zero, c.neg_lr, c.lr));
  // A sign hides what is not finite; mix - mix does not, and is zero elsewhere. Taking +0 away leaves -0 what it is.
  const Vec decayed = Lane::mul(master.template load<Lane>(i), c.decay);
  const Vec weight = Lane::sub(decayed, Lane::add(step, Lane::sub(mix, mix)));
  Lane::store(m + i, new_m);
  master.template store<Lane>(i, weight);
  return Lane::count_nonfinite(weight);
}

template <class Master, class Grad>
int64_t lion_range(const LionScalars& scalars, const Master master, float* m, const Grad* g, int64_t begin,
                   int64_t end) {  // master by value, as in adamw_kernel.inl
  const LionCoefficients<Wide> wide(scalars);
  int64_t num_nonfinite = 0;
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    master.prefetch(i), prefetch_block(m + i), prefetch_block(g + i);
    for (int64_t k = i; k < i + kBlock; k += Wide::kWidth) num_nonfinite += update<Wide>(wide, master, m, g, k);
  }
  for (; i + Wide::kWidth <= end; i += Wide::kWidth) num_nonfinite += update<Wide>(wide, master, m, g, i);
  const LionCoefficients<Narrow> narrow(scalars);
  for (; i < end; ++i) num_nonfinite += update<Narrow>(narrow, master, m, g, i);
  return num_nonfinite;
}

int64_t lion_chunk(const LionArrays& a, const LionScalars& s, int64_t begin, int64_t end) {
  const auto run = [&](const auto& master) {
    const auto with = [&](const auto* grad) { return lion_range(s, master, a.exp_avg, grad, begin, end); };
    return a.grad_is_bf16 ? with(static_cast<const uint16_t*>(a.grad)) : with(static_cast<const float*>(a.grad));
  };
  if (a.lo) return run(SplitMaster{static_cast<uint16_t*>(a.master), a.lo});
  return run(WholeMaster{static_cast<float*>(a.master)});
}
