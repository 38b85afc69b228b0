"""A unit: one module whose parameters travel together. The one place that reroutes a module's forward.

Its code is untouched. Forward waits for the weights in a slot, runs the original forward without a graph, and lets
others have the slot; backward waits for them again, recomputes under the saved generator state with a graph, and hands
the gradients on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from offload.engine.units.belongings import NotePlace, note_places
from offload.engine.units.find import Candidate, Place, regions_of
from offload.engine.units.resting import OffloadedTensor, past_subclasses
from offload.engine.units.traits import Trained, UnitTraits
from offload.errors import ConfigError, format_bytes, warn
from offload.layout.regions import Piece, Region
from offload.tiers.slots import Slots

_NOTHING = nullcontext()
MakeLive = Callable[[Sequence[Region]], dict[Piece, nn.Parameter]]
"""Makes Parameters that view the device's copy of regions, by the pieces that they are."""


class Unit:
    """A module, the places of its parameters, the regions that hold them, and what the recording pass has learned
    about it.
    """

    def __init__(
        self, number: int, candidate: Candidate, regions: Sequence[Region], slots: Slots, make_live: MakeLive
    ) -> None:
        self.number = number
        self.name, self.module, self.places = candidate.name, candidate.module, candidate.places
        self.layer = candidate.layer or self.name
        """The name of what of the model the unit is, all of it or some rows."""
        self.modules = list(self.module.modules())
        self.whole, self.resident, self.is_block = candidate.whole, candidate.resident, candidate.is_block
        self.in_records = bool(candidate.records)
        """The unit is a layer's experts, which come up a few at a time inside the use of their block."""
        self.regions = tuple(regions)
        self._trainable = [index for region in regions if region.trainable for index in region.parameters]
        self.weight_bytes = sum(region.weight_bytes for region in regions)
        self.frozen: frozenset[int] = frozenset()
        self.trainable = bool(self._trainable)
        """A parameter of the unit takes gradients."""
        self.traits = UnitTraits()
        self.known: dict[Hashable, UnitTraits] = {}
        self.resting: dict[int, nn.Parameter] = {}
        self._hung: Mapping[int, nn.Parameter] = {}  # what was put into the module last
        self._live: dict[int, dict[int, nn.Parameter]] = {}
        self._slots, self._make_live = slots, make_live
        self._kinds: list[type] = []
        self._notes: Collection[NotePlace] = ()
        self._original: Callable[..., Any] | None = None
        self._own: Callable[..., Any] | None = None  # what hung in the module itself before

    def learn(self, structure: Hashable) -> UnitTraits:
        """Open the variant for uses with arguments of this structure, empty or with what earlier passes wrote."""
        self.traits = self.known.setdefault(structure, UnitTraits())
        return self.traits

    def recall(self, structure: Hashable) -> bool:
        """Turn to the variant for uses of this structure. Where there is none: what is safe for any use, and False."""
        found = self.known.get(structure)
        if found is None:
            buffers = {place for variant in self.known.values() for place in variant.buffers}
            needs_graph = any(variant.needs_graph for variant in self.known.values())
            self.traits = UnitTraits(buffers=buffers, needs_graph=needs_graph)
            return False
        self.traits = found
        return True

    @property
    def notes(self) -> Collection[NotePlace]:
        """Where code could change something in place that is no buffer. It is looked for anew whenever attributes have
        come, or hold other kinds of things.
        """
        kinds = list(map(type, chain.from_iterable(map(dict.values, map(vars, self.modules)))))
        if kinds != self._kinds:
            self._kinds, self._notes = kinds, note_places(self.modules)
        return self._notes

    def still_buffers(self) -> list[tuple[torch.Tensor, int]]:
        """Return the buffers that no forward was seen to move, and their versions."""
        moving = self.traits.buffers
        return [
            (buffer, buffer._version)
            for module in self.modules
            if module._buffers
            for key, buffer in module._buffers.items()
            if buffer is not None and (module, key) not in moving and not buffer.is_inference()
        ]

    # -- the module's parameters -----------------------------------------------------------------------------

    def install(self, parameters: dict[int, nn.Parameter]) -> None:
        """Hang Parameters (by the model's index) in the module."""
        self._hung = parameters
        put_parameters(self.places, parameters)

    def rest(self) -> None:
        """Leave nothing in the module that views weights in a slot, wherever a pass was given up."""
        if not self.resident:
            self.install(self.resting)

    def live(self) -> dict[int, nn.Parameter]:
        """Return the Parameters that view this unit's weights where they are on the device, made once a place."""
        offset = self._slots.offset(self._slots.cargo_of(self.regions))
        if offset not in self._live:
            live = self._make_live(self.regions)  # a unit has its parameters as a whole
            self._live[offset] = {piece.parameter: parameter for piece, parameter in live.items()}
            self._mark(self._live[offset])
        return self._live[offset]

    def trained_of(self, tensors: Sequence[torch.Tensor]) -> Trained:
        """Return what of a use with these inputs takes gradients."""
        return tuple([tensor.requires_grad for tensor in tensors]), self.frozen

    def freeze(self, frozen: frozenset[int]) -> None:
        """Take no gradients for these parameters from now on, and for all others that were to be trained."""
        self.frozen = frozen
        self.trainable = not frozen.issuperset(self._trainable)
        for parameters in (self.resting, *self._live.values()):
            self._mark(parameters)

    def frozen_with(self, then: frozenset[int]) -> AbstractContextManager[None]:
        """Within, a backward: what was frozen `then`, in its forward, takes no gradients, nor does what is by now."""
        resting = self.resting

        def look() -> list[int]:
            return [index for index in self._trainable if not resting[index].requires_grad]

        frozen = then.union(past_subclasses(look))  # else each look at a parameter is a call
        return _NOTHING if frozen == self.frozen else self._frozen_as(frozen)

    @contextmanager
    def _frozen_as(self, frozen: frozenset[int]) -> Iterator[None]:
        before = self.frozen

        def mark(frozen: frozenset[int]) -> None:
            self.frozen = frozen
            for parameters in self._live.values():
                self._mark(parameters)

        mark(frozen)
        try:
            yield
        finally:
            mark(before)

    def _mark(self, parameters: dict[int, nn.Parameter]) -> None:
        for index in self._trainable:
            parameters[index].requires_grad_(index not in self.frozen)

    def has(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """True where a Parameter views weights on the device, as those of a unit that stays there do."""
        return parameter.dtype == dtype and not isinstance(parameter, OffloadedTensor) and self._slots.holds(parameter)

    def drop_gradients(self) -> None:
        """Forget gradients that autograd had made when an exception kept their hooks from taking them."""
        for parameters in self._live.values():
            for parameter in parameters.values():
                parameter.grad = None

    def forget_live(self) -> None:
        """The device's memory for weights is another."""
        self._live.clear()

    # -- the module's forward --------------------------------------------------------------------------------

    def route(self, call: Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Send calls of the module to `call(unit, args, kwargs)`. Its signature stays readable."""
        self._own = self.module.__dict__.get("forward")
        self._original = original = self.module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(self, args, kwargs)

        self.module.forward = forward

    def warn_that_it_stays(self, num_bytes: int) -> None:
        """Warn that so many bytes of weights will stay on the device; raise ConfigError where they cannot."""
        warn(
            f"unit {self.name} is read from outside itself: its weights stay on the device ({format_bytes(num_bytes)})."
        )

    def stay(self) -> None:
        """The weights stay on the device: the module runs as it is."""
        self.unroute()
        self.resident = True

    def unroute(self) -> None:
        """Give the module its own forward back."""
        if self._original is None:
            return
        if self._own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self._own
        self._original = None

    def hang(self) -> bool:
        """Hang the weights in the module where they do not yet, and return whether they did not. Raises ConfigError
        where somebody has hung others there (`functional_call` of the module alone), whose gradients would be lost.
        """
        num_resting, resting, hung = 0, self.resting, self._hung
        for place in self.places:
            found = place.module._parameters[place.key]
            if found is resting[place.parameter]:
                num_resting += 1
            elif found is not hung[place.parameter] and (found is None or not self.has(found, found.dtype)):
                raise ConfigError(
                    f"unit {self.name} was called after its {place.key} was replaced (functional_call does it), while "
                    "the weights are in an engine, which would not see the gradient of the other. Change the model "
                    "before Engine(), or after engine.close(restore=True)."
                )
        if num_resting:
            self.install(self.live())
        return num_resting > 0

    @contextmanager
    def up(self) -> Iterator[None]:
        """Within, the weights hang in the module, or what hung there before in their place."""
        hung = self.hang()
        try:
            yield
        finally:
            if hung:
                self.install(self.resting)

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's original forward."""
        assert self._original is not None
        return self._original


class CutLayer(Unit):
    """A layer whose weight is cut in blocks of rows, which are units: it has no weights of its own, and its module runs
    over what stands for them, which hands its operations on to the blocks.
    """

    def route(self, call: Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        pass

    def warn_that_it_stays(self, num_bytes: int) -> NoReturn:  # noqa: ARG002
        raise ConfigError(
            f"the weight of {self.name} is larger than the device's share and goes in blocks of rows, and the model "
            "reads it by another operation than linear and embedding, which needs all of it at once. Raise "
            "--offload.device_memory until all of it fits, or let the model call the layer (or functional.linear)."
        )


def open_units(
    candidates: Iterable[Candidate], regions: Sequence[Region], slots: Slots, make_live: MakeLive
) -> Iterator[Unit]:
    """Yield the units, in the order of their candidates; the arguments are those of `Unit`."""
    for number, candidate in enumerate(candidates):
        kind = CutLayer if candidate.is_cut else Unit
        yield kind(number, candidate, regions_of(candidate, regions), slots, make_live)


def put_parameters(places: Iterable[Place], parameters: Mapping[int, nn.Parameter]) -> None:
    """Hang Parameters (by the model's index) in their places by the short way, or through a module's own `__setattr__`
    where it keeps references (the RNNs of torch do).
    """
    for place in places:
        module, parameter = place.module, parameters[place.parameter]
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[place.key] = parameter
        else:
            setattr(module, place.key, parameter)
