"""What there is to compute on beside the CPU. No other file names a kind of it, or torch's modules for one."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import ConfigError, warn

_ACTIVE_AND_HELD = "active_bytes", "allocated_bytes"
_bounds: dict[torch.device, list[int]] = {}
"""What was given out before there was a bound, and what each of those that bound a device's allocator grants it: there
is one allocator in a process."""


def accelerators() -> list[Accelerator]:
    """Return the accelerators that this process may use, in torch's order; none where the CPU is all there is."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # Apple's shares the host's memory, and has no streams
        return []
    count = torch.get_device_module(kind).device_count()
    return [open_accelerator(torch.device(kind.type, index)) for index in range(count)]


def parse_device(name: str | None, flag: str = "offload.device") -> torch.device | None:
    """Read what `own_accelerator` takes, whatever there is. Raises ConfigError."""
    try:
        return None if name is None else torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{flag} is {name!r}, which torch takes for no device; give cpu, cuda, cuda:1, ..., or nothing for the "
            f"accelerator that there is."
        ) from error


def own_accelerator(
    name: str | None = None, environ: Mapping[str, str] = os.environ, flag: str = "offload.device"
) -> Accelerator | None:
    """Return the accelerator that is called so, as torch names devices; None for the CPU. Without a name, or an index,
    it is the one that the thread has chosen (`set_device`), else that of LOCAL_RANK, else the first.

    Raises ConfigError, which names the flag, where there is no such device.
    """
    asked, found = parse_device(name, flag), accelerators()
    if not found if asked is None else asked.type == "cpu":
        if asked is None and (why := unusable_gpu(environ)):
            warn(why)
        return None
    if asked is not None and asked.type not in {each.device.type for each in found}:
        there = f"{found[0].device.type} alone" if found else "nothing but the CPU"
        raise ConfigError(f"{flag} is {name}, and torch finds {there}: give cpu, or nothing.")
    index = None if asked is None else asked.index
    if index is None:  # a process begins with device 0, which therefore is no choice
        index = torch.accelerator.current_device_index() or int(environ.get("LOCAL_RANK") or 0) % len(found)
    if index >= len(found):
        raise ConfigError(
            f"{flag} is {name}, and torch finds {len(found)} of this kind: give {found[0].device.type}:0 "
            f"to {found[-1].device}."
        )
    return found[index]


def unusable_gpu(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return why a GPU whose driver is on this machine is none that torch finds; None where there is no such GPU, or
    where the variables hide it."""
    kinds = {"cuda": ("NVIDIA", "dev/nvidiactl"), "hip": ("AMD", "dev/kfd")}
    for runtime, (maker, path) in kinds.items():
        if not (root / path).exists() or not environ.get(f"{runtime.upper()}_VISIBLE_DEVICES", "unset"):
            continue
        version = root / "proc/driver/nvidia/version"
        driver = re.search(r"\d+\.\d+[.\d]*", version.read_text()) if maker == "NVIDIA" and version.exists() else None
        built = getattr(torch.version, runtime)
        return (
            f"This machine has the driver of an {maker} GPU{f' ({driver[0]})' if driver else ''}, and torch "
            f"{torch.__version__} finds no GPU, so the CPU computes. That torch was built "
            + (
                f"for {runtime.upper()} {built}: the driver may be too old for it, or may not be given to this process."
                if built
                else f"without {runtime.upper()}: install one that has it."
            )
            + " The device cpu asks for the CPU, and says nothing."
        )
    return None


def device_of(accelerator: Accelerator | None) -> torch.device:
    """Return the device of an accelerator; the CPU for None."""
    return torch.device("cpu") if accelerator is None else accelerator.device


def open_accelerator(device: torch.device) -> Accelerator:
    """Return the accelerator of a device that is not the CPU."""
    module = torch.get_device_module(device)
    return (CudaAccelerator if hasattr(module, "cudart") else Accelerator)(device, module)


class Accelerator:
    """One device. `module`: what torch has for its kind, under the names of torch.cuda; a stream, a generator's state
    and figures of memory are asked of it, of `device`. `can_register`: the last three methods register host memory.
    """

    can_register = False
    _sleeping: Mapping[str, bool] = {}

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device, self.module = device, module

    def describe(self) -> dict[str, Any]:
        """Return what torch tells of it as plain data; "pci" is its place on the bus, such as "0000:3b:00.0"."""
        found, kind = self.module.get_device_properties(self.device), self.device.type
        told = {"name": found.name, "memory_bytes": found.total_memory}
        told["runtime"] = f"{kind.upper()} {getattr(torch.version, kind, None) or torch.version.hip}"
        with suppress(AttributeError):  # other kinds, and an older torch, do not tell
            told["capability"] = f"{found.major}.{found.minor}"
            told["pci"] = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return told

    @property
    def hardware(self) -> tuple[str, str | None]:
        """Which piece of hardware the device is, alike in all processes of a machine: its UUID, which a slice of a GPU
        has too, else its place on the bus, else torch's name. And the place on the bus, where torch tells.
        """
        pci = self.describe().get("pci")
        uuid = getattr(self.module.get_device_properties(self.device), "uuid", None)
        return str(uuid or pci or self.device), pci

    @property
    def is_integrated(self) -> bool:
        """True where it computes in the host's memory, so that what is offloaded goes nowhere."""
        return bool(getattr(self.module.get_device_properties(self.device), "is_integrated", False))

    @property
    def backend(self) -> str | None:
        """What its ranks exchange tensors by; None where torch knows nothing but gloo."""
        return dist.Backend.default_device_backend_map.get(self.device.type)

    @property
    def free_bytes(self) -> int:
        """Memory that nobody has, or that torch's allocator keeps for later."""
        kept = self.module.memory_reserved(self.device) - self.module.memory_allocated(self.device)
        return self.module.mem_get_info(self.device)[0] + kept

    @property
    def peak_bytes(self) -> int:
        """The most that torch's allocator could not give to others since `take_peak`: temporaries of operations are in
        it, and freed memory that another stream still used.
        """
        return self.module.memory_stats(self.device).get("active_bytes.all.peak", 0)

    @property
    def waiting_bytes(self) -> int:
        """Memory that was freed, and that streams other than its own still use, as far as torch's allocator knows."""
        found = self.module.memory_stats_as_nested_dict(self.device)  # flat it takes a hundred calls
        active, held = (found.get(which, {}).get("all", {}).get("current", 0) for which in _ACTIVE_AND_HELD)
        return active - held

    def take_peak(self) -> int:
        """Return `peak_bytes`, and begin anew."""
        peak = self.peak_bytes
        self.module.reset_peak_memory_stats(self.device)
        return peak

    def bound(self, num_bytes: int) -> Callable[[], None]:
        """Let torch's allocator have, in this process, no more than what others hold by now and `num_bytes`, memory
        that it keeps for later included; return what takes that back. Several bounds add up.
        """
        self.module.empty_cache()  # which may be more than that by now
        bounds = _bounds.setdefault(self.device, [self.module.memory_allocated(self.device)])
        total = self.module.mem_get_info(self.device)[1]

        def limit() -> None:
            share = min(1.0, sum(bounds) / total) if len(bounds) > 1 else 1.0
            with self.module.device(self.device):  # which torch makes the thread's own
                self.module.set_per_process_memory_fraction(share, self.device)

        def end() -> None:
            bounds.remove(num_bytes)
            limit()
            if len(bounds) == 1:
                del _bounds[self.device]

        bounds.append(num_bytes)
        limit()
        return end

    def enter(self) -> None:
        """Be this thread's device. A thread begins on device 0, where its first call would make a context."""
        self.module.set_device(self.device)

    def current_stream(self) -> torch.Stream:
        """Return the stream into which this thread puts its work."""
        return self.module.current_stream(self.device)

    def event(self, *, is_timed: bool = False, sleeps: bool = False) -> torch.Event:
        """Return an event. `sleeps`: a host that waits for it leaves its core to others, where the kind has that."""
        return self.module.Event(enable_timing=is_timed, **(self._sleeping if sleeps else {}))

    def wait(self) -> None:
        """Return when the device has done all that it was given. Raises RuntimeError where the device has failed."""
        self.module.synchronize(self.device)

    def compile_kernel(self, source: str, name: str, options: Sequence[str]) -> Callable[..., None] | None:  # noqa: ARG002
        """Compile a kernel for the device, `name` in C++, and return what launches it, called as torch's compiled
        kernels are; None where torch compiles none for this kind. Raises whatever the compiler, or torch, refuses by.
        """
        return None

    def register(self, address: int, num_bytes: int) -> int:
        """Register a range of host memory, of which no byte is registered; return the driver's error, 0 for none."""
        raise NotImplementedError

    def unregister(self, address: int) -> int:
        """Take back the registration that begins at `address`; return the error."""
        raise NotImplementedError

    def forget_error(self) -> None:
        """Let nobody else find the error that a call of this thread has just returned."""
        raise NotImplementedError


class CudaAccelerator(Accelerator):
    """A GPU of CUDA, of ROCm, which torch calls by the same name, or of whatever else has CUDA's runtime. It is called
    with this as the thread's device: a finalizer runs in any thread, where a call would make a context on GPU 0.
    """

    can_register = True
    _sleeping: Mapping[str, bool] = {"blocking": True}  # which torch.Event ignores

    def compile_kernel(self, source: str, name: str, options: Sequence[str]) -> Callable[..., None] | None:
        # torch's own `_compile_kernel` does the same, where a CUDA toolkit is installed: it asks for headers of one.
        found, tools = self.module.get_device_properties(self.device), self.module._utils
        own = ["--gpu-architecture=sm_{0.major}{0.minor}", "-default-device"]
        if torch.version.hip:
            own = ["--offload-arch={0.gcnArchName}", "-ffp-contract=off"]
        with self.module.device(self.device):
            options = [*(option.format(found) for option in own), *options]
            image, lowered = compiled_image(tools._get_gpu_rtc_library(), source, name, options)
            return tools._cuda_load_module(image, [lowered])[lowered]

    def register(self, address: int, num_bytes: int) -> int:
        with self.module.device(self.device):
            return int(self.module.cudart().cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> int:
        with self.module.device(self.device):
            return int(self.module.cudart().cudaHostUnregister(address))

    def forget_error(self) -> None:
        # The runtime keeps it until cudaGetLastError is called, which torch does after each launch, raising what it
        # finds; Python has no way to call it. So this launches one kernel, for the error.
        with self.module.device(self.device), suppress(RuntimeError):
            torch.ones(1, device=self.device)


_SIZED = ["signed char int8", "short int16", "int int32", "long long int64"]
INTEGERS = "".join(
    f"typedef {each}_t; typedef unsigned {each.removeprefix('signed ').replace(' int', ' uint')}_t; " for each in _SIZED
)
"""<cstdint> as far as a kernel wants it, for compilers that come without a standard library."""


def compiled_image(
    library: Any, source: str, name: str, options: Sequence[str], kind: str = "CUBIN"
) -> tuple[bytes, str]:
    """Return what NVRTC, or what torch calls by its names, makes of a source, and what the kernel `name` is called
    there. Raises RuntimeError with the compiler's words.
    """
    program, size, lowered = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()

    def check(error: int, doing: str) -> None:
        if error:
            raise RuntimeError(f"{doing}: error {error} of the GPU's compiler")

    def read(what: str) -> bytes:
        check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        text = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{what}")(program, text), what)
        return text.raw

    names, texts = ((ctypes.c_char_p * 1)(text.encode()) for text in ("cstdint", INTEGERS))
    begun = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"offload.cu", 1, texts, names)
    check(begun, "create a program")
    try:
        check(library.nvrtcAddNameExpression(program, name.encode()), name)
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            raise RuntimeError(read("ProgramLog").rstrip(b"\0").decode())
        check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)), name)
        return read(kind), (lowered.value or b"").decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
