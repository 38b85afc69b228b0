"""The compute of a step, measured on a model on `meta`: nothing is allocated, and blocks that are alike run once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from offload.distributed.comm import ImaginedRanks
from offload.engine.assemble import EnginePlan
from offload.engine.caches import Caches
from offload.engine.loss.batch import Batch
from offload.engine.loss.chunked_head import Chunk, ChunkedHead, HeadByRows
from offload.engine.loss.label_trials import base_of
from offload.engine.loss.loss import find_loss, select_inputs
from offload.engine.loss.shared_rows import SharedRows, over_whole_rows
from offload.engine.units.arguments import deliver, received
from offload.engine.units.find import Candidate
from offload.engine.units.resting import stand_in
from offload.engine.units.row_blocks import RowBlocks
from offload.engine.units.shared_attention import OwnAttention, SharedAttention, WholeRows
from offload.engine.units.unit import put_parameters
from offload.forecast.op_counter import OpCounter, UnknownValueError
from offload.forecast.tiled_uses import ROWS, TiledUses
from offload.forecast.unit_use import SeenUse, SeenUses
from offload.forecast.workload import NO_COST, NO_WORK, UnitWork, Workload
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo
from offload.telemetry.counters import Counters

_FEW_TOKENS = 8
"""Of a row on which is found what may run over tiles; half of it is an encoder's, where there is one."""
_CHUNKED_LOSS = "ForCausalLMLoss"
"""Of transformers: the loss that takes labels which are shifted already, and divides by the count that it is given."""


class CannotMeasureError(Exception):
    """A model that does not run on shapes alone; says why."""


@dataclass(frozen=True)
class BatchSpec:
    """What a step of one rank is made on.

    kind: of the model: causal, masked, reward, or seq2seq, whose encoder reads the first half of a row.
    rows, length: of the batch, of whose sequences this rank has so many tokens.
    is_padded: rows end in padding, so that attention needs a mask.
    shared_by: how many ranks share each sequence.
    """

    kind: str
    rows: int
    length: int
    is_padded: bool = False
    shared_by: int = 1

    def make(self, rows: int) -> dict[str, torch.Tensor]:
        """Return so many rows, on `meta`. To be called under a OpCounter, which knows their values."""
        length = self.length // 2 if self.kind == "seq2seq" else self.length
        ones = functools.partial(torch.ones, rows, dtype=torch.long, device="meta")
        batch = {"input_ids": ones(length), "labels": ones(self.length - length or length)}
        if self.kind == "reward":
            batch["labels"] = torch.ones(rows, device="meta")
        if self.is_padded:
            batch["attention_mask"] = ones(length)
            batch["attention_mask"][:, -1] = 0
        if self.shared_by > 1:
            batch["position_ids"] = ones(length)
        return batch

    def shared(self, given: Mapping[str, torch.Tensor]) -> SharedRows | None:
        """Return what a rank knows of the rows of a batch that it was `given` its tokens of; None where it has all."""
        if self.shared_by == 1:
            return None
        whole = replace(self, length=self.length * self.shared_by, shared_by=1).make(len(given["labels"]))
        rows = WholeRows(len(whole["labels"][0]), whole["input_ids"], whole.get("attention_mask"))
        return SharedRows(rows, given["labels"], {})


def measure(model: nn.Module, batch: BatchSpec, prepared: EnginePlan) -> Workload:
    """Run a micro-batch forward and backward through a model on `meta`, of which `prepared` was made; return what a
    step computes. The model is as it was afterwards.

    Raises CannotMeasureError.
    """
    settings = prepared.settings
    micro_rows = min(batch.rows, settings.micro_batch_size or batch.rows)
    num_micro_batches = -(-batch.rows // micro_rows)
    caches, modes = Caches(model), [(module, module.training) for module in model.modules()]
    caches.turn_off()
    model.train()
    try:
        tiles = _find_tiles(model, batch, prepared)
        workload = _run(model, batch, prepared, micro_rows, tiles)
        if num_micro_batches > 1:  # what is the same for more rows is there once
            more = _run(model, batch, prepared, micro_rows + 1, tiles)
            workload = replace(workload, calls=tuple(_of_all_rows(workload.calls, more.calls, micro_rows, batch.rows)))
    except UnknownValueError as error:
        raise CannotMeasureError(f"{type(model).__name__} asks for {error}, which shapes do not tell") from error
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise CannotMeasureError(f"{type(model).__name__} on meta: {type(error).__name__}: {error}") from error
    finally:
        caches.restore()
        for module, mode in modes:
            module.training = mode
    return replace(
        workload, num_micro_batches=num_micro_batches, logits_bytes=workload.logits_bytes * num_micro_batches
    )


def _find_tiles(model: nn.Module, batch: BatchSpec, prepared: EnginePlan) -> TiledUses | None:
    """Return what runs over tiles of the sequence, found on a few tokens; None for nothing. An engine that is told auto
    tiles where a block would not fit otherwise, which is to be forecast with the number that suits.
    """
    size = prepared.settings.sequence_tile
    if not isinstance(size, int) or batch.length <= size:
        return None
    tiles, few = TiledUses(size), replace(batch, length=_FEW_TOKENS, shared_by=1)
    probe = _Probe(prepared, tiles, looks=True)
    with probe.routed(), probe.counter.watching(), torch.enable_grad():
        probe.run(model, few.make(ROWS), None, few)
    tiles.find()
    return tiles


def _run(
    model: nn.Module, batch: BatchSpec, prepared: EnginePlan, rows: int, tiles: TiledUses | None = None
) -> Workload:
    """Return what one micro-batch of so many rows computes."""
    probe = _Probe(prepared, tiles)
    with probe.routed(), probe.counter.watching(), torch.enable_grad():
        num_chunks = probe.run(model, batch.make(rows), prepared.chunk_bytes, batch)
    return Workload(probe.works(num_chunks), 1, batch.rows * batch.length, num_chunks, probe.last_result_bytes)


def _of_all_rows(calls: Sequence[UnitWork], more: Sequence[UnitWork], rows: int, all_rows: int) -> Iterator[UnitWork]:
    """Yield calls over so many rows with what `more` over one row more do not have more of; of those that run once, the
    work of all rows.
    """
    for work, other in zip(calls, more, strict=True):
        of_a_row = other.input_bytes - work.input_bytes
        found = replace(work, shared_bytes=max(0, work.input_bytes - rows * of_a_row))
        if not work.is_cut:
            forward = work.forward.with_rows(all_rows - rows, other.forward)
            found = replace(found, forward=forward, backward=work.backward.with_rows(all_rows - rows, other.backward))
        yield found


@dataclass
class _Entry:
    """A use of a unit, or a stretch between units, while it is measured."""

    work: UnitWork
    """What was measured so far."""
    held_bytes: int = 0
    """What waits for a backward once the use has run its forward, of all uses so far."""


class _Probe:
    """Takes the calls of units, and what is computed between them."""

    def __init__(self, prepared: EnginePlan, tiles: TiledUses | None = None, *, looks: bool = False) -> None:
        """`tiles`: what runs over tiles of the sequence; `looks`: to be found in this run of a few tokens."""
        is_cpu = torch.device(prepared.settings.device or "cpu").type == "cpu"
        self.counter, self.last_result_bytes = OpCounter(fuses_dropout=not is_cpu), 0
        self._prepared = prepared
        self._entries: list[_Entry] = []
        self._chunk: list[_Entry] = []
        self._uses = SeenUses(self.counter, tiles, looks=looks)
        self._held: dict[int, int] = {}
        self._movable: dict[int, _Entry] = {}  # whose input went to no other unit so far, by storage
        self._mark, self._is_inside = NO_COST, False

    # -- the model -------------------------------------------------------------------------------------------

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Within, the units' calls come here, and parameters have the dtypes in which the device computes."""
        infos, candidates = self._prepared.structure.infos, self._prepared.structure.candidates
        before = [(place, place.module._parameters[place.key]) for unit in candidates for place in unit.places]
        made: dict[tuple[int, torch.Size], nn.Parameter] = {}  # by their shapes too: of what is cut there are several
        with ExitStack() as stack:
            for unit in candidates:
                for place in unit.places:
                    info, parameter = infos[place.parameter], place.module._parameters[place.key]
                    assert parameter is not None
                    key, dtype = (info.index, parameter.shape), DTYPES[info.compute]
                    if key not in made and unit.is_cut:
                        made[key] = stand_in(info, dtype, torch.device("meta"), _Nobody(), unit.blocks)
                    elif key not in made:
                        like = torch.empty_like(parameter, dtype=dtype, device="meta")
                        made[key] = nn.Parameter(like, requires_grad=info.trainable)
                    put_parameters([place], {info.index: made[key]})
                if not (unit.resident or unit.records or unit.is_cut):
                    self._route(unit, stack)
            for place, old in before:
                assert old is not None
                stack.callback(put_parameters, [place], {place.parameter: old})
            yield

    def _route(self, unit: Candidate, stack: ExitStack) -> None:
        module, own = unit.module, unit.module.__dict__.get("forward")
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(unit, original, args, kwargs)

        def restore() -> None:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own

        stack.callback(restore)
        module.forward = forward

    def run(self, model: nn.Module, given: dict[str, torch.Tensor], chunk_bytes: int | None, batch: BatchSpec) -> int:
        """Go forward and backward; return in how many chunks the head ran."""
        attention = _attention(model, batch, self.counter)
        attention.divert()
        try:
            with over_whole_rows(attention, batch.shared(given), given, lambda tensor: tensor) as (inputs, labelled):
                return self._run_over(model, inputs, labelled, chunk_bytes, batch)
        finally:
            attention.undo()

    def _run_over(
        self, model: nn.Module, given: Batch, labelled: Batch, chunk_bytes: int | None, batch: BatchSpec
    ) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self._hold, lambda tensor: tensor):
            head = _chunked_head(model, batch)
            if head is None or chunk_bytes is None:
                return self._run_whole(model, given)
            size, blocks = max(1, chunk_bytes // (_num_logits(model) * 4)), _blocks_of_head(model)
            if batch.rows * batch.length <= size:
                return self._run_whole(model, given)
            try:
                output = head.base_output(lambda: model(**select_inputs(model, given, None)))
            except TypeError:  # the model goes another way to its head
                self._forget()
                return self._run_whole(model, given)
            hidden = output["last_hidden_state"]
            self._end_stretch()
            gradient = torch.zeros_like(hidden, requires_grad=False)
            # Of a batch of all rows a chunk has so many tokens, and each row the same share of them.
            if blocks is not None:
                size = max(1, chunk_bytes // (blocks.most_rows * 4))
            here = min(given["labels"].numel(), len(given["labels"]) * max(1, size // batch.rows))
            chunk = Chunk(torch.arange(here, device=hidden.device), here)
            if blocks is None:
                self._run_chunk(head.losses(output, labelled, [chunk], given["labels"].numel()))
            else:
                self._run_chunk(HeadByRows(head, blocks).sums_over(0, output, labelled, chunk))
                self._repeat_chunk(blocks, -(-given["labels"].numel() // here))
            self.begin()
            hidden.backward(gradient)
            self._end_backward(0)
        if blocks is not None:
            return 1
        return -(-batch.rows * (batch.length - 1) // size)  # each token but a row's last has a target

    def _run_whole(self, model: nn.Module, given: Batch) -> int:
        loss = find_loss(model(**select_inputs(model, given, None)))
        self._end_stretch()
        self.counter.begin()
        loss.backward()
        self._end_backward(0)
        return 1

    def _run_chunk(self, losses: Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Run the first chunk: its memory is its own, and nothing of it waits for the backward of what is below."""
        before, held, held_bytes = self._entries, dict(self._held), sum(self._held.values())
        self._entries = []
        self.counter.begin()
        loss, _leaf, _places = next(losses)
        self._end_stretch()
        most = self.counter.peak_bytes
        loss.backward()
        most = max(most, self.counter.peak_bytes)
        self._end_backward(0)
        works = [replace(e.work, saved_bytes=0, forward_temporary_bytes=0) for e in self._entries]
        unit = next((work for work in works if work.name is not None), None)
        rest = [work for work in works if work is not unit]
        stretch = replace(
            NO_WORK, forward=sum((w.forward for w in rest), NO_COST), backward=sum((w.backward for w in rest), NO_COST)
        )
        most_bytes = most - held_bytes
        self._chunk = [_Entry(replace(stretch, forward_temporary_bytes=most_bytes, is_cut=False), held_bytes)]
        if unit is not None:
            # Its input is a copy of some columns of the hidden states, in the shape of their gradient.
            unit = replace(unit, input_bytes=unit.gradient_bytes, is_cut=False)
            self._chunk.insert(0, _Entry(unit, held_bytes))
        self._entries, self._held = before, held

    def _repeat_chunk(self, blocks: RowBlocks, num_chunks: int) -> None:
        """Of the first chunk over the first block of a head, make all chunks over each of its blocks: forward once
        without a graph, and in the backward again.
        """
        names = {unit.module: unit.name for unit in self._prepared.structure.candidates}
        found = []
        for entry in self._chunk:
            costs = [sum([cost] * num_chunks, NO_COST) for cost in (entry.work.forward, entry.work.backward)]
            found.append(_Entry(replace(entry.work, forward=costs[0], backward=costs[1] + costs[0]), entry.held_bytes))
        self._chunk = [
            _Entry(replace(entry.work, name=names[block], keeps_graph=False, reads_weights=True), entry.held_bytes)
            if entry.work.name is not None
            else entry
            for block in blocks.blocks
            for entry in found
        ]

    def works(self, num_chunks: int) -> tuple[UnitWork, ...]:
        """Return all uses and stretches, without those that do nothing."""
        works = [entry.work for entry in (*self._entries, *self._chunk * num_chunks)]
        return tuple(w for w in works if w.name is not None or w.forward.num_operations or w.backward.num_operations)

    # -- between units ---------------------------------------------------------------------------------------

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that the graph between units saves."""
        key = self.counter.storage_of(tensor)
        if self.counter.is_own(key):
            self._held.setdefault(key, tensor.untyped_storage().nbytes())
        return tensor

    def _end_stretch(self) -> None:
        """What was computed since the last unit is a stretch of its own."""
        held = self._entries[-1].held_bytes if self._entries else 0
        saved = sum(self._held.values()) - held
        work = replace(
            NO_WORK,
            forward=self.counter.cost - self._mark,
            saved_bytes=saved,
            forward_temporary_bytes=max(0, self.counter.peak_bytes - held - saved),
            is_cut=False,
        )
        self._entries.append(_Entry(work, held + saved))
        self.begin()

    def _end_backward(self, number: int) -> None:
        """A backward has come to the stretch's begin."""
        entry = self._entries[number]
        peak = max(0, self.counter.peak_bytes - entry.held_bytes)
        entry.work = replace(entry.work, backward=self.counter.cost - self._mark, backward_temporary_bytes=peak)
        self.begin()

    def _forget(self) -> None:
        self._entries, self._held, self._movable = [], {}, {}
        self.begin()

    # -- a unit ----------------------------------------------------------------------------------------------

    def _call(self, unit: Candidate, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_inside:
            return forward(*args, **kwargs)
        self._end_stretch()
        arguments, containers = received(args, kwargs)
        self._is_inside = True
        try:
            seen = self._uses.see(unit, forward, arguments)
        finally:
            self._is_inside = False
        entry = _Entry(replace(seen.work, name=unit.name, is_block=unit.is_block))
        self._wait(entry, arguments.tensors)
        entry.held_bytes = sum(self._held.values())
        self._entries.append(entry)
        self.last_result_bytes = entry.work.result_bytes
        number = len(self._entries) - 1
        anchor = torch.empty((), device="meta", requires_grad=any(p.requires_grad for p in unit.module.parameters()))
        self._mark = self.counter.cost
        outputs = _Border.apply(self, number, seen, anchor, *arguments.tensors)
        self.counter.begin()
        return deliver(seen.result, outputs, containers)

    def _wait(self, entry: _Entry, tensors: Sequence[torch.Tensor]) -> None:
        """Note the inputs of a use, which wait for its backward, each once."""
        fresh = staying = 0
        for storage, tensor in {self.counter.storage_of(tensor): tensor for tensor in tensors}.items():
            num_bytes = tensor.untyped_storage().nbytes()
            if storage in self._movable:  # it is not put away if another unit gets it too
                first = self._movable.pop(storage)
                first.work = replace(first.work, staying_bytes=first.work.staying_bytes + num_bytes)
            elif self.counter.is_own(storage) and storage not in self._held:
                self._held[storage] = num_bytes
                fresh += num_bytes
                if tensor.requires_grad:
                    self._movable[storage] = entry
                else:
                    staying += num_bytes
        entry.work = replace(entry.work, input_bytes=fresh, staying_bytes=staying)

    def backward_of(self, number: int) -> None:
        """The backward between units has come to a unit's results."""
        if number + 1 < len(self._entries):
            self._end_backward(number + 1)

    def begin(self) -> None:
        """Whatever was computed so far is no part of what comes: a stretch, or the backward of one."""
        self._mark = self.counter.cost
        self.counter.begin()


class _Border(torch.autograd.Function):
    """A use of a unit in the graph between units: its results and gradients have shapes alone."""

    @staticmethod
    def forward(
        ctx: Any, probe: _Probe, number: int, seen: SeenUse, _anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        ctx.probe, ctx.number, ctx.tensors = probe, number, tensors
        ctx.set_materialize_grads(False)
        outputs = tuple(
            torch.empty_strided(*like[:2], dtype=like[2], device="meta") if source is None else tensors[source]
            for source, like in zip(seen.sources, seen.likes, strict=True)
        )
        if seen.work.keeps_graph:  # a graph that is kept has its results as well
            ctx.results = [t.detach() for t in outputs]
        plain = [t for t, differs in zip(outputs, seen.differentiable, strict=True) if not differs]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        ctx.probe.backward_of(ctx.number)
        tensors, ctx.tensors, ctx.results = ctx.tensors, (), ()
        found = [
            torch.empty_like(t) if need else None for t, need in zip(tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        del tensors
        ctx.probe.begin()
        return (None, None, None, None, *found)


class _CountedExchange(ImaginedRanks):
    """Ranks that share sequences, none of which runs."""

    def __init__(self, size: int, counter: OpCounter) -> None:
        super().__init__(size)
        self._counter = counter

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], what: str) -> None:  # noqa: ARG002
        self._counter.exchange(sum(piece.nbytes for piece in pieces[1:]))


def _attention(model: nn.Module, batch: BatchSpec, counter: OpCounter) -> OwnAttention:
    """Return the attention of a rank over a batch."""
    if batch.shared_by == 1:
        return OwnAttention()
    return SharedAttention(model, _CountedExchange(batch.shared_by, counter), Counters())


def _chunked_head(model: nn.Module, batch: BatchSpec) -> ChunkedHead | None:
    """Return the head of a model whose loss transformers' own function makes, which is known to add up over chunks.
    (An engine finds out by trying.)
    """
    base, loss = base_of(model), getattr(model, "loss_function", None)
    if batch.kind != "causal" or batch.length < 4 or base is None:
        return None
    return ChunkedHead(model, base) if getattr(loss, "__name__", "") == _CHUNKED_LOSS else None


def _blocks_of_head(model: nn.Module) -> RowBlocks | None:
    """Return the blocks of rows in which the head of a model goes; None for a whole head."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    blocks: RowBlocks | None = getattr(getattr(find(), "weight", None), "blocks", None)
    return blocks


class _Nobody:
    """Has no values of what is cut: it is computed with by its blocks alone."""

    def values_of(self, info: ParameterInfo) -> NoReturn:
        raise ValueError(f"{info.name} is cut in blocks of rows, and read otherwise than by linear and embedding")

    def refuse(self, info: ParameterInfo, what: str, how: str = "") -> None:
        """Nothing is lost here."""

    def check_look(self, info: ParameterInfo, how: str) -> None:
        """Nothing is lost here."""


def _num_logits(model: nn.Module) -> int:
    return int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
