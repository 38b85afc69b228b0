"""Trainers and scripts with torch.compile or a compiled model, against an engine with `compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from offload.engine.units.residency import engine_of
from offload.errors import ConfigError
from offload.extras.large import compiled_forwards as forwards
from tests.engine.test_compiled import backend
from tests.integrations.plain import (
    LR,
    PLACEMENT,
    assert_same_weights,
    llama,
    logged,
    needs,
    offload_trainer,
    reset_accelerate,
    rows,
)

needs("accelerate")


from offload.integrations.accelerate import OffloadAccelerator  # noqa: E402
from offload.integrations.transformers import OffloadTrainer, offload_optimizer_factory  # noqa: E402


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile settings stay in the environment and in the process; reset both."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    monkeypatch.setattr(forwards, "BACKEND", backend(1 + 2**-18))
    torch._dynamo.reset()


def compiled() -> Any:
    return torch.compile(llama(), backend="eager")


def told(folder: Path) -> Any:
    """Compile with the Trainer argument."""
    return offload_trainer(folder, llama(), OffloadTrainer, torch_compile=True)


def told_and_given(folder: Path) -> Any:
    return offload_trainer(folder, compiled(), OffloadTrainer, torch_compile=True)


def made_later(folder: Path) -> Any:
    kwargs = {"model_init": compiled}
    return offload_trainer(folder, None, OffloadTrainer, torch_compile=True, kwargs=kwargs)  # type: ignore[arg-type]


def by_the_factory(folder: Path) -> Any:
    settings = {"placement": PLACEMENT, "lr": LR, "weight_decay": 0.1}
    kwargs = {"offload": None, "optimizer_cls_and_kwargs": (offload_optimizer_factory, settings)}

    def plain(offload: Any, **how: Any) -> Trainer:
        assert offload is None
        return Trainer(**how)

    how = {
        "torch_compile": True,
        "remove_unused_columns": False,
        "kwargs": kwargs,
    }  # a plain Trainer inspects the wrapper
    return offload_trainer(folder, compiled(), plain, **how)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.compile was removed from")
@pytest.mark.parametrize("how", [told, told_and_given, made_later, by_the_factory])
def test_a_trainer_that_is_to_compile_has_its_blocks_compiled(tmp_path: Path, how: Callable[[Path], Any]) -> None:
    wanted, found = [
        make(tmp_path / make.__name__)
        for make in (
            lambda folder: offload_trainer(
                folder, llama(), OffloadTrainer, kwargs={"offload": {"placement": PLACEMENT, "compile": "always"}}
            ),
            how,
        )
    ]
    for trainer in (wanted, found):
        trainer.train()
    assert logged(found) == logged(wanted)
    engines = [engine_of(trainer.model) for trainer in (wanted, found)]
    assert [engine.compiled_graphs for engine in engines] == [2, 2]
    assert_same_weights(*(dict(engine.named_parameters()) for engine in engines))


@pytest.mark.slow
@pytest.mark.parametrize("given", ["a backend", "a compiled model"])
def test_a_script_that_is_to_compile_has_its_blocks_compiled(given: str) -> None:
    losses, graphs = {}, {}
    for name in ("asked", "engine", "eager"):
        reset_accelerate()
        offload = {"placement": PLACEMENT} | ({"compile": "always"} if name == "engine" else {})
        how = {"dynamo_backend": "inductor"} if name == "asked" else {}
        accelerator = OffloadAccelerator(cpu=True, offload=offload, **how)  # type: ignore[arg-type]
        model = compiled() if name == "asked" and given == "a compiled model" else llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert accelerator.engine is not None
        assert model is accelerator.engine.model
        found = []
        for _ in range(2):
            loss = model(**{key: value[None] for key, value in rows(1)[0].items()}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses[name], graphs[name] = found, accelerator.engine.compiled_graphs
    assert losses["asked"] == losses["engine"]
    assert graphs == {"asked": 2, "engine": 2, "eager": 0}


def test_how_to_compile_is_the_engines_to_say() -> None:
    with pytest.raises(ConfigError, match=r"dynamo_backend='aot_eager'.*inductor"):
        OffloadAccelerator(cpu=True, dynamo_backend="aot_eager")
