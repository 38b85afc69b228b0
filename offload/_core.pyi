"""The C++ kernels (csrc/bind.cpp) and I/O engines (csrc/bind_io.cpp). Arrays are addresses;
`offload.native.kernels` and `offload.native.io` check what they point to.

`isa` is the number of an instruction set in csrc/cpu.h.
"""

NUM_ROOFLINE_VARIANTS: int

def supported_isas() -> list[str]: ...
def physical_cores() -> int: ...
def adamw(
    master: int,
    lo: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_is_bf16: bool,
    n: int,
    grad_scale: float,
    decay: float,
    lerp_weight: float,
    beta2: float,
    one_minus_beta2: float,
    sqrt_correction2: float,
    eps: float,
    neg_step_size: float,
    threads: int,
    isa: int,
    /,
) -> int: ...
def correct_adamw(
    master: int,
    lo: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_is_bf16: bool,
    n: int,
    applied_scale: float,
    grad_scale: float,
    lerp_weight: float,
    one_minus_beta2: float,
    least_v_per_m2: float,
    sqrt_correction2: float,
    eps: float,
    neg_step_size: float,
    threads: int,
    isa: int,
    /,
) -> int: ...
def lion(
    master: int,
    lo: int,
    exp_avg: int,
    grad: int,
    grad_is_bf16: bool,
    n: int,
    grad_scale: float,
    decay: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    lr: float,
    threads: int,
    isa: int,
    /,
) -> int: ...
def split(master: int, hi: int, lo: int, n: int, threads: int, isa: int, /) -> None: ...
def join(hi: int, lo: int, master: int, n: int, threads: int, isa: int, /) -> None: ...
def to_bf16(source: int, out: int, n: int, threads: int, isa: int, /) -> None: ...
def round_bf16(x: int, n: int, threads: int, isa: int, /) -> None: ...
def accumulate(total: int, x: int, x_is_bf16: bool, n: int, threads: int, isa: int, /) -> None: ...
def sum_squares(x: int, x_is_bf16: bool, n: int, threads: int, isa: int, /) -> float: ...
def copy_sum_squares(x: int, out: int, is_bf16: bool, n: int, threads: int, isa: int, /) -> float: ...
def sum_squares_segments(
    x: int, x_is_bf16: bool, offsets: int, sizes: int, sums: int, num_segments: int, threads: int, isa: int, /
) -> None: ...
def roofline_fp32(p: int, m: int, v: int, g: int, n: int, variant: int, threads: int, isa: int, /) -> None: ...
def roofline_split(
    hi: int, lo: int, m: int, v: int, g: int, n: int, variant: int, threads: int, isa: int, /
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
