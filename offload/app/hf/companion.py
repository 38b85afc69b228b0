"""A frozen model beside the trained one: a submodule of it, so that one engine streams both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from offload.app.hf.models import BuiltModel
from offload.engine.companions import add_companion
from offload.files.sources import Source


def beside(built: BuiltModel, name: str, companion: BuiltModel) -> BuiltModel:
    """Return `built` with the frozen model of `companion` as the submodule `name`. Both may be unfilled."""
    add_companion(built.model, name, companion.model)
    prefix = f"{name}."

    def fill(unit: str, module: nn.Module) -> Mapping[nn.Parameter, Source] | None:
        if unit == name or unit.startswith(prefix):
            return companion.fill(unit.removeprefix(name).removeprefix("."), module)
        found = dict(built.fill(unit, module) or {})
        if not unit:  # the whole model: both
            found.update(companion.fill("", companion.model) or {})
        return found

    def source(parameter: str) -> Source | None:
        if parameter.startswith(prefix):
            return companion.source(parameter.removeprefix(prefix))
        return built.source(parameter)

    def close() -> None:
        built.close()
        companion.close()

    quantized = {**built.quantized, **companion.quantized}
    return replace(built, fill=fill, source=source, close=close, quantized=quantized)
