"""A script reads a model while an engine holds the weights. It gets true values or an error, never NaN."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, stateless
from torch.utils._pytree import tree_leaves

from offload import Engine
from offload.engine.units import residency
from offload.errors import ConfigError, DoesNotFitError, OffloadError, TornError
from offload.native import kernels
from tests.cases.models import build, gemma2, llama, tokens
from tests.engine import ranks
from tests.engine.compare import placed, same_bits
from tests.engine.device import cpu_only, twin
from tests.engine.handmade import Stack, cross_entropy, words
from tests.engine.inside import parts_of, recovery_of
from tests.matrix import quick

HOST = torch.device("cpu")
ANEW = r"before Engine\(\).*close\(restore=True\)"
COPY = r"engine\.export.*engine\.save_checkpoint.*close\(restore=True\)"
SPENT = "closed without restore=True.*lost.*engine.export"
GRADIENT = r"would be lost.*loss_fn.*detach\(\)"
MIDDLE, STAYS = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"

KINDS = [(tier, precision) for tier in ("cpu", "device", "nvme") for precision in ("fp32", "bf16")]


def tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


class Trained:
    """An engine after two steps, and a plain model with equal weights."""

    def __init__(self, tier: str, precision: str, folder: Path, make: Callable[[], nn.Module] = tied) -> None:
        self.engine = Engine(build(make), placement=placed(tier, folder), precision=precision)
        self.model = self.engine.model
        for seed in range(2):
            self.engine.step(tokens(seed))
        plain = build(make)
        masters = dict(self.engine.named_parameters())
        for name, p in plain.named_parameters():
            # The high half of a master is rounded to nearest as well, but ties round away from zero.
            p.data = (kernels.split(masters[name])[0] if precision == "bf16" else masters[name]).clone()
        self.plain = twin(plain)


@pytest.fixture(
    scope="module", params=quick(((one,) for one in KINDS), [(KINDS[0],), (KINDS[3],), (KINDS[5],)]), ids="-".join
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    made = Trained(*request.param, tmp_path_factory.mktemp("nvme"))
    yield made
    made.engine.step(tokens(2))  # training continues after any read
    made.engine.close()


def outcome(read: Callable[[Any], Any], what: Any) -> Any:
    """Return the result, or the error class. torch refuses some reads on any tensor."""
    try:
        return read(what)
    except OffloadError:
        raise
    except Exception as error:
        return type(error)


def assert_same(found: Any, expected: Any) -> None:
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            for key in ("shape", "dtype", "device"):
                assert getattr(one, key) == getattr(other, key)
            assert one.stride() == other.stride()
            assert same_bits(one.detach().clone(), other.detach())
            assert not other.is_floating_point() or not one.detach().isnan().any()
        elif isinstance(other, np.ndarray):
            assert np.array_equal(one, other)
        else:
            assert one == other


def in_a_thread(read: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def assert_refused(
    uses: Mapping[str, Callable[[Any], Any]], what: Any, match: str = ".", kinds: Any = ConfigError
) -> None:
    """Check the error of each use."""

    def refuses(use: Callable[[Any], Any]) -> None:
        with pytest.raises(kinds, match=match):
            use(what)

    assert not failures({key: partial(refuses, use) for key, use in uses.items()})


def filled(like: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    target = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        fill(target)
    return target


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    **{
        name: methodcaller(name) for name in ["sum", "clone", "detach", "cpu", "float", "contiguous", "tolist", "numpy"]
    },
    "arithmetic": lambda p: 1 - p / 2 + p,
    "comparison": lambda p: p == p.detach().clone(),
    "equal": lambda p: torch.equal(p, p.detach()),
    "detach clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data,
    "data clone": lambda p: p.data.clone(),
    "data of data": lambda p: p.data.data,
    "to": lambda p: p.to("cpu", torch.float64),
    "to nowhere": lambda p: p.to(p.device),
    "view": lambda p: p.view(-1),
    "view of dtype": lambda p: p.detach().view(torch.int16),
    "transposed": lambda p: p.unsqueeze(0).transpose(0, 1),
    "row": lambda p: p[0],
    "part of a row": lambda p: p[1:][0],
    "mask": lambda p: p[p > 0],
    "rows": lambda p: p[torch.tensor([1, 0], device=p.device)],
    "iteration": lambda p: list(p)[1],
    "split": lambda p: p.split(5)[1],
    "item": lambda p: p.view(-1)[3].item(),
    "number": lambda p: float(p.view(-1)[3]),
    "truth": lambda p: bool(p.view(-1)[3] > 0),
    "detached numpy": lambda p: p.detach().numpy(),
    "numpy of a view": lambda p: p.detach()[1:].numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "text": repr,
    "format": lambda p: f"{p}",
    "format of an element": lambda p: f"{p.detach().view(-1)[0]:.3f}",
    "tensor": lambda p: torch.tensor(p.data),
    "as_tensor": lambda p: torch.as_tensor(p),
    "new_tensor": lambda p: p.new_tensor(p.data),
    "Tensor": lambda p: torch.Tensor(p.data),
    "Parameter": lambda p: nn.Parameter(p.data),
    "Parameter of itself": nn.Parameter,
    "Parameter of a copy": lambda p: nn.Parameter(p.detach().clone()),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "zeros_like": lambda p: torch.zeros_like(p),
    "vector": lambda p: parameters_to_vector([p, p]),
    "foreach": lambda p: torch._foreach_norm([p, p]),
    "foreach with another": lambda p: torch._foreach_mul([torch.ones_like(p)], [p.detach()]),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p),
    "operation by name": lambda p: torch.ops.aten.add(p, 1),
    "linear": lambda p: nn.functional.linear(torch.ones(2, p.shape[-1], dtype=p.dtype, device=p.device), p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1], device=p.device), p),
    "copied into another": lambda p: filled(p, lambda t: t.copy_(p)),
    "put into another": lambda p: filled(p, lambda t: t.__setitem__(slice(None), p)),
    "out": lambda p: filled(p, lambda t: torch.mul(p, 2, out=t)),
    "in inference mode": lambda p: torch.inference_mode()(lambda: p * 2)().clone(),
    "in another thread": lambda p: in_a_thread(lambda: p * 2),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy of data": lambda p: copy.deepcopy(p.data),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "saved": saved,
    "saved data": lambda p: saved({"a": p.data, "b": p.data[0]}),
    "clipped": lambda p: clip_grad_norm_([p], 1.0),
    "nothing to zero": lambda p: setattr(p, "grad", None),
    "kind": lambda p: (isinstance(p, nn.Parameter), isinstance(p.data, nn.Parameter), p.requires_grad, p.is_leaf),
    "layout": lambda p: (p.shape, p.stride(), p.is_contiguous(), p.numel(), p.element_size(), p.dim(), p.nbytes),
    "where": lambda p: (p.device, p.dtype, p.is_meta, p.is_sparse, p.layout, p.grad, p.is_floating_point()),
    "thawed": lambda p: p.requires_grad_(True).requires_grad,
}


def failures(uses: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Run all functions and return the errors. Hundreds of tests with a millisecond each would take a minute."""
    wrong: dict[str, str] = {}
    for name, use in uses.items():
        try:
            use()
        except (Exception, pytest.fail.Exception) as error:
            wrong[name] = "".join(traceback.format_exception(error)[-2:])
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", [MIDDLE, "lm_head.weight", STAYS])
@pytest.mark.filterwarnings("ignore")
def test_a_parameter_reads_as_in_plain_torch(trained: Trained, name: str) -> None:
    ours, theirs = (each.get_parameter(name) for each in (trained.model, trained.plain))
    reads = {
        key: lambda read=read: assert_same(outcome(read, ours), outcome(read, theirs)) for key, read in READS.items()
    }
    if name == STAYS:  # nn.Parameter takes no instance of a subclass whose detach() is a plain tensor, and says so
        del reads["Parameter of itself"]
    assert not failures(reads)


class Wrapper(nn.Module):
    """Wraps a model like an adapter library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model


ON_HOST: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "of a part": lambda model: model.model.layers[0].state_dict(),
    "of what stays": lambda model: model.model.norm.state_dict(),
    "with a prefix": lambda model: model.state_dict(prefix="a."),
    "into a dictionary": lambda model: dict(model.state_dict(destination=OrderedDict(a=1))),
    "of a wrapper": lambda model: Wrapper(model).state_dict(),
    "of a copy": lambda model: copy.copy(model).state_dict(),
    "saved": lambda model: saved(model.state_dict()),
    "copied": lambda model: copy.deepcopy(model.state_dict()),
}
WHERE_IT_IS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters themselves": lambda model: model.state_dict(keep_vars=True),
    "parameters": lambda model: dict(model.named_parameters()),
    "parameters saved": lambda model: saved(dict(model.named_parameters())),
    "embeddings": lambda model: model.get_input_embeddings().weight,
    "for functional_call": lambda model: {name: p.detach() for name, p in model.named_parameters()},
    "size": lambda model: (model.num_parameters(), model.get_memory_footprint()),
    "dtype": lambda model: model.dtype,
}


def assert_same_state(found: Any, expected: Any, is_on_host: bool) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None)
    if is_on_host:
        expected = {
            key: value.to(HOST) if isinstance(value, torch.Tensor) else value for key, value in expected.items()
        }
    assert_same(found, expected)


@pytest.mark.slow
def test_a_model_reads_as_in_plain_torch(trained: Trained) -> None:
    reads = {
        key: lambda key=key, read=read: assert_same_state(read(trained.model), read(trained.plain), key in ON_HOST)
        for key, read in {**ON_HOST, **WHERE_IT_IS}.items()
    }
    assert not failures(reads)


def test_tied_names_have_one_tensor_in_a_state(trained: Trained) -> None:
    state = trained.model.state_dict()
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    again = trained.model.state_dict()
    assert again["lm_head.weight"] is again["model.embed_tokens.weight"]
    assert again["lm_head.weight"] is not state["lm_head.weight"]
    state["lm_head.weight"].zero_()
    assert again["lm_head.weight"].any(), "what is done to one reaches another"


ADDRESSES: dict[str, Callable[[nn.Parameter], Any]] = {
    "address": lambda p: p.data_ptr(),
    "address of data": lambda p: p.data.data_ptr(),
    "address of a row": lambda p: p[1].data_ptr(),
    "typed storage": lambda p: p.storage(),
    "safetensors": lambda p: save_file({"a": p}, "/dev/null"),
}
RAW: dict[str, Callable[[nn.Parameter], Any]] = {
    "data of another": lambda p: filled(p, lambda t: setattr(t, "data", p.data)),
    "storage": lambda p: p.untyped_storage().data_ptr(),
    "capsule": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())),
}


@pytest.mark.filterwarnings("ignore")
def test_what_reads_memory_by_itself_fails(trained: Trained) -> None:
    parameter = trained.model.get_parameter(MIDDLE)
    assert_refused(ADDRESSES, parameter, MIDDLE + r".*engine\.named_parameters\(\).*engine\.export")
    assert_refused(RAW, parameter, kinds=(RuntimeError, BufferError))  # these reads bypass the tensor's Python code


HOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "on a gradient": lambda p: p.register_hook(lambda gradient: gradient),
    "after a gradient": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
    "on several": lambda p: torch.autograd.graph.register_multi_grad_hook([p], lambda gradients: None),
}


def test_hooks_that_would_never_run_are_refused(trained: Trained) -> None:
    parameter, ran = trained.model.get_parameter(MIDDLE), []
    assert_refused(HOOKS, parameter, MIDDLE + r".*would never run.*engine\.grad_norm\(\)")
    for own in (parameter.detach().requires_grad_(), nn.Parameter(parameter)):
        own.register_hook(ran.append)
        own.pow(2).sum().backward()
        assert same_bits(own.grad, 2 * parameter.detach())
    assert len(ran) == 2, "what a script has made of it takes gradients of its own"


# -- writes -----------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "zero_": lambda p: p.zero_(),
    "mul_": lambda p: p.mul_(2),
    "element": lambda p: p.__setitem__(0, 1.0),
    "element of data": lambda p: p.data.__setitem__(0, 1.0),
    "copy_ to data": lambda p: p.data.copy_(torch.ones_like(p)),
    "row of data": lambda p: p.data[0].fill_(1),
    "view of data": lambda p: p.data.view(-1)[3:].zero_(),
    "row of detach": lambda p: p.detach().unbind()[0].add_(1),
    "add to data": lambda p: p.data.__iadd__(1),
    "data": lambda p: setattr(p, "data", torch.ones_like(p)),
    "data of a shape": lambda p: setattr(p, "data", p.data[1:]),
    "out": lambda p: torch.add(torch.ones_like(p), 1, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "init": nn.init.zeros_,
    "normal": lambda p: nn.init.normal_(p),
    "set_": lambda p: p.set_(torch.ones_like(p)),
    "resize_": lambda p: p.data.resize_(4),
    "gradient": lambda p: setattr(p, "grad", torch.ones(p.shape, device=p.device, dtype=p.dtype)),
    "shared memory": lambda p: p.share_memory_(),
    "other's place": lambda p: torch.utils.swap_tensors(p, torch.ones_like(p)),
    "place of another": lambda p: torch.utils.swap_tensors(torch.ones_like(p), p),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.ones(p.numel(), device=p.device, dtype=p.dtype), [p]),
}


def test_writes_are_refused(trained: Trained) -> None:
    parameter = trained.model.get_parameter(MIDDLE)
    with torch.no_grad():
        assert_refused(WRITES, parameter, MIDDLE + ".*" + ANEW)
    assert parameter.grad is None
    assert same_bits(parameter.detach().clone(), trained.plain.get_parameter(MIDDLE).detach())


NUMPY: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda p: p.numpy(),
    "of a view": lambda p: p[1:].numpy(),
    "asarray": lambda p: np.asarray(p),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("read", NUMPY)
def test_a_numpy_array_of_an_offloaded_parameter_is_read_only(read: str) -> None:
    """In plain torch the array shares the memory of the weight. Here the array is a copy: a write would be lost."""
    with Engine(build(Stack), device="cpu", precision="fp32") as engine:
        parameter = engine.model.blocks[1].up.weight.detach()
        with pytest.raises(ValueError, match="read-only"):
            NUMPY[read](parameter).__imul__(0.5)
        assert NUMPY[read](parameter * 2).flags.writeable


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "to a dtype": lambda model: model.to(torch.float64),
    "to a device": lambda model: model.to("meta"),
    "more words": lambda model: model.resize_token_embeddings(80),
    "share_memory": lambda model: model.share_memory(),
    "functional_call": lambda model: torch.func.functional_call(
        model, {MIDDLE: torch.zeros_like(model.get_parameter(MIDDLE))}, (), tokens()
    ),
}
COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "load by assignment": lambda model: model.load_state_dict(model.state_dict(), assign=True),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "pickle of a part": lambda model: pickle.dumps(model.model.layers[0]),
    "pickle of what stays": lambda model: pickle.dumps(model.model.norm),
    "deepcopy of a part": lambda model: copy.deepcopy(model.model.layers[1].mlp),
    "load_state_dict of a part": lambda model: model.lm_head.load_state_dict({"weight": torch.ones(64, 32)}),
    "average": torch.optim.swa_utils.AveragedModel,
}


def test_changes_of_a_model_are_refused(trained: Trained) -> None:
    assert_refused(CHANGES, trained.model, ANEW)
    assert_refused(COPIES, trained.model, COPY)


@cpu_only("of an engine elsewhere")
def test_a_part_is_not_called_with_other_weights(trained: Trained) -> None:
    """Gradients of the other weights would be lost silently."""
    mlp = trained.model.model.layers[1]
    other = {"mlp.up_proj.weight": trained.plain.get_parameter(MIDDLE)}
    hidden = torch.ones(1, 3, 32, dtype=trained.model.dtype)
    with pytest.raises(ConfigError, match=r"replaced.*before Engine\(\)"), stateless._reparametrize_module(mlp, other):
        mlp(hidden, position_embeddings=(hidden[..., :8], hidden[..., :8]))


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [MIDDLE, "lm_head.weight"])
def test_a_gradient_that_would_be_lost_is_refused(name: str) -> None:
    engine, other = (Engine(build(tied)) for _ in range(2))
    weight = engine.model.get_parameter(name)
    for read in (
        lambda: weight.pow(2).sum(),
        lambda: weight.t()[1:].sum(),
        lambda: torch.stack([weight, weight]).sum(),
    ):
        with pytest.raises(ConfigError, match="(up_proj|embed_tokens).*" + GRADIENT):
            read().backward()
        with pytest.raises(ConfigError, match=GRADIENT):
            engine.backward(engine.model(**tokens()).loss + read())
    loss = engine.model(**tokens()).loss + weight.detach().pow(2).sum()
    engine.backward(loss)
    other.backward(other.model(**tokens()).loss)
    assert engine.update().grad_norm == other.update().grad_norm


# -- when -------------------------------------------------------------------------------------------------------------


def test_an_update_of_another_weight_that_fails_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of the weight itself is done, but the step as a whole has failed."""
    engine = Engine(build(tied), throttle={"update": {"bandwidth": "100GiB"}})
    engine.step(tokens())
    lanes, may_fail = parts_of(engine).lanes, threading.Event()
    lanes.drain_updates()
    drain = lanes.drain_updates

    def fail() -> None:
        may_fail.wait()
        raise RuntimeError("an update")

    lanes.update.submit(fail)
    monkeypatch.setattr(lanes, "drain_updates", lambda: (may_fail.set(), drain()))
    try:
        with pytest.raises(RuntimeError, match="an update"):
            engine.model.get_parameter(MIDDLE).sum()
    finally:
        may_fail.set()
    with pytest.raises(TornError):
        engine.model.get_parameter(MIDDLE).sum()


def test_weights_that_were_loaded_are_waited_for(tmp_path: Path) -> None:
    engine = Engine(build(tied), throttle={"h2d": {"bandwidth": "100GiB", "latency_seconds": 0.02}})
    engine.step(tokens())
    before = engine.model.get_parameter(STAYS).detach().clone()
    engine.save_checkpoint(tmp_path / "states")
    engine.step(tokens(1))
    engine.load_checkpoint(tmp_path / "states")
    assert same_bits(engine.model.get_parameter(STAYS).detach(), before)
    engine.close()


def test_an_interrupt_in_a_module_of_a_backward_leaves_nothing_to_update_from() -> None:
    """The interrupt comes in model code, in the second unit recomputed by the caller's loss.backward()."""

    class Interrupting(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    engine = Engine(build(tied), recompute="always")
    loss = engine.model(**tokens()).loss
    mlp = engine.model.model.layers[0].mlp
    activation, mlp.act_fn = mlp.act_fn, Interrupting()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    mlp.act_fn = activation
    with pytest.raises(ConfigError, match="there are no gradients"):
        engine.update()
    assert engine.step(tokens()).loss.isfinite()


def test_a_backward_that_is_refused_before_it_begins_costs_nothing() -> None:
    engine, other = (Engine(build(tied)) for _ in range(2))
    loss = engine.model(**tokens()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(OffloadError, match="backward ran twice"):
        loss.backward()
    other.model(**tokens()).loss.backward()
    assert engine.update().grad_norm == other.update().grad_norm


def test_a_loss_function_that_reads_later_than_it_did_is_refused() -> None:
    model = build(Stack)
    engine, reads = Engine(model), []

    def loss_fn(outputs: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(outputs, batch) + (0.1 * model.head.weight.pow(2).sum() if len(reads) else 0)

    engine.step(words(), loss_fn=loss_fn)
    before = dict(engine.named_parameters())
    reads.append(True)
    with pytest.raises(ConfigError, match=r"head\.weight was read during a pass"):
        engine.step(words(), loss_fn=loss_fn)
    assert all(same_bits(value, before[name]) for name, value in engine.named_parameters())
    reads.clear()
    engine.step(words(), loss_fn=loss_fn)


def test_a_state_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build(tied))
    monkeypatch.setattr(residency, "memory", lambda: {"available_bytes": 30 << 10})
    with pytest.raises(DoesNotFitError, match=r"the model needs 6\d\.?\d* KiB.* 30 KiB .*engine\.export"):
        engine.model.state_dict()
    assert len(engine.model.model.layers[0].mlp.gate_proj.state_dict()) == 1
    assert engine.model.state_dict(keep_vars=True)


# -- closed and dropped engines --------------------------------------------------------------------------------------


def first(model: nn.Module) -> nn.Parameter:
    return model.model.layers[0].mlp.up_proj.weight


QUESTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "value": lambda model: first(model).sum(),
    "what stays": lambda model: model.model.norm.weight.tolist(),
    "detach": lambda model: first(model).detach().clone(),
    "text": lambda model: repr(first(model)),
    "numpy": lambda model: first(model).detach().numpy(),
    "pickle": lambda model: pickle.dumps(first(model)),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a part": lambda model: model.model.layers[0].state_dict(),
    "state_dict of a wrapper": lambda model: Wrapper(model).state_dict(),
    "save_model": lambda model: save_model(model, "/dev/null"),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "load_state_dict": lambda model: model.load_state_dict({}, strict=False),
    "its parameters": lambda model: model.state_dict(keep_vars=True),
    "write": lambda model: first(model).data.zero_(),
    "forward": lambda model: model(**tokens()),
    "forward of a part": lambda model: model.model(tokens()["input_ids"]),
}


@pytest.mark.parametrize("end", ["closed", "dropped", "failed"])
def test_nothing_is_read_of_weights_that_are_gone(end: str) -> None:
    model, questions = build(tied), dict(QUESTIONS)
    if end == "failed":
        with pytest.raises(OSError, match="no more"):
            Engine(model, fill=_fails_in_the_middle())
    elif end == "closed":
        Engine(model).close()
    else:
        Engine(model)
        del questions["forward"], questions["forward of a part"]  # a model without an engine still runs
        gc.collect()
    if end != "closed":
        del questions["what stays"]  # the weight is still on the device, or was never moved
    with torch.no_grad():
        assert_refused(questions, model, "restore=True" if end == "closed" else ".")
        if end == "closed":
            assert_refused({"value": QUESTIONS["value"]}, model, SPENT)


def _fails_in_the_middle() -> Callable[[str, nn.Module], None]:
    names: list[str] = []

    def fill(name: str, _module: nn.Module) -> None:
        names.append(name)
        if len(names) > 3:
            raise OSError("no more")

    return fill


def test_what_was_given_back_is_an_ordinary_model() -> None:
    engine = Engine(build(tied))
    engine.step(tokens())
    kept, view = engine.model.lm_head.weight, engine.model.lm_head.weight.data
    masters = dict(engine.named_parameters())
    engine.close(restore=True)
    assert type(engine.model.lm_head.weight) is nn.Parameter
    assert same_bits(engine.model.lm_head.weight.detach().cpu(), masters["model.embed_tokens.weight"])
    engine.model.load_state_dict(copy.deepcopy(engine.model).state_dict())
    engine.model.half()
    for old in (kept, view):
        with pytest.raises(ConfigError, match="is a placeholder.*back in the model"):
            old.sum()


def test_a_torn_engine_is_read_by_nobody() -> None:
    engine = Engine(build(tied))
    recovery_of(engine).torn = "an update failed"
    with pytest.raises(TornError, match="from different steps"):
        engine.model.state_dict()


# -- ranks ------------------------------------------------------------------------------------------------------------


def read_on_rank_0(stage: int, precision: str) -> Any:
    """Read on rank 0 alone, without waiting for the others. Then train on all ranks."""
    engine = Engine(build(gemma2), zero_stage=stage, precision=precision)
    engine.step(tokens())
    said = ""
    found: dict[str, torch.Tensor] = {}
    if engine.rank == 0:
        try:
            found = engine.model.state_dict()
            found |= {f"p {name}": p.detach().cpu().clone() for name, p in engine.model.named_parameters()}
        except ConfigError as error:
            said = str(error)
    masters = dict(engine.named_parameters())
    wrong = [
        name
        for name, value in found.items()
        if not same_bits(
            value, masters[name.removeprefix("p ").replace("lm_head", "model.embed_tokens")].to(value.dtype)
        )
    ]
    loss = engine.step(tokens(1)).loss.item()
    engine.close()
    return said, len(found), wrong, loss


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "fp32")])
def test_one_rank_reads_what_it_has_or_is_refused_at_once(stage: int, precision: str) -> None:
    (said, num_found, wrong, loss), (_, _, _, other) = ranks.run(2, read_on_rank_0, stage=stage, precision=precision)
    assert not wrong
    assert loss == other
    if stage == 3:
        assert "partitioned over 2 ranks" in said
        assert "engine.named_parameters()" in said
    else:
        assert num_found > 40
        assert not said
