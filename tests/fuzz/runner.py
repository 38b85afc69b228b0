"""Run one case: a resident engine first, then the engine under test, with a comparison after each operation.

Some cases also run plain PyTorch and one rank.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from offload import AdamW, Engine
from offload.distributed.comm import Comm
from offload.engine.checkpoint_save import PendingCheckpoint
from offload.engine.companions import without_companions
from offload.engine.units import offloaded_graph
from offload.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    DoesNotFitError,
    NonFiniteError,
    OffloadError,
    RankLostError,
    TornError,
)
from offload.extras.large import compiled_forwards as compiled
from offload.extras.quant import products
from offload.extras.zeroth.record import ZerothOrderRecord
from tests.cases.features import CASES, Cell
from tests.cases.features import Case as Feature
from tests.cases.run import Training, registered, small
from tests.engine.fp8 import LEAST_SIZE, multiply_in_fp8
from tests.engine.inside import memory_of, parts_of
from tests.engine.reference import Reference, count_labels, count_shifted, sum_by_layer
from tests.fuzz import forwards, habits, models
from tests.fuzz.cases import RULES, Case, Op
from tests.fuzz.faults import Faults, Told
from tests.fuzz.oracles import Wrong, all_states, check_ledgers, leaving_nothing, near, same

_BACKEND = "aot_eager"
"""Traces and differentiates blocks like any backend, but runs operation by operation.

The bits equal uncompiled code, without seconds for code generation.
"""
_SEVERE = (RankLostError, TornError, DiskError, CheckpointError)
_REORDERS = {"head_chunk_bytes", "passes", "sequence_tile"}
"""Settings that change the summation order."""
_SMALL_TILES = Feature(limits={"offload.planning.device_updates._LARGEST_TILE": 2048})
_PLACES = ("parameters", "optimizer", "gradients", "activations", "graphs", "optimizer_memory")


@dataclass
class Outcome:
    """The result of a case: an error, a refusal that ended the case, and counts of finished operations."""

    wrong: str = ""
    refused: str = ""
    is_sound: bool = True  # the process can run another case
    notes: Counter[str] = field(default_factory=Counter)


class Refused(Exception):
    """The engine refused an operation with a permitted error. The text begins with the error class."""


@dataclass
class Seen:
    """Result of an operation, and the weights after the operation. None: not read."""

    result: Any = None
    weights: dict[str, Tensor] | None = None


class Player:
    """Builds the engine for a case and runs operations."""

    def __init__(
        self, case: Case, comm: Comm, folder: Path, layout: Mapping[str, Any], budgets: Mapping[str, int]
    ) -> None:
        self.case, self.comm, self.folder, self._budgets = case, comm, folder, budgets
        self.faults: Faults | None = None
        self.owes_fault = False  # a fault on a prefetching lane has not surfaced yet
        self._num_saved = 0
        self._saved: Path | None = None
        self._under_way: tuple[PendingCheckpoint, Path] | None = None
        self.records: list[ZerothOrderRecord] = []  # MeZO steps that led to the current weights
        self._num_records_saved = 0
        self.may_copy = True  # whether checkpoints may copy states to spare memory
        self.outside = habits.Outside(models.width_of(case.model))
        self._frozen: str | None = None
        self.engine = self.open(layout)
        self.base_lr = self.engine.lr

    def open(self, layout: Mapping[str, Any]) -> Engine:
        model = models.build(self.case.model)
        self._trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if self.case.kind == "interrupts":
            self.faults = Faults(model)
        budgets = self._budgets if layout is self.case.layouts[0] else {}
        engine = open_engine(model, settings_of(self.case), layout, self.folder, self.comm, budgets)
        if self.faults is not None:
            self.faults.watch(engine)
        self._freeze(engine, self._frozen)
        return engine

    def _freeze(self, engine: Engine, pattern: str | None) -> None:
        if pattern is not None:
            self._frozen, named = pattern, dict(engine.model.named_parameters())
            habits.freeze({name: [named[name]] for name in self._trained}, pattern)

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way[0].abort()
        self.engine.close()

    def do(self, op: Op) -> Any:
        """Return the result of an operation. Raises Refused for a refusal by the engine."""
        torch.manual_seed(op["seed"])
        self._freeze(self.engine, op.get("freeze"))
        if op.get("parks"):
            with suppress(DoesNotFitError):  # without room on the host, nothing changes
                self.engine.park()
            self.engine.resume()
        try:
            return getattr(self, f"_{op['do']}")(op)
        except _SEVERE:
            raise
        except OffloadError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    def weights(self) -> dict[str, Tensor]:
        return dict(self.engine.named_parameters())

    def _batch(self, op: Op) -> dict[str, Any]:
        drawn = op["batch"]
        if op["do"] != "step":  # avoids a mean without targets
            drawn = {**drawn, "ignored": False}
        return self.outside.given(op, models.batch(self.case.model, drawn, self.comm.rank))

    def _loss_fn(self, op: Op) -> Any:
        if op.get("outside") == "scale":
            return lambda outputs, given: self.outside.scaled(op, models.cross_entropy(outputs, given))
        return models.loss_fn(self.engine.model, op)

    def _step(self, op: Op) -> Any:
        result = self.engine.step(self._batch(op), loss_fn=self._loss_fn(op))
        if result.tokens != self._num_targets(op):
            raise Wrong(f"{result.tokens} tokens, and there are {self._num_targets(op)} targets")
        if result.measured is not None:
            self.records.append(result.measured)
        return (
            models.bits(result.loss.item()),
            models.bits(result.grad_norm),
            result.tokens,
            result.skipped,
            *(() if result.measured is None else (result.measured,)),
            *map(models.bits, self.outside.learn(op)),
        )

    def _num_targets(self, op: Op) -> int:
        spec = self.case.model
        given = [models.batch(spec, op["batch"], rank) for rank in range(self.comm.size)]
        # The engine detects the target count from the loss. For a family the count is known.
        return sum(models.targets(spec, one, models.is_own(op)) for one in given)

    def _empty(self, op: Op) -> Any:
        if op.get("loss_fn"):
            return None
        given = self._batch(op)
        return self.engine.step({**given, "labels": torch.full_like(given["labels"], -100)})

    def _evaluate(self, op: Op) -> Any:
        return models.bits(self.engine.evaluate(self._batch(op), loss_fn=self._loss_fn(op)).item())

    def _own(self, op: Op) -> Any:
        done = len(self.engine._own_loop.losses)  # before an interrupt
        if op.get("lost_forward") and not done:
            self.loss(op)
        for number in range(done, op.get("passes", 1)):
            torch.manual_seed(op["seed"] + number)
            loss = self.loss(op)
            self._freeze(self.engine, op.get("midway"))
            self.engine.backward(loss)
        result = self.engine.update()
        return (
            models.bits(result.loss.item()),
            models.bits(result.grad_norm),
            result.skipped,
            *map(models.bits, self.outside.learn(op)),
        )

    def loss(self, op: Op) -> Tensor:
        """Call the model like a custom loop."""
        return called(self.case, self.engine.model, self.outside, op, self._batch(op))

    def _ungraded(self, op: Op) -> Any:
        self.loss(op)

    def _forward(self, op: Op) -> Any:
        with torch.no_grad():
            return models.bits(self.loss(op).item())

    def _read(self, op: Op) -> Any:
        self.weights()

    def _lr(self, op: Op) -> Any:
        self.engine.lr = self.base_lr * op["factor"]

    def _save(self, op: Op) -> Any:
        self._num_saved += 1
        self._num_records_saved = len(self.records)
        folder = self.folder / "checkpoints" / f"{op['seed']}-{self._num_saved}"
        self.settle()
        if self.may_copy and op["seed"] % 2:
            self._under_way = self.engine.begin_checkpoint(folder, meta={"seed": op["seed"]}), folder
        else:
            self.engine.save_checkpoint(folder, meta={"seed": op["seed"]})
            self._saved = folder

    def settle(self) -> None:
        """Finish a pending checkpoint."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            saving, folder = under_way
            saving.finish()
            self._saved = folder

    def _load(self, op: Op) -> Any:
        self.settle()
        if self._saved is not None:
            self.engine.load_checkpoint(self._saved)
            del self.records[self._num_records_saved :]

    def _replay(self, op: Op) -> Any:
        """One rank repeats all steps from the recorded measurements, with any placement."""
        wanted, problem = self.weights(), ""
        if self.comm.rank == 0:
            layout = self.case.layouts[op["layout"]] | {"zero_stage": 0}
            engine = open_engine(models.build(self.case.model), settings_of(self.case), layout, self.folder, Comm(), {})
            try:
                engine.replay(self.records)
                problem = same(dict(engine.named_parameters()), wanted)
            finally:
                engine.close()
        problem = agreed(self.comm, problem)
        if problem:
            raise Wrong(f"replayed: {problem}")

    def _export(self, op: Op) -> Any:
        if not models.is_family(self.case.model):
            return
        self._num_saved += 1
        folder = self.folder / "exports" / f"{op['seed']}-{self._num_saved}"
        self.engine.export(folder, dtype=torch.float32)
        wanted = self.weights()
        problem = same(dict(type(self.engine.model).from_pretrained(folder).named_parameters()), wanted)
        if problem:
            raise Wrong(f"exported: {problem}")

    def _reopen(self, op: Op) -> Any:
        """Continue in a new engine with another placement."""
        self.settle()
        before, lr, num_records = self._saved, self.engine.lr, self._num_records_saved
        self._save(op)
        self.settle()
        self.engine.close()
        self.engine = self.open(self.case.layouts[op["layout"]])
        self.engine.load_checkpoint(self._saved or "")
        self.engine.lr, self._saved, self._num_records_saved = lr, before, num_records

    def _world(self, op: Op) -> Any:
        """One rank loads the checkpoint of all ranks and saves a new one. All ranks continue from there."""
        self.settle()
        before, num_records = self._saved, self._num_records_saved
        self._save(op)
        self._num_records_saved = num_records
        self.settle()
        if models.moves(self.case.model):  # buffers differ by rank, and the checkpoint has one copy
            self.engine.load_checkpoint(self._saved or "")
            self._saved = before
            return
        wanted, problem = self.weights(), ""
        saved, other = self._saved, self.folder / "checkpoints" / f"{op['seed']}-alone"
        assert saved is not None
        if self.comm.rank == 0:
            engine = open_engine(models.build(self.case.model), settings_of(self.case), {}, self.folder, Comm(), {})
            engine.load_checkpoint(saved)
            problem = same(dict(engine.named_parameters()), wanted)
            engine.save_checkpoint(other)
            engine.close()
        problem = agreed(self.comm, problem)
        if problem:
            raise Wrong(f"one rank has loaded other weights than {self.comm.size} have saved: {problem}")
        self.engine.load_checkpoint(other)
        self._saved = before


def called(case: Case, model: nn.Module, outside: habits.Outside, op: Op, given: dict[str, Any]) -> Tensor:
    """Return the loss from a model call in a custom loop."""
    is_own = not op.get("loss_fn")
    if "probe" in op:
        width = models.width_of(case.model)
        given = habits.probed(op["probe"], given, width, lambda moved: models.loss_of(model, moved, is_own))
    return outside.scaled(op, models.loss_of(model, given, is_own))


def settings_of(case: Case) -> dict[str, Any]:
    """Return the engine settings for a case, with an update-rule object for MeZO cases."""
    return case.settings if case.forwards is None else {**case.settings, "optimizer": forwards.rule_of(case)}


def open_engine(
    model: nn.Module,
    settings: Mapping[str, Any],
    layout: Mapping[str, Any],
    folder: Path,
    comm: Comm,
    budgets: Mapping[str, int],
) -> Engine:
    """Return an engine over a model in a layout."""
    places = {key: layout[key] for key in _PLACES if key in layout}
    if "nvme" in places.values() or "host_extra" in layout:
        (folder / "nvme").mkdir(parents=True, exist_ok=True)
        places["nvme_dir"] = str(folder / "nvme")
    keys = ("debug", "recompute", "prefetch", "compile", "throttle", "update", "zero_stage")
    more = {key: layout[key] for key in keys if key in layout}
    given = {key: value for key, value in settings.items() if key != "stage"}
    rule = given.pop("optimizer", AdamW())
    given["optimizer"] = RULES[rule] if isinstance(rule, str) else rule
    training = Training(Feature(), Cell({**places, **budgets}, {**given, **more}), folder / "nvme")
    with small(_SMALL_TILES) if layout.get("small_tiles") else nullcontext():
        return training.open(model, comm=comm)


def twin_layout(case: Case) -> dict[str, Any]:
    """Return the resident layout. (Speculative clipping needs the CPU tier.)"""
    tier = "cpu" if case.settings.get("clip") == "speculative" else "device"
    return {"parameters": tier, "optimizer": tier, "prefetch": 0, "recompute": "always"}


def agreed(comm: Comm, problem: str) -> str:
    """Return the errors from all ranks, so that all ranks stop."""
    found = [f"rank {rank}: {one}" for rank, one in enumerate(comm.gather_objects(problem, "verdict")) if one]
    return "; ".join(found) if comm.size > 1 else problem


# -- a case ----------------------------------------------------------------------------------------------------------


def run_case(case: Case, comm: Comm | None = None) -> Outcome:
    """Run an engine case. Return the outcome."""
    comm, outcome = comm or Comm(), Outcome()
    with tempfile.TemporaryDirectory(prefix="offload-fuzz-") as name:
        folder = Path(comm.gather_objects(name, "folder of a case")[0])
        try:
            with (
                leaving_nothing(folder / "nvme"),
                mock.patch.object(compiled, "BACKEND", _BACKEND),
                mock.patch.object(offloaded_graph, "SMALLEST_BYTES", 1),
                mock.patch.object(products, "LEAST_SIZE", LEAST_SIZE),
                registered(CASES[case.settings["stage"]]) if "stage" in case.settings else nullcontext(),
            ):
                _run(case, comm, folder, outcome)
                comm.barrier("end of the engines")  # all ranks share a folder
        except Refused as refused:
            outcome.refused = str(refused)
        except Wrong as wrong:
            outcome.wrong = str(wrong)
        try:
            comm.barrier("end of a case")  # before rank 0 deletes the folder
        except RankLostError:
            outcome.is_sound = False
            if not outcome.wrong and not outcome.refused:  # an error on this rank says more
                raise
    return outcome


def _run(case: Case, comm: Comm, folder: Path, outcome: Outcome) -> None:
    ops = [op for op in case.ops if op]
    seen = record(case, comm, folder / "twin", ops)
    check_refusals(case, comm, folder / "calm", ops, seen)
    outcome.notes.update(op["do"] for op in ops[: len(seen)])
    if not seen:  # the first operation had non-finite gradients
        return
    if case.plain and case.forwards is not None:
        problem = forwards.compare(case, ops, seen, _last["blocks"], outcome.notes) if comm.rank == 0 else ""
        problem = agreed(comm, problem)
        if problem:
            raise Wrong(problem)
    elif case.plain:
        compare_plain(case, ops, seen, outcome)
    if case.one:
        compare_one(case, comm, folder / "one", ops, seen)
    budgets: dict[str, int] = {}
    layout = case.layouts[0]
    if "device_extra" in layout or "host_extra" in layout:
        budgets = find_budgets(case, comm, folder / "probe", ops[: len(seen)], layout)
    player = make(case, comm, folder, layout, budgets)
    with closing(player):
        for number, (op, wanted) in enumerate(zip(ops, seen, strict=False)):
            where = f"op {number} ({op['do']})"
            if op["do"] == "fail":
                fail(player, op, seen[number - 1], wanted, where, outcome)
            else:
                follow(player, op, wanted, where, bool(budgets), outcome)
        player.settle()
        finish(player, seen, case, comm)


@contextmanager
def closing(player: Player) -> Iterator[None]:
    """Close the engine at the end.

    A verdict shared by all ranks is no engine error, and closes the engine normally.
    """
    verdict = None
    try:
        yield
    except (Wrong, Refused) as found:
        verdict = found
    except BaseException:
        player.close()
        raise
    player.close()
    if verdict is not None:
        raise verdict


def make(case: Case, comm: Comm, folder: Path, layout: Mapping[str, Any], budgets: Mapping[str, int]) -> Player:
    try:
        return Player(case, comm, folder, layout, budgets)
    except (ConfigError, DoesNotFitError) as error:
        if isinstance(error, ConfigError) and layout != twin_layout(case):
            raise Wrong(f"refused, where the twin was made: {error}") from error
        raise Refused(f"{type(error).__name__}: {error}") from error


_last: dict[str, Any] = {}


def record(case: Case, comm: Comm, folder: Path, ops: list[Op]) -> list[Seen]:
    """Run the operations on the resident twin without faults. Ends early at non-finite gradients."""
    player = make(case, comm, folder, twin_layout(case), {})
    seen: list[Seen] = []
    with closing(player):
        for op in ops:
            done = op["of"] if op["do"] == "fail" else op
            try:
                result = None if done["do"] in ("reopen", "world") else player.do(done)
            except Refused as refused:
                if str(refused).startswith("NonFinite"):
                    break
                result = refused
            looks = op.get("look") or done.get("look") or op.get("counted")
            seen.append(Seen(result, player.weights() if looks else None))
        if seen:
            seen[-1].weights = player.weights()
            _last.update(blocks=[unit.name for unit in parts_of(player.engine).units if unit.is_block])
            _last.update(states=all_states(player.engine), buffers=buffers(player.engine))
    return seen


def check_refusals(case: Case, comm: Comm, folder: Path, ops: list[Op], seen: list[Seen]) -> None:
    """A refusal by the twin for a habit must name the habit."""
    refused = [
        (number, one.result)
        for number, one in enumerate(seen)
        if isinstance(one.result, Refused) and not habits.is_named(str(one.result), case.habits)
    ]
    if not refused or not case.habits:
        return
    calm, last = case.leave_out(habits.HABITS), dict(_last)
    without = record(calm, comm, folder, [op for op in calm.ops if op])
    _last.update(last)
    for number, one in refused:
        if number >= len(without) or not isinstance(without[number].result, Refused):
            raise Wrong(f"op {number}: refused, and not by the name of {sorted(case.habits)}: {one}")


def buffers(engine: Engine) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in engine.model.named_buffers()}


def follow(player: Player, op: Op, wanted: Seen, where: str, is_tight: bool, outcome: Outcome) -> None:
    """Run an operation and compare the result with the twin."""
    try:
        result = do_counted(player, op)
    except Refused as refused:
        if is_tight and str(refused).startswith("DoesNotFit"):
            outcome.notes["did not fit"] += 1
            raise
        if not isinstance(wanted.result, Refused) or _kind(wanted.result) != _kind(refused):
            if _kind(refused) == "ConfigError" and habits.is_named(str(refused), player.case.habits):
                raise
            raise Wrong(f"{where}: refused, and the twin gave {wanted.result}: {refused}") from refused
        outcome.notes["refused ops"] += 1
        result = wanted.result
    if isinstance(wanted.result, Refused) and not isinstance(result, Refused) and player.case.habits:
        raise wanted.result  # the refusal has a checked name
    problem = "" if same_result(result, wanted.result) else f"gave {result}, the twin {wanted.result}"
    if not problem and wanted.weights is not None:
        problem = same(player.weights(), wanted.weights)
    problem = agreed(player.comm, problem)
    if problem:
        raise Wrong(f"{where}: {problem}")
    check_ledgers(player.engine, after_step=op["do"] == "step" and not isinstance(result, Refused))


def do_counted(player: Player, op: Op) -> Any:
    """Run an operation, and count fault places if the next operation has a fault.

    A fault on a prefetching lane surfaces in the first dependent operation and fails only this attempt.
    """
    try:
        if player.faults is None or not op.get("counted"):
            return player.do(op)
        with player.faults.counting():
            return player.do(op)
    except Told:
        if not player.owes_fault:
            raise
        player.owes_fault = False
        return do_counted(player, op)


def _kind(refused: Refused) -> str:
    return str(refused).partition(":")[0]


def same_result(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Refused):
        return isinstance(found, Refused) and _kind(found) == _kind(wanted)
    return bool(found == wanted) or player_gives_nothing(wanted)


def player_gives_nothing(wanted: Any) -> bool:
    return wanted is None


def finish(player: Player, seen: list[Seen], case: Case, comm: Comm) -> None:
    """Compare all weights, moments, step counts and buffers at the end, and the weights restored to the model."""
    if not seen or seen[-1].weights is None:
        return
    problem = same(player.weights(), seen[-1].weights)
    if not problem and comm.size == 1:
        found = all_states(player.engine)
        different = [key for key, value in _last["states"].items() if not same_value(found.get(key), value)]
        problem = f"{len(different)} states differ, first {different[:2]}" if different else ""
    problem = agreed(comm, problem or same(buffers(player.engine), _last["buffers"]))
    if problem:
        raise Wrong(f"at the end: {problem}")
    if case.restore:
        player.engine.close(restore=True)
        with without_companions(player.engine.model):
            found = {name: value.detach() for name, value in player.engine.model.named_parameters()}
        wanted = {name: value.to(found[name].dtype) for name, value in seen[-1].weights.items()}
        problem = agreed(comm, same(found, wanted))
        if problem:
            raise Wrong(f"restored weights: {problem}")


def same_value(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return isinstance(found, Tensor) and not same({"": found}, {"": wanted})
    return bool(found == wanted)


# -- faults ----------------------------------------------------------------------------------------------------------


def fail(player: Player, op: Op, before: Seen, after: Seen, where: str, outcome: Outcome) -> None:
    """Run an operation with a fault inside.

    Then the engine has the weights from before or after the operation, or is torn and becomes sound through a
    checkpoint load. Finally the operation is repeated if necessary, and must give the twin's result.
    """
    faults, of = player.faults, op["of"]
    assert faults is not None
    assert before.weights is not None
    place = op["lane"] if op["where"] == "lane" else op["where"]
    sound = player.folder / "checkpoints" / f"sound-{op['seed']}"
    random = torch.get_rng_state()
    player.engine.save_checkpoint(sound)
    where, num_steps = f"{where}, {of['do']} with a fault in {place}", player.engine.num_steps
    try:
        with faults.armed(place, op["share"]):
            player.do(of)
    except (Told, KeyboardInterrupt, TornError):
        pass
    except Refused as refused:
        if not isinstance(after.result, Refused):
            raise Wrong(f"{where}: refused: {refused}") from refused
    except Exception as error:
        raise Wrong(f"{where}: {type(error).__name__}: {error}\n{_trace(error)}") from error
    player.owes_fault |= op["where"] == "lane" and faults.has_raised
    outcome.notes[f"fault in {op['where']}{'' if faults.has_raised else ', missed'}"] += 1
    try:
        recover(player, of, sound, num_steps, before, after, where, outcome)
    except (OffloadError, Refused, Wrong):
        raise
    except Exception as error:
        raise Wrong(f"{where}, afterwards: {type(error).__name__}: {error}\n{_trace(error)}") from error
    torch.set_rng_state(random)


def recover(
    player: Player, of: Op, sound: Path, num_steps: int, before: Seen, after: Seen, where: str, outcome: Outcome
) -> None:
    assert before.weights is not None
    assert after.weights is not None
    try:
        now = read_after_fault(player)
    except TornError:
        player.engine.load_checkpoint(sound)
        now, state = player.weights(), "torn"
        problem = same(now, before.weights)
        if problem:
            raise Wrong(f"{where}: torn, and after load_checkpoint {problem}") from None
    else:
        is_made = player.engine.num_steps != num_steps  # a step can leave all weights unchanged
        is_before, is_after = (not same(now, seen.weights or {}) for seen in (before, after))
        state = "before" if is_before and not (is_made and is_after) else "after" if is_after else "neither"
    outcome.notes[f"{state} a fault"] += 1
    # Like in plain PyTorch, a forward pass in a custom loop has moved buffers.
    if state == "before" and of["do"] == "own" and models.moves(player.case.model):
        player.engine.load_checkpoint(sound)
    if state == "neither":
        raise Wrong(f"{where}: neither as before ({same(now, before.weights)}) nor as after")
    if state in ("before", "torn"):
        try:
            result = do_counted(player, of)
        except Refused as refused:
            result = refused
        if not same_result(result, after.result):
            raise Wrong(f"{where}: done again after it ({state}) it gave {result}, the twin {after.result}")
    problem = same(player.weights(), after.weights)
    if problem:
        raise Wrong(f"{where}: done again after it ({state}): {problem}")
    check_ledgers(player.engine, after_step=of["do"] == "step")


def read_after_fault(player: Player) -> dict[str, Tensor]:
    """Return the weights. A fault behind a step can surface here and leaves the engine torn."""
    try:
        return player.weights()
    except Told:
        return player.weights()


def _trace(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)[-12:])


# -- budgets ---------------------------------------------------------------------------------------------------------


def find_budgets(case: Case, comm: Comm, folder: Path, ops: list[Op], layout: Mapping[str, Any]) -> dict[str, int]:
    """Return budgets slightly above the minimum for these operations."""
    calm = dict(layout)
    if calm.get("recompute") == "auto":
        calm["recompute"] = "always"
    player = make(case, comm, folder, calm, {})
    player.may_copy = False
    try:
        for op in ops:
            if op["do"] in ("reopen", "world", "replay", "export"):
                continue
            of = op["of"] if op["do"] == "fail" else op
            with suppress(Refused):
                player.do(of)
            # the operation can run again after a load, with a new recording pass and other saved graphs
            if op["do"] == "fail":
                player.engine.save_checkpoint(folder / "probe")
                player.engine.load_checkpoint(folder / "probe")
                with suppress(Refused):
                    player.do(of)
        memory = memory_of(player.engine)
        peaks = comm.gather_objects((memory.device.ledger.peak_bytes, memory.host.peak_bytes), "peaks")
    finally:
        player.engine.close()
    device, host = map(max, zip(*peaks, strict=True))
    budgets = {}
    if "device_extra" in layout:
        budgets["device_memory"] = device + layout["device_extra"]
    if "host_extra" in layout:
        budgets["host_memory"] = comm.local_size * (host + layout["host_extra"])
    return budgets


# -- plain PyTorch, and one rank -------------------------------------------------------------------------------------


def compare_plain(case: Case, ops: list[Op], seen: list[Seen], outcome: Outcome) -> None:
    """Train plain PyTorch on the same steps, up to the first unknown operation.

    Compare loss, norm and weights, bit for bit if the summation order is equal.
    """
    spec, settings = case.model, case.settings
    rows, rule = settings.get("micro_batch_size"), settings.get("optimizer")
    is_exact = not rows and settings.get("clip") != "speculative" and not _REORDERS & settings.keys()
    is_wide = settings.get("precision") != "bf16"
    if (
        spec.get("half")
        or (not is_wide and (not is_exact or models.moves(spec)))
        or ((rows or "passes" in settings) and (models.is_random(spec) or models.moves(spec)))
    ):
        return
    reference = Reference(
        models.build(spec),
        RULES[rule] if rule else None,
        precision=settings.get("precision", "fp32"),
        max_grad_norm=settings.get("max_grad_norm", 1.0),
        seed=settings.get("seed", 0),
        micro_batch_size=None if models.mixes_rows(spec) else rows,  # their batches stay whole
        group=partial(_group, settings.get("matmul")),
    )
    outside, rate = habits.Outside(models.width_of(spec)), reference.rule.lr
    trained = {name: uses for name, uses in reference.named.items() if uses[0].requires_grad}
    for number, (op, wanted) in enumerate(zip(ops, seen, strict=False)):
        habits.freeze(trained, op.get("freeze"))
        if isinstance(wanted.result, Refused) or op["do"] in ("read", "evaluate"):
            continue
        if op["do"] == "lr":
            reference.rule = replace(reference.rule, lr=rate * op["factor"])
            continue
        if (op["do"] not in ("step", "own") or op.get("lost_forward")) and models.moves(spec):
            return
        if op["do"] not in ("step", "own"):
            continue
        torch.manual_seed(op["seed"])
        given = models.batch(spec, {**op["batch"], "ignored": op["do"] == "step" and op["batch"].get("ignored")})
        given = outside.given(op, given)
        if op["do"] == "step":
            own = not op.get("loss_fn")
            count = count_shifted if own and models.shifts(spec) else count_labels
            if not count(given):
                return
            loss, norm = step(reference, given, op, count, outside)
        else:
            losses = []
            for again in range(op.get("passes", 1)):
                torch.manual_seed(op["seed"] + again)
                losses.append(called(case, reference.model, outside, op, given))
                habits.freeze(trained, op.get("midway"))
                losses[-1].backward()
                reference.collect()
            loss, norm = torch.stack([one.detach().float() for one in losses]).mean(), reference.update()
            # A shared parameter sums over its places first, and then over the passes.
            is_shared = models.shares(reference.model) or any(len(uses) > 1 for uses in reference.named.values())
            is_exact = is_exact and not (spec["make"] == "mixtral" or is_shared)
            if not is_exact and not is_wide:
                return
        _judge_plain((loss.item(), norm, *outside.learn(op)), wanted, reference, is_exact, f"op {number}")
        outcome.notes["plain, to the bit" if is_exact else "plain"] += 1


def _group(matmul: str | None, model: nn.Module) -> None:
    """Make plain PyTorch sum gradients and multiply as the engine does."""
    sum_by_layer(model)
    if matmul is not None:
        multiply_in_fp8(matmul, model)


def _judge_plain(plain: tuple[float, ...], seen: Seen, reference: Reference, is_exact: bool, where: str) -> None:
    problem = ""
    names = ("loss", "norm", "gradient outside")
    for name, one, other in zip(names, (*seen.result[:2], seen.result[-1]), plain, strict=False):
        if one == models.bits(other):
            continue
        if is_exact:
            problem = f"{name} is {one!r}, and plain PyTorch gives {other!r}"
        elif isinstance(one, str) or abs(one - other) > 2e-4 * max(1e-3, abs(other)):
            problem = problem or f"{name} is {one}, and plain PyTorch gives {other}"
    if not problem and seen.weights is not None:
        if is_exact:
            problem = same(seen.weights, reference.masters)
        elif getattr(reference.rule, "eps", 0) == 1.0 and not reference.split:  # from RULES["smooth"]
            problem = near(seen.weights, reference.masters, 1e-5 if reference.rows else 3e-6)
    if problem:
        raise Wrong(f"{where}, plain PyTorch: {problem}")


def step(
    reference: Reference, given: dict[str, Any], op: Op, count: Any, outside: habits.Outside
) -> tuple[Tensor, float]:
    """Take a reference step on a model with a loss, for any output type."""
    total = torch.zeros(())
    num_rows = len(given["labels"])
    rows = reference.rows or num_rows
    for start in range(0, num_rows, rows):
        cut = [key for key, value in given.items() if isinstance(value, Tensor) and len(value) == num_rows]
        part = given | {key: given[key][start : start + rows] for key in cut}
        if count(part):
            loss = outside.scaled(op, models.loss_of(reference.model, part, not op.get("loss_fn")))
            loss = loss * (count(part) / count(given))
            loss.backward()
            total += loss.detach().float()
            reference.collect()
    return total, reference.update()


def compare_one(case: Case, comm: Comm, folder: Path, ops: list[Op], seen: list[Seen]) -> None:
    """Repeat the run on one rank with the rows of all ranks."""
    problem = ""
    if comm.rank == 0:
        alone = copy.deepcopy(case)
        for op in alone.ops:
            if "batch" in op:
                op["all"] = True
        problem = _compare_one(alone, comm.size, folder, [op for op in alone.ops if op], seen)
    problem = agreed(comm, problem)
    if problem:
        raise Wrong(f"one rank: {problem}")


def _compare_one(case: Case, world: int, folder: Path, ops: list[Op], seen: list[Seen]) -> str:
    alone = _alone(case, world, folder, ops, seen)
    problem = _apart(alone, [seen[one.number] for one in alone])
    if problem:
        # In a tiny model the summation order can matter much: run again with the ranks' rows in reverse order.
        again = _alone(case, world, folder, ops, seen, order=-1)
        distances = [
            abs(one - two) / _bound(one)
            for first, second in zip(alone, again, strict=False)
            for one, two in zip(first.result, second.result, strict=True)
        ]
        problem = _apart(alone, [seen[one.number] for one in alone], slack=4.0 * max(distances, default=0.0))
    return problem


@dataclass
class Alone(Seen):
    """Result of operation `number` on one rank: loss, and for a step the norm."""

    number: int = 0


def _alone(case: Case, world: int, folder: Path, ops: list[Op], seen: list[Seen], order: int = 1) -> list[Alone]:
    settings = {key: value for key, value in case.settings.items() if key not in {"micro_batch_size", *_REORDERS}}
    engine, results = open_engine(models.build(case.model), settings, twin_layout(case), folder, Comm(), {}), []
    try:
        for number, (op, wanted) in enumerate(zip(ops, seen, strict=False)):
            if op["do"] not in ("step", "evaluate") or isinstance(wanted.result, Refused):
                continue
            drawn = op["batch"] if op["do"] == "step" else {**op["batch"], "ignored": False}
            shares = [models.batch(case.model, drawn, rank) for rank in range(world)][::order]
            whole = {key: torch.cat([share[key] for share in shares]) for key in shares[0]}
            loss_fn = models.loss_fn(engine.model, op)
            if op["do"] == "evaluate":
                found = [engine.evaluate(whole, loss_fn=loss_fn).item()]
            else:
                result = engine.step(whole, loss_fn=loss_fn)
                found = [result.loss.item(), result.grad_norm]
            weights = None if wanted.weights is None else dict(engine.named_parameters())
            results.append(Alone(found, weights, number))
    except NonFiniteError:
        pass
    finally:
        engine.close()
    return results


def _bound(value: float) -> float:
    return 2e-6 * max(1.0, abs(value))


def _apart(alone: list[Alone], ranks: list[Seen], slack: float = 1.0) -> str:
    """Return the first difference between one rank and several above the effect of the summation order."""
    for one, several in zip(alone, ranks, strict=True):
        its = list(several.result[: len(one.result)]) if len(one.result) > 1 else [several.result]
        if not all(abs(x - y) <= slack * _bound(x) for x, y in zip(one.result, its, strict=True)):
            return f"op {one.number}: {one.result}, and several ranks {its}"
        if one.weights is not None and (apart := near(one.weights, several.weights or {}, slack * 5e-6)):
            return f"op {one.number}: {apart}"
    return ""
