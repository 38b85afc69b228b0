"""Objects by name, from the core and from extras."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from offload.app.training.task import TASKS, Task, TaskKind
from offload.doors import Door
from offload.engine.steps import METHODS
from offload.errors import ConfigError
from offload.extras import ENTRIES
from offload.extras.data.dataset import Dataset


@pytest.mark.parametrize("kind", ENTRIES)
def test_each_entry_is_there(kind: str) -> None:
    door = Door[object](kind, {})
    assert set(door) == set(ENTRIES[kind])
    for name, place in ENTRIES[kind].items():
        module, _, attribute = place.partition(":")
        assert door[name] is (getattr(import_module(module), attribute) if attribute else import_module(module))


@pytest.mark.parametrize(("contract", "own"), [(Task, Dataset), (TaskKind, TASKS["rows"])])
def test_rows_from_files_have_all_members_of_a_task(contract: type, own: type) -> None:
    members = {name for name in vars(contract) if not name.startswith("_")}
    assert members <= {*dir(own), *getattr(own, "__dataclass_fields__", ())}


def test_of_an_unused_extra_only_the_table_of_conflicts_is_imported() -> None:
    code = """if True:
        import sys, torch, offload, offload.optim.rules
        engine = offload.Engine(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), offload.AdamW(lr=1e-3))
        engine.step({"input": torch.ones(2, 8)}, lambda outputs, _: outputs.mean())
        print([name for name in sys.modules if name.count(".") > 2 and "extras." in name and ".conflicts" not in name])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_another_package_registers_an_object() -> None:
    door = Door("method", {"backward": "own"})
    door.register("mine", "theirs")
    assert door["mine"] == "theirs"
    assert list(door) == ["backward", "mine", *ENTRIES["method"]]
    for taken in ("mine", "forwards"):
        with pytest.raises(ConfigError, match=f"'{taken}' exists already"):
            door.register(taken, "again")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no method 'forward' \(did you mean forwards\?\)"):
        METHODS["forward"]


def test_names_keep_their_order_whatever_is_imported_first() -> None:
    before = list(Door[object]("codec", {"exact": None}))
    door = Door[object]("codec", {"exact": None})
    assert door["nf4"]
    assert list(door) == before == ["exact", *ENTRIES["codec"]]
