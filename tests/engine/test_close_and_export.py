"""Closing an engine: a restored model, or an export folder that transformers loads."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from offload import Engine, Placement
from offload.errors import OffloadError
from offload.native import kernels
from tests.engine.compare import assert_same, same_bits, step_of, weights
from tests.engine.device import NO_LSTM
from tests.engine.families import build, gemma2, llama, tokens
from tests.engine.handmade import MODELS, Namespace, Recurrent, Stack, cross_entropy, words

Maker = Callable[[], nn.Module]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plain_module_becomes_one_safetensors_file(precision: str, tmp_path: Path) -> None:
    """The file has the module's own names, tied weights once, and the dtype used on the device."""
    engine = Engine(build(Namespace), precision=precision)
    engine.step(words(), loss_fn=cross_entropy)
    engine.export(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    found, wanted = load_file(tmp_path / "model.safetensors"), weights(engine)
    assert sorted(found) == sorted(wanted)
    for name, tensor in found.items():
        master = wanted[name]
        assert same_bits(tensor, master if precision == "fp32" else kernels.split(master)[0]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype", "precision"),
    [(llama, torch.float16, "fp32"), (gemma2, torch.bfloat16, "bf16"), (gemma2, torch.float32, "fp32")],
)
def test_close_gives_the_model_back(make: Maker, dtype: torch.dtype, precision: str) -> None:
    model = build(make).to(dtype)
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    signature = inspect.signature(model.model.layers[0].forward)
    engine = Engine(model, precision=precision)
    assert inspect.signature(model.model.layers[0].forward) == signature, "the signature stays readable"
    engine.step(tokens())
    masters = weights(engine)
    engine.close(restore=True)
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()} == shapes
    for name, parameter in model.named_parameters():
        assert same_bits(parameter.detach().cpu(), masters[name].to(dtype)), name
    assert model.config.use_cache is True
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    if make is gemma2:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    model(**tokens()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("model", [*MODELS[::3], pytest.param(Recurrent, marks=NO_LSTM)])
def test_a_restored_model_trains_on_like_one_that_never_streamed(model: type[nn.Module]) -> None:
    """Without a step, the restored weights are equal bit for bit, and a second engine takes them over."""
    plain, given = build(model), build(model)
    engine = Engine(given)
    engine.evaluate(words(), loss_fn=cross_entropy)
    engine.close(restore=True)
    engine.close()
    engine.close(restore=True)  # a second close is harmless
    assert_same(dict(given.named_parameters()), dict(plain.named_parameters()))
    again, fresh = Engine(given), Engine(plain)
    assert step_of(again, words(), cross_entropy, seed=0) == step_of(fresh, words(), cross_entropy, seed=0)


USES: dict[str, Callable[[Engine, Path], Any]] = {
    "step": lambda engine, path: engine.step(tokens()),
    "evaluate": lambda engine, path: engine.evaluate(tokens()),
    "named_parameters": lambda engine, path: list(engine.named_parameters()),
    "backward": lambda engine, path: engine.backward(torch.zeros((), requires_grad=True)),
    "update": lambda engine, path: engine.update(),
    "export": lambda engine, path: engine.export(path / "hf"),
    "save_checkpoint": lambda engine, path: engine.save_checkpoint(path / "hf"),
    "load_checkpoint": lambda engine, path: engine.load_checkpoint(path / "hf"),
    "resolve_clip": lambda engine, path: engine.resolve_clip(1),
    "with": lambda engine, path: engine.__enter__(),
}


@pytest.mark.parametrize("restore", [True, False])
def test_a_closed_engine_says_so(restore: bool, tmp_path: Path) -> None:
    engine = Engine(build(llama))
    engine.close(restore)
    for use in USES.values():
        with pytest.raises(OffloadError, match="closed"):
            use(engine, tmp_path)
    assert not (tmp_path / "hf").exists()


@contextmanager
def without_finalizers() -> Iterator[None]:
    """Assert the absence of `weakref.finalize` callbacks in the block."""
    gc.collect()
    ran = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is weakref.finalize.__call__.__code__:
            ran.append(frame)

    sys.setprofile(note)
    try:
        yield
        gc.collect()
    finally:
        sys.setprofile(None)
    assert not ran


def test_no_finalizer_is_left_to_run_once_an_engine_is_closed(tmp_path: Path) -> None:
    """A finalizer swallows exceptions: a Ctrl-C while the garbage collector frees the engine would be lost."""
    nvme = Placement(parameters="nvme", optimizer="nvme", nvme_dir=tmp_path)
    engine = Engine(build(Stack), placement=nvme)
    engine.step(words(), loss_fn=cross_entropy)
    with without_finalizers():
        engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    with without_finalizers():
        del engine
