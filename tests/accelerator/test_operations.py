"""Operations have the bits of single-threaded CPU torch, forward and backward, in any stream order."""

import pytest
import torch
import torch.nn.functional as F

from tests.threads import torch_threads

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]


@pytest.fixture(autouse=True)
def _one_thread():
    with torch_threads(1):
        yield


def numbers(*sizes, dtype=torch.float32, seed=0):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(op_name, dtype):
    """Return the floating-point inputs for an operation below."""
    sizes = SIZES.get(op_name, [(6, 8)])
    return [numbers(*size, dtype=dtype, seed=number) for number, size in enumerate(sizes)]


def index(x, values):
    return torch.tensor(values, device=x.device)


OPS = {  # of each way through the simulation one: in place, views, several results, lists, kernels of its own, waits
    "add": lambda x, y: x + y * 2 - 0.5,
    "broadcast": lambda x, y: x + y,
    "in_place": lambda x: x.clone().mul_(2).add_(1).relu_(),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "sum": lambda x: x.sum(-1) + x.mean(-1),
    "maximum": lambda x: x.max(-1).values + x.amax(-1) + x.min(-1).values,
    "sort": lambda x: x.sort(-1).values + x.topk(8, -1).values,
    "softmax": lambda x: torch.softmax(x, -1) + torch.log_softmax(x, 0),
    "matmul": lambda x, y: x @ y,
    "linear": lambda x, w, b: F.linear(x, w, b),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "masked": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool, device=q.device).tril()
    ),
    "conv1d": lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=2),
    "conv_transpose": lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2),
    "embedding": lambda w: F.embedding(index(w, [[0, 3], [5, 0]]), w),
    "cross_entropy": lambda x: F.cross_entropy(x, index(x, [0, 1, -100, 3, 4, 5])),
    "scatter_add": lambda x, y: x.scatter_add(0, index(x, [[0, 1], [0, 1]]), y),
    "index": lambda x: x[index(x, [0, 2, 2])] + x[:3][:, index(x, [1, 1, 0, 2, 3, 4, 5, 6])],
    "index_put": lambda x, y: x.clone().index_put_((index(x, [0, 2]),), y[:2]),
    "mask_index": lambda x: x[x > 0],
    "views": lambda x: x.view(2, 3, 8).transpose(0, 1)[:, :, ::2].reshape(-1).unfold(0, 4, 2).permute(1, 0).flatten(),
    "cat": lambda x, y: torch.cat([x, y, x], 1) + torch.stack([y, x, y], 1).flatten(1),
    "split": lambda x: torch.cat(list(x.split([2, 6], 1))[::-1], 1) + torch.cat(x.chunk(4, 1), 1),
    "repeat": lambda x: x.repeat(2, 2) + x.expand(1, 6, 8).repeat_interleave(2, 1).repeat(1, 1, 2)[0],
    "casts": lambda x: x.to(torch.float64).mul(3).to(torch.bfloat16).float() + x.half().float(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.float().view(6, 4, 2)) * (1 + 2j)),
    "conjugate": lambda x: torch.view_as_real(
        torch.view_as_complex(x.float().view(6, 4, 2)).conj().transpose(0, 1) * (1 + 2j)
    ).contiguous(),
    "arange": lambda x: x * torch.arange(8, device=x.device) + torch.linspace(0, 1, 8, device=x.device).to(x.dtype),
    "solve": lambda x, y: torch.linalg.solve(x.float() + 10 * torch.eye(6, device=x.device), y.float()),
}
ATTENTION = [(2, 4, 6, 8)] * 3
SIZES = {
    "add": [(6, 8)] * 2, "broadcast": [(6, 1), (1, 8)], "matmul": [(6, 8), (8, 5)],
    "linear": [(6, 8), (5, 8), (5,)], "layer_norm": [(6, 8), (8,), (8,)], "attention": ATTENTION,
    "causal": ATTENTION, "masked": ATTENTION, "grouped": [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)],
    "conv1d": [(2, 4, 9), (6, 2, 3), (6,)], "conv_transpose": [(2, 4, 5), (4, 3, 3), (3,)],
    "scatter_add": [(6, 8), (2, 2)], "index_put": [(6, 8)] * 2, "cat": [(6, 8)] * 2, "solve": [(6, 6), (6, 2)],
}  # fmt: skip


def run(op, given, device):
    leaves = [each.to(device, copy=True).requires_grad_() for each in given]
    result = op(*leaves)
    weights = numbers(*result.shape, seed=77).to(device)
    (result.float() * weights).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPS)
def test_bits(sim, name, dtype):
    given = inputs(name, dtype)
    expected = run(OPS[name], given, "cpu")
    sim.set_jitter(200, seed=1)
    for found, want in zip(run(OPS[name], given, "sim"), expected, strict=True):
        assert found.dtype == want.dtype
        assert torch.equal(found.cpu(), want), name


def test_operations_do_not_wait(sim):
    """Exceptions are operations with a result needed on the host."""
    x = numbers(6, 8).to("sim").requires_grad_()
    waiting = {"mask_index", "solve", "index", "scatter_add", "index_put", "embedding", "cross_entropy"}
    torch.accelerator.synchronize()
    for name in sorted(set(OPS) - waiting):
        leaves = [each.to("sim").requires_grad_() for each in inputs(name, torch.float32)]
        torch.sim.set_sync_debug_mode("error")
        OPS[name](*leaves).sum().backward()
        torch.sim.set_sync_debug_mode("default")
    sim.reset_counters()
    torch.ones(3, device="sim").masked_fill_(torch.ones(3, dtype=torch.bool, device="sim"), 2.0)
    assert sim.counters()["waits"] == 0
    for wait in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x[x > 0], lambda: torch.unique(x.detach())):
        sim.reset_counters()
        wait()
        assert sim.counters()["operation_waits"] >= 1
    sim.reset_counters()
    assert torch.equal(x, x)
    assert sim.counters()["operation_waits"] >= 1


def test_views_copy_nothing(sim):
    x = torch.zeros(4, 6, device="sim")
    sim.reset_counters()
    views = [x.view(2, 12), x[1:], x.t(), x.unfold(1, 2, 2), x[None], x.expand(2, 4, 6), x.diagonal(), x.detach()]
    views += [
        x.view(torch.int32),
        x.chunk(2)[0],
        *x.unbind(0),
        x.as_strided((2, 2), (1, 2)),
        x.squeeze(),
        x.narrow(1, 2, 2),
    ]
    assert sim.counters()["launches"] == 0
    assert {view.untyped_storage().data_ptr() for view in views} == {x.data_ptr()}
    views[2].fill_(1)
    assert x.sum().item() == 24


def test_out_and_resize(sim):
    x, out = numbers(4, 4).to("sim"), torch.empty(0, device="sim")
    assert torch.add(x, 1, out=out) is out
    assert torch.equal(out.cpu(), x.cpu() + 1)
    out.resize_(2, 3)
    assert out.shape == (2, 3)
    values, order = torch.empty(0, device="sim"), torch.empty(0, dtype=torch.long, device="sim")
    torch.sort(x, out=(values, order))
    assert torch.equal(order.cpu(), x.cpu().sort().indices)


def test_numbers_in_host_tensors_go_along(sim):
    x, number = torch.ones(3, device="sim"), torch.tensor(2.0)
    with sim.held(torch.accelerator.current_stream()):
        y = x * number
        number.fill_(5)
    assert y.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="same device"):
        x * torch.ones(3)


def test_integers_are_counted_as_by_cuda(sim):
    found = torch.histc(torch.tensor([0, 3, 3, 2], dtype=torch.int32, device="sim"), bins=4, min=0, max=3)
    assert found.dtype == torch.int32
    assert found.tolist() == [1, 0, 1, 2]


def test_a_host_tensor_as_index(sim):
    x = numbers(6, 8).to("sim")
    order = torch.tensor([2, 0, 1])
    sim.reset_counters()
    found = x[order]
    assert sim.counters()["operation_waits"] >= 1
    assert torch.equal(found.cpu(), x.cpu()[order])


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizers(sim, kind):
    def steps(device):
        weights = [numbers(5, 3, seed=number).to(device).requires_grad_() for number in range(3)]
        optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1, **kind)
        for step in range(3):
            for number, weight in enumerate(weights):
                weight.grad = numbers(5, 3, seed=10 * step + number).to(device)
            norm = torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=kind != {"foreach": False})
            optimizer.step()
        return [norm.cpu(), *(weight.detach().cpu() for weight in weights)]

    for found, want in zip(steps("sim"), steps("cpu"), strict=True):
        assert torch.equal(found, want)


def test_a_fused_update_is_one_launch(sim):
    tensors = [[torch.ones(1000, device="sim") for _ in range(8)] for _ in range(4)]
    counts = [torch.tensor(1.0, device="sim") for _ in range(8)]
    sim.reset_counters()
    torch._fused_adamw_(
        *tensors, [], counts, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False
    )
    assert sim.counters()["launches"] == 1
    assert sim.counters()["waits"] == 0


def test_what_the_cpu_has_no_kernel_for_is_refused(sim):
    layer = torch.nn.LSTM(4, 5).to("sim")  # torch uses a fused cell on devices
    with pytest.raises(NotImplementedError, match="CPU kernels, and there is none for aten::_thnn_fused_lstm_cell"):
        layer(numbers(2, 3, 4).to("sim"))


def test_operators_whose_names_end_as_those_in_place_do():
    bits = torch.arange(-3, 5, dtype=torch.int32)
    on_device = bits.to("sim")
    assert torch.equal((on_device << 3).cpu(), bits << 3)
    assert torch.equal((on_device >> 1).cpu(), bits >> 1)
    on_device <<= 2
    assert torch.equal(on_device.cpu(), bits << 2)
