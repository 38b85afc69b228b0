"""Measure the compute of a step on a `meta` model. Nothing is allocated, and identical blocks run only once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from offload.app.config.sections import DOCUMENTS
from offload.distributed.comm import Comm
from offload.engine.caches import Caches
from offload.engine.loss.batch import Batch, Chunk
from offload.engine.loss.chunked_head import ROUNDED_TO, ChunkedHead, HeadInputs
from offload.engine.loss.label_trials import find_base_model
from offload.engine.loss.loss import Loss, LossFunction, as_loss, run_loss, select_inputs
from offload.engine.prepare import EnginePlan
from offload.engine.units.arguments import deliver_result, receive_call
from offload.engine.units.attention import ATTENTIONS, attention_for
from offload.engine.units.find import UnitCandidate
from offload.engine.units.offloaded_tensor import make_placeholder
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.engine.units.stages import OriginalForward, stages_in_memory
from offload.engine.units.unit import put_parameters
from offload.extras.large.compiled_forwards import CompiledForwards
from offload.extras.large.row_block_head import RowBlockHead
from offload.extras.large.row_blocks import RowBlocks, blocks_of
from offload.extras.large.shared_rows import SharedRows, WholeRows
from offload.extras.large.tiles import Tiles
from offload.extras.plan.adapted_stacks import adapters_on_shapes
from offload.extras.plan.op_counter import OpCounter, UnknownValueError
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.unit_use import ROWS, FoundUses, TiledUses, UnitMeasurement, UnitMeasurements
from offload.extras.plan.workload import NO_COST, NO_WORK, UnitWork, Workload
from offload.fused_attention import Capability
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo
from offload.modules import forwards_replaced
from offload.tiers.counters import Counters

_FEW_TOKENS = 8
"""Row length in tokens for the tile search. In a seq2seq model the encoder reads half."""
_CHUNKED_LOSS = "ForCausalLMLoss"
"""transformers loss function with support for pre-shifted labels and an explicit token count."""


class CannotMeasureError(Exception):
    """The model does not run on shapes alone. The message has the reason."""


@dataclass(frozen=True)
class BatchSpec:
    """Batch shape for a step on one rank.

    model_kind: causal, masked, reward, embedding or seq2seq. A seq2seq encoder reads the first half of each row.
    rows, length: batch rows, and tokens per row on this rank.
    is_padded: rows end in padding, so attention needs a mask.
    is_isolated: positions restart in each document of a row, and attention needs a mask.
    document_length: tokens in each document, if documents are computed one by one, without a mask. 0: they are not.
    document_share: actual squares of document lengths, as a share of those with `document_length`.
    shared_by: sequence-parallel ranks per sequence.
    """

    model_kind: str
    rows: int
    length: int
    is_padded: bool = False
    is_isolated: bool = False
    shared_by: int = 1
    document_length: int = 0
    document_share: float = 1.0

    def make(self, rows: int) -> dict[str, torch.Tensor]:
        """Return a `meta` batch with `rows` rows.

        Call under an `OpCounter`, so that shape-determined values are known.
        """
        length = self.length // 2 if self.model_kind == "seq2seq" else self.length
        ones = functools.partial(torch.ones, rows, dtype=torch.long, device="meta")
        batch = {"input_ids": ones(length), "labels": ones(self.length - length or length)}
        if self.model_kind == "reward":
            batch["labels"] = torch.ones(rows, device="meta")
        if self.model_kind == "embedding":
            del batch["labels"]
        if self.is_padded:
            batch["attention_mask"] = ones(length)
            batch["attention_mask"][:, -1] = 0
        if self.document_length:
            batch["position_ids"] = (torch.arange(length, device="meta") % self.document_length).repeat(rows, 1)
        elif self.is_isolated or self.shared_by > 1:
            batch["position_ids"] = ones(length)
        return batch

    def shared_rows(self, batch: Mapping[str, torch.Tensor]) -> SharedRows | None:
        """Return this rank's view of sequence-parallel rows, from the local batch part.

        None: the rank has whole sequences.
        """
        if self.shared_by == 1:
            return None
        whole = replace(self, length=self.length * self.shared_by, shared_by=1).make(len(batch["labels"]))
        rows = WholeRows(len(whole["labels"][0]), whole["input_ids"], whole.get("attention_mask"))
        return SharedRows(rows, batch["labels"], {})


def measure(
    model: nn.Module,
    batch: BatchSpec,
    prepared: EnginePlan,
    found_tiles: dict[Hashable, Tiles] | None = None,
    found_uses: FoundUses | None = None,
    loss: Loss | None = None,
    capability: Capability | None = None,
) -> Workload:
    """Run one micro-batch forward and backward through a `meta` model and return the compute of a whole step.

    `found_tiles`: tile searches of earlier calls with this model and precision, and the place for new ones.
    `found_uses`: the same for uses of units, from calls that differ only in rows and chunks. `loss`: in
    place of the model's own. `capability`: as for `fused`. The model belongs to `prepared` and is restored afterwards.
    Raises CannotMeasureError.
    """
    uses: FoundUses = {} if found_uses is None else found_uses
    settings = prepared.settings
    micro_rows = min(batch.rows, settings.micro_batch_size or batch.rows)
    num_micro_batches = -(-batch.rows // micro_rows)
    caches, modes = Caches(model), [(module, module.training) for module in model.modules()]
    caches.turn(on=False)
    model.train()
    try:
        tiles = _find_tiles(model, batch, prepared, {} if found_tiles is None else found_tiles)
        workload = _run(model, batch, prepared, micro_rows, tiles, uses, loss, capability)
        if num_micro_batches > 1:  # a second run with one more row separates shared tensors
            more = _run(model, batch, prepared, micro_rows + 1, tiles, uses, loss, capability)
            workload = replace(
                workload, calls=tuple(_scale_to_rows(workload.calls, more.calls, micro_rows, batch.rows))
            )
    except UnknownValueError as error:
        raise CannotMeasureError(f"{type(model).__name__} reads {error}, but a forecast has only shapes") from error
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise CannotMeasureError(f"{type(model).__name__} on meta: {type(error).__name__}: {error}") from error
    finally:
        caches.turn(on=True)
        for module, mode in modes:
            module.training = mode
    return replace(
        workload, num_micro_batches=num_micro_batches, logits_bytes=workload.logits_bytes * num_micro_batches
    )


def _find_tiles(
    model: nn.Module, batch: BatchSpec, prepared: EnginePlan, found: dict[Hashable, Tiles]
) -> TiledUses | None:
    """Find the tileable modules in a run with few tokens. None: no tiling.

    Needs an explicit tile size. With "auto", the engine tiles only blocks too large for the device, and `place`
    forecasts tiling with a concrete size instead.
    """
    size = prepared.settings.sequence_tile
    if not isinstance(size, int) or batch.length <= size:
        return None
    tiles, few = TiledUses(size, found), replace(batch, length=_FEW_TOKENS, shared_by=1)
    _WorkloadProbe(prepared, tiles, {}).run(model, ROWS, None, few)
    tiles.find()
    return tiles


def _mean_state(outputs: Any, _batch: Batch) -> torch.Tensor:
    """Stand in for a loss over embeddings, which compares a few numbers of each row."""
    states: torch.Tensor = outputs["last_hidden_state"]
    return states.mean()


def _run(
    model: nn.Module,
    batch: BatchSpec,
    prepared: EnginePlan,
    rows: int,
    tiles: TiledUses | None,
    uses: FoundUses,
    loss: Loss | None,
    capability: Capability | None,
) -> Workload:
    """Return the workload for one micro-batch with `rows` rows."""
    probe = _WorkloadProbe(prepared, tiles, uses, loss, capability)
    with stages_in_memory(model, prepared.settings):
        num_chunks = probe.run(model, rows, prepared.chunk_bytes, batch)
    return Workload(
        probe.works(num_chunks),
        1,
        batch.rows * batch.length,
        num_chunks,
        probe.last_result_bytes,
        chunk_uses=len(probe.chunk),
        chunk_heads=max(1, sum(work.name is not None for work in probe.chunk)),
    )


def _scale_to_rows(calls: Sequence[UnitWork], more: Sequence[UnitWork], rows: int, all_rows: int) -> Iterator[UnitWork]:
    """Yield the calls with shared bytes, and scale uses run once per step to all rows.

    Both come from the difference between `calls` (`rows` rows) and `more` (one row more). Of a head in thousands of
    chunks, all chunks are one object, before and after.
    """
    scaled: dict[tuple[int, int], UnitWork] = {}
    for work, other in zip(calls, more, strict=True):
        key = id(work), id(other)
        if key not in scaled:
            scaled[key] = _scaled(work, other, rows, all_rows)
        yield scaled[key]


def _scaled(work: UnitWork, other: UnitWork, rows: int, all_rows: int) -> UnitWork:
    row_bytes = other.input_bytes - work.input_bytes
    scaled = replace(work, shared_bytes=max(0, work.input_bytes - rows * row_bytes))
    if work.is_cut:
        return scaled
    forward = work.forward.with_rows(all_rows - rows, other.forward)
    return replace(scaled, forward=forward, backward=work.backward.with_rows(all_rows - rows, other.backward))


@dataclass
class _UseRecord:
    """Measurement in progress for a unit use or a stretch."""

    work: UnitWork
    """Measurements so far."""
    kept_bytes: int = 0
    """Bytes kept for the backward by all uses up to and including this one, after the forward."""


class _WorkloadProbe:
    """Intercepts unit calls and counts compute between units."""

    def __init__(
        self,
        prepared: EnginePlan,
        tiles: TiledUses | None,
        uses: FoundUses,
        loss: Loss | None = None,
        capability: Capability | None = None,
    ) -> None:
        is_cpu = torch.device(prepared.settings.device or "cpu").type == "cpu"
        self.counter = OpCounter(fuses_dropout=not is_cpu, capability=capability)
        self.last_result_bytes = 0
        self._prepared = prepared
        self._loss = loss
        self._entries: list[_UseRecord] = []
        self.chunk: list[UnitWork] = []
        """Uses and stretches of one chunk of the head."""
        self._uses = UnitMeasurements(self.counter, tiles, prepared.settings, uses)
        self._kept: dict[int, int] = {}
        self._inputs: set[int] = set()
        self._movable: dict[int, _UseRecord] = {}  # storage -> first user, if no other unit shares the input
        self._start_cost, self._is_inside = NO_COST, False

    # -- the model -------------------------------------------------------------------------------------------

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Route unit calls to the probe and give parameters the compute dtypes, in this context."""
        infos, candidates = self._prepared.structure.infos, self._prepared.structure.candidates
        before = [(place, place.module._parameters[place.key]) for unit in candidates for place in unit.places]
        # One parameter has several shapes if cut into blocks.
        parameters: dict[tuple[int, torch.Size], nn.Parameter] = {}
        whole = [unit for unit in candidates if not (unit.resident or unit.records or unit.is_cut)]
        with forwards_replaced({unit.module: self._intercepted(unit) for unit in whole}):
            for unit in candidates:
                for place in unit.places:
                    info, parameter = infos[place.parameter], place.module._parameters[place.key]
                    assert parameter is not None
                    key, dtype = (info.index, parameter.shape), DTYPES[info.compute]
                    if key not in parameters and unit.is_cut:
                        parameters[key] = make_placeholder(
                            info, dtype, torch.device("meta"), _NoOwner(), unit.blocks.functions
                        )
                    elif key not in parameters:
                        like = torch.empty_like(parameter, dtype=dtype, device="meta")
                        parameters[key] = nn.Parameter(like, requires_grad=info.trainable)
                    put_parameters([place], {info.index: parameters[key]})
            try:
                yield
            finally:
                for place, old in before:
                    assert old is not None
                    put_parameters([place], {place.parameter: old})

    def _intercepted(self, unit: UnitCandidate) -> Callable[..., Any]:
        original = unit.module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(unit, original, args, kwargs)

        return forward

    def run(self, model: nn.Module, rows: int, chunk_bytes: int | None, batch: BatchSpec) -> int:
        """Run forward and backward over `rows` rows of the batch. Returns the head chunk count."""
        self.counter.causal_share = batch.document_share
        adapters = adapters_on_shapes(model, self._prepared.structure.candidates, self.counter)
        with self.intercepting(), adapters, self.counter.watching(), torch.enable_grad():
            tensors = as_loss(self._loss).fill_shapes(batch.make(rows))
            ranks = _CountingRanks(batch.shared_by, self.counter)
            kind = ATTENTIONS[DOCUMENTS] if batch.document_length else attention_for(batch.shared_by)
            attention = kind.open(model, batch.shared_by, ranks, Counters())
            attention.divert()
            try:
                shared = batch.shared_rows(tensors)
                with attention.over(shared, tensors, lambda tensor: tensor) as (inputs, labelled):
                    return self._run_batch(model, inputs, labelled, chunk_bytes, batch)
            finally:
                attention.undo()

    def _run_batch(
        self, model: nn.Module, tensors: Batch, labelled: Batch, chunk_bytes: int | None, batch: BatchSpec
    ) -> int:
        with saved_tensors_watched(self._record_kept):
            head = _chunked_head(model, batch)
            if head is None or chunk_bytes is None:
                return self._run_whole(model, tensors)
            num_logits = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
            size, blocks = max(1, chunk_bytes // (num_logits * 4)), None
            if self._loss is None:  # a loss over logits needs all of a token's
                blocks = _blocks_of_head(model)
            if batch.rows * batch.length <= size:
                return self._run_whole(model, tensors)
            # With all rows, a chunk has `size` tokens, or all targets and filler, evenly divided over the rows.
            if blocks is not None:
                size = max(1, chunk_bytes // (blocks.most_rows * 4))
            filled = -(-batch.rows * (batch.length - 1) // ROUNDED_TO) * ROUNDED_TO
            num_tokens = len(tensors["labels"]) * min(max(1, size // batch.rows), -(-filled // batch.rows))
            # The first position alone, as of filler: a chunk may have more tokens than a short batch has labels.
            chunk = Chunk(torch.zeros(num_tokens, dtype=torch.long, device="meta"), num_tokens)
            inputs = select_inputs(model, tensors, self._loss)
            term = as_loss(self._loss).term(inputs, labelled, [chunk])
            if self._prepared.settings.compile == "always":
                term = CompiledForwards(OriginalForward()).term_of(term)
            try:
                output = head.base_output(lambda: model(**inputs))
            except TypeError:  # the head has an unexpected call pattern
                self._entries, self._kept, self._inputs, self._movable = [], {}, set(), {}
                self.begin()
                return self._run_whole(model, tensors)
            hidden = output["last_hidden_state"]
            self._end_stretch()
            gradient = torch.zeros_like(hidden, requires_grad=False)
            head_inputs = HeadInputs(output, labelled, [chunk], term=term)
            if blocks is None:
                slopes = torch.ones(tensors["labels"].shape, device=hidden.device)
                self._run_chunk((part.logits, part.gradient) for part in head.parts(head_inputs, slopes))
            else:
                self._run_chunk((sums, None) for sums in RowBlockHead(head, blocks).sums_over(0, head_inputs))
                self._repeat_chunk(blocks, -(-tensors["labels"].numel() // num_tokens))
            self.begin()
            hidden.backward(gradient)
            self._end_backward(0)
        if blocks is not None:
            return 1
        return -(-batch.rows * (batch.length - 1) // size)  # the last token of a row has no target

    def _run_whole(self, model: nn.Module, tensors: Batch) -> int:
        loss_fn: LossFunction | None = self._loss
        if "labels" not in tensors:
            loss_fn = _mean_state
        loss = run_loss(model, tensors, loss_fn)
        self._end_stretch()
        loss.backward()
        self._end_backward(0)
        return 1

    def _run_chunk(self, chunks: Iterator[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Measure the first chunk of a head, from (result, gradient) of each.

        Chunk memory is separate: nothing is kept for the backward below the head.
        """
        before, kept, kept_bytes = self._entries, dict(self._kept), sum(self._kept.values())
        self._entries = []
        self.counter.begin()
        result, gradient = next(chunks)
        self._end_stretch()
        peak_bytes = self.counter.peak_bytes
        result.backward(gradient)
        peak_bytes = max(peak_bytes, self.counter.peak_bytes)
        self._end_backward(0)
        works = [replace(entry.work, saved_bytes=0, forward_temporary_bytes=0) for entry in self._entries]
        units = [work for work in works if work.name is not None]
        stretches = [work for work in works if work.name is None]
        stretch = replace(
            NO_WORK,
            forward=sum((w.forward for w in stretches), NO_COST),
            backward=sum((w.backward for w in stretches), NO_COST),
        )
        self.chunk = [replace(stretch, forward_temporary_bytes=peak_bytes - kept_bytes, is_cut=False)]
        # The input is a copy of some hidden states, with the shape of their gradient.
        of_units = [replace(unit, input_bytes=unit.gradient_bytes, stretch_bytes=0, is_cut=False) for unit in units]
        self.chunk = [*of_units, *self.chunk]
        self._entries, self._kept = before, kept

    def _repeat_chunk(self, blocks: RowBlocks, num_chunks: int) -> None:
        """Multiply the measured chunk over all chunks and all row blocks of the head.

        Each runs forward once without a graph and again in the backward.
        """
        names = {unit.module: unit.name for unit in self._prepared.structure.candidates}
        works = []
        for work in self.chunk:
            forward, backward = (sum([cost] * num_chunks, NO_COST) for cost in (work.forward, work.backward))
            if work.name is None:  # the recomputation of a unit is added to its backward with every recomputation
                backward += forward
            # The backward follows at once, so the input stays on the device.
            works.append(replace(work, forward=forward, backward=backward, staying_bytes=work.input_bytes))
        self.chunk = [
            work if work.name is None else replace(work, name=names[block], keeps_graph=False, reads_weights=True)
            for block in blocks.blocks
            for work in works
        ]

    def works(self, num_chunks: int) -> tuple[UnitWork, ...]:
        """Return all uses, and all stretches with work."""
        works = [*(entry.work for entry in self._entries), *self.chunk * num_chunks]
        return tuple(w for w in works if w.name is not None or w.forward.num_operations or w.backward.num_operations)

    # -- between units ---------------------------------------------------------------------------------------

    def _record_kept(self, tensor: torch.Tensor) -> None:
        """Record a tensor saved by the graph between units."""
        key = self.counter.storage_of(tensor)
        if self.counter.is_own(key):
            self._kept.setdefault(key, tensor.untyped_storage().nbytes())

    def _end_stretch(self) -> None:
        """Record the compute since the last unit as a stretch."""
        kept_before = self._entries[-1].kept_bytes if self._entries else 0
        saved_bytes = sum(self._kept.values()) - kept_before
        work = replace(
            NO_WORK,
            forward=self.counter.cost - self._start_cost,
            saved_bytes=saved_bytes,
            forward_temporary_bytes=max(0, self.counter.peak_bytes - kept_before - saved_bytes),
            is_cut=False,
        )
        self._entries.append(_UseRecord(work, kept_before + saved_bytes))
        self.begin()

    def _end_backward(self, number: int) -> None:
        """Record a stretch backward."""
        entry = self._entries[number]
        peak = max(0, self.counter.peak_bytes - entry.kept_bytes)
        entry.work = replace(entry.work, backward=self.counter.cost - self._start_cost, backward_temporary_bytes=peak)
        self.begin()

    # -- a unit ----------------------------------------------------------------------------------------------

    def _call(
        self, unit: UnitCandidate, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._is_inside:
            return forward(*args, **kwargs)
        self._end_stretch()
        arguments, containers = receive_call(args, kwargs)
        self._is_inside = True
        try:
            measurement = self._uses.measure(unit, forward, arguments)
        finally:
            self._is_inside = False
        entry = _UseRecord(replace(measurement.work, name=unit.name, is_block=unit.is_block))
        if torch.is_grad_enabled():
            self._record_inputs(entry, arguments.tensors)
        else:
            entry.work = entry.work.without_backward()
        entry.kept_bytes = sum(self._kept.values())
        self._entries.append(entry)
        self.last_result_bytes = entry.work.result_bytes
        number = len(self._entries) - 1
        anchor = torch.empty((), device="meta", requires_grad=any(p.requires_grad for p in unit.module.parameters()))
        self._start_cost = self.counter.cost
        outputs = _UnitBoundary.apply(self, number, measurement, anchor, *arguments.tensors)
        self.counter.begin()
        return deliver_result(measurement.result, outputs, containers)

    def _record_inputs(self, entry: _UseRecord, tensors: Sequence[torch.Tensor]) -> None:
        """Record the inputs kept for the backward of a use, each storage once.

        The ledger does not know that a stretch, such as attention between modules, may hold an input too.
        """
        fresh = staying = in_stretches = 0
        for storage, tensor in {self.counter.storage_of(tensor): tensor for tensor in tensors}.items():
            num_bytes = tensor.untyped_storage().nbytes()
            if storage in self._movable:  # an input shared by two units is never offloaded
                first = self._movable.pop(storage)
                first.work = replace(first.work, staying_bytes=first.work.staying_bytes + num_bytes)
            elif self.counter.is_own(storage) and storage not in self._inputs:
                self._inputs.add(storage)
                in_stretches += num_bytes if storage in self._kept else 0
                self._kept[storage] = num_bytes
                fresh += num_bytes
                if tensor.requires_grad:
                    self._movable[storage] = entry
                else:
                    staying += num_bytes
        entry.work = replace(entry.work, input_bytes=fresh, staying_bytes=staying, stretch_bytes=in_stretches)

    def backward_of(self, number: int) -> None:
        """Called when the backward between units reaches unit results."""
        if number + 1 < len(self._entries):
            self._end_backward(number + 1)

    def begin(self) -> None:
        """Start measuring from here: reset cost mark and memory peak."""
        self._start_cost = self.counter.cost
        self.counter.begin()


class _UnitBoundary(torch.autograd.Function):
    """Represents a unit use in the graph between units. Results and gradients have shapes only."""

    @staticmethod
    def forward(
        ctx: Any,
        probe: _WorkloadProbe,
        number: int,
        measurement: UnitMeasurement,
        _anchor: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.probe, ctx.number, ctx.tensors = probe, number, tensors
        ctx.set_materialize_grads(False)
        outputs = tuple(
            torch.empty_strided(*like[:2], dtype=like[2], device="meta") if source is None else tensors[source]
            for source, like in zip(measurement.sources, measurement.likes, strict=True)
        )
        plain = [t for t, differs in zip(outputs, measurement.differentiable, strict=True) if not differs]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        ctx.probe.backward_of(ctx.number)
        tensors, ctx.tensors = ctx.tensors, ()
        gradients = [
            torch.empty_like(t) if need else None for t, need in zip(tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        del tensors
        ctx.probe.begin()
        return (None, None, None, None, *gradients)


class _CountingRanks(SimulatedRanks):
    """Simulated sequence-parallel ranks. Counts the bytes sent."""

    def __init__(self, size: int, counter: OpCounter) -> None:
        super().__init__(size)
        self._counter = counter

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], operation: str) -> None:  # noqa: ARG002
        self._counter.cost += replace(NO_COST, exchanged_bytes=sum(piece.nbytes for piece in pieces[1:]))

    def _neighbours(self, num: int) -> Comm:  # noqa: ARG002
        return self  # all ranks share the rows


def _chunked_head(model: nn.Module, batch: BatchSpec) -> ChunkedHead | None:
    """Return the chunkable head of a causal model with the standard transformers loss, else None.

    This loss is known to be additive over chunks. The engine decides by a trial run instead.
    """
    base, loss = find_base_model(model), getattr(model, "loss_function", None)
    if batch.model_kind != "causal" or batch.length < 4 or base is None:
        return None
    return ChunkedHead(model, base) if getattr(loss, "__name__", "") == _CHUNKED_LOSS else None


def _blocks_of_head(model: nn.Module) -> RowBlocks | None:
    """Return the row blocks of the output embedding; None: a whole head."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    return blocks_of(getattr(find(), "weight", None))


class _NoOwner:
    """Owner of weights cut into row blocks. Only the blocks are computed with, so the whole weight has no values."""

    def is_in_model(self) -> bool:
        """Return True: nothing else runs."""
        return True

    def values_of(self, info: ParameterInfo, _dtype: torch.dtype) -> NoReturn:
        raise ValueError(
            f"{info.name} is cut into blocks of rows, but read by another operation than linear and embedding"
        )

    def refuse(self, info: ParameterInfo, what: str, how: str = "") -> None:
        """Do nothing: no data can be lost here."""

    def gradient_of(self, info: ParameterInfo) -> None:
        """Return None: no loop reads gradients here."""

    def drop_gradient(self, info: ParameterInfo) -> None:
        """Do nothing: no data can be lost here."""
