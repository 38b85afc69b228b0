"""Train one family twice, streamed and resident, and report the differences."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload import Engine, Placement
from offload.engine.units.unit import Unit
from tests.engine.compare import PROPORTIONAL
from tests.engine.inside import keep_gradients, parts_of, steps_of
from tests.engine.reference import Batch, Reference, count_labels, count_shifted, sum_by_layer
from tests.zoo.families import ROWS, Family

STEPS = {"fp32": 2, "bf16": 1}


@dataclass(frozen=True)
class Mode:
    """Settings for an engine step: recomputation mode, and rows per micro-batch."""

    name: str
    recompute: str = "always"
    rows: int | None = None


ALWAYS, NEVER = Mode("always"), Mode("never", "never")
MICRO = tuple(Mode(f"{rows} of {ROWS} rows", rows=rows) for rows in (1, 2, 3))
SUMS = "a tensor enters a layer in several places: its gradients are summed layer by layer"
ROUNDING = 1e-6
"""Allowed gradient difference in micro-batches, relative to the largest gradient in the unit."""
_SMALL_SHARE = 16
"""Units outside the blocks, smaller than the largest unit divided by this, may stay resident without a warning."""


@dataclass
class Outcome:
    """Comparison results after a few steps.

    - `differences`: the largest difference per quantity, relative to the largest value in the unit (0: bit-equal).
    - `why`: the explanation for the differences, if known.
    - `resident`: units on the device. `reported`: units with an engine warning.
    - `unsplit`: units without batch splitting, with reasons.
    - `order`: for micro-batch differences above rounding, the gradient difference in plain PyTorch between whole and
      split batches.
    """

    family: str
    class_name: str
    precision: str
    num_parameters: int = 0
    num_units: int = 0
    resident: list[str] = field(default_factory=list)
    resident_parameters: int = 0
    order: float = 0.0
    unsplit: dict[str, str] = field(default_factory=dict)
    reported: list[str] = field(default_factory=list)
    kept_fp32: list[str] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    worst: dict[str, str] = field(default_factory=dict)
    loss: float = 0.0
    is_finite: bool = True
    is_made_in_bf16: bool = False
    why: str = ""

    @property
    def is_equal(self) -> bool:
        return not any(self.differences.values())

    @property
    def is_within_rounding(self) -> bool:
        """Whether micro-batches change only the summation order."""
        allowed = max(ROUNDING, 4 * self.order)
        kinds = {"loss": ROUNDING, "norm": allowed, "gradient": allowed, "parameter": allowed, "evaluate": ROUNDING}
        return all(difference <= kinds[kind] for kind, difference in self.differences.items())

    def note(self, kind: str, got: torch.Tensor, wanted: torch.Tensor, scale: float, where: str = "") -> None:
        """Record a comparison between two tensors with one dtype."""
        self.is_finite &= bool(torch.isfinite(wanted).all())
        largest = self.differences.setdefault(kind, 0.0)
        if torch.equal(got, wanted):
            return
        difference = (got.double() - wanted.double()).abs().max().item() / max(scale, 1e-30)
        if not difference <= largest:
            self.differences[kind] = difference
            self.worst[kind] = where


class Plain(Reference):
    """The resident run. Keeps the last gradients, and in bf16 sums over repeated layer calls in fp32."""

    def __init__(self, model: nn.Module, precision: str, **settings: Any) -> None:
        super().__init__(model, precision=precision, **settings)
        self.gradients: dict[str, torch.Tensor] = {}
        self._calls: Counter[int] = Counter()
        self._first = {name: list(uses) for name, uses in self.named.items()}
        names = {id(p): name for name, uses in self.named.items() for p in uses}
        self._places = {
            (module, key): (names[id(p)], p)
            for module in self.model.modules()
            for key, p in module._parameters.items()
            if p is not None
        }
        layers = (layer for parent in self.model.modules() if isinstance(parent, nn.ModuleList) for layer in parent)
        for layer in layers if precision == "bf16" else ():
            layer.register_forward_pre_hook(self._renew)

    def _renew(self, layer: nn.Module, args: object) -> None:
        """Give a repeatedly called layer separate parameters for this call."""
        self._calls[id(layer)] += 1
        if self._calls[id(layer)] > 1:
            for module in layer.modules():
                for key, p in module._parameters.items():
                    if p is not None:
                        module._parameters[key] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
                        self.named[self._places[module, key][0]].append(module._parameters[key])

    def update(self) -> float:
        self.gradients = dict(self._sums)
        for (module, key), (_, first) in self._places.items():
            module._parameters[key] = first
        self.named = {name: list(uses) for name, uses in self._first.items()}
        self._calls.clear()
        return super().update()


def examine(family: Family, precision: str, mode: Mode = ALWAYS) -> Outcome:
    """Compare, and find the reason for different bits."""
    outcome = compare(family, precision, mode)
    if mode.rows and outcome.differences["gradient"] > ROUNDING:
        outcome.order = compare(family, precision, mode, measures_order=True).order
    if not outcome.is_equal and not mode.rows and compare(family, precision, mode, by_layer=True).is_equal:
        outcome.why = SUMS
    return outcome


def compare(
    family: Family,
    precision: str,
    mode: Mode = ALWAYS,
    by_layer: bool = False,
    made_in: torch.dtype = torch.float32,
    measures_order: bool = False,
) -> Outcome:
    """Train `family` for a few steps, streamed and resident, and check the final states.

    With `by_layer` the resident run sums the gradients of layer inputs layer by layer, like the streamed run. In
    micro-batches both runs have no dropout, and an update rule in proportion to the gradients. With `measures_order`
    the resident run on micro-batches is also compared with whole batches.
    """
    with _quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = family.build(dtype=made_in, calm=bool(mode.rows) or family.is_random)
        plain = copy.deepcopy(model)
        configured = [module for module in model.modules() if hasattr(getattr(module, "config", None), "use_cache")]
        cached = {module: module.config.use_cache for module in configured}
        shared: dict[str, Any] = {"precision": precision, "micro_batch_size": mode.rows}
        if mode.rows:
            shared["optimizer"] = PROPORTIONAL
        # Debug mode poisons free slots: a saved graph must find the weights after each fetch.
        engine = Engine(model, placement=Placement(), recompute=mode.recompute, debug=mode is NEVER, **shared)
        gradients = keep_gradients(engine)
        infos = parts_of(engine).infos
        kept = {info.name for info in infos if info.compute == "fp32"}
        group = sum_by_layer if by_layer else lambda model: None
        reference = Plain(plain, kept=kept.__contains__, group=group, **shared)
        outcome = Outcome(family.name, family.class_name, precision, is_made_in_bf16=made_in == torch.bfloat16)
        outcome.kept_fp32 = sorted(kept) if precision == "bf16" else []
        whole = Plain(plain, **shared | {"micro_batch_size": None}) if measures_order else None
        count = _targets_of(reference, family.batch()) if mode.rows else None
        for step in range(STEPS[precision]):
            batch = family.batch(step)
            torch.manual_seed(100 + step)
            try:
                loss, norm = reference.step(batch, count=count)
            except RuntimeError as error:
                if precision == "fp32" or made_in == torch.bfloat16 or "dtype" not in str(error):
                    raise
                # buffers are fp32 because of the construction dtype
                return compare(family, precision, mode, by_layer, torch.bfloat16)
            torch.manual_seed(100 + step)
            result = engine.step(batch)
            outcome.loss = loss.item()
            outcome.note("loss", result.loss, loss, loss.abs().item())
            outcome.note("norm", torch.tensor(result.grad_norm).double(), torch.tensor(norm).double(), norm)
            _compare_states(outcome, engine, gradients, reference)
            if whole is not None:
                whole.step(batch)
                _measure_order(outcome, engine, reference, whole)
        _compare_evaluation(outcome, engine, reference, family.batch(STEPS[precision]))
        messages = [str(warning.message) for warning in caught]
        outcome.reported = [text for text in messages if "is read from outside" in text]
        if not steps_of(engine).splits:
            outcome.unsplit = {
                unit.name: _why_not_split(unit)
                for unit in parts_of(engine).units
                if unit.traits.is_compared and not unit.resident and not unit.traits.splits
            }
        _check_streamed(outcome, engine)
        _check_restored(engine, model, cached)
        return outcome


def _targets_of(reference: Reference, batch: Batch) -> Callable[[Batch], int]:
    """Return the function to count targets. For shifted labels the first token in a row is no target."""
    first = torch.full_like(batch["labels"], -100)
    first[:, 0] = batch["labels"][:, 0]
    with torch.no_grad():
        loss = copy.deepcopy(reference.model).eval()(**{**batch, "labels": first}).loss
    return count_labels if loss.isfinite() and loss != 0 else count_shifted


def _why_not_split(unit: Unit) -> str:
    learned = unit.traits
    if learned.mutated:
        return "changes an input in place"
    if not all(learned.outputs):
        return "its result has no batch axis"
    return "mixes rows, or differs from use to use"


def _compare_states(outcome: Outcome, engine: Engine, gradients: dict[str, torch.Tensor], reference: Plain) -> None:
    infos, parts = parts_of(engine).infos, parts_of(engine)
    for state in parts.store.states.values():
        region = state.region
        wanted = [reference.gradients.get(infos[index].name) for index in region.parameters]
        scale = max((gradient.abs().max().item() for gradient in wanted if gradient is not None), default=0.0)
        touched = parts.gradients.measures.touched.get(region.index, [False] * len(wanted))
        received = [gradient is not None for gradient in wanted]
        assert touched == received, f"unit {region.name}: other parameters received a gradient"
        for index, gradient in zip(region.parameters, wanted, strict=True):
            if gradient is not None:
                got = gradients[infos[index].name]
                outcome.note("gradient", got, gradient.reshape(-1).to(got.dtype), scale, infos[index].name)
    for name, got in engine.named_parameters():
        outcome.note("parameter", got, reference.masters[name], reference.masters[name].abs().max().item(), name)


def _measure_order(outcome: Outcome, engine: Engine, reference: Plain, whole: Plain) -> None:
    for unit in parts_of(engine).units:
        names = {parts_of(engine).infos[place.parameter].name for place in unit.places} & reference.gradients.keys()
        pairs = [(reference.gradients[name], whole.gradients[name]) for name in names]
        scale = max((wanted.abs().max().item() for wanted, _ in pairs), default=0.0)
        for wanted, got in pairs:
            outcome.order = max(outcome.order, (got - wanted).abs().max().item() / max(scale, 1e-30))


def _compare_evaluation(outcome: Outcome, engine: Engine, reference: Plain, batch: dict[str, torch.Tensor]) -> None:
    reference.model.eval()
    torch.manual_seed(7)
    with torch.no_grad():
        plain = reference.model(**batch).loss.float()
    torch.manual_seed(7)
    outcome.note("evaluate", engine.evaluate(batch), plain, plain.abs().item())


def _check_streamed(outcome: Outcome, engine: Engine) -> None:
    """Check that every parameter has a unit, and that all units stream except small or reported ones."""
    units, infos = parts_of(engine).units, parts_of(engine).infos
    sizes = {unit.name: {place.parameter: infos[place.parameter].numel for place in unit.places} for unit in units}
    stay = {index: size for unit in units if unit.resident for index, size in sizes[unit.name].items()}
    outcome.num_units, outcome.num_parameters = len(units), sum(info.numel for info in infos)
    outcome.resident, outcome.resident_parameters = [unit.name for unit in units if unit.resident], sum(stay.values())
    owned = {index for size in sizes.values() for index in size}
    assert owned == set(range(len(infos))), "a parameter belongs to no unit"
    num_streamed = len(units) - len(outcome.resident)
    wanted = 3 - len(outcome.reported)
    assert num_streamed >= wanted, f"only {num_streamed} units stream: two blocks and an embedding are wanted"
    largest = max(sum(size.values()) for size in sizes.values())
    for name in outcome.resident:
        if not any(f"unit {name} " in text for text in outcome.reported):
            is_small = sum(sizes[name].values()) * _SMALL_SHARE < largest
            assert is_small, f"unit {name} stays on the device without a warning"


def _check_restored(engine: Engine, model: nn.Module, cached: dict[nn.Module, bool | None]) -> None:
    trained = dict(engine.named_parameters())
    engine.close(restore=True)
    assert list(trained) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name].to(parameter.dtype)), f"{name} is not as it was trained"
    for module, use_cache in cached.items():
        assert module.config.use_cache == use_cache, f"use_cache of {type(module).__name__} has changed"


@contextmanager
def _quiet() -> Iterator[None]:
    """Use one thread, and hide transformers warnings about tiny configurations."""
    threads, logger = torch.get_num_threads(), logging.getLogger("transformers")
    level = logger.level
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logger.setLevel(level)
