"""The C++ kernels (csrc/bind.cpp) and I/O engines (csrc/bind_io.cpp). Arrays are addresses;
`offload.native.kernels`, `directions` and `io` check what they point to.

`isa` is the number of an instruction set in csrc/cpu.h, `element_type` that of an Element in csrc/kernels.h.
"""

from collections.abc import Sequence

NUM_ROOFLINE_VARIANTS: int

def supported_isas() -> list[str]: ...
def physical_cores() -> int: ...
def adamw(
    master: int,
    lo: int,
    states: int,
    moments: Sequence[int],
    grad: int,
    types: int,
    n: int,
    scalars: Sequence[float],
    key: int,
    step: int,
    element: int,
    threads: int,
    isa: int,
    /,
) -> int: ...
def correct_adamw(
    master: int,
    lo: int,
    states: int,
    moments: Sequence[int],
    grad: int,
    types: int,
    n: int,
    scalars: Sequence[float],
    key: int,
    step: int,
    element: int,
    threads: int,
    isa: int,
    /,
) -> int: ...
def lion(
    master: int,
    lo: int,
    states: int,
    moments: Sequence[int],
    grad: int,
    types: int,
    n: int,
    scalars: Sequence[float],
    key: int,
    step: int,
    element: int,
    threads: int,
    isa: int,
    /,
) -> int: ...
def sgd(
    master: int,
    lo: int,
    states: int,
    moments: Sequence[int],
    grad: int,
    types: int,
    n: int,
    scalars: Sequence[float],
    key: int,
    step: int,
    element: int,
    threads: int,
    isa: int,
    /,
) -> int: ...
def draw(out: int, n: int, key: int, step: int, purpose: int, element: int, threads: int, isa: int, /) -> None: ...
def perturb(
    weights: int,
    plus: int,
    minus: int,
    element_type: int,
    n: int,
    key: int,
    step: int,
    first_purpose: int,
    element: int,
    threshold: float,
    eps: float,
    threads: int,
    isa: int,
    /,
) -> None: ...
def descend(
    master: int,
    lo: int,
    element_type: int,
    n: int,
    key: int,
    step: int,
    first_purpose: int,
    element: int,
    threshold: float,
    rounding: int,
    coefficients: Sequence[float],
    lr: float,
    weight_decay: float,
    threads: int,
    isa: int,
    /,
) -> int: ...
def split(master: int, hi: int, lo: int, n: int, threads: int, isa: int, /) -> None: ...
def join(hi: int, lo: int, master: int, n: int, threads: int, isa: int, /) -> None: ...
def round_bf16(x: int, n: int, threads: int, isa: int, /) -> None: ...
def accumulate(total: int, x: int, x_type: int, n: int, threads: int, isa: int, /) -> None: ...
def decode(
    codec: int,
    records: int,
    levels: int,
    numbers: int,
    out: int,
    out_type: int,
    num_records: int,
    threads: int,
    isa: int,
    /,
) -> None: ...
def encode_int8(weights: int, low: int, element_type: int, n: int, records: int, threads: int, isa: int, /) -> None: ...
def encode_rest(
    bits: int, values: int, element_type: int, error: int, records: int, num_records: int, threads: int, isa: int, /
) -> None: ...
def encode_nf4(weights: int, n: int, borders: int, pairs: int, sizes: int, threads: int, isa: int, /) -> None: ...
def sum_squares(x: int, x_type: int, n: int, threads: int, isa: int, /) -> float: ...
def copy_sum_squares(x: int, out: int, element_type: int, n: int, threads: int, isa: int, /) -> float: ...
def sum_squares_segments(
    x: int, x_type: int, offsets: int, sizes: int, sums: int, num_segments: int, threads: int, isa: int, /
) -> None: ...
def roofline(
    written: Sequence[int],
    num_bytes: Sequence[int],
    read: int,
    read_bytes: int,
    n: int,
    variant: int,
    threads: int,
    isa: int,
    /,
) -> None: ...

class IoRequest: ...

class IoEngine:
    def submit(self, is_write: bool, fd: int, offset: int, address: int, num_bytes: int, /) -> IoRequest: ...
    def wait(self, request: IoRequest, /) -> tuple[int, int, int, int]: ...
    def is_done(self, request: IoRequest, /) -> bool: ...
    def add_file(self, fd: int, /) -> int: ...
    def remove_file(self, fd: int, /) -> None: ...
    def add_memory(self, address: int, num_bytes: int, /) -> tuple[int, int]: ...
    def close(self) -> None: ...

def io_engine(use_io_uring: bool, depth: int, block_bytes: int, /) -> tuple[IoEngine | None, int]: ...
