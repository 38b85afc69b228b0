"""A small tensor-parallel language model, its training in memory, and jobs for ranks."""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import offload
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, NonFiniteError, OffloadError
from offload.native import kernels

WIDTH, VOCABULARY, HEADS = 32, 64, 4
DECAY = [("norm|bias", {"weight_decay": 0.01})]
"""Like torch's AdamW: weight decay for all parameters."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))]
        y: Tensor = functional.scaled_dot_product_attention(*heads, is_causal=True)
        result: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result


class Spike(torch.autograd.Function):
    """Zeros like a bias, with a chosen gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, gradient: float) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.full_like(gradient, ctx.gradient), None


class Block(nn.Module):
    spike: float | None = None
    """Gradient added to that of this rank's part of the bias, and of no other weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y = self.up(self.norm_2(x))
        if self.spike is not None:
            y = y + Spike.apply(self.up.bias.to_local(), self.spike)
        result: Tensor = x + self.down(functional.gelu(y))
        return result


class Decoder(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def cut(model: Decoder, mesh: DeviceMesh, way: str) -> Decoder:
    """Cut a model over a mesh. Ways: "layers", "tied" too (embedding and head are one), "sequences" too (norms over a
    part of each sequence), "mesh" of two.
    """
    column, row = ColwiseParallel(), RowwiseParallel()
    attention = {f"attention.{key}": column for key in "qkv"}
    if way in ("layers", "tied"):
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        inside: Any = {**attention, "attention.o": row, "up": column, "down": row}
    elif way == "sequences":
        back = RowwiseParallel(output_layouts=Shard(1))
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        inside = {"norm_1": SequenceParallel(), "norm_2": SequenceParallel(), "attention": gather, **attention}
        inside |= {"attention.o": back, "up": ColwiseParallel(input_layouts=Shard(1)), "down": back}
    else:  # each matrix in two dimensions
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.out_features == 4 * WIDTH:
                two = distribute_tensor(module.weight.detach(), mesh, [Shard(0), Shard(1)])
                module.weight = nn.Parameter(two)
                module.bias = nn.Parameter(distribute_tensor(module.bias.detach(), mesh, [Shard(0), Replicate()]))
                module.register_forward_pre_hook(
                    lambda _, args: (DTensor.from_local(args[0], mesh, [Replicate()] * 2),)
                )
                module.register_forward_hook(lambda _, args, result: result.full_tensor())
        return model
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
    if way == "tied":
        model.head.weight = model.embedding.weight
        model.blocks[0].requires_grad_(False)
    return model


def build(mesh: DeviceMesh, way: str, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return cut(Decoder().to(dtype), mesh, way)


def batches(num: int, rows: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCABULARY, (rows, 16), generator=generator) for _ in range(num)]
    return [{"input_ids": each, "labels": each} for each in ids]


def local(value: Any, like: Any = None) -> Tensor:
    """Return the local tensor of a DTensor, in the layout of the parameter `like`."""
    if isinstance(value, DTensor):
        value = value.redistribute(placements=(like if like is not None else value).placements).to_local()
    result: Tensor = value.detach()
    return result


class Resident:
    """A model in memory, trained by torch's AdamW with the arithmetic of the project's kernel."""

    def __init__(self, model: nn.Module, lr: float = 1e-2) -> None:
        self.model, self.lr, self.number = model, lr, 0
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: local(p).float() for name, p in self.named.items()}
        self.states = {name: [torch.zeros_like(value) for _ in range(2)] for name, value in self.masters.items()}

    def gradients(
        self, batch: Mapping[str, Tensor], micro_rows: int | None, scale: float
    ) -> tuple[float, dict[str, Tensor]]:
        sums: dict[str, Tensor] = {}
        total, rows = 0.0, len(batch["input_ids"])
        num_targets = batch["labels"][:, 1:].numel()
        for begin in range(0, rows, micro_rows or rows):
            part = {key: value[begin : begin + (micro_rows or rows)] for key, value in batch.items()}
            if micro_rows:
                logits = self.model(part["input_ids"])[:, :-1].flatten(0, 1)
                loss = functional.cross_entropy(logits, part["labels"][:, 1:].flatten(), reduction="sum") / num_targets
            else:
                loss = self.model(**part)
            (loss * scale).backward()
            total += loss.item()
            for name, p in self.named.items():
                gradient, p.grad = local(p.grad, p), None
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
        return total, sums

    def step(
        self,
        batch: Mapping[str, Tensor],
        micro_rows: int | None = None,
        scale: float = 1.0,
        group: Any = None,
        limit: float | None = None,
    ) -> tuple[float, float]:
        """Train on a batch. `group`: data-parallel process group. Return the loss and the gradient norm."""
        loss, sums = self.gradients(batch, micro_rows, scale)
        if group is not None:
            for each in sums.values():
                dist.all_reduce(each, group=group)
        norm = self.norm(sums)
        coefficient = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        self.number += 1
        for name, p in self.named.items():
            weights = self.masters[name].view(-1)
            moments = [each.view(-1) for each in self.states[name]]
            kernels.adamw(
                weights, *moments, sums[name].contiguous().view(-1), step=self.number, lr=self.lr, betas=(0.9, 0.999),
                eps=1e-8, weight_decay=0.01, grad_scale=coefficient,
            )  # fmt: skip
            shown = self.masters[name] if p.dtype == torch.float32 else kernels.split(self.masters[name])[0]
            local(p).copy_(shown)  # of two bf16 numbers equally near, the engine has the one away from zero
        return loss, norm

    def norm(self, sums: Mapping[str, Tensor]) -> float:
        """Return the norm over the parts on all ranks, each counted once."""
        whole = []
        for name, p in self.named.items():
            value = (
                DTensor.from_local(sums[name], p.device_mesh, p.placements).full_tensor()
                if isinstance(p, DTensor)
                else sums[name]
            )
            whole.append(value.double().square().sum())
        return float(torch.stack(whole).sum().sqrt())


@contextmanager
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Iterator[DeviceMesh]:
    """A device mesh over all ranks of a job. The names differ between the jobs of a process, because torch remembers
    layouts by the name and keeps the process group of the first.
    """
    dist.init_process_group("gloo")
    try:
        job = os.environ["MASTER_PORT"]
        yield init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{name} {job}" for name in names))
    finally:
        dist.destroy_process_group()


def rule() -> offload.AdamW:
    return offload.AdamW(lr=1e-2, weight_decay=0.01, groups=DECAY)


def assert_equal(model: nn.Module, engine: offload.Engine, tolerance: float = 0.0) -> None:
    for (name, p), (own, value) in zip(model.named_parameters(), engine.named_parameters(), strict=True):
        assert name == own
        difference = float((local(p) - value.to(p.dtype)).abs().max())
        assert difference <= tolerance, f"{name} differs by {difference}"


def train(
    way: str,
    num_ranks: int,
    micro_rows: int | None = None,
    tier: str = "cpu",
    folder: str | None = None,
    limit: float | None = None,
    precision: str = "fp32",
) -> list[float]:
    """Compare three steps with a model in memory, and the state dict afterwards. Return the norms."""
    shape = (2, num_ranks // 2) if way == "mesh" else (num_ranks,)
    with mesh_of(shape, ("rows", "columns")[: len(shape)]) as mesh:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        resident, model = Resident(build(mesh, way, dtype)), build(mesh, way, dtype)
        placement = {"parameters": tier, "optimizer": tier, "nvme_dir": folder}
        own = {"max_grad_norm": limit, "micro_batch_size": micro_rows, "precision": precision}
        norms = []
        with offload.Engine(model, rule(), placement, **own) as engine:
            for batch in batches(3):
                loss, norm = resident.step(batch, micro_rows, limit=limit)
                result = engine.step(batch)
                assert micro_rows or result.loss.item() == loss
                assert abs(result.grad_norm - norm) <= 1e-6 * norm
                norms.append(result.grad_norm)
            # torch's sum over more than two ranks has an order by position in the tensor, other in a micro-batch
            tolerance = 2e-6 if micro_rows and num_ranks > 2 else 0.0
            assert_equal(resident.model, engine, tolerance)
            saved, expected = model.state_dict(), resident.model.state_dict()
            assert saved.keys() == expected.keys()
            for name, value in expected.items():
                assert type(saved[name]) is type(value)
                assert torch.allclose(local(saved[name]), local(value), rtol=0, atol=tolerance)
                if isinstance(value, DTensor):
                    assert saved[name].placements == value.placements
                    assert saved[name].shape == value.shape
            engine.close(restore=True)
        assert all(type(p) is type(q) for p, q in zip(model.parameters(), resident.model.parameters(), strict=True))
        batch = batches(1)[0]
        assert abs(model(**batch).item() - resident.model(**batch).item()) <= tolerance
        return norms


def save(folder: str) -> None:
    """Write a checkpoint, in a folder for each part, and go on from the states in a new engine. A missing part is an
    error on all ranks. Write the model's own state dict by torch, and read it into a model in memory.
    """
    with mesh_of((2,), ("tp",)) as mesh, open_comm() as comm:
        own: dict[str, Any] = {"max_grad_norm": None, "comm": comm}
        model = build(mesh, "layers")
        with offload.Engine(model, rule(), **own) as engine:
            engine.step(batches(1)[0])
            engine.save_checkpoint(f"{folder}/checkpoint")
            with pytest.raises(ConfigError, match="this rank has one of 2 parts of each layer"):
                engine.export(f"{folder}/export")
            expected = engine.step(batches(2)[1])
            weights = dict(engine.named_parameters())
            checkpoint.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/torch")
        names = {each.name for each in Path(folder).iterdir()}
        assert names == {"checkpoint.part-0-of-2", "checkpoint.part-1-of-2", "torch"}
        with offload.Engine(build(mesh, "layers"), rule(), **own) as engine:
            engine.load_checkpoint(f"{folder}/checkpoint")
            assert torch.equal(engine.step(batches(2)[1]).loss, expected.loss)
            assert_weights(engine, weights)
            if mesh.get_local_rank() == 1:
                shutil.rmtree(f"{folder}/checkpoint.part-1-of-2")
            with pytest.raises(OffloadError, match=r"\[rank 1\].*checkpoint\.part-1-of-2"):
                engine.load_checkpoint(f"{folder}/checkpoint")
            assert_weights(engine, weights)
        plain = Decoder()
        saved = {"model": plain.state_dict()}
        checkpoint.load(saved, checkpoint_id=f"{folder}/torch")
        cut_again = cut(plain, mesh, "layers")
        assert all(torch.equal(local(p), weights[name]) for name, p in cut_again.named_parameters())


def assert_weights(engine: offload.Engine, expected: Mapping[str, Tensor]) -> None:
    assert all(torch.equal(value, expected[name]) for name, value in engine.named_parameters())


def overflow() -> None:
    """A gradient that is not finite on one rank alone skips the step, or fails it, on all ranks."""
    with mesh_of((2,), ("tp",)) as mesh, open_comm() as comm:
        for limit, on_nonfinite in (1.0, "skip"), (None, "stop"):
            model = build(mesh, "layers")
            model.blocks[1].spike = 0.0
            with offload.Engine(model, rule(), comm=comm, max_grad_norm=limit, on_nonfinite=on_nonfinite) as engine:
                engine.step(batches(1)[0])
                before = {name: value.clone() for name, value in engine.named_parameters()}
                model.blocks[1].spike = math.inf if mesh.get_local_rank() else 0.0
                if on_nonfinite == "stop":
                    with pytest.raises(NonFiniteError):
                        engine.step(batches(2)[1])
                    continue
                assert engine.step(batches(2)[1]).skipped
                assert_weights(engine, before)
                model.blocks[1].spike = 0.0
                assert not engine.step(batches(2)[1]).skipped


def train_with_rows_cut() -> float:
    """Between two units a DTensor is cut over rows, as the micro-batches are: these fall back to whole batches. Return
    the loss.
    """
    with mesh_of((2,), ("tp",)) as mesh:
        resident, model = build(mesh, "layers"), build(mesh, "layers")
        for each in resident, model:
            each.embedding.register_forward_hook(
                lambda _module, _args, x: DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
            )
            each.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].full_tensor(),))
        expected = resident(**batches(1)[0]).item()
        with offload.Engine(model, rule(), micro_batch_size=2) as engine:
            assert engine.step(batches(1)[0]).loss.item() == expected
        return float(expected)


def train_replicas() -> list[float]:
    """Two replicas of a model cut over two ranks: the sum over both, in a step."""
    with mesh_of((2, 2), ("dp", "tp")) as mesh:
        dp, tp = (mesh[name] for name in mesh.mesh_dim_names or ())
        resident, model = Resident(build(tp, "sequences")), build(tp, "sequences")
        rank = dp.get_local_rank()
        norms = []
        with offload.Engine(model, rule(), max_grad_norm=None) as engine:
            assert (engine.rank, engine.world_size) == (rank, 2)
            for batch in batches(3, rows=8):
                part = {key: value[4 * rank : 4 * rank + 4] for key, value in batch.items()}
                _, norm = resident.step(part, scale=0.5, group=dp.get_group())
                result = engine.step(part)
                assert abs(result.grad_norm - norm) < 1e-6 * norm
                norms.append(result.grad_norm)
            assert_equal(resident.model, engine)
        return norms


def wrap_loop() -> None:
    """A plain loop over `offload.wrap`, from the states of torch's optimizer, and back through its state dicts."""
    with mesh_of((2,), ("tp",)) as mesh:

        def steps(model: Any, optimizer: Any, which: range) -> list[float]:
            losses = []
            for batch in batches(4)[which.start : which.stop]:
                loss = model(**batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        def own(model: nn.Module) -> Any:
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        plain = build(mesh, "layers")
        optimizer = own(plain)
        expected = steps(plain, optimizer, range(4))
        model = build(mesh, "layers")
        first = own(model)
        losses = steps(model, first, range(1))
        wrapped, outer = offload.wrap(model, first)
        losses += steps(wrapped, outer, range(1, 3))
        states, weights = outer.state_dict(), wrapped.state_dict()
        again, resident = build(mesh, "layers"), build(mesh, "layers")
        second, alone = own(again), own(resident)
        for loaded, optimizer in (again, second), (resident, alone):
            loaded.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(states))
        assert steps(resident, alone, range(3, 4)) == expected[3:]
        last, outer_again = offload.wrap(again, second)
        losses += steps(last, outer_again, range(3, 4))
        assert losses == expected
        for name, value in last.state_dict().items():
            assert torch.equal(local(value), local(plain.state_dict()[name])), name
        loss = last(**batches(1)[0])
        loss.backward()
        with pytest.raises(ConfigError, match="the gradients are divided over 2 ranks"):
            torch.nn.utils.clip_grad_norm_(last.parameters(), 1.0)
        outer_again.clip_grad_norm_(last.parameters(), 1.0)
        outer_again.step()
        for engine in (outer.engine, outer_again.engine):
            engine.close(restore=True)


def refuse() -> dict[str, str]:
    """Return the error for each refused model or setting."""
    errors = {}

    def note(name: str, model: nn.Module, *args: Any, **settings: Any) -> None:
        before = list(model.parameters())
        try:
            offload.Engine(model, *(args or (rule(),)), comm=comm, **settings)
        except OffloadError as error:
            errors[name] = str(error)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True)), name

    with mesh_of((2,), ("tp",)) as mesh, open_comm() as comm:
        for key, value in {
            "recompute": "auto", "compile": "always", "clip": "speculative", "sequence_tile": 4,
            "sequence_parallel": 2, "link_weights": "int8", "head_chunk_bytes": 1 << 20, "fill": lambda *_: None,
        }.items():  # fmt: skip
            note(key, build(mesh, "layers"), **{key: value})
        note("dispatch", build(mesh, "layers"), dispatch="always", zero_stage=2)
        note("rule", build(mesh, "layers"), offload.Muon(lr=0.1))
        uneven = build(mesh, "layers")
        uneven.norm.weight = nn.Parameter(distribute_tensor(torch.ones(33), mesh, [Shard(0)]))
        note("uneven", uneven)
        partial = build(mesh, "layers")
        partial.norm.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH), mesh, [Partial()]))
        note("partial", partial)
        differing = build(mesh, "layers")
        with torch.no_grad():
            differing.norm.weight.add_(dist.get_rank())
        note("differing", differing)
        buffer = build(mesh, "layers")
        buffer.register_buffer("table", distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        note("buffer", buffer)
        own_forward = build(mesh, "layers")
        own_forward.head.forward = own_forward.head.forward
        note("own_forward", own_forward)
        # The engine has the local tensors by now, and gives back the parameters that the caller holds.
        note("room", build(mesh, "layers"), placement=offload.Placement(device_memory="1KiB"))
        sharded = Decoder()
        fully_shard(sharded)
        note("fully_shard", sharded)
    return errors


def run_page(code: str) -> list[float]:
    """Run the code of a page on this rank. Return the losses."""
    dist.init_process_group("gloo")
    try:
        values: dict[str, Any] = {}
        exec(code, values)
        assert isinstance(values["weights"]["model.layers.0.mlp.up_proj.weight"], DTensor)
        losses: list[float] = values["losses"]
        return losses
    finally:
        dist.destroy_process_group()
