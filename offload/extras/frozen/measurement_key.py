"""The key for values measured with a frozen model: a hash over every input to the computation.

All settings except `LEFT_OUT` are included, so a new setting counts until someone excludes it with a reason. The rest
comes from the objects themselves: weights, buffers, module attributes, code, rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.app.config.config import Config
from offload.app.environment import describe_environment
from offload.checkpoint.manifest import raw
from offload.distributed.comm import digest
from offload.engine.engine import Engine
from offload.engine.moved_buffers import digests_of
from offload.extras.data.dataset import Dataset
from offload.extras.data.sources import hash_text
from offload.planning.memory import EXPERT_BUFFER
from offload.user_cache import class_hash, code_hash

LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("run.dir", "run.name", "run.report_to"),
        "It names where a run is written.",
    ),
    **dict.fromkeys(
        (
            *("model.path", "model.preset", "model.init", "lora.config", "lora.adapter"),
            *("prefs.reference", "distill.teacher"),
        ),
        "It names where a model is from: the weights, buffers, attributes and code of the model are in the key.",
    ),
    **dict.fromkeys(
        (
            *("data.source", "data.sources", "data.eval_source", "data.format", "data.columns", "data.tokenizer"),
            *("data.stopping_strategy", "data.on_bad_row", "data.train_on_prompt", "data.num_workers"),
            "data.eval_share",
        ),
        "It decides about rows, and a hash of the rows is in the key.",
    ),
    **dict.fromkeys(
        (
            *("train.beta", "train.steps", "train.epochs", "train.max_seconds", "train.recompute"),
            *("train.max_grad_norm", "train.clip", "train.on_nonfinite", "train.delay", "train.delay_after"),
            *("train.eval_every", "train.eval_batches", "train.log_every"),
            *("train.early_stopping_patience", "train.early_stopping_min_delta", "optimizer.reset", "optimizer.lr"),
            *("optimizer.betas", "optimizer.eps", "optimizer.weight_decay", "optimizer.momentum", "optimizer.nesterov"),
            *("optimizer.schedule", "optimizer.warmup_steps", "optimizer.states", "distill.beta", "distill.labels"),
        ),
        "It is about steps, and the reference is computed before the first one, without a backward.",
    ),
    **dict.fromkeys(
        (
            *("offload.parameters", "offload.optimizer", "offload.gradients", "offload.activations", "offload.graphs"),
            *("offload.optimizer_memory", "offload.graphs_memory", "offload.host_memory"),
            *("offload.nvme_dir", "offload.nvme_memory", "offload.prefetch", "offload.throttle", "offload.update"),
            *("offload.zero_stage", "offload.replicas", "offload.replica_states"),
        ),
        "It decides where states are and when they move, which changes no bit of a forward.",
    ),
    **dict.fromkeys(
        (
            *("checkpoint.every", "checkpoint.keep", "checkpoint.resume", "checkpoint.on_error"),
            *("checkpoint.keep_best", "checkpoint.export", "checkpoint.export_best"),
        ),
        "It is about files that are written after the reference is known.",
    ),
}
"""Settings left out of the key, each with a reason."""
LEFT_OUT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "base_model_name_or_path"),
        "A configuration names where it was loaded from.",
    ),
    **dict.fromkeys(
        ("memory", "platform", "pci"),
        "The environment lists free memory, the kernel of the operating system and the slot of a GPU.",
    ),
    "_original_object_hash": (
        "Python salts it in each process. It tells transformers whether a generation configuration was edited."
    ),
}
"""Attributes and items left out of the key everywhere, each with a reason."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def measurement_key(config: Config, engine: Engine, data: Dataset) -> str:
    """Return 32 hexadecimal digits, equal only for runs with bit-equal measured values. Collective."""
    # Streamed experts run by other operations, with other last bits.
    streams_experts = any(name == EXPERT_BUFFER for _, name, _ in engine.allocations)  # with auto, memory decides
    passes = engine.device.type, engine.world_size, engine.head_chunk_bytes, engine.told_tiles, streams_experts
    rows = [(name, rows.identity, rows.sequence_length) for name, rows in data.row_sets.items()]
    batches = data.pad_id, data.batch_size, type(data.batching).__name__
    machine = describe_environment(), torch.get_float32_matmul_precision()
    own = describe_settings(config), describe_model(engine.model)
    # Any edit of the code counts: nobody can tell harmless edits from others.
    code = code_hash(), class_hash({type(module) for module in engine.model.modules()})
    return hash_text(
        repr((*own, engine.weights_mark(whole=True), _Description().of([passes, rows, batches, machine, code])))
    )


def describe_settings(config: Config) -> str:
    """Return, as text, the settings that must be equal to reuse the results of a reference model."""
    return repr(_Description().of([item for item in config.items() if item[0] not in LEFT_OUT]))


def describe_model(model: Any) -> str:
    """Return model structure, buffers, attributes, hooks and configurations as text.

    Parameters are left to `Engine.weights_mark`.
    """
    modules = [
        (
            name,
            type(module),
            {key: value for key, value in vars(module).items() if key not in _MODULE_ATTRIBUTES},
            [list(getattr(module, hooks).values()) for hooks in _HOOKS],
        )
        for name, module in model.named_modules()
    ]
    return repr((digests_of(model, torch.Tensor.cpu), _Description().of(modules)))


class _Description:
    """Describes values as nested text lists, equal for equal values in any process: no addresses, no set order."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps values alive, so ids stay unique

    def of(self, value: Any) -> Any:
        """Return the description of a value.

        Modules, parameters and engine attributes on modules appear by class name alone.
        """
        value_class = type(value)
        name = [value_class.__module__, value_class.__qualname__]
        if isinstance(value, nn.Module | nn.Parameter) or value_class.__module__.startswith("offload.engine."):
            return name
        if not hasattr(value, "__dict__") and not isinstance(value, list | tuple | dict | set | frozenset):
            # The default text of an object has an address, another one in each process.
            if any("__repr__" in vars(each) for each in value_class.__mro__[:-1]):
                return repr(value)
            return name
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        return [*name, *self._inside(value)]

    def _inside(self, value: Any) -> list[Any]:
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            cells = getattr(value, "__closure__", None) or ()
            # A function is code, hashed elsewhere, and the values in the closure.
            captured = [getattr(value, "__self__", None), *(each.cell_contents for each in cells)]
            return [value.__module__, value.__qualname__, *(self.of(each) for each in captured)]
        if isinstance(value, partial):
            return [self.of(each) for each in (value.func, value.args, value.keywords)]
        if isinstance(value, torch.Tensor | np.ndarray):
            return [str(value.dtype), *value.shape, digest(raw(torch.as_tensor(value).cpu().contiguous()).tobytes())]
        if isinstance(value, Mapping):
            items = [(repr(self.of(key)), self.of(each)) for key, each in value.items() if key not in LEFT_OUT_NAMES]
            # Sorted: the order of insertion changes no result.
            return sorted(items, key=lambda item: item[0])
        if isinstance(value, set | frozenset):
            return sorted(repr(self.of(each)) for each in value)
        if isinstance(value, list | tuple):
            return [self.of(each) for each in value]
        return self._inside(vars(value))
