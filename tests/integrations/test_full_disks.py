"""A disk that fills while another library saves: no half folder, and the run goes on from the last checkpoint."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from offload.errors import DiskError
from offload.integrations.saving import complete_or_absent
from offload.integrations.transformers import OffloadTrainer
from tests.disks import mounted
from tests.integrations.plain import assert_same_weights, llama, offload_trainer

STEPS = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "accelerator_config": {"use_seedable_sampler": True},
}


class Filling(TrainerCallback):
    """Another process uses the space of a disk after two steps, until `left_bytes` remain."""

    def __init__(self, disk: Path, left_bytes: int) -> None:
        self.disk, self.left_bytes = disk, left_bytes

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        status = os.statvfs(self.disk)
        num_bytes = status.f_bavail * status.f_frsize - self.left_bytes
        if state.global_step == 2:
            with (self.disk / "other").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("left_bytes", [8 << 10, 64 << 10, 300 << 10], ids=["model", "torch.save", "states"])
def test_a_trainer_resumes_from_the_last_checkpoint(left_bytes: int, tmp_path: Path) -> None:
    """Break: leave the folder of the failed save; `resume_from_checkpoint=True` takes the newest one."""
    whole = offload_trainer(tmp_path / "whole", llama(), OffloadTrainer, **STEPS)
    whole.train()
    with mounted(tmp_path, 16 << 20) as disk:
        filling = {"callbacks": [Filling(disk, left_bytes)]}
        full = offload_trainer(disk / "run", llama(), OffloadTrainer, **STEPS, kwargs=filling)
        with pytest.raises(DiskError, match=r", with .*B free.* Make room: .* goes on from .*checkpoint-1\."):
            full.train()
        full.engine.close()
        assert get_last_checkpoint(str(disk / "run")) == str(disk / "run" / "checkpoint-1")
        (disk / "other").unlink()
        resumed = offload_trainer(disk / "run", llama(), OffloadTrainer, **STEPS)
        resumed.train(resume_from_checkpoint=True)
        assert_same_weights(dict(resumed.engine.named_parameters()), dict(whole.engine.named_parameters()))
        resumed.engine.close()


FAILURES = [
    (DiskError("full", errno.ENOSPC, Path("there")), "^full$"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), r"the write of .*new failed: .*ENOSPC\), with .*B free"),
    (RuntimeError("basic_ios::clear: iostream error"), "torch.save cannot write to .*new, with .*B free: basic_ios"),
]


@pytest.mark.parametrize(("error", "words"), FAILURES, ids=["ours", "Python's", "torch's"])
def test_a_new_folder_is_complete_or_absent(error: Exception, words: str, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "half").touch()
        raise error

    (tmp_path / "earlier").mkdir()
    for name, is_writer in (("new", True), ("of-another-rank", False), ("earlier", True)):
        expected = pytest.raises(DiskError, match=words.replace("new", name))
        with expected, complete_or_absent(tmp_path / name, is_writer=is_writer):
            fail(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "of-another-rank"]
    with pytest.raises(RuntimeError, match="another"), complete_or_absent(tmp_path / "new", is_writer=True):
        raise RuntimeError("another")
