"""Equivalence check: engine and resident model over the first steps of a run, compared bit for bit.

The engine trains all steps first, as in a run, then the resident model; weights are compared after the last step. After
a difference, both train again and are compared after each step, to locate the first difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from offload.accelerators import open_accelerator, own_accelerator
from offload.amounts import Tell, tell_nobody, unmeasured
from offload.app.config.command_line import say_nothing
from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.hf.models import (
    BuiltModel,
    attention_options,
    fill_all,
    fuse_attention,
    is_pretrained,
    load_model_config,
    load_whole,
    model_kind,
)
from offload.app.telemetry.progress import work_progress
from offload.app.training.build import Run, make_run
from offload.app.training.objectives import Batch
from offload.app.training.parts import make_settings, rate_at
from offload.app.training.ranks import Share
from offload.app.training.resident import BatchPart, ResidentTrainer, resident_bytes
from offload.app.training.resume import ResumePoint, check_settings
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.distributed.share import share
from offload.engine.engine import Engine
from offload.engine.loss.loss import Loss, as_loss
from offload.engine.units.find import describe_parameters
from offload.engine.units.stages import stages_in_memory
from offload.errors import ConfigError, DoesNotFitError, format_bytes
from offload.extras.large.compiled_forwards import compile_modules
from offload.layout.planes import DTYPES
from offload.machine.limits import memory

Say = Callable[[str], None]

NUMBERS = ("loss", "grad_norm")
_LENGTHS = ("train.steps", "train.epochs", "train.max_seconds")
"""Settings of the length. If all have their defaults, a run over few rows is as long as the comparison."""
TOLERANCES = {
    "fp32": {"numbers": 1e-4, "weights": 1e-2},
    "fp16": {"numbers": 1e-2, "weights": 0.25},
    "bf16": {"numbers": 2e-2, "weights": 0.25},
}
"""Tolerances by precision, used when sum orders differ.

numbers: relative difference between losses or norms. weights: distance relative to the change since the start. Single
elements have no tolerance: a rule that divides by the root of a second moment turns a rounding-only gradient into a
full-length step.
"""
NORM_ON_DEVICE = 1e-7
"""Allowed relative difference between norms if the engine sums on an accelerator (docs/reference/numerics.md)."""


@dataclass(frozen=True)
class Difference:
    """The first difference between the offloaded and the resident side."""

    step: int
    """Step after which the difference appears, counted from 1."""
    name: str
    """Differing value: "loss", "grad_norm", or a parameter name."""
    element: tuple[int, ...]
    """Element index in the parameter; () for a scalar."""
    offloaded: float
    """Value in the engine."""
    resident: float
    """Value on the resident side."""

    def __str__(self) -> str:
        place = self.name
        if self.element:
            place += str(list(self.element))
        return f"step {self.step}, {place}: offloaded {self.offloaded!r}, resident {self.resident!r}"

    def fields(self) -> dict[str, Any]:
        """Return a JSON object."""
        what = "weight"
        parameter: str | None = self.name
        if self.name in NUMBERS:
            what, parameter = self.name, None
        return {
            "step": self.step,
            "what": what,
            "parameter": parameter,
            "element": list(self.element),
            "offloaded": json_number(self.offloaded),
            "resident": json_number(self.resident),
        }


@dataclass
class WeightComparison:
    """Comparison between the weights on two sides, one parameter at a time."""

    num_parameters: int = 0
    """Parameters compared so far."""
    num_elements: int = 0
    """Elements compared so far."""
    differing: dict[str, int] = field(default_factory=dict)
    """Elements with different bits, for each differing parameter."""
    largest: float = 0.0
    """Largest absolute difference between two elements."""
    first: Difference | None = None
    """First difference in parameter order. None: no difference."""
    _distance: float = 0.0
    _change: float = 0.0

    def add(
        self, step: int, name: str, offloaded: torch.Tensor, resident: torch.Tensor, initial: torch.Tensor | None = None
    ) -> None:
        """Compare a parameter bit for bit. Tensors: fp32, equal shape, on the CPU.

        initial: common initial value, for `distance`.
        """
        self.num_parameters += 1
        self.num_elements += offloaded.numel()
        mismatch = first_mismatch(offloaded, resident)
        if mismatch is not None:
            element, count = mismatch
            gap = (offloaded.double() - resident.double()).abs_()
            self.differing[name] = count
            self.largest = max(self.largest, gap.max().item())
            if gap.isnan().any():  # `max` alone would lose a NaN
                self.largest = math.nan
            self._distance += gap.square_().sum().item()
            difference = Difference(step, name, element, offloaded[element].item(), resident[element].item())
            self.first = self.first or difference
        if initial is not None:
            self._change += (resident.double() - initial.double()).square_().sum().item()

    @property
    def distance(self) -> float:
        """Relative distance: L2 norm of the difference, divided by the L2 norm of the change in the resident weights.

        0 for equal weights; inf if nothing has changed.
        """
        if not self.differing:
            return 0.0
        if not self._change:
            return math.inf
        return math.sqrt(self._distance / self._change)

    def fields(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "parameters": self.num_parameters,
            "elements": self.num_elements,
            "differing_parameters": len(self.differing),
            "differing_elements": sum(self.differing.values()),
            "largest_difference": json_number(self.largest),
            "distance": json_number(self.distance),
        }


def first_mismatch(one: torch.Tensor, other: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
    """Return the index of the first element with different bits, and the count of such elements.

    None: all equal. Both tensors are fp32. NaN equals itself; 0.0 differs from -0.0.
    """
    # As integers: a comparison of floats takes 0.0 for -0.0, and no NaN for another.
    differs = one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)
    count = int(differs.sum())
    if not count:
        return None
    flat = int(differs.view(-1).to(torch.uint8).argmax())
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), one.shape)), count


def json_number(value: float) -> float | str:
    """Return a JSON value. Non-finite numbers become strings."""
    if math.isfinite(value):
        return value
    return str(value)  # JSON has neither NaN nor infinity


@dataclass(frozen=True)
class StepNumbers:
    """Loss and gradient norm in one step on both sides, by name: "loss" and "grad_norm"."""

    step: int
    """Counted from 1."""
    offloaded: dict[str, float]
    """Values in the engine."""
    resident: dict[str, float]
    """Values on the resident side."""
    norm_within: float = 0.0
    """Relative difference up to which norms count as equal."""

    def first_difference(self) -> Difference | None:
        """Return the first number with a different bit. Norms: with a difference above `norm_within`."""
        for name, within in zip(NUMBERS, (0.0, self.norm_within), strict=True):
            if self.distance(name) > within:
                return Difference(self.step, name, (), self.offloaded[name], self.resident[name])
        return None

    def distance(self, name: str) -> float:
        """Return the relative difference of a number between the sides."""
        one, other = self.offloaded[name], self.resident[name]
        if one == other or (math.isnan(one) and math.isnan(other)):
            return 0.0
        gap = abs(one - other) / max(abs(one), abs(other))
        if not math.isfinite(gap):  # one side alone is not finite, perhaps NaN
            return math.inf
        return gap

    def fields(self) -> dict[str, Any]:
        """Return a JSON object."""
        sides = {"offloaded": self.offloaded, "resident": self.resident}
        values = {name: {side: json_number(its[name]) for side, its in sides.items()} for name in NUMBERS}
        return {"step": self.step, **values}


@dataclass
class ParityResult:
    """Result of the equivalence check. Differences are known on rank 0 only."""

    num_ranks: int
    """Ranks that trained the engine's side."""
    precision: str
    """Compute precision on both sides."""
    in_same_order: bool
    """True if the resident side sums in the engine's order as far as possible."""
    notes: list[str]
    """Intended approximations, equal on both sides."""
    steps: list[StepNumbers] = field(default_factory=list)
    """Numbers by step."""
    weights: WeightComparison = field(default_factory=WeightComparison)
    """Weights after the last step."""
    first: Difference | None = None
    """First difference. None: not searched, or not found in the comparison at each step."""
    reasons: list[str] = field(default_factory=list)
    """Reasons for possible bit differences. Empty: all bits must be equal."""
    is_equal: bool = True
    """False if an unexpected difference exists. Equal on all ranks."""

    @property
    def tolerance(self) -> dict[str, float] | None:
        """An entry of `TOLERANCES`. None: every bit must be equal."""
        if not self.reasons:
            return None
        return TOLERANCES[self.precision]

    @property
    def is_bit_equal(self) -> bool:
        """True if no loss, norm or weight differs."""
        return not self.weights.differing and all(step.first_difference() is None for step in self.steps)

    @property
    def is_close(self) -> bool:
        """True if all differences are within the tolerance."""
        if (tolerance := self.tolerance) is None:
            return self.is_bit_equal
        numbers = [step.distance(name) for step in self.steps for name in NUMBERS]
        return max(numbers, default=0.0) <= tolerance["numbers"] and self.weights.distance <= tolerance["weights"]

    def fields(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "equal": self.is_equal,
            "bit_equal": self.is_bit_equal,
            "tolerance": self.tolerance,
            "norm_within": max((step.norm_within for step in self.steps), default=0.0),
            "order_differs": self.reasons,
            "notes": self.notes,
            "ranks": self.num_ranks,
            "steps": [each.fields() for each in self.steps],
            "weights": self.weights.fields(),
            "first_difference": None if self.first is None else self.first.fields(),
        }


def check_parity(config: Config, num_steps: int, *, same_order: bool, comm: Comm, say: Say) -> ParityResult:
    """Compare the engine with a resident model over the first steps of a configured run. Collective.

    Both sides begin with the initial weights. With several ranks, rank 0 runs the resident side. After an unexpected
    difference, both sides train a second time.

    same_order: the resident side sums in the engine's order where possible. say: prints a line, on rank 0.

    Raises ConfigError for settings without a comparison, DoesNotFitError if the resident model does not fit in memory.
    """
    with share_failure(comm, "check of the settings"):
        config.check_source()
        check_settings(config, comm)
        _check_steps(num_steps, config.train.steps)  # before hours in which another model is measured
    with work_progress() if comm.rank == 0 else nullcontext(tell_nobody) as tell:
        result = _train_both(config, num_steps, same_order, comm, say, tell, compares_each_step=False)
        result.is_equal = comm.from_rank(0, result.is_close, "whether both sides are equal")
        # With a tolerance each step differs in some bits, and the first difference says nothing.
        if not result.is_equal and result.tolerance is None:
            say("something differs: both sides train once more, with a comparison after each step.")
            result.first = _train_both(
                config, num_steps, same_order, comm, say_nothing, tell, compares_each_step=True
            ).first
    return result


def _train_both(
    config: Config, num_steps: int, same_order: bool, comm: Comm, say: Say, tell: Tell, *, compares_each_step: bool
) -> ParityResult:
    """Train both sides from the start. `compares_each_step`: compare weights after each step, until a difference."""
    steps = range(num_steps)
    run = make_run(ResumePoint(config), comm, say, say, doing=tell)
    most = run.config.train.steps
    if most is not None and num_steps > most and config.is_default(*_LENGTHS):
        most = num_steps
        run = replace(run, config=run.config.with_resolved(train__steps=most))
    with closing(run.engine), ExitStack() as stack:
        if (accelerator := own_accelerator(config.offload.device)) is not None:
            stack.callback(accelerator.bound(1 << 62))  # the engine's budget must not limit the resident side
        with share_failure(comm, "check of the steps"):
            _check_steps(num_steps, most)
        data, _ = run.objective.prepare(run.config, run.engine, run.data, comm, (), say)
        is_measured = data is not run.data
        run = replace(run, data=data)
        resident = None
        with share_failure(comm, "making of the resident side"):
            if comm.rank == 0:
                resident = _build_resident(run, same_order)
                stack.enter_context(stages_in_memory(resident.model, make_settings(run.config)))
        sides = _Sides(run, resident, comm, same_order)
        notes = list(_notes(config, run.engine))
        if is_measured:
            notes.append("values of another model, such as a reference, are measured once, and equal on both sides.")
        result = ParityResult(sides.num_ranks, str(run.config.train.precision), same_order, notes)
        # In one group the engine's steps follow each other as in a run, and updates overlap the next forward.
        groups: list[Sequence[int]] = [steps]
        if compares_each_step:
            groups = [[step] for step in steps]
        for group in groups:
            done = []
            for step in group:
                tell(f"step {step + 1}, offloaded", run.engine.amount)
                if sides.train_offloaded(step):
                    done.append(step)
            for step in done:
                tell(f"step {step + 1}, resident", unmeasured)
                sides.train_resident(step, result)
            tell("comparing the weights", unmeasured)
            if len(done) < len(group):
                say(f"the data end before step {group[len(done)] + 1}.")
            if compares_each_step and result.first is None:
                result.first = sides.compare().first
            # Only rank 0 has compared, and all ranks must leave the loop together.
            if compares_each_step and comm.from_rank(0, result.first is not None, "whether a side differs"):
                return result
        result.weights = sides.compare()
        result.first = result.first or result.weights.first
        result.reasons = sides.reasons()
    return result


def _check_steps(num_steps: int, most: int | None) -> None:
    if most is not None and num_steps > most:
        raise ConfigError(f"--steps is {num_steps}, but the run has only {most}: raise --train.steps as well.")


def _notes(config: Config, engine: Engine) -> Iterator[str]:
    train, optimizer = config.train, config.optimizer
    if engine.compiles:
        yield (
            "blocks are compiled on both sides. Uncompiled blocks, compared with --train.compile never, differ in the "
            "last bits."
        )
    if engine.device.type != "cpu":
        yield (
            "attention runs in torch's own kernels on both sides. Training may choose others (cuDNN on recent GPUs), "
            "with other last bits."
        )
    if optimizer.states == "int8":
        yield "moments in int8 are an approximation of AdamW or Lion, made by the same kernel on both sides."
    if optimizer.states == "bf16":
        yield "moments in bf16 are rounded at random, by the same generator of (seed, step, element) on both sides."
    if train.matmul != "precision":
        yield f"products in {train.matmul} are made by the same functions on both sides."
    if train.delay:
        yield f"updates come a step late on both sides, from step {train.delay_after + 1} on."


class _Sides:
    """Both sides of an equivalence check. `resident`: None except on rank 0."""

    def __init__(self, run: Run, resident: ResidentTrainer | None, comm: Comm, same_order: bool) -> None:
        self._run = run
        self._engine: Engine = run.engine
        self._resident = resident
        self._comm = comm
        self.num_ranks = comm.size
        self._share = Share.of(run.config, comm)
        self._same_order = same_order
        self._offloaded: dict[int, dict[str, float]] = {}  # numbers by step, until the resident side has them too
        # For `distance`: a difference counts relative to the change since the start.
        self._initial: dict[str, torch.Tensor] = {}
        if resident is not None:
            self._initial = {name: value.clone() for name, value in resident.weights()}

    def train_offloaded(self, step: int) -> bool:
        """Train the engine on one batch. Return False at the end of the data. Collective."""
        batches = self._batches(step)
        if not batches:
            return False
        self._engine.lr = rate_at(step, self._run.config)
        self._begin(step)
        result = self._engine.step(batches[self._share.number], self._run.objective.loss)
        self._offloaded[step] = {"loss": float(result.loss), "grad_norm": result.grad_norm}
        return True

    def train_resident(self, step: int, parity: ParityResult) -> None:
        """Train the resident side on the engine's batch, and store both results. Collective."""
        with share_failure(self._comm, "step of the resident side"):
            if self._resident is not None:
                self._resident.lr = rate_at(step, self._run.config)
                # The engine chose the classes to compile in the first step.
                if not parity.steps:
                    compile_modules(self._resident.blocks(self._engine.compiled_classes))
                self._begin(step)
                loss, norm = self._step_resident(self._batches(step))
                norm_within = NORM_ON_DEVICE
                if self._engine.device.type == "cpu":
                    norm_within = 0.0
                numbers = {"loss": loss, "grad_norm": norm}
                parity.steps.append(StepNumbers(step + 1, self._offloaded[step], numbers, norm_within))
                parity.first = parity.first or parity.steps[-1].first_difference()

    def _begin(self, step: int) -> None:
        """Seed the generators equally on both sides."""
        torch.manual_seed(self._run.config.run.seed * 1_000_003 + step)

    def _batches(self, step: int) -> list[Batch]:
        """Return the rows per rank or sequence group. Empty: end of the data."""
        run, num_shares = self._run, self._share.num_shares
        size, batches = run.config.num_rows, []
        for number in range(num_shares):
            try:
                rows = run.data.batch(step, number, num_shares)
            except StopIteration:
                return []
            batches.append(run.objective.apply(rows, step, share(size, number, num_shares).start, size))
        return batches

    def _step_resident(self, batches: list[Batch]) -> tuple[float, float]:
        assert self._resident is not None
        device = self._engine.device
        parts = self._parts(batches)
        before = _generators(device)
        try:
            numbers = self._resident.step(parts)
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(
                "the resident side has too little memory for a step, because it holds the whole model on the device: "
                f"{' '.join(str(error).split())[:300]} Lower --train.batch_size or --data.sequence_length."
            ) from None
        # The generators moved, so the model drew: other numbers for other cuts of the batch.
        draws = any(not torch.equal(one, other) for one, other in zip(before, _generators(device), strict=True))
        if draws and (self.num_ranks > 1 or self._micro_rows or self._num_passes > 1):
            raise ConfigError(
                "the model draws random numbers (dropout), and ranks, micro-batches or passes draw other numbers than "
                "plain PyTorch for a whole batch, so nothing can be compared. Leave out --gpus, --train.passes and "
                "--train.micro_batch_size, or set the model's dropout to 0."
            )
        return numbers

    @property
    def _micro_rows(self) -> int | None:
        """Rows per micro-batch. None: whole batches."""
        config = self._run.config
        if config.micro_rows is not None and config.micro_rows < -(-config.num_rows // self._share.num_shares):
            return config.micro_rows
        return None

    @property
    def _num_passes(self) -> int:
        """Passes of a step, at most."""
        return self._run.config.train.passes

    def _parts(self, batches: list[Batch]) -> list[BatchPart]:
        """Return the resident side's batches: all ranks' rows at once, or in the engine's parts."""
        count, loss = self._run.objective.count, as_loss(self._run.objective.loss)
        whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        if not self._same_order or loss.obstacle:
            return [(whole, 1.0)]
        # By targets, not by rows: a loss is a mean over the targets of the batch.
        total = count(whole)
        parts = []
        for batch in batches:
            num_rows = len(next(iter(batch.values())))
            num_groups = num_rows // loss.group
            passes = min(self._num_passes, num_groups)
            ends = [num_groups * number // passes * loss.group for number in range(passes + 1)]
            step = self._micro_rows or num_rows
            for first, end in pairwise(ends):
                for begin in range(first, end, step):
                    part = {key: value[begin : min(begin + step, end)] for key, value in batch.items()}
                    if num_targets := count(part):  # a mean over no targets would be NaN
                        parts.append((part, num_targets / total))
        return parts

    def compare(self) -> WeightComparison:
        """Compare all weights after the last step. Collective; the result is valid on rank 0."""
        comparison, step = WeightComparison(), len(self._offloaded)
        others = None
        if self._resident is not None:
            others = self._resident.weights()
        # On all ranks: partitioned weights are gathered.
        for name, offloaded in self._engine.named_parameters():
            if others is not None:
                comparison.add(step, name, offloaded, next(others)[1], self._initial[name])
        return comparison

    def reasons(self) -> list[str]:
        """Return the reasons for bit differences outside the engine's guarantees."""
        engine, reasons = self._engine, []
        if self.num_ranks > 1:
            reasons.append(f"{self.num_ranks} ranks: each sums the gradients of its own rows, and a part of the norm")
        if (size := self._run.config.train.sequence_parallel) > 1:
            reasons.append(f"sequences shared by {size} ranks: sums over tokens are split")
        if self._micro_rows:
            reasons.append(f"micro-batches of {self._micro_rows} rows: the gradients of each are summed separately")
        if self._num_passes > 1:
            reasons.append(f"{self._num_passes} passes: the gradients of each are summed separately")
        if engine.head_chunks > 1:
            reasons.append(
                f"the head in {engine.head_chunks} chunks: losses and gradients are summed chunk by chunk "
                "(--train.head_chunk_bytes none computes all logits at once)"
            )
        if engine.max_grad_norm is not None:
            if engine.clip == "speculative":
                reasons.append("speculative clipping: updates are corrected (--train.clip deferred is exact)")
            if engine.device.type != "cpu":
                reasons.append("the norm for clipping is summed on the device (--train.max_grad_norm none is exact)")
        return reasons


def _build_resident(run: Run, same_order: bool) -> ResidentTrainer:
    """Build the resident side with the initial model of the run. Raises DoesNotFitError."""
    config, engine = run.config, run.engine
    built, _ = _build(run, lambda _, built: built)
    infos = describe_parameters(built.model, engine.optimizer, str(config.train.precision))
    # On shapes, before any weight is read.
    _check_fit(resident_bytes(infos, engine.optimizer), engine)
    built, loss = _build(run, partial(_load_plainly, DTYPES[str(config.train.precision)]))
    fill_all(built)
    late_after = None
    if config.train.delay:
        late_after = config.train.delay_after
    return ResidentTrainer(
        built.model.train(),
        engine.optimizer,
        precision=str(config.train.precision),
        device=engine.device,
        update_devices=engine.update_devices,
        max_grad_norm=engine.max_grad_norm,
        seed=config.run.seed,
        skips=config.train.on_nonfinite == "skip",
        late_after=late_after,
        sums_by_unit=same_order,
        frozen_weights=config.offload.frozen_weights,
        link_weights=config.offload.link_weights,
        loss_fn=loss,
    )


def _build(run: Run, load: Callable[[ModelSection, BuiltModel], BuiltModel]) -> tuple[BuiltModel, Loss | None]:
    """Return the model of a run again, with companions beside it, and a loss over them. `load` replaces each model."""
    setup, config = run.setup, run.config
    objective = setup.objective(config, run.data)
    built = setup.trainable.prepare(load(config.model, run.build_base()))
    built = setup.with_companions(config, objective, built, lambda section: load(section, run.build_other(section)))
    return built, objective.loss


def _load_plainly(dtype: torch.dtype, section: ModelSection, built: BuiltModel) -> BuiltModel:
    """Return a model as loaded by `from_pretrained`, if its folder has complete, unquantized weights: the check then
    does not depend on our own reader.
    """
    if not is_pretrained(section, built.folder) or built.notes or built.quantized:
        return built
    assert built.folder is not None
    own: Any = built.model.config
    config: Any = load_model_config(section)
    if own.is_encoder_decoder:  # chosen by the run where the folder has none
        config.decoder_start_token_id = own.decoder_start_token_id
    plain = load_whole(model_kind(own).auto, built.folder, config, dtype, attention_options(section))
    fuse_attention(section, plain.model)
    return replace(built, model=plain.model, fill=plain.fill)


def _check_fit(needs: Mapping[str, int], engine: Engine) -> None:
    """Raise DoesNotFitError if the resident side does not fit beside the engine. Activations are not counted."""
    accelerator = own_accelerator(str(engine.device))
    computes = "cpu"
    free = {"cpu": memory().get("available_bytes"), "device": None}
    if accelerator is not None:
        computes = "device"
        free["device"] = accelerator.free_bytes
    # The resident side updates where the engine does.
    updates = computes
    if all(device.type == "cpu" for device in engine.update_devices.values()):
        updates = "cpu"
    places = {"weights": computes, "gradients": computes, "masters": updates, "moments": updates}
    needs = {**needs, "first weights": needs["masters"]}  # needed for the distance
    for tier, room in free.items():
        on_tier = {name: num_bytes for name, num_bytes in needs.items() if places.get(name, "cpu") == tier}
        needed = sum(on_tier.values())
        if room is not None and needed > room:
            listed = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in on_tier.items())
            raise DoesNotFitError(
                f"parity needs memory for the resident model beside the engine: {format_bytes(needed)} on the {tier} "
                f"without activations ({listed}), but {format_bytes(room)} are free there. Use a smaller model of the "
                "same family (--model.path of a config.json with fewer layers), or a machine with more memory."
            )


def _generators(device: torch.device) -> list[torch.Tensor]:
    """Return the states of random generators used in a forward pass."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(open_accelerator(device).module.get_rng_state(device))
    return states
