"""Settings that all tests share."""

import gc
import os
import signal

import pytest
from hypothesis import settings

from tests import forks

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: a busy machine is slow otherwise

settings.register_profile("offload", deadline=None)  # the machine may be busy; a slow example is not a wrong one
settings.load_profile("offload")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: Ctrl-C is tested too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist fork from the same two servers, which import what they need while those collect."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        forks.share()


def pytest_collection_finish() -> None:
    """What is here before the first test stays: a garbage collection looks through what a test made, and takes
    milliseconds."""
    gc.collect()
    gc.freeze()
