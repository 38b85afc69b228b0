"""The bytes and operations that rate measurements count are those of the kernels they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from offload.extras.plan import probe
from tests.engine.device import cpu_only

pytestmark = cpu_only("what is counted does not depend on the device")
CPU = torch.device("cpu")


class Watch(TorchDispatchMode):
    """Counts the bytes that operations read and write, and collects their arguments."""

    num_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.read: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_iter((args, kwargs or {})) if isinstance(t, torch.Tensor)]
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
            self.read += tensors
        return result


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Run each measurement once, in one second."""
    watch = Watch()

    def once(run: Callable[[], object]) -> float:
        with watch:
            run()
        return 1.0

    monkeypatch.setattr(probe, "_best_seconds", once)
    return watch


def test_elementwise_kernels_count_every_byte(watched: Watch) -> None:
    assert probe.moved_bytes_per_second(CPU, 1 << 20) == watched.num_bytes
    assert {tensor.dtype for tensor in watched.read} == {torch.float32, torch.bfloat16}
    assert any(not tensor.is_contiguous() for tensor in watched.read)
    held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in watched.read}
    assert sum(held.values()) <= 1.1 * (1 << 20)


def test_attention_counts_half_of_all_scores(watched: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ATTENTION_TOKENS", (64,))
    shape = (1, probe._ATTENTION_HEADS, 64, probe._ATTENTION_WIDTH)
    whole = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert probe.attention_flops_per_second(CPU, torch.float32) == whole / 2


@pytest.mark.parametrize(
    "measure",
    [
        lambda: probe.flops_per_second(CPU, torch.bfloat16),
        lambda: probe.device_bytes_per_second(CPU, 1 << 16),
        lambda: probe.moved_bytes_per_second(CPU, 1 << 16),
    ],
)
def test_measurements_read_random_numbers(
    measure: Callable[[], float], watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU runs up to 13 % faster over constants."""
    monkeypatch.setattr(probe, "_SIZES", (64,))
    measure()
    assert watched.read[0].float().std() > 0.5
