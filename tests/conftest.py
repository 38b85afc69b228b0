"""Settings that all tests share."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import accelerator, forks

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: a busy machine is slow otherwise

MOST_JITTER_US = 300

settings.register_profile("offload", deadline=None)  # the machine may be busy; a slow example is not a wrong one
settings.load_profile("offload")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: Ctrl-C is tested too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("offload")
    group.addoption("--device", choices=("cpu", "sim"), default="cpu", help="what engines open on by themselves")
    group.addoption("--jitter-seed", type=int, help="with --device sim: wait at random before kernels and copies")
    group.addoption("--slow", choices=("all", "compute", "copies"), default="all", help="of which sides")


def pytest_configure(config: pytest.Config) -> None:
    """The simulated accelerator comes first: torch of a process has it for good, and so do processes that are forked.

    The workers of pytest-xdist fork from the same two servers, which import what they need while those collect.
    """
    if config.option.device == "sim":
        os.environ |= {accelerator.LOADS: "1", "SIM_DEVICES": os.environ.get("SIM_DEVICES", "4")}
        accelerator.load()
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        forks.share()


def pytest_collection_finish() -> None:
    """What is here before the first test stays: a garbage collection looks through what a test made, and takes
    milliseconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def simulation(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --device sim each test begins with the same settings of the simulation, on device 0."""
    option = request.config.option
    if option.device != "sim":
        yield
        return
    control = accelerator.load()
    gc.collect()  # engines that tests leave hold memory of the device
    control.reset()
    control.enter(0)
    if option.jitter_seed is not None:
        control.set_jitter(MOST_JITTER_US, option.jitter_seed, option.slow)
    yield
    control.reset()
