"""Settings for all tests."""

import gc
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import accelerator, forks, mutations
from tests.flaky import shuffle

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before the torch import; otherwise a busy machine is slow

MOST_JITTER_US = 300
BEGIN_S = time.monotonic()
SLOW_SHARES = 16
"""Number of shares of the slow tests. CI runs one share per commit."""
SPLIT = {
    "tests/accelerator/test_engine.py",
    "tests/test_docs.py",
    "tests/training/test_trainer.py",
    "tests/zoo/test_zoo.py",
}
"""Files split over workers: slow, with little shared work, or last in the order."""
CONTRACTS = "tests/contracts/test_contracts.py"

pytest.register_assert_rewrite("tests.contracts.contracts")
settings.register_profile("offload", deadline=None)  # a busy machine makes examples slow, not wrong
settings.register_profile("quick", settings.get_profile("offload"), max_examples=15)
settings.load_profile("offload")

# a background process in a shell ignores Ctrl-C, but tests send it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("offload")
    group.addoption(
        "--device", choices=("cpu", "sim", "cuda"), default="cpu", help="what engines open on by themselves"
    )
    group.addoption("--jitter-seed", type=int, help="with --device sim: wait at random before kernels and copies")
    group.addoption(
        "--slow-within", type=float, metavar="S", help="skip slow tests that would begin later; shuffle files"
    )
    group.addoption("--mutation", metavar="NAME", help="break the engine on purpose (python -m tests.mutations --list)")
    group.addoption(
        "--slow-turn", type=int, metavar="N", help=f"of slow tests only share N, of {SLOW_SHARES}: N may be any number"
    )
    group.addoption("--order-seed", type=int, metavar="N", help="shuffle files, and the tests in each (tests/flaky.py)")
    group.addoption("--slow", choices=("all", "compute", "copies"), default="all", help="of which sides")


def pytest_configure(config: pytest.Config) -> None:
    """Load the simulated accelerator first: torch keeps the backend for the whole process and for forks.

    All pytest-xdist workers fork from the same two servers as their processes: packages are imported twice.
    """
    if "not slow" in config.option.markexpr:
        settings.load_profile("quick")
    if config.option.device == "sim":
        os.environ |= {accelerator.LOADS: "1", "SIM_DEVICES": os.environ.get("SIM_DEVICES", "4")}
        if config.option.jitter_seed is not None:
            os.environ[accelerator.JITTER] = f"{MOST_JITTER_US} {config.option.jitter_seed} {config.option.slow}"
        accelerator.load()
    if config.option.device == "cuda":
        _compare_bits_on_cuda()
    else:  # also hides a real GPU from the engine's default device
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    if config.option.mutation:
        mutations.apply(config.option.mutation)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        forks.share()
        if config.option.device == "cpu":
            config.option.tx = [f"popen//python={sys.executable} -m tests.forks"] * len(config.option.tx)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by file, except for SPLIT files and the contracts: no worker ends alone with a long file.

    The contracts of one case share runs, so they stay together.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file in SPLIT else nodeid.rsplit("-", 2)[0] if file == CONTRACTS else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _compare_bits_on_cuda() -> None:
    """Use deterministic GPU kernels, with fp32 products in fp32. Raises pytest.UsageError."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # small, because the budgets here are a few MiB
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "64")  # KiB
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(f"--device cuda: torch {torch.__version__} finds no GPU")
    torch.use_deterministic_algorithms(True, warn_only=True)  # some operations have no deterministic algorithm
    for choose in ("flash", "mem_efficient", "cudnn"):  # these backward passes only warn, and sum in any order
        getattr(torch.backends.cuda, f"enable_{choose}_sdp")(False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    from offload.planning import settings

    settings.compiles_by_default = lambda *_: False  # the references are uncompiled


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a real GPU, skip tests for the simulated accelerator, and rank tests with fewer than two GPUs.

    Files of whole runs come first, so that no worker ends alone with one. With a time limit for slow tests, shuffle the
    files, so that no test is always beyond the limit.
    """
    if config.option.order_seed is not None:
        shuffle(items, random.Random(config.option.order_seed), in_files=True)
    elif config.option.slow_within is not None:
        # equal order for all workers
        shuffle(items, random.Random(getattr(config, "workerinput", {}).get("testrunuid")))
    else:
        items.sort(key=lambda item: item.path.parent.name != "training")
    turn = config.option.slow_turn
    if turn is not None:
        kept, others = list[pytest.Item](), list[pytest.Item]()
        for item in items:
            (others if item.get_closest_marker("slow") and not _is_share(item, turn) else kept).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = kept
    if config.option.device != "cuda":
        return
    import torch

    for item in items:
        if item.get_closest_marker("accelerator"):
            item.add_marker(pytest.mark.skip(reason="asks and tells the simulated accelerator"))
        if item.path.name.startswith("test_ranks") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="ranks have a GPU each, and there is one"))


def _is_share(item: pytest.Item, turn: int) -> bool:
    return zlib.crc32(item.nodeid.encode()) % SLOW_SHARES == turn % SLOW_SHARES


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turn off garbage collection: repeated scans of the collected tests took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze existing objects: a later collection then scans only test objects, in milliseconds.

    Collections of the oldest objects become rare: each scans all imports of tests, and took a twentieth of the time.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests after the time limit."""
    limit_s = item.config.option.slow_within
    if limit_s is not None and item.get_closest_marker("slow") and time.monotonic() - BEGIN_S > limit_s:
        pytest.skip(f"slow tests had {limit_s:g} s, which are over")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system with 16 MiB. The unmount fails while a process holds an open file there."""
    from tests.disks import mounted  # imports torch

    with mounted(tmp_path, 16 << 20) as point:
        yield point


@pytest.fixture(autouse=True)
def simulation(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --device sim, reset the simulation settings before each test, on device 0."""
    option = request.config.option
    if option.device != "sim":
        yield
        return
    control = accelerator.load()
    gc.collect()  # engines from earlier tests hold device memory
    control.reset()
    control.enter(0)
    if option.jitter_seed is not None:
        control.set_jitter(MOST_JITTER_US, option.jitter_seed, option.slow)
    yield
    control.reset()
