"""A kernel that the compiler refuses, or with wrong results, is not used: torch operations have the right bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from offload.accelerators import CudaAccelerator
from offload.extras.quant.casts import to_fp8
from offload.extras.quant.codecs import NF4
from offload.native import kernels, torch_fallback
from tests.accelerator.test_decoding import decoded_in_slot, on_host, records_of
from tests.accelerator.test_device_update import run
from tests.accelerator.test_fp8_casts import every_number
from tests.native.states import ordinary, same_bits

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.usefixtures("sim", "forgetful"),
    pytest.mark.skipif(not kernels.is_native(), reason="there is no source"),
]


def decoded(device: str) -> Sequence[Tensor]:
    records = records_of(NF4, 3)
    return [on_host(NF4, records, torch.bfloat16) if device == "cpu" else decoded_in_slot(NF4, records)]


def updated(device: str) -> Sequence[Tensor]:
    s = ordinary(500)
    return run("adamw", "fp32", s, False, s.g, 1.0, device)


def cast(device: str, by_row: bool) -> Sequence[Tensor]:
    found = to_fp8(every_number(torch.bfloat16).to(device), by_row=by_row)
    return found.values.view(torch.uint8).cpu(), found.scale.cpu()


class User(NamedTuple):
    """A user of kernels. wrong: lines before the source that make results wrong, with words of the warning."""

    run: Callable[[str], Sequence[Tensor]]
    warning: str
    wrong: Mapping[str, str]


PRODUCT = "#define __fmul_rn(a, b) ((a) * (b) * 1.0000001f)"
CASTS = {
    "#define __fdiv_rn(a, b) ((a) * (1 / (b)))": "other numbers",
    "#define __fadd_rn(a, b) ((a) + (b) * 1.0000001f)": "other numbers",
    "#define __syncthreads()": "other",
}
USERS = {
    "decoding": User(decoded, "decoded by torch operations", {PRODUCT: "other weights"}),
    "update": User(updated, "run as torch operations", {PRODUCT: "other bits"}),
    "cast by row": User(partial(cast, by_row=True), "cast to FP8 by torch operations", CASTS),
    "cast of a matrix": User(partial(cast, by_row=False), "cast to FP8 by torch operations", CASTS),
}
CASES = [(name, line) for name, user in USERS.items() for line in ("#error refused", *user.wrong)]


@pytest.mark.parametrize(("name", "line"), CASES)
def test_a_kernel_that_is_refused_or_wrong_is_not_used(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(self: CudaAccelerator, source: str, *given: Any, own: Any = CudaAccelerator.compile_kernel) -> Any:
        return own(self, f"{line}\n{source}", *given)

    user = USERS[name]
    wanted = user.run("cpu")
    monkeypatch.setattr(CudaAccelerator, "compile_kernel", compiled)
    # The square root on GPUs is correctly rounded. The simulation uses torch's CPU kernels, with another rounding.
    monkeypatch.setattr(torch_fallback, "_sqrt", lambda x: x.double().sqrt_().float())
    with pytest.warns(UserWarning, match=f"{user.warning}(.|\n)*{user.wrong.get(line, 'refused')}") as caught:
        found = [user.run("sim"), user.run("sim")]
    assert len(caught) == 1
    assert all(same_bits(one, other) for each in found for one, other in zip(each, wanted, strict=True))
