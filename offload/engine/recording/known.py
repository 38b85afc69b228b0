"""Properties of recorded kinds of passes: results of trials, recorded integers, modes, and finished checks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache, partial
from types import CodeType
from typing import Any

from offload.distributed.comm import digest
from offload.engine.entries import ModelCall
from offload.engine.flow import Flow
from offload.engine.loss.batch import Batch, BatchForm, Rows, batch_pattern, check_batch
from offload.engine.loss.batch_agreement import PassInputs
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.loss.loss import LossFunction, LossRule, has_even_targets

MOST_CHOICES = 4
"""Recorded values per int argument. An int with more values is a count, not a choice between branches."""


@dataclass(frozen=True)
class TrialResult:
    """Trial run results for one batch pattern. The defaults are those before the first trial."""

    rule: LossRule = field(default_factory=LossRule)
    """How the model loss counts targets."""
    head: ChunkedHead | None = None
    """The head with logits in chunks. None: full logits."""
    obstacle: str = ""
    """Reason why the model cannot run on a few rows alone; "" if it can."""


@dataclass(frozen=True)
class KnownPass:
    """Knowledge about one batch before the pass."""

    kind: str
    """Key shared by batches with the same path through the model and the loss."""
    rows: int
    """Rows in the batch."""
    form: BatchForm
    """Row axes of the batch. The obstacle is known from a recording."""
    result: TrialResult | None
    """Results of the trials with this kind of batch. None: no recording yet."""
    is_new: bool
    """True if the batch needs a recording. A recorded kind needs another one for new int values, and for rows that now
    differ in a value that was equal in all recorded rows: the recording says nothing about row cuts.
    """


class KnownPasses:
    """Properties of the recorded kinds of passes.

    `rows`: configured row axes of the batch values, or None. `results`: trial results by kind of batch. `choices`:
    recorded int values by kind of batch or call. `constant_keys`: keys with equal values in all recorded rows, by kind
    of batch. `even`: kinds of batches recorded on rows with equal numbers of targets alone. `modes`: hash of training
    modes and frozen parameters at the last recording. `checks`: integers of the checked batches, by kind of pass and
    execution. `watched_calls`: kinds of calls already run without gradients. `claims`: kinds of batches and calls from
    another engine, not yet checked here; None: nothing is from another engine. All kinds are strings.
    """

    def __init__(self, flow: Flow, rows: Rows | None) -> None:
        self._flow = flow
        self.rows = rows
        self.results: dict[str, TrialResult] = {}
        self.choices: dict[str, dict[str, set[int]]] = {}
        self.constant_keys: dict[str, set[str]] = {}
        self.even: set[str] = set()
        self.checks: dict[str, set[str]] = {}
        self.watched_calls: set[str] = set()
        self.claims: set[str] | None = None
        self.modes = 0
        self._modes: tuple[list[bool], list[int]] = ([], [])  # training modes and frozen parameters behind `modes`
        self._hooks: list[tuple[int, str]] = []  # (number of the module, name), at the last recording or call
        self._modules = list(flow.model.modules())
        configs = {id(m.config): m.config for m in self._modules if hasattr(getattr(m, "config", None), "__dict__")}
        self.configs = list(configs.values())

    def look_up(self, batch: Batch, loss_fn: LossFunction | None) -> KnownPass:
        """Return the knowledge about a batch. Raises ConfigError for a bad batch."""
        rows = check_batch(batch)
        kind = f"{batch_pattern(batch, rows)} {loss_key(loss_fn)} {self.flags()}"
        form = BatchForm.of(batch, self.rows)
        result, constant_keys = self.results.get(kind), self.constant_keys.get(kind, set())
        is_new = (
            result is None
            or self._is_new(kind, int_arguments((), batch))
            or constant_keys != form.constant_keys(batch, constant_keys)
            or (kind in self.even and not has_even_targets(batch))
        )
        if result is not None:
            form = replace(form, obstacle=result.obstacle)
        return KnownPass(kind, rows, form, result, is_new)

    def is_new_call(self, call: ModelCall) -> bool:
        """True if this call in the caller's own loop needs a recording: a new pattern, or a new value for an int.

        An int with few values may select a branch in the model. Ints with `MOST_CHOICES` recorded values are lengths
        and counts (`logits_to_keep`, `max_length_q`) and may be new in every call.
        """
        return self._is_new(self.signature_of_call(call), int_arguments(call.args, call.kwargs))

    def _is_new(self, signature: str, ints: Iterable[tuple[str, int]]) -> bool:
        seen_values = self.choices.get(signature)
        return seen_values is None or any(
            len(seen_values[key]) < MOST_CHOICES and value not in seen_values[key] for key, value in ints
        )

    def store_ints(self, signature: str, ints: Iterable[tuple[str, int]]) -> None:
        seen_values = self.choices.setdefault(signature, {})
        for key, value in ints:
            seen_values.setdefault(key, set()).add(value)

    def signature_of_call(self, call: ModelCall) -> str:
        """Return a key shared by calls with the same path through the model. An int counts as zero or nonzero."""
        _, name, args, kwargs = call
        arguments = [*enumerate(args), *kwargs.items()]
        plain = [(key, value) for key, value in arguments if isinstance(value, bool | str | None)]
        ints = [(key, type(value).__name__, bool(value)) for key, value in int_arguments(args, kwargs)]
        return f"{name and f'{name} '}{len(args)} {sorted(kwargs)} {sorted([*plain, *ints], key=repr)} {self.flags()}"

    def forget_other_modes(self) -> None:
        """Discard recordings from another training mode (dropout, moving statistics), for other frozen parameters, or
        with other forward hooks, which may keep tensors.
        """
        # One expression, because each step runs this for all modules. By name: a hook may be a new object each time.
        hooks = [
            (number, getattr(hook, "__qualname__", type(hook).__qualname__))
            for number, module in enumerate(self._modules)
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        ]
        before, self._hooks = self._hooks, hooks
        if before and hooks != before:
            self.checks.clear()  # the check has not seen the new hooks either
            self.results.clear()
            self.choices.clear()
        if self.update_modes():
            self.results.clear()
            self.choices.clear()

    def update_modes(self) -> bool:
        """Store the current modes. Return True if they changed."""
        modes = [module.training for module in self._modules], sorted(self._flow.snapshot.frozen)
        if modes == self._modes:  # first, because each step asks, and a hash takes longer
            return False
        before = self.modes
        self._modes = modes
        self.modes = digest(repr(modes).encode())
        return self.modes != before  # after `adopt` only the hash is known

    def flags(self) -> int:
        """Return a hash of the boolean options in the model configuration.

        Some options make tensors leave units by another path.
        """
        options = tuple(
            (key, value) for config in self.configs for key, value in vars(config).items() if isinstance(value, bool)
        )
        return digest(repr(options).encode())

    def kinds(self) -> dict[str, Any]:
        """Return all properties except the checks by name: JSON values, and sets."""
        results = {
            kind: [astuple(each.rule), each.head and [each.head.vocabulary, each.head.num_logits], each.obstacle]
            for kind, each in self.results.items()
        }
        names = ("choices", "constant_keys", "watched_calls", "modes")
        return {"results": results, **{name: getattr(self, name) for name in names}}

    def adopt(self, kinds: Mapping[str, Any]) -> None:
        """Take over the `kinds` of another engine, with lists in place of sets. Their first uses are checked."""
        model, splitting = self._flow.model, self._flow.splitting
        self.results = {
            kind: TrialResult(LossRule(*rule), head and ChunkedHead.of(model, head[0], head[1], splitting), obstacle)
            for kind, (rule, head, obstacle) in kinds["results"].items()
        }
        self.choices = {
            kind: {key: set(values) for key, values in choices.items()} for kind, choices in kinds["choices"].items()
        }
        self.constant_keys = {kind: set(keys) for kind, keys in kinds["constant_keys"].items()}
        self.modes = kinds["modes"]
        self._modes = ([], [])
        self.claims = {*self.choices}

    def forget(self) -> None:
        """Discard everything except the modes."""
        for each in (self.results, self.choices, self.constant_keys, self.even, self.checks, self.watched_calls):
            each.clear()
        self.claims = None

    def is_claim(self, call: ModelCall) -> bool:
        """True if the recording of this call in the caller's own loop is from another engine, and not yet checked."""
        return self.signature_of_call(call) in (self.claims or ())

    def has_checked(self, inputs: PassInputs, has_chunks: bool) -> bool:
        """Return whether such passes were checked with the current execution and this batch's integers.

        Also True after many different integers: they are then counts, and select no code path.
        """
        known = self.checks.get(self._check_key(inputs, has_chunks), set())
        return _ints(inputs) in known or len(known) >= MOST_CHOICES

    def add_check(self, inputs: PassInputs, has_chunks: bool) -> None:
        """Record a check of such passes with the current execution."""
        self.checks.setdefault(self._check_key(inputs, has_chunks), set()).add(_ints(inputs))

    def _check_key(self, inputs: PassInputs, has_chunks: bool) -> str:
        rank_batch = inputs.plan.ranks[0]
        names = tuple((name, shape if isinstance(shape, str) else len(shape)) for name, shape in rank_batch.shapes)
        modes, mode = sorted({each.modes for each in inputs.plan.ranks}), vars(self._flow.execution_mode).values()
        return repr((rank_batch.operation, names, rank_batch.has_loss_function, inputs.cuts, has_chunks, modes, *mode))


def _ints(inputs: PassInputs) -> str:
    return repr(sorted({rank_batch.ints for rank_batch in inputs.plan.ranks}))


def int_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the ints among the arguments, by position or name."""
    arguments = [*enumerate(args), *kwargs.items()]
    return [(str(key), value) for key, value in arguments if isinstance(value, int) and not isinstance(value, bool)]


def loss_key(loss_fn: Any) -> str:
    """Return a key for a loss function: the code and the boolean or string options.

    Function identity is no key, because a lambda in a loop is a new function every time.
    """
    if loss_fn is None:
        return ""
    if isinstance(loss_fn, partial):
        return f"{loss_key(loss_fn.func)} {_options([*loss_fn.args, *loss_fn.keywords.items()])}"
    closure: Mapping[str, Any] = {}
    if inspect.isfunction(loss_fn):
        closure = inspect.getclosurevars(loss_fn).nonlocals
    state = getattr(getattr(loss_fn, "__self__", loss_fn), "__dict__", {})
    function = loss_fn
    if not hasattr(loss_fn, "__code__"):
        function = getattr(type(loss_fn), "__call__", None)  # noqa: B004
    name = f"{type(loss_fn).__qualname__} {getattr(function, '__qualname__', '')}"
    code = getattr(function, "__code__", None)
    return f"{name} {code and code_hash(code)} {_options([*closure.items(), *state.items()])}"


@lru_cache(1024)
def code_hash(code: CodeType) -> int:
    """Return a hash of a function's code, equal in every process."""
    constants: list[Any] = []
    for value in code.co_consts:
        match value:
            case CodeType():
                constants.append(code_hash(value))
            case frozenset():  # another order in every process
                constants.append(sorted(map(repr, value)))
            case _:
                constants.append(repr(value))
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return digest(repr((names, code.co_code, constants)).encode())


def _options(values: Sequence[Any]) -> list[Any]:
    pairs = ((value, value[1] if isinstance(value, tuple) else value) for value in values)
    return [value for value, option in pairs if isinstance(option, bool | str | None)]
