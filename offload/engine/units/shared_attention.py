"""Attention over sequences that ranks share: each of a group has some of the tokens of every row, and in attention all
tokens of some of the heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Attention is called through transformers' own interface. What is computed is the model's own: its attention function
runs over the whole rows, with fewer heads, and so does what makes its masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.errors import ConfigError
from offload.telemetry.counters import Counters

IMPLEMENTATION = "offload_shared"
"""What transformers knows the attention over shared sequences as."""
_SHARED: WeakValueDictionary[int, SharedAttention] = WeakValueDictionary()
"""By the identity of their models' configurations."""
_HEADS, _TOKENS = 1, 2
"""The axes of queries, keys and values."""


@dataclass(frozen=True)
class WholeRows:
    """What attention has to know of rows whose tokens several ranks have."""

    length: int
    """The tokens of a row, those of all ranks."""
    positions: torch.Tensor
    """The position of each token, int64 [rows, length]."""
    padding: torch.Tensor | None = None
    """Which tokens are no padding, bool [rows, length]; None where nobody says."""
    documents: torch.Tensor | None = None
    """The number of the document that each token is in, int64 [rows, length]; None where a row is one."""

    @property
    def needs_mask(self) -> bool:
        """True where a token may not see all tokens before it."""
        return self.documents is not None or (self.padding is not None and not bool(self.padding.all()))

    def on(self, bring_up: Callable[[torch.Tensor], torch.Tensor]) -> WholeRows:
        """Return the same on a device, to which `bring_up` takes tensors."""
        padding, documents = (t if t is None else bring_up(t) for t in (self.padding, self.documents))
        return WholeRows(self.length, bring_up(self.positions), padding, documents)


class OwnAttention:
    """Each rank has whole sequences: nothing is exchanged in attention."""

    comm = Comm()
    """The ranks that share sequences."""

    def divert(self) -> None:
        """From now on calls of attention come here."""

    def undo(self) -> None:
        """Let attention be computed as it was before."""

    def begin_pass(self, needs_mask: bool) -> None:
        """A pass begins. `needs_mask`: on some rank tokens may not see all tokens before them, so that all make masks:
        what units are called with is alike on all ranks.
        """

    @contextmanager
    def over(self, rows: WholeRows) -> Iterator[None]:  # noqa: ARG002
        """Within, attention is over these rows, of which each rank has some tokens."""
        yield

    def refuse_own_loop(self) -> None:
        """Raise ConfigError where a model cannot be called by a loop that is not the engine's."""


class SharedAttention(OwnAttention):
    """The ranks of `comm` share the sequences of a model, each in the order of its number."""

    def __init__(self, model: nn.Module, comm: Comm, counters: Counters) -> None:
        self.comm, self._counters = comm, counters
        self._configs = {id(config): config for config in _configs(model)}
        self._own = {key: config._attn_implementation for key, config in self._configs.items()}
        self._rows: WholeRows | None = None
        self._needs_mask = False

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
            f"train.sequence_parallel is {self.comm.size}, and the model was called by a loop of its caller's, whose "
            "rows the engine cannot cut in tokens: train by engine.step(batch), or set sequence_parallel to 1."
        )

    def begin_pass(self, needs_mask: bool) -> None:
        self._needs_mask = needs_mask

    @contextmanager
    def over(self, rows: WholeRows) -> Iterator[None]:
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    def mask(self, config: Any, **given: Any) -> Any:
        """Return the mask that the model's own function makes, of whole rows while these are shared."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        own, rows = ALL_MASK_ATTENTION_FUNCTIONS[self._own[id(config)]], self._rows
        given["allow_is_causal_skip"] = given.get("allow_is_causal_skip", True) and not self._needs_mask
        if rows is not None:
            given |= {"q_length": rows.length, "kv_length": rows.length, "attention_mask": rows.padding}
            if rows.documents is not None:
                given["mask_function"] = _of_documents(given["mask_function"], rows.documents, rows.positions)
        return own(config=config, **given)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **given: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention by the model's own function. While rows are shared, queries [rows, heads, tokens, width],
        keys and values are exchanged for those of all tokens and some heads, and the results back.
        """
        own = self._attention_of(module)
        if self._rows is None:
            return own(module, query, key, value, mask, **given)
        size, what = self.comm.size, f"all-to-all of attention {getattr(module, 'layer_idx', '')}"
        check_heads(size, query.shape[_HEADS], key.shape[_HEADS])
        extra = [name for name, each in given.items() if isinstance(each, torch.Tensor) and name != "position_ids"]
        if extra:
            raise ConfigError(
                f"train.sequence_parallel is {size}, and attention takes {', '.join(extra)} of its own heads or "
                "tokens, which ranks cannot share: set --train.sequence_parallel 1."
            )
        if (times := size // key.shape[_HEADS]) > 1:  # a head for each rank
            key, value = (tensor.repeat_interleave(times, _HEADS) for tensor in (key, value))
        query, key, value = self._exchange(what, _HEADS, _TOKENS, query, key, value)
        stand_in: Any = _WithGroups(module, query.shape[_HEADS] // key.shape[_HEADS]) if times > 1 else module
        result, _ = own(stand_in, query, key, value, mask, **given)
        (result,) = self._exchange(what, 1, 2, result)  # [rows, tokens, heads, width]
        return result, None

    def _attention_of(self, module: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config: Any = module.config
        name = self._own[id(config)]
        if name == "eager":  # each family has its own, beside its modules
            return vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return ALL_ATTENTION_FUNCTIONS[name]

    def _exchange(self, what: str, split: int, join: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _Exchange.apply(self, what, split, join, *tensors)

    def redistribute(self, what: str, split: int, join: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Cut tensors along the axis `split`, give each rank of the group its part, in rank order, and put what comes
        from them together along the axis `join`. One exchange for all.
        """
        size = self.comm.size
        parts = [tensor.chunk(size, split) for tensor in tensors]
        pieces = [torch.cat([of_tensor[rank].reshape(-1) for of_tensor in parts]) for rank in range(size)]
        received = [torch.empty_like(piece) for piece in pieces]
        self.comm.all_to_all(received, pieces, what)
        self._counters.count("all_to_all_elements", size * pieces[0].numel())
        sizes = [of_tensor[0].numel() for of_tensor in parts]
        by_tensor = zip(*(piece.split(sizes) for piece in received), strict=True)
        return [
            torch.cat([part.view(of_tensor[0].shape) for part in its], join)
            for its, of_tensor in zip(by_tensor, parts, strict=True)
        ]


class _Exchange(torch.autograd.Function):
    """An exchange, whose backward is the inverse exchange of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, shared: SharedAttention, what: str, split: int, join: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = shared, what, split, join
        return tuple(shared.redistribute(what, split, join, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        shared, what, split, join = ctx.how
        return None, None, None, None, *shared.redistribute(f"{what}, backward", join, split, gradients)


class _WithGroups:
    """An attention module as its attention function sees it, with another number of queries for a key."""

    def __init__(self, module: nn.Module, num_groups: int) -> None:
        self._module, self.num_key_value_groups = module, num_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Compute attention as it is shared; of a copy of the model, in one of transformers' ways."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = module.config
    shared = _SHARED.get(id(config))
    return (ALL_ATTENTION_FUNCTIONS["sdpa"] if shared is None else shared.attend)(module, *args, **kwargs)


def _mask(config: Any, **given: Any) -> Any:
    """Return a mask, as `_attend` computes attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    shared = _SHARED.get(id(config))
    return (ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] if shared is None else shared.mask)(config=config, **given)


def _of_documents(allows: Callable[..., Any], documents: torch.Tensor, positions: torch.Tensor) -> Callable[..., Any]:
    """Return what a token may see, where `allows` says so by positions, of its own document alone."""

    def inner(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_same: torch.Tensor = documents[row, query] == documents[row, key]
        return is_same & allows(row, head, positions[row, query], positions[row, key])

    return inner


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a model that say how attention is computed."""
    found = (getattr(module, "config", None) for module in model.modules())
    return [config for config in {id(each): each for each in found}.values() if hasattr(config, "_attn_implementation")]


def check_shared(model: nn.Module, size: int) -> None:
    """Raise ConfigError where `size` ranks cannot share the sequences of a model, as far as its configuration tells."""
    if size == 1:
        return
    configs = _configs(model)
    if not configs:
        raise ConfigError(
            f"train.sequence_parallel is {size}, and {type(model).__name__} has no configuration of transformers, by "
            "whose interface attention is exchanged: set --train.sequence_parallel 1."
        )
    for config in configs:
        if config._attn_implementation not in ("sdpa", "eager"):
            raise ConfigError(
                f"train.sequence_parallel is {size}, and attention is computed by {config._attn_implementation}; ranks "
                "share that of sdpa or eager: build the model with attn_implementation='sdpa', or set "
                "--train.sequence_parallel 1."
            )
        num = getattr(config, "num_attention_heads", None)
        if isinstance(num, int):
            check_heads(size, num, getattr(config, "num_key_value_heads", None) or num)


def check_heads(size: int, num_heads: int, num_key_value_heads: int) -> None:
    """Raise ConfigError where `size` ranks cannot have as many heads each."""
    if num_heads % size == 0 and (num_key_value_heads % size == 0 or size % num_key_value_heads == 0):
        return
    fitting = [
        n for n in range(1, num_heads + 1)
        if num_heads % n == 0 and (num_key_value_heads % n == 0 or n % num_key_value_heads == 0)
    ]  # fmt: skip
    raise ConfigError(
        f"train.sequence_parallel is {size}, and attention has {num_heads} heads of queries and {num_key_value_heads} "
        f"of keys and values, of which each rank is to have as many: set --train.sequence_parallel to one of "
        f"{', '.join(map(str, fitting))}."
    )


def open_attention(model: nn.Module, size: int, comm: Comm, counters: Counters) -> OwnAttention:
    """Return the attention of a model whose sequences groups of `size` ranks share. Collective. Raises ConfigError."""
    return OwnAttention() if size == 1 else SharedAttention(model, comm.neighbours(size), counters)
