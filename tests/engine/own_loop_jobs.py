"""What a rank does in the tests of own loops over ranks."""

from __future__ import annotations

from typing import Any

from offload import Engine
from offload.errors import ConfigError
from tests.engine.families import build, llama, tokens
from tests.engine.ranks_child import share


def plain_backward(zero_stage: int) -> tuple[list[Any], list[str]]:
    """Make the same steps by `engine.backward` and by the losses' own; return what came of them, and what is
    refused."""
    found: list[Any] = []
    refused: list[str] = []
    for own in (False, True):
        engine = Engine(build(llama), zero_stage=zero_stage)
        for step in range(2):
            batch = share(tokens(step), (2, 2), engine.rank)
            loss = engine.model(**batch).loss / engine.world_size
            if own:
                loss.backward()
            else:
                engine.backward(loss)
            norm = engine.grad_norm()
            result = engine.update(max_grad_norm=0.5)
            assert result.grad_norm == norm
            assert result.loss.isnan() == own
            found.append(norm)
        found.append({name: value.sum().item() for name, value in engine.named_parameters()})
        loss = engine.model(**batch).loss
        loss.backward()
        for differs in (
            lambda engine: engine.update(max_grad_norm=1.0 + engine.rank),
            lambda engine: engine.tune({"betas": (0.5, 0.5 + engine.rank / 10)}),
        ):
            try:
                differs(engine)
            except ConfigError as error:
                refused.append(str(error))
        engine.close()
    return found, refused


def dropped_gradients(zero_stage: int) -> list[Any]:
    """Make the same two steps, with and without others between them whose gradients are dropped."""
    found: list[Any] = []
    for drops in (False, True):
        engine = Engine(build(llama), zero_stage=zero_stage)
        for step in range(2):
            for number in range(2 * drops):
                (engine.model(**share(tokens(7 + number), (2, 2), engine.rank)).loss / engine.world_size).backward()
                if number:
                    engine.grad_norm()
                engine.zero_grad()
            engine.backward(engine.model(**share(tokens(step), (2, 2), engine.rank)).loss / engine.world_size)
            result = engine.update()
            found.append((drops, step, float(result.loss), result.grad_norm))
        found.append((drops, {name: value.double().sum().item() for name, value in engine.named_parameters()}))
        engine.close()
    return found
