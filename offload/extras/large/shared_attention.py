"""Attention with sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509).

Each rank has some tokens from every row, and during attention all tokens for some heads. Calls arrive through the
transformers attention interface. The model's own attention and mask functions run over whole rows with fewer heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from offload.accelerators import single_queue
from offload.distributed.comm import Comm
from offload.engine.comparison import OTHER_ORDER, tolerance
from offload.engine.loss.batch import map_tensors
from offload.engine.loss.loss import select_inputs
from offload.engine.recording.equivalence import isolated
from offload.engine.units import attention
from offload.engine.units.attention import Attention, BaseModelHead, Batch, Copy
from offload.engine.units.stages import Host
from offload.engine.units.trial import ENGINE_ERRORS
from offload.errors import ConfigError
from offload.extras.large.shared_rows import SharedRows, WholeRows, share_rows
from offload.modules import in_eval_mode
from offload.tiers.counters import Counters

IMPLEMENTATION = "offload_shared"
"""Name of this attention in transformers."""
_SHARED: WeakValueDictionary[int, SharedAttention] = WeakValueDictionary()
"""Keyed by id of the model config."""
_HEADS, _TOKENS = 1, 2
"""Axes in queries, keys and values."""
_ROUNDING_OF_ONE = 4
"""Allowed ratio between the error at one token position and the mean error. A router may send a token elsewhere."""


class SharedAttention(Attention):
    """The ranks of `comm` share sequences, split in rank order."""

    def __init__(self, model: nn.Module, comm: Comm, counters: Counters) -> None:
        self.comm = comm
        self.size = comm.size
        self._counters = counters
        self._configs = {id(config): config for config in attention_configs(model)}
        self._own = {key: config._attn_implementation for key, config in self._configs.items()}  # before `divert`
        # Of the pass: layers get neither through the model's own code.
        self._rows: WholeRows | None = None
        self._needs_mask = False

    @classmethod
    def open(cls, model: nn.Module, size: int, comm: Comm, counters: Counters) -> Attention:
        if variable := single_queue(comm.device):
            raise ConfigError(
                f"train.sequence_parallel is {size}, and {variable} is 1, so all streams of the GPU share a queue. The "
                "exchanges of attention and the gathers of weights would wait for each other there: unset the "
                "variable, or set it to 32."
            )
        return cls(model, comm.neighbours(size), counters)

    @staticmethod
    def check_model(model: nn.Module, size: int) -> None:
        configs = attention_configs(model)
        if not configs:
            raise ConfigError(
                f"train.sequence_parallel is {size}, but {type(model).__name__} has no transformers configuration, "
                "through which the engine replaces attention: set --train.sequence_parallel 1."
            )
        for config in configs:
            if config._attn_implementation not in ("sdpa", "eager"):
                raise ConfigError(
                    f"train.sequence_parallel is {size}, but attention is computed by {config._attn_implementation}; "
                    "ranks can share only sdpa or eager: build the model with attn_implementation='sdpa', or set "
                    "--train.sequence_parallel 1."
                )
            num = getattr(config, "num_attention_heads", None)
            if isinstance(num, int):
                check_heads(size, num, getattr(config, "num_key_value_heads", None) or num)

    def divert(self) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
        for key, config in self._configs.items():
            config._attn_implementation = IMPLEMENTATION
            _SHARED[key] = self

    def undo(self) -> None:
        for key, config in self._configs.items():
            config._attn_implementation = self._own[key]
            _SHARED.pop(key, None)

    def refuse_own_loop(self) -> None:
        raise ConfigError(
            f"train.sequence_parallel is {self.size}, but the model was called in your own training loop, where "
            "the engine cannot split rows into tokens: use engine.step(batch), or set --train.sequence_parallel 1."
        )

    def begin_pass(self, needs_mask: bool) -> None:
        self._needs_mask = needs_mask

    def share(self, batch: Batch, loss_fn: object) -> tuple[Batch, SharedRows]:
        own, shared = share_rows(batch, loss_fn, self.comm)
        self._check_positions(int(shared.whole.positions.max()) + 1)
        return own, shared

    def _check_positions(self, num_positions: int) -> None:
        """Raise ConfigError if ranks with the first tokens of a row would have other frequencies than the last one."""
        from offload.app.hf.models import rope_limit

        limit = min((limit for each in self._configs.values() if (limit := rope_limit(each))), default=num_positions)
        if num_positions > limit:
            raise ConfigError(
                f"train.sequence_parallel is {self.size}, but beyond {limit:,} tokens the model has other rotary "
                f"frequencies for the whole row, and the batch has positions for {num_positions:,}: the ranks would "
                f"have different ones. Set --data.sequence_length {limit}, or --train.sequence_parallel 1."
            )

    @contextmanager
    def over(
        self, shared: attention.SharedRows | None, batch: Batch, copy_to_device: Copy
    ) -> Iterator[tuple[Batch, Batch]]:
        if not isinstance(shared, SharedRows):
            yield batch, batch
            return
        # The length of this mask tells the model the full row length. `mask` inserts the actual mask.
        ones = torch.ones((), dtype=torch.int64, device=batch["labels"].device)
        carrier = ones.expand(len(batch["labels"]), shared.whole.length)
        before, self._rows = self._rows, shared.whole.to_device(copy_to_device)
        try:
            yield {**batch, "attention_mask": carrier}, {**batch, "shift_labels": copy_to_device(shared.targets)}
        finally:
            self._rows = before

    def check(self, host: Host, head: BaseModelHead | None, shared: attention.SharedRows | None) -> bool:
        if not isinstance(shared, SharedRows):
            return False
        _check_sharing(self, host, head, shared)
        return True

    def mask(self, config: Any, **options: Any) -> Any:
        """Return the mask from the model's own mask function, for whole rows inside `over`."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        own, rows = ALL_MASK_ATTENTION_FUNCTIONS[self._own[id(config)]], self._rows
        # A skipped mask means plain causal attention, across documents and padding.
        options["allow_is_causal_skip"] = options.get("allow_is_causal_skip", True) and not self._needs_mask
        if rows is not None:
            options |= {"q_length": rows.length, "kv_length": rows.length, "attention_mask": rows.padding}
            if rows.documents is not None:
                options["mask_function"] = _within_documents(options["mask_function"], rows.documents, rows.positions)
        return own(config=config, **options)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention by the model's own function.

        Inside `over`, queries, keys and values [rows, heads, tokens, width] are exchanged for all tokens and some
        heads; the result is exchanged back.
        """
        own = self._attention_of(module)
        if self._rows is None:
            return own(module, query, key, value, mask, **options)
        size, label = self.size, f"all-to-all of attention {getattr(module, 'layer_idx', '')}"
        check_heads(size, query.shape[_HEADS], key.shape[_HEADS])
        extra = [name for name, each in options.items() if isinstance(each, torch.Tensor) and name != "position_ids"]
        if extra:
            raise ConfigError(
                f"train.sequence_parallel is {size}, but attention takes {', '.join(extra)} by head or token, which "
                "ranks cannot share: set --train.sequence_parallel 1."
            )
        regrouped: Any = module
        if (times := size // key.shape[_HEADS]) > 1:  # Repeat keys and values to one head per rank.
            key, value = (tensor.repeat_interleave(times, _HEADS) for tensor in (key, value))
            regrouped = _RegroupedModule(module, query.shape[_HEADS] // key.shape[_HEADS])
        query, key, value = self._exchange(label, _HEADS, _TOKENS, query, key, value)
        result, _ = own(regrouped, query, key, value, mask, **options)
        (result,) = self._exchange(label, 1, 2, result)  # [rows, tokens, heads, width]
        return result, None

    def _attention_of(self, module: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config: Any = module.config
        name = self._own[id(config)]
        if name == "eager":  # Each model family has an own eager function in the module file.
            return vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return ALL_ATTENTION_FUNCTIONS[name]

    def _exchange(self, label: str, split: int, join: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _Exchange.apply(self, label, split, join, *tensors)

    def redistribute(self, label: str, split: int, join: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split tensors along axis `split`, exchange the parts, and concatenate along axis `join`.

        Each rank receives one part, in rank order. One all-to-all serves all tensors.
        """
        size = self.size
        parts = [tensor.chunk(size, split) for tensor in tensors]
        pieces = [torch.cat([of_tensor[rank].reshape(-1) for of_tensor in parts]) for rank in range(size)]
        received_pieces = [torch.empty_like(piece) for piece in pieces]
        self.comm.all_to_all(received_pieces, pieces, label)
        self._counters.count("all_to_all_elements", size * pieces[0].numel())
        sizes = [of_tensor[0].numel() for of_tensor in parts]
        by_tensor = zip(*(piece.split(sizes) for piece in received_pieces), strict=True)
        return [
            torch.cat([part.view(of_tensor[0].shape) for part in rank_parts], join)
            for rank_parts, of_tensor in zip(by_tensor, parts, strict=True)
        ]


class _Exchange(torch.autograd.Function):
    """An all-to-all. The backward is the inverse all-to-all for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, shared: SharedAttention, label: str, split: int, join: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange = shared, label, split, join
        return tuple(shared.redistribute(label, split, join, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        shared, label, split, join = ctx.exchange
        return None, None, None, None, *shared.redistribute(f"{label}, backward", join, split, gradients)


class _RegroupedModule:
    """Proxy for an attention module with another number of query heads per key head."""

    def __init__(self, module: nn.Module, num_groups: int) -> None:
        self._module = module
        self.num_key_value_groups = num_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Compute shared attention. A copied model, not registered here, uses sdpa."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = module.config
    shared = _SHARED.get(id(config))
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if shared is not None:
        attend = shared.attend
    return attend(module, *args, **kwargs)


def _mask(config: Any, **options: Any) -> Any:
    """Return a mask, with the same fallback as `_attend`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    shared = _SHARED.get(id(config))
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if shared is not None:
        mask = shared.mask
    return mask(config=config, **options)


def _within_documents(
    allows: Callable[..., Any], documents: torch.Tensor, positions: torch.Tensor
) -> Callable[..., Any]:
    """Return a mask function: `allows` by position, restricted to the same document."""

    def inner(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_same: torch.Tensor = documents[row, query] == documents[row, key]
        # By position, because a window counts tokens of one document.
        return is_same & allows(row, head, positions[row, query], positions[row, key])

    return inner


def attention_configs(model: nn.Module) -> list[Any]:
    """Return the model configs with an attention implementation."""
    # A model of text and images has several, and each of their modules refers to one.
    configs = (getattr(module, "config", None) for module in model.modules())
    return [
        config for config in {id(each): each for each in configs}.values() if hasattr(config, "_attn_implementation")
    ]


def check_heads(size: int, num_heads: int, num_key_value_heads: int) -> None:
    """Raise ConfigError if heads cannot be divided evenly over `size` ranks."""
    if num_heads % size == 0 and (num_key_value_heads % size == 0 or size % num_key_value_heads == 0):
        return
    fitting = [
        n for n in range(1, num_heads + 1)
        if num_heads % n == 0 and (num_key_value_heads % n == 0 or n % num_key_value_heads == 0)
    ]  # fmt: skip
    raise ConfigError(
        f"train.sequence_parallel is {size}, but {num_heads} query heads and {num_key_value_heads} key-value heads of "
        "attention cannot be divided evenly among the ranks: set --train.sequence_parallel to one of "
        f"{', '.join(map(str, fitting))}."
    )


def _check_sharing(own: SharedAttention, host: Host, head: BaseModelHead | None, shared: SharedRows) -> None:
    """Run the model on the first tokens of a few rows, whole and shared, and compare the base model outputs.

    Collective. Raises ConfigError on all ranks if a module mixes tokens outside attention, if attention bypasses the
    transformers interface, or if the loss is not a mean over tokens.
    """
    comm, size = own.comm, own.size
    name = type(host.model).__name__
    if head is None:
        raise ConfigError(
            f"train.sequence_parallel is {size}, but the loss of {name} is not a mean over tokens with shifted "
            "labels: it has a term over all tokens (such as a router's auxiliary loss, output_router_logits), uses "
            "other targets, or takes no shift_labels. Leave that out, or set --train.sequence_parallel 1."
        )

    def hidden_states(batch: Batch) -> torch.Tensor:
        output: Any = head.base_output(lambda: host.model(**select_inputs(host.model, batch, None)))
        return output["last_hidden_state"].float()

    difference, distance = "", 0.0
    most = tolerance(OTHER_ORDER, [next(host.model.parameters())]).token
    with isolated(host), in_eval_mode(host.model):
        copy_to_device = host.device.copy_to_device
        own_sample, shared_sample = share_rows(shared.sample, None, comm)
        own.begin_pass(shared_sample.needs_mask)
        try:
            whole_sample, own_sample = (map_tensors(copy_to_device, each) for each in (shared.sample, own_sample))
            expected = hidden_states(whole_sample)
            with own.over(shared_sample, own_sample, copy_to_device) as (model_batch, _):
                actual = hidden_states(model_batch)
            expected = expected[:, comm.rank * actual.shape[1] :][:, : actual.shape[1]]  # without filler tokens
            actual = actual[:, : expected.shape[1]]
            if expected.numel():
                token_errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
                # A lost neighbour token affects only the first tokens on a rank; rounding affects any token.
                distance = float(max(token_errors.mean(), token_errors.mean(0).max() / _ROUNDING_OF_ONE))
            if distance > most:
                difference = f"tokens differ by {distance:.1g} of their norm on rank {host.comm.rank}"
        except ENGINE_ERRORS:
            raise
        except Exception as error:  # same error on all ranks in the group, after equal exchanges
            host.runner.has_failed = False
            difference = f"{type(error).__name__}: {error}".splitlines()[0]
    difference = next(filter(None, host.comm.gather_objects(difference, "trial run with shared sequences")), "")
    if difference:
        raise ConfigError(
            f"train.sequence_parallel is {size}, but {name} gives other results on shared sequences than on whole "
            f"ones ({difference}): a module other than attention mixes tokens (such as a convolution or linear "
            "attention), or attention is not called through transformers' interface. Set --train.sequence_parallel 1."
        )
