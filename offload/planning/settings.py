"""What an engine is told, checked in one place."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from offload.accelerators import parse_device
from offload.config.arguments import check_types
from offload.config.sections import parse_chunks
from offload.errors import ConfigError, shorten
from offload.lanes.throttle import Throttle, parse_throttle
from offload.layout.codecs import CODECS, EXACT, GRADIENT_CODECS, INT8
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule
from offload.tiers.placement import Placement

LEAST_CHUNK_BYTES = 256 << 20
"""Of logits in fp32 at once, where nobody says."""
_CHUNK_SHARE = 30
"""The part of the device's budget that they take. With what the loss and the gradients hold beside them it is a tenth:
larger chunks crowd out graphs that are kept, and smaller ones add up the head's gradient so often that it shows.
"""
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Settings:
    """What an engine is told; each field is a keyword of `Engine` as well. Raises ConfigError, which names the key that
    the field has in a configuration.

    optimizer: the update rule.
    placement: which states live on which tier, and the budgets.
    precision: in what the device computes: fp32, or bf16, with fp32 masters unless the optimizer says otherwise.
    max_grad_norm: the norm to which gradients are clipped; None or 0 for no clipping. A rule that has a `clip_norm`
        goes by that instead; one without gradients has nothing to clip.
    clip: when clipped updates are made: deferred (once the norm is known), speculative (and corrected), or auto, for
        which see `Engine.resolve_clip`.
    on_nonfinite: what becomes of a step whose gradients are not finite: stop (an error), or skip.
    micro_batch_size: rows that a unit computes at a time; None for all of a batch.
    rows: what of a batch has its rows, where it is not all whose first axis has their number. A list of names: these
        have them along the first axis, and nothing else has any. A mapping says it of single names: the axis; None for
        what belongs to every row; the name of a tensor [rows, ...] whose product over all other axes is the number of
        entries of each row, as in {"pixel_values": "image_grid_thw"}; or a function (batch, numbers) that returns the
        rows of these numbers, int64.
    recompute: whether a unit's forward is computed again in its backward: always, never, or auto (where memory is
        short).
    compile: whether blocks run as torch.compile makes them, one compilation for all equal ones: never, or auto, which
        leaves those as they are that cannot be compiled, or give something else.
    sequence_tile: how many tokens of a sequence those modules of a block compute at a time that are functions of single
        tokens, as MLPs and norms are, which is tried out: each tile is recomputed in the backward (arXiv:2506.13996).
        none: all at once; auto: tiles where a block would not fit the device's budget otherwise.
    sequence_parallel: how many neighbouring ranks share the same rows, each with a part of their tokens; attention has
        all tokens of some heads on each (DeepSpeed-Ulysses, arXiv:2309.14509). All of them give the same batch. With it
        auto of recompute is always, so that all exchange alike.
    prefetch: how many units are fetched before they are needed; auto: as far as the memory reaches.
    zero_stage: what ranks share out, 0 to 3 (arXiv:1910.02054).
    replicas: how many copies of the model the ranks hold, each shared out over as many of them as zero_stage says, with
        gradients summed between them; auto: one on each machine where there are several, else one.
    replica_states: whole: each replica has all states of the optimizer; shared: one rank of all replicas has a state,
        updates its weights and gives them to the others (hpZ in ZeRO++, arXiv:2306.10209, section 3.2). In stage 3.
    throttle: links that are played slower than they are, by name.
    seed: of what a step draws in micro-batches.
    debug: poison memory that is given back; a number also lets lanes wait at random, by that seed.
    head_chunk_bytes: logits that may exist at once, in fp32; None for all; auto for a thirtieth of the device's budget,
        and at least 256 MiB.
    delay: by how many steps updates come late, 0 or 1: the update of a step is made beside all of the next one, which
        computes with the weights from before (ZeRO-Offload, arXiv:2101.06840, section 5.2).
    delay_after: the steps before that, whose updates come in time.
    update: where states that rest on the host are updated: cpu; device, to which they stream beside compute; both: on
        the device those of regions whose other states rest there, as many as it has room for, and the others on the
        host; or auto, whichever is measured to be fastest.
    noise_scale: measure in each step how the gradients of micro-batches and ranks scatter (`StepResult.noise`).
    frozen_weights: how the matrices of frozen blocks rest and travel: exact; int8, a byte each with a scale for 128; or
        nf4, half a byte each as in QLoRA (arXiv:2305.14314). They are decoded on the device, and training is exact over
        the decoded weights. Embeddings, and what is outside of the blocks or has fewer than 4,096 elements or less than
        two dimensions, stay as they are.
    link_weights: how trained weights travel to where they are used, and between ranks: exact; or int8, a byte each with
        an fp32 scale for 128, which the update makes of the master weights (ZeRO++, arXiv:2306.10209, section 3.2).
        Training is then over what these stand for, and so is evaluation; gradients go to the master weights as they
        are, which alone are in checkpoints and exports. What has less than two dimensions, or fewer than 4,096
        elements, travels exactly.
    link_gradients: how gradients travel between replicas: exact; or int8, or int4, a byte or half of one each with an
        fp32 scale for 128. What the codes lack of a step's gradients is kept, in bf16, and added to the next step's
        (ZeRO++, section 3.4, with error feedback: arXiv:1901.09847). All replicas make the same update. One replica
        has none to send.
    device: what computes, as torch names it: cpu, cuda, cuda:1, ...; None for the accelerator that the thread has
        chosen, else that of LOCAL_RANK, else the first, and the CPU where there is none. It becomes the thread's.
    """

    optimizer: UpdateRule = field(default_factory=AdamW)
    placement: Placement = field(default_factory=Placement)
    precision: str = "fp32"
    max_grad_norm: float | None = 1.0
    clip: str = "auto"
    on_nonfinite: str = "stop"
    micro_batch_size: int | None = None
    rows: Sequence[str] | Mapping[str, Any] | None = None
    recompute: str = "always"
    compile: str = "never"
    sequence_tile: int | str = "none"
    sequence_parallel: int = 1
    prefetch: str | int = "auto"
    zero_stage: int = 3
    replicas: int | str = "auto"
    replica_states: str = "whole"
    throttle: Mapping[str, Any] | None = None
    seed: int = 0
    debug: bool | int = False
    head_chunk_bytes: float | str | None = "auto"
    delay: int = 0
    delay_after: int = 0
    update: str = "auto"
    noise_scale: bool = False
    frozen_weights: str = EXACT.name
    link_weights: str = EXACT.name
    link_gradients: str = EXACT.name
    device: str | None = None

    def __post_init__(self) -> None:
        _check_rule(self.optimizer)
        object.__setattr__(self, "placement", Placement.of(self.placement))
        check_types(Settings, vars(self))
        _check(self.precision, ("fp32", "bf16"), "train.precision")
        if self.precision == "fp32" and not self.optimizer.has_low:
            raise ConfigError(
                "optimizer.master is bf16, and train.precision is fp32, in which compute uses all bits of the weights: "
                "set --train.precision bf16, or leave --optimizer.master out."
            )
        _check(self.clip, ("auto", "deferred", "speculative"), "train.clip")
        lacking = [type(rule).__name__ for rule in self.optimizer.parts if not rule.can_correct]
        if self.clip == "speculative" and lacking:
            raise ConfigError(
                f"train.clip is speculative, which updates before the norm is known and corrects afterwards, and "
                f"{lacking[0]} has no correction: set --train.clip deferred or auto."
            )
        _check(self.on_nonfinite, ("stop", "skip"), "train.on_nonfinite")
        _check(self.recompute, ("always", "never", "auto"), "train.recompute")
        below = self.placement.graphs in ("cpu", "nvme")
        if self.recompute == "never" and below and self.placement.graphs_memory is not None:
            raise ConfigError(
                "offload.graphs_memory is set and train.recompute is never, with which all graphs wait below the "
                "device: set --train.recompute always or auto, or leave offload.graphs_memory out."
            )
        _check(self.compile, ("never", "auto"), "train.compile")
        check_tile(self.sequence_tile)
        if self.placement.experts == "streamed":
            if self.sequence_tile not in ("none", "auto"):
                raise ConfigError(
                    f"offload.experts is streamed and train.sequence_tile is {self.sequence_tile}: experts "
                    "would come up for each tile of a sequence. Set --train.sequence_tile none, or "
                    "--offload.experts whole."
                )
            # Blocks with such experts run by their own code.
            object.__setattr__(self, "sequence_tile", "none")
            object.__setattr__(self, "compile", "never")
        self._check_sequences()
        if self.prefetch != "auto" and (isinstance(self.prefetch, str) or self.prefetch < 0):
            raise ConfigError(f"offload.prefetch is {self.prefetch!r}; a number of units, at least 0, or auto.")
        _check(self.update, ("auto", "cpu", "device", "both"), "offload.update")
        _check(self.frozen_weights, tuple(CODECS), "offload.frozen_weights")
        if self.placement.parameters == "files" and self.frozen_weights != EXACT.name:
            raise ConfigError(
                f"offload.parameters is files and offload.frozen_weights is {self.frozen_weights}: what rests in the "
                "model's files is read as it is there. Set --offload.parameters cpu (or nvme), or "
                "--offload.frozen_weights exact."
            )
        _check(self.link_weights, (EXACT.name, INT8.name), "offload.link_weights")
        if self.link_weights != EXACT.name and (why := self._why_exact_links):
            raise ConfigError(f"offload.link_weights is {self.link_weights}, and {why} --offload.link_weights exact.")
        _check(self.link_gradients, tuple(GRADIENT_CODECS), "offload.link_gradients")
        _check_ranks(self)
        _check(self.delay, (0, 1), "train.delay")
        if self.delay_after < 0:
            raise ConfigError(f"train.delay_after is {self.delay_after!r}; a number of steps, at least 0.")
        if self.delay_after and not self.delay:
            raise ConfigError(
                f"train.delay_after is {self.delay_after}, and train.delay is 0, with which no update is late: set "
                "--train.delay 1, or leave it out."
            )
        if self.delay and (self.clip == "speculative" or self.placement.optimizer == "device"):
            wrong = "train.clip is speculative" if self.clip == "speculative" else "offload.optimizer is device"
            raise ConfigError(
                f"train.delay is 1 and {wrong}: delayed updates are made on the host, once the norm is known. Set "
                f"--train.delay 0, or --train.clip deferred and --offload.optimizer cpu."
            )
        if self.delay and self.optimizer.drops_gradients:
            raise ConfigError(
                f"train.delay is 1, and the gradients of {type(self.optimizer).__name__} do not wait for a later step: "
                "set --train.delay 0, or another --optimizer.name."
            )
        if self.delay and not self.optimizer.has_gradients:
            raise ConfigError(
                f"train.delay is 1, and {type(self.optimizer).__name__} has no backward pass beside which an update "
                "could run late: set --train.delay 0."
            )
        if self.update in ("device", "both") and self.host_bound:
            raise ConfigError(
                f"offload.update is {self.update}, and {self.host_bound}: set --offload.update cpu or auto."
            )
        if self.update == "both" and self.placement.optimizer in ("cpu", "nvme"):
            raise ConfigError(
                f"offload.update is both, and offload.optimizer is {self.placement.optimizer}, with which no states "
                "rest on the device to be updated there: set --offload.optimizer auto, or --offload.update cpu or auto."
            )
        size, norm = self.micro_batch_size, self.max_grad_norm
        if size is not None and size < 1:
            raise ConfigError(f"train.micro_batch_size is {size!r}; it must be a whole number, at least 1.")
        check_max_grad_norm(norm)
        clips_to = (self.optimizer.clip_norm or norm or None) if self.optimizer.has_gradients else None
        object.__setattr__(self, "max_grad_norm", clips_to)
        parse_device(self.device)
        parse_throttle(self.throttle)
        self.chunk_bytes(None)

    def _check_sequences(self) -> None:
        """Raise ConfigError where ranks cannot share sequences."""
        size = self.sequence_parallel
        if size < 1:
            raise ConfigError(f"train.sequence_parallel is {size!r}; a number of ranks, at least 1.")
        if size == 1:
            return
        graphs, name = self.placement.graphs, type(self.optimizer).__name__
        for is_wrong, what, why, fix in (
            (
                not self.optimizer.has_gradients,
                f"optimizer.name is {name}",
                "whose passes go by turns, in no order that ranks share",
                "another --optimizer.name",
            ),
            (
                self.compile != "never",
                f"train.compile is {self.compile}",
                "which would compile the exchange of attention",
                "--train.compile never",
            ),
            (
                self.noise_scale,
                "train.noise_scale is true",
                "which takes what ranks have for samples of their own",
                "--train.noise_scale false",
            ),
            (
                graphs in ("cpu", "nvme") and self.recompute != "never",
                f"offload.graphs is {graphs}",
                "of which each rank keeps as many as it has room for, and would make other exchanges than the others",
                "--train.recompute never, or --offload.graphs device",
            ),
        ):
            if is_wrong:
                raise ConfigError(
                    f"train.sequence_parallel is {size}, and {what}, {why}: set {fix}, or --train.sequence_parallel 1."
                )
        if self.recompute == "auto":
            object.__setattr__(self, "recompute", "always")

    @property
    def _why_exact_links(self) -> str:
        """Say what asks for weights that travel as they are, and what to set; empty where nothing does."""
        if self.delay:
            return (
                "train.delay is 1, which keeps the weights from before an update as they are: set --train.delay 0, or"
            )
        if not self.optimizer.has_gradients:
            return f"{type(self.optimizer).__name__} updates weights where they come up, in all their bits: set"
        return ""

    @property
    def resolved_clip(self) -> str:
        """When clipped updates are made, as far as that follows from the settings: deferred where there is nothing to
        correct, or no way to.
        """
        corrects = all(rule.can_correct for rule in self.optimizer.parts) and self.max_grad_norm and not self.skips
        return self.clip if corrects and not self.delay else "deferred"

    @property
    def host_bound(self) -> str:
        """Why states that rest on the host are updated there, whatever `update` says; empty where they need not be."""
        if self.delay:
            return "train.delay is 1, which keeps the weights from before an update on the host"
        whole = next((type(rule).__name__ for rule in self.optimizer.parts if rule.by_matrix), "")
        return f"{whole} updates parameters as a whole, which cannot stream in pieces" if whole else ""

    @property
    def throttles(self) -> Mapping[str, Throttle]:
        """The throttles by the names of their links."""
        return parse_throttle(self.throttle)

    def chunk_bytes(self, device_bytes: int | None) -> int | None:
        """Return the bytes of logits that may exist at once on a device that may hold so many (None: without end); None
        for all.
        """
        found = parse_chunks(self.head_chunk_bytes, "train.head_chunk_bytes")
        return max(LEAST_CHUNK_BYTES, (device_bytes or 0) // _CHUNK_SHARE) if isinstance(found, str) else found

    @property
    def skips(self) -> bool:
        """True where a step is skipped for a gradient that is not finite."""
        return self.on_nonfinite == "skip"

    @property
    def splits(self) -> bool:
        """True where a step may have several micro-batches."""
        return self.micro_batch_size is not None

    @property
    def keeps_gradients(self) -> bool:
        """True where gradients wait on the host: for the norm, for the certainty that they are finite, for a
        correction, or as updates are late.
        """
        waits = self.optimizer.has_gradients and not self.optimizer.drops_gradients
        return self.judges_gradients and waits

    @property
    def judges_gradients(self) -> bool:
        """True where the gradients as a whole say how, or whether, or when units are updated."""
        return self.max_grad_norm is not None or self.skips or self.delay > 0

    @property
    def delay_seed(self) -> int | None:
        """The seed by which lanes wait at random; None where they do not."""
        return None if self.debug is False else int(self.debug)


def _check_rule(given: Any) -> None:
    if isinstance(given, UpdateRule):
        return
    is_torch = isinstance(given, torch.optim.Optimizer)
    shown = f"a torch.optim.{type(given).__name__}" if is_torch else shorten(repr(given))
    raise ConfigError(
        f"the optimizer is {shown}; it must be an update rule, such as offload.AdamW(lr=1e-4), and its learning rate "
        "is engine.lr. (Settings as a whole are given by name: settings=...)"
    )


def check_max_grad_norm(norm: float | None) -> None:
    """Raise ConfigError unless gradients can be clipped to this, or not at all."""
    if norm is not None and not (isinstance(norm, int | float) and 0 <= norm < math.inf):
        raise ConfigError(f"train.max_grad_norm is {norm!r}; a positive number, or none for no clipping.")


def check_tile(tile: int | str) -> None:
    """Raise ConfigError unless sequences can be cut in tiles of this."""
    if tile not in ("none", "auto") and (isinstance(tile, str) or tile < 1):
        raise ConfigError(
            f"train.sequence_tile is {tile!r}; it must be a number of tokens, at least 1, none for whole sequences, or "
            "auto."
        )


def with_settings(function: _Function) -> _Function:
    """Let a function that takes `**settings` show each of them to `help`, and what it means."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    known = {each.name for each in own}
    shown = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in dataclasses.fields(Settings)
        if each.name not in known
    ]
    fields_of = inspect.getdoc(Settings) or ""
    function.__doc__ = f"{inspect.getdoc(function) or ''}\n\n{fields_of.split(chr(10) * 2)[1]}".strip()
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return function


def _check_ranks(settings: Settings) -> None:
    """Raise ConfigError for a wrong value of what ranks share out."""
    _check(settings.zero_stage, (0, 1, 2, 3), "offload.zero_stage")
    if settings.replicas != "auto" and (isinstance(settings.replicas, str) or settings.replicas < 1):
        raise ConfigError(f"offload.replicas is {settings.replicas!r}; a number of copies, at least 1, or auto.")
    _check(settings.replica_states, ("whole", "shared"), "offload.replica_states")
    if settings.replica_states == "shared" and (settings.zero_stage < 3 or not settings.optimizer.has_gradients):
        wrong = f"offload.zero_stage is {settings.zero_stage}, with which each rank holds all weights"
        fix = "--offload.zero_stage 3, or --offload.replicas 1, whose states all ranks share out, and"
        if settings.zero_stage == 3:
            wrong, fix = f"{type(settings.optimizer).__name__} has no gradients and no states", "another rule, or"
        raise ConfigError(f"offload.replica_states is shared, and {wrong}: set {fix} --offload.replica_states whole.")


def _check(value: object, allowed: tuple[object, ...], key: str) -> None:
    if value not in allowed:
        names = ", ".join(str(item) for item in allowed)
        raise ConfigError(f"{key} is {value!r}; this version allows {names}.")
