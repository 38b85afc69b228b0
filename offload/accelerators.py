"""Accelerators: devices other than the CPU. Only this file names device types and their torch modules."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import ConfigError, OffloadError, format_bytes, warn
from offload.fused_attention import Capability, has_cudnn_fault, torch_version
from offload.user_cache import hash_paths, kept_bytes

_ACTIVE_AND_HELD = "active_bytes", "allocated_bytes"
_BF16_CAPABILITY = 8, 0
"""First compute capability with bf16 products: Ampere."""
_TRITON_CAPABILITY = 7, 0
_FP8_CAPABILITY = 8, 9
"""First compute capability with FP8 products: Ada."""
PINNING_ADVICE = (
    "Pinned memory counts in full against the memory limit of the container, pod or job, and WSL2 pins only a part of "
    "its memory: raise that limit, or lower --offload.host_memory. (Shown once.)"
)
_FP8_STREAMS = 2, 12
"""First torch whose FP8 products with row scales follow the current stream on Ada (pytorch #177651)."""
_bounds: dict[torch.device, list[int]] = {}
"""Allocator limits per device, in bytes: first the memory already allocated before any limit, then one entry per active
`bound`. A process has a single allocator.
"""


def accelerators() -> list[Accelerator]:
    """Return the accelerators available to this process, in torch order; an empty list for CPU only."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "mps":  # Apple GPUs share host memory and have no streams
        return []
    count = torch.get_device_module(device).device_count()
    return [open_accelerator(torch.device(device.type, index)) for index in range(count)]


def parse_device(name: str | None, flag: str = "offload.device") -> torch.device | None:
    """Parse a device name for `own_accelerator`, without a check for presence. Raises ConfigError."""
    try:
        return None if name is None else torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{flag} is {name!r}, which torch does not accept as a device; give cpu, cuda, cuda:1, ..., or leave it "
            "out to use the machine's accelerator."
        ) from error


def own_accelerator(
    name: str | None = None, environ: Mapping[str, str] = os.environ, flag: str = "offload.device"
) -> Accelerator | None:
    """Return the accelerator with a torch device name; None for the CPU.

    Without a name or an index: the device already selected in this thread (`set_device`), else the index in LOCAL_RANK,
    else the first. Raises ConfigError with the flag name if no such device exists.
    """
    requested = parse_device(name, flag)
    available = accelerators()
    if requested is not None and requested.type == "cpu":
        return None
    if requested is None and not available:
        # Someone with a GPU expects it to compute.
        if why := unusable_gpu(environ):
            warn(why)
        return None
    if requested is not None and requested.type not in {each.device.type for each in available}:
        device_types = "only the CPU"
        if available:
            device_types = f"{available[0].device.type} alone"
        raise ConfigError(f"{flag} is {name}, and torch finds {device_types}: give cpu, or nothing.")
    index = None if requested is None else requested.index
    if index is None:  # a process starts on device 0, so 0 is no explicit selection
        index = torch.accelerator.current_device_index() or int(environ.get("LOCAL_RANK") or 0) % len(available)
    if index >= len(available):
        raise ConfigError(
            f"{flag} is {name}, but torch finds {len(available)} of this kind: give {available[0].device.type}:0 to "
            f"{available[-1].device}."
        )
    return available[index]


def unusable_gpu(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return why torch cannot use a GPU with an installed driver. None: no such GPU, or hidden by environment
    variables.
    """
    makers = {"cuda": ("NVIDIA", "dev/nvidiactl"), "hip": ("AMD", "dev/kfd")}
    for runtime, (maker, path) in makers.items():
        # An empty variable hides the GPUs on purpose.
        if not (root / path).exists() or not environ.get(f"{runtime.upper()}_VISIBLE_DEVICES", "unset"):
            continue
        version = root / "proc/driver/nvidia/version"
        driver = ""
        if maker == "NVIDIA" and version.exists() and (found := re.search(r"\d+\.\d+[.\d]*", version.read_text())):
            driver = f" ({found[0]})"
        built = f"without {runtime.upper()}: install one that has it."
        if number := getattr(torch.version, runtime):
            why = "the driver may be too old for it, or may not be given to this process."
            built = f"for {runtime.upper()} {number}: {why}"
        return (
            f"This machine has the driver of an {maker} GPU{driver}, but torch {torch.__version__} finds no GPU, so "
            f"the CPU computes. This torch was built {built} Set the device to cpu to avoid this warning."
        )
    return None


def has_bf16(accelerator: Accelerator | None) -> bool:
    """True if the accelerator computes in bf16 itself; for the CPU (None) too, which has no faster fp16."""
    return accelerator is None or accelerator.has_bf16


def device_of(accelerator: Accelerator | None) -> torch.device:
    """Return the torch device for an accelerator; the CPU for None."""
    if accelerator is None:
        return torch.device("cpu")
    return accelerator.device


def compiles_by_default(device: str, capability: Capability | None) -> bool:
    """True for a device, in torch notation, on which fused kernels are much faster: a CUDA or ROCm GPU.

    A CPU gains little over minutes spent compiling, and the compiler may not know other devices. Triton, for kernels on
    a GPU, begins with Volta.
    """
    return runs_gpu_kernels(torch.device(device).type) and (capability is None or capability >= _TRITON_CAPABILITY)


def runs_gpu_kernels(device_type: str) -> bool:
    """True if torch's own GPU kernels run on this type of device: on CUDA and ROCm GPUs."""
    return device_type == "cuda"


def multiplies_fp8(device_type: str) -> bool:
    """True if torch multiplies FP8 matrices on this type of device, or (on `meta`) knows the shape of the product."""
    return device_type in ("cuda", "meta")


def single_queue(device: torch.device, environ: Mapping[str, str] = os.environ) -> str:
    """Return the environment variable that puts all streams of the device into one hardware queue. Empty: none does."""
    name = f"{device.type.upper()}_DEVICE_MAX_CONNECTIONS"
    if environ.get(name) != "1":
        return ""
    return name


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability; None for devices other than NVIDIA GPUs."""
    if device.type in ("cpu", "meta"):
        return None
    return open_accelerator(device).capability


def masked_attention_fault(device: torch.device) -> str:
    """Return torch's version and the GPU where cuDNN's attention with a mask can give wrong gradients. Empty: it does
    not, or is switched off.

    torch prefers cuDNN there. A row has NaN gradients if all its scores are far below zero.
    """
    if not torch.backends.cuda.cudnn_sdp_enabled() or not has_cudnn_fault(capability_of(device)):
        return ""
    return f"torch {torch.__version__} on {torch.get_device_module(device).get_device_properties(device).name}"


def open_accelerator(device: torch.device) -> Accelerator:
    """Return the accelerator for a device other than the CPU."""
    module = torch.get_device_module(device)
    # By a feature, not by name: ROCm GPUs are "cuda" too.
    if hasattr(module, "cudart"):
        return CudaAccelerator(device, module)
    return Accelerator(device, module)


class Accelerator:
    """One device.

    module: the torch module for the device type, with the interface of torch.cuda; streams, generator state and memory
    statistics come from this module. can_register: True if the last three methods can register host memory.
    """

    can_register = False
    _sleeping: Mapping[str, bool] = {}

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self.module = module

    def describe(self) -> dict[str, Any]:
        """Return torch device properties as plain data. "pci" is the bus address, for example "0000:3b:00.0"."""
        properties = self.module.get_device_properties(self.device)
        device_type = self.device.type
        description = {"name": properties.name, "memory_bytes": properties.total_memory}
        # ROCm GPUs are called "cuda" too, and torch then has no version of CUDA.
        description["runtime"] = (
            f"{device_type.upper()} {getattr(torch.version, device_type, None) or torch.version.hip}"
        )
        if self.is_integrated:
            description["weights_in_host_memory"] = "used in place" if self.uses_pages else "copied"
        with suppress(AttributeError):  # missing for other device types and older torch versions
            description["capability"] = f"{properties.major}.{properties.minor}"
            description["pci"] = (
                f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
            )
        return description

    @property
    def capability(self) -> Capability | None:
        """Compute capability. None: not an NVIDIA GPU."""
        return None

    @property
    def hardware(self) -> tuple[str, str | None]:
        """Hardware identity, equal in all processes on a machine, and PCI address (None if unknown).

        The identity is the UUID (a MIG slice has a separate one), else the PCI address, else the torch device name.
        """
        pci = self.describe().get("pci")
        uuid = getattr(self.module.get_device_properties(self.device), "uuid", None)
        return str(uuid or pci or self.device), pci

    @property
    def is_integrated(self) -> bool:
        """True if the device computes in host memory, where offloading saves nothing."""
        return bool(getattr(self.module.get_device_properties(self.device), "is_integrated", False))

    @property
    def uses_pages(self) -> bool:
        """True if the device computes over registered host memory without copies, at full rate.

        A GH200 may, but its link has a ninth of the rate of its own memory: there copies pay.
        """
        return self.can_register and self.is_integrated

    def over(self, host: torch.Tensor) -> torch.Tensor:
        """Return a device tensor over the memory of `host`, which is registered, flat and contiguous. No copy.

        Raises OffloadError if the driver has not registered the memory.
        """
        if host.numel() and not host.is_pinned():
            raise OffloadError(
                f"{self.device} computes over weights in host memory, and the driver has not registered "
                f"{format_bytes(host.nbytes)} of them. Raise the limit of locked memory (`ulimit -l`, or that of the "
                "container), or keep the states on the device: --offload.parameters device --offload.optimizer device."
            )
        address = self.device_address(host.data_ptr()) if host.numel() else 0
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, host.nbytes)
        weakref.finalize(storage, _drop, host).atexit = False  # the storage owns no memory: `host` lives as long
        return torch.empty(0, dtype=host.dtype, device=self.device).set_(storage, 0, host.shape, (1,))

    @property
    def backend(self) -> str | None:
        """Process-group backend for device tensors; None if torch knows only gloo.

        Raises ConfigError if this torch was built without the library.
        """
        name = dist.Backend.default_device_backend_map.get(self.device.type)
        if name is not None and not dist.is_backend_available(name):
            raise ConfigError(
                f"Several ranks on {self.device.type} devices exchange tensors over {name}, and torch "
                f"{torch.__version__} was built without it: install a torch with {name}, start one rank, or set "
                "--offload.device cpu."
            )
        return name

    @property
    def free_bytes(self) -> int:
        """Device memory free or cached by the torch allocator, in bytes."""
        # Cached memory counts as used for the driver, though torch takes from it first.
        cached_bytes = self.module.memory_reserved(self.device) - self.module.memory_allocated(self.device)
        return self.module.mem_get_info(self.device)[0] + cached_bytes

    @property
    def total_bytes(self) -> int:
        """All device memory, in bytes."""
        return self.module.mem_get_info(self.device)[1]

    @property
    def peak_bytes(self) -> int:
        """Peak bytes in use by the torch allocator since `take_peak`, including temporaries and freed memory still in
        use on another stream.
        """
        return self.module.memory_stats(self.device).get("active_bytes.all.peak", 0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes freed but still in use on other streams, as far as the torch allocator knows."""
        stats = self.module.memory_stats_as_nested_dict(self.device)  # the flat form takes a hundred calls
        active, allocated = (stats.get(name, {}).get("all", {}).get("current", 0) for name in _ACTIVE_AND_HELD)
        return active - allocated

    def take_peak(self) -> int:
        """Return `peak_bytes` and reset the peak."""
        peak = self.peak_bytes
        self.module.reset_peak_memory_stats(self.device)
        return peak

    def empty_cache(self) -> None:
        """Give the memory that torch caches, or keeps for libraries, back to the driver."""
        self.module.empty_cache()

    def bound(self, num_bytes: int) -> Callable[[], None]:
        """Limit the torch allocator in this process to current allocations plus `num_bytes`, cached memory included.

        Return a function to remove the limit. Several limits add up.
        """
        self.module.empty_cache()  # cached memory may already exceed the limit
        bounds = _bounds.setdefault(self.device, [self.module.memory_allocated(self.device)])
        total = self.total_bytes

        def limit() -> None:
            share = 1.0
            if len(bounds) > 1:
                share = min(1.0, sum(bounds) / total)
            with self.module.device(self.device):  # set_per_process_memory_fraction changes the current device
                self.module.set_per_process_memory_fraction(share, self.device)

        def end() -> None:
            bounds.remove(num_bytes)
            limit()
            if len(bounds) == 1:
                del _bounds[self.device]

        bounds.append(num_bytes)
        limit()  # at once: the next allocation already counts
        return end

    def enter(self) -> None:
        """Select this device for the thread. A thread starts on device 0, and the first call there would create a
        context.
        """
        self.module.set_device(self.device)

    @property
    def has_bf16(self) -> bool:
        """True if the device computes in bf16 itself. Others emulate it, far more slowly than fp16."""
        return True

    @property
    def lacks_fp8(self) -> str:
        """Why the device cannot multiply in FP8 (float8_e4m3fn). Empty: it can, or the products are emulated."""
        return ""

    @property
    def loses_fp8_stream(self) -> bool:
        """True if an FP8 product with row scales runs on the default stream, whatever the current one is."""
        return False

    @property
    def is_on_default_stream(self) -> bool:
        """True if this thread computes on the default stream."""
        return bool(self.current_stream() == self.module.default_stream(self.device))

    def current_stream(self) -> torch.Stream:
        """Return the current stream in this thread."""
        return self.module.current_stream(self.device)

    def event(self, *, is_timed: bool = False, sleeps: bool = False) -> torch.Event:
        """Return an event. sleeps: a waiting host thread yields the core, if the device type supports this."""
        more = self._sleeping if sleeps else {}
        return self.module.Event(enable_timing=is_timed, **more)

    def wait(self) -> None:
        """Wait until the device has finished all submitted work. Raises RuntimeError after a device failure."""
        self.module.synchronize(self.device)

    def compile_kernel(self, source: str, name: str, options: Sequence[str]) -> Callable[..., None] | None:  # noqa: ARG002
        """Compile a kernel for the device, and return a launch function with the interface of torch compiled kernels.

        name: kernel name in C++. Return None if torch compiles no kernels for this device type. Raises any error from
        the compiler or torch.
        """
        return None

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a small flat buffer in pinned host memory; if the driver refuses, in ordinary memory with one warning.

        The driver copies from and to ordinary memory before the call returns: later, and equally right.
        """
        try:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _warn_of_pageable(self.device, str(error).partition("\n")[0])
            return torch.empty(numel, dtype=dtype, device="cpu")

    def register(self, address: int, num_bytes: int) -> int:
        """Register an unregistered range in host memory. Return the driver error, 0 for success."""
        raise NotImplementedError

    def device_address(self, address: int) -> int:
        """Return the address at which kernels find a registered host address. Raises OffloadError."""
        raise NotImplementedError

    def unregister(self, address: int) -> int:
        """Unregister the range starting at `address`. Return the driver error."""
        raise NotImplementedError

    def forget_error(self) -> None:
        """Clear the error just returned by a call in this thread, so no later call reports the error."""
        raise NotImplementedError


def _drop(_host: torch.Tensor) -> None:
    """End the life of a tensor kept by a finalizer."""


_warned: set[torch.device] = set()
"""Devices with small buffers in ordinary memory."""


def _warn_of_pageable(device: torch.device, reason: str) -> None:
    if device not in _warned:
        _warned.add(device)
        warn(
            f"the driver refused pinned memory for small buffers of {device} ({reason}): they are in ordinary memory, "
            f"and copies from and to it are slower. {PINNING_ADVICE}"
        )


class CudaAccelerator(Accelerator):
    """A CUDA GPU, a ROCm GPU (also called "cuda" in torch), or another device with the CUDA runtime.

    Each method first selects the device: a finalizer can run in any thread, where a call would otherwise create a
    context on GPU 0.
    """

    can_register = True
    _sleeping: Mapping[str, bool] = {"blocking": True}  # ignored by torch.Event

    @property
    def capability(self) -> Capability | None:
        properties = self.module.get_device_properties(self.device)
        if torch.version.hip or not runs_gpu_kernels(self.device.type):
            return None
        return properties.major, properties.minor

    @property
    def has_bf16(self) -> bool:
        return self.capability is None or self.capability >= _BF16_CAPABILITY

    @property
    def lacks_fp8(self) -> str:
        if torch.version.hip:
            return "is an AMD GPU, with another FP8 format"
        if self.capability is not None and self.capability < _FP8_CAPABILITY:
            number = "{}.{}".format(*self.capability)
            return f"has compute capability {number}, and FP8 products need 8.9 or above"
        return ""

    @property
    def loses_fp8_stream(self) -> bool:
        return self.capability == _FP8_CAPABILITY and torch_version() < _FP8_STREAMS

    def empty_cache(self) -> None:
        with suppress(AttributeError):  # torch has no public call for the workspaces of cuBLAS
            torch._C._cuda_clearCublasWorkspaces()
        super().empty_cache()

    def compile_kernel(self, source: str, name: str, options: Sequence[str]) -> Callable[..., None] | None:
        # torch `_compile_kernel` does the same but needs the headers from an installed CUDA toolkit.
        properties = self.module.get_device_properties(self.device)
        tools = self.module._utils
        own = ["--gpu-architecture=sm_{0.major}{0.minor}", "-default-device"]
        if torch.version.hip:
            own = ["--offload-arch={0.gcnArchName}", "-ffp-contract=off"]
        with self.module.device(self.device):
            options = [*(option.format(properties) for option in own), *options]
            image, lowered = kept_image(tools._get_gpu_rtc_library(), source, name, options)
            return tools._cuda_load_module(image, [lowered])[lowered]

    def register(self, address: int, num_bytes: int) -> int:
        with self.module.device(self.device):
            return int(self.module.cudart().cudaHostRegister(address, num_bytes, 0))

    def device_address(self, address: int) -> int:
        # On ROCm, WSL and older Jetsons another address than the host's.
        runtime = self.module.cudart()
        if runs_gpu_kernels(self.device.type):  # torch has no binding
            runtime = _loaded_runtime()
        name = ("hip" if torch.version.hip else "cuda") + "HostGetDevicePointer"
        found = ctypes.c_void_p()
        error = "its runtime is not loaded"
        if runtime is not None:
            with self.module.device(self.device):
                code = getattr(runtime, name)(ctypes.byref(found), ctypes.c_void_p(address), 0)
            error = f"{name} returns error {code}" if code else ""
        if error or not found.value:
            raise OffloadError(
                f"{self.device} computes over weights in host memory, but the driver gives no address of them for the "
                f"device ({error}). Keep the states on the device: --offload.parameters device --offload.optimizer "
                "device."
            )
        return found.value

    def unregister(self, address: int) -> int:
        with self.module.device(self.device):
            return int(self.module.cudart().cudaHostUnregister(address))

    def forget_error(self) -> None:
        # The runtime keeps the error until cudaGetLastError. torch calls this function after each launch and raises the
        # error; Python has no direct access. So launch a kernel, and swallow the error.
        with self.module.device(self.device), suppress(RuntimeError):
            torch.ones(1, device=self.device)


_RUNTIME = re.compile(r"/lib(cudart|amdhip64)[-\w]*\.so[.\d]*$")


def _loaded_runtime() -> ctypes.CDLL | None:
    """Return the runtime that torch has loaded. None: not found."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if _RUNTIME.search(path):
            return ctypes.CDLL(path)
    return None


_SIZED = ["signed char int8", "short int16", "int int32", "long long int64"]
INTEGERS = "".join(
    f"typedef {each}_t; typedef unsigned {each.removeprefix('signed ').replace(' int', ' uint')}_t; " for each in _SIZED
)
"""Minimal <cstdint> for kernels, because some compilers come without a standard library."""


def kept_image(library: Any, source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Return `compiled_image`, from the user cache if an earlier process has compiled the same program.

    The key has everything that decides the code: all source text, the options with the type of card, and the version of
    torch, which requires one version of the compiler.
    """
    folders = [Path(option[2:]) for option in options if option.startswith("-I")]
    included = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    others = [option for option in options if not option.startswith("-I")]
    version = f"{torch.__version__} {torch.version.cuda} {torch.version.hip}"

    def compiled() -> bytes:
        image, lowered = compiled_image(library, source, name, options)
        return lowered.encode() + b"\0" + image

    kept = kept_bytes("kernels", [version, source, INTEGERS, hash_paths(included), name, *others], compiled)
    lowered, _, image = kept.partition(b"\0")
    return image, lowered.decode()


def compiled_image(
    library: Any, source: str, name: str, options: Sequence[str], image_format: str = "CUBIN"
) -> tuple[bytes, str]:
    """Compile a source with NVRTC, or with hipRTC, for which torch has aliases with NVRTC's names. Return (image,
    lowered kernel name).

    `image_format`: CUBIN for code of one device (with hipRTC too), or PTX for text (NVRTC alone). Raises RuntimeError
    with the compiler log.
    """
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    lowered = ctypes.c_char_p()

    def check(error: int, doing: str) -> None:
        if error:
            raise RuntimeError(f"{doing}: error {error} of the GPU's compiler")

    def read(field: str) -> bytes:
        check(getattr(library, f"nvrtcGet{field}Size")(program, ctypes.byref(size)), field)
        text = ctypes.create_string_buffer(size.value)
        check(getattr(library, f"nvrtcGet{field}")(program, text), field)
        return text.raw  # not `value`, which ends at the first zero byte

    # One header, given as text: the compiler may have none.
    texts, names = ((ctypes.c_char_p * 1)(text.encode()) for text in (INTEGERS, "cstdint"))
    status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"offload.cu", 1, texts, names)
    check(status, "create a program")
    try:
        # The loader finds a kernel by the lowered (mangled) name.
        check(library.nvrtcAddNameExpression(program, name.encode()), name)
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), arguments):
            raise RuntimeError(read("ProgramLog").rstrip(b"\0").decode())
        check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)), name)
        return read(image_format), (lowered.value or b"").decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
