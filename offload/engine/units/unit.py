"""A unit: one module whose parameters move together. This file is the only place where a module forward is replaced.

Module code stays unchanged. The forward waits for the weights in a slot, runs the original forward without an autograd
graph and releases the slot. The backward waits for the weights again, recomputes with the saved RNG state and a graph,
and passes on the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from offload.engine.gradients.flow import take_gradient
from offload.engine.units.find import ParameterPlace, UnitCandidate, regions_of
from offload.engine.units.fitted_attention import with_fitted_attention
from offload.engine.units.offloaded_tensor import OffloadedTensor, lend_gradient
from offload.engine.units.snapshots import past_subclasses
from offload.engine.units.state_snapshot import AttributePlace, find_mutable_attributes
from offload.engine.units.traits import GradientSignature, UnitTraits
from offload.errors import ConfigError, format_bytes, warn
from offload.layout.regions import Piece, Region
from offload.tiers.slots import Slots

MakeLive = Callable[[Sequence[Region]], dict[Piece, nn.Parameter]]
"""Creates Parameters as views of device weights, keyed by piece."""
_requires_grad = attrgetter("requires_grad")
CallTarget = Callable[["Unit", tuple[Any, ...], dict[str, Any]], Any]
"""Runs the call of a unit module: unit, positional and keyword arguments. Returns the result for the caller."""


class CallReceiver(Protocol):
    """Object with the target of unit calls. The target may change between calls."""

    target: CallTarget


class Unit:
    """A module with its parameter places, regions, and traits learned in the recording pass."""

    def __init__(
        self, number: int, candidate: UnitCandidate, regions: Sequence[Region], slots: Slots, make_live: MakeLive
    ) -> None:
        self.number = number
        self.name = candidate.name
        self.layer = candidate.layer or self.name
        """Name of the model part in this unit: the module, or for a row block the cut layer."""

        # The module and its weights.
        self.module = candidate.module
        self.modules = list(self.module.modules())
        self.places = candidate.places
        self.whole = candidate.whole
        self.is_block = candidate.is_block
        self.resident = candidate.resident
        self.in_records = bool(candidate.records)
        """True for the experts of one layer, fetched record by record while the surrounding block runs."""
        self.regions = tuple(regions)
        self.weight_bytes = sum(region.weight_bytes for region in regions)
        self._slots = slots
        self._make_live = make_live

        # Gradients. A script may freeze parameters between steps.
        self._trainable = [index for region in regions if region.trainable for index in region.parameters]
        self.trainable = bool(self._trainable)
        """True if any parameter of the unit takes gradients."""
        self.frozen: frozenset[int] = frozenset()

        # What the recording pass has learned.
        self.variants: dict[Hashable, UnitTraits] = {}
        """Traits by structure of the arguments."""
        self.traits = UnitTraits()
        """The variant of the last call. A use keeps those of its own call."""
        self._attribute_types: list[type] = []  # at the last search for mutable attributes
        self._mutable_attributes: Collection[AttributePlace] = ()

        # Parameters in the module.
        self.placeholders: dict[int, nn.Parameter] = {}
        """Parameters in the module between uses: stand-ins, or for tied weights those of a unit on the device."""
        self._tied: dict[int, nn.Parameter] = {}  # of other units, which stay on the device
        self._installed: Mapping[int, nn.Parameter] = {}  # installed last
        self._live: dict[int, dict[int, nn.Parameter]] = {}  # over the slot, by offset there

        # Forwards of the module, known from `route` on.
        self.forward: Callable[..., Any]
        """The original one."""
        self.compute: Callable[..., Any]
        """The same, with attention that fits the device."""
        self._is_routed = False
        self._routed: Callable[..., Any] | None = None
        self._own_forward: Callable[..., Any] | None = None  # in `vars(module)`; None too for the class's forward

    def learn(self, structure: Hashable) -> UnitTraits:
        """Select the variant for an argument structure, with the traits from earlier passes or new empty traits."""
        self._find_adopted(structure)
        self.traits = self.variants.setdefault(structure, UnitTraits())
        return self.traits

    def recall(self, structure: Hashable) -> None:
        """Select the variant for an argument structure, or traits safe for any use if none was recorded."""
        traits = self.variants.get(structure) or self._find_adopted(structure)
        if traits is None:
            # Whatever some recorded use did, this one may do too.
            buffers = {place for variant in self.variants.values() for place in variant.buffers}
            needs_graph = any(variant.needs_graph for variant in self.variants.values())
            keeps = any(variant.keeps for variant in self.variants.values())
            traits = UnitTraits(buffers=buffers, needs_graph=needs_graph, keeps=keeps)
        self.traits = traits

    def _find_adopted(self, structure: Hashable) -> UnitTraits | None:
        """Return the traits from an analysis, which has the text of the structure, and keep them by the structure."""
        if structure not in self.variants and (text := repr(structure)) in self.variants:
            self.variants[structure] = self.variants.pop(text)
        return self.variants.get(structure)

    @property
    def mutable_attributes(self) -> Collection[AttributePlace]:
        """Places with non-buffer values mutable in place.

        Computed again after attributes were added or changed type.
        """
        # One C call for all attributes, because each use asks.
        types = list(map(type, chain.from_iterable(map(dict.values, map(vars, self.modules)))))
        if types != self._attribute_types:
            self._attribute_types, self._mutable_attributes = types, find_mutable_attributes(self.modules)
        return self._mutable_attributes

    def still_buffers(self) -> list[tuple[torch.Tensor, int]]:
        """Return (buffer, version) for all buffers unchanged by every recorded forward."""
        moving = self.traits.buffers
        return [
            (buffer, buffer._version)
            for module in self.modules
            if module._buffers
            for key, buffer in module._buffers.items()
            if buffer is not None and (module, key) not in moving and not buffer.is_inference()
        ]

    # -- the module's parameters -----------------------------------------------------------------------------

    @functools.cached_property
    def stand_ins(self) -> tuple[OffloadedTensor, ...]:
        """Stand-ins for parameters in the module. Units inside it count too."""
        return tuple(p for p in self.module.parameters() if isinstance(p, OffloadedTensor) and p.is_placeholder)

    def install(self, parameters: dict[int, nn.Parameter]) -> None:
        """Put Parameters (keyed by model index) into the module."""
        self._installed = parameters
        put_parameters(self.places, parameters)

    @contextmanager
    def showing(self, parameters: dict[int, nn.Parameter]) -> Iterator[None]:
        """Have other Parameters in the module during the context, for a script that reads them."""
        put_parameters(self.places, parameters)
        try:
            yield
        finally:
            put_parameters(self.places, self._installed)

    def tie(self, other: Unit) -> None:
        """Show the Parameters of `other`, which stays on the device, for all weights of both units.

        A tied weight is one Parameter of the model, before and under an engine. Uses of this unit have their own views.
        """
        tied = {index: parameter for index, parameter in other.live().items() if index in self.placeholders}
        self._tied.update(tied)
        self.placeholders.update(tied)
        self.install_placeholders()

    def install_placeholders(self) -> None:
        """Put the placeholders back after an aborted pass, so no view of slot memory remains in the module."""
        if not self.resident:
            self.install(self.placeholders)

    def live(self) -> dict[int, nn.Parameter]:
        """Return Parameters over the device weights of this unit, created once per slot offset."""
        offset = self._slots.offset(self._slots.cargo_of(self.regions))
        if offset not in self._live:
            live = self._make_live(self.regions)  # A unit has each parameter as one piece.
            self._live[offset] = {piece.parameter: parameter for piece, parameter in live.items()}
            if self.resident:
                self._live[offset] |= self._tied
                for index, parameter in self._live[offset].items():  # scripts see these
                    lend_gradient(parameter, self.placeholders[index])
            self._mark(self._live[offset])
        return self._live[offset]

    def gradient_signature(self, tensors: Sequence[torch.Tensor]) -> GradientSignature:
        """Return the gradient signature of a use: requires_grad per input, and the frozen parameters."""
        return tuple(map(_requires_grad, tensors)), self.frozen

    def freeze(self, frozen: frozenset[int]) -> None:
        """Take no gradients for these parameters from now on, and gradients for all other trainable ones."""
        self.frozen = frozen
        self.trainable = not frozen.issuperset(self._trainable)
        for parameters in (self.placeholders, *self._live.values()):
            self._mark(parameters)

    @contextmanager
    def frozen_with(self, frozen_before: frozenset[int]) -> Iterator[None]:
        """During a backward, freeze the parameters in `frozen_before` (frozen in the forward) and all frozen since."""
        placeholders, before = self.placeholders, self.frozen

        def find_frozen() -> list[int]:
            return [index for index in self._trainable if not placeholders[index].requires_grad]

        # `past_subclasses`, because otherwise each read of requires_grad is a `__torch_function__` call.
        self._freeze_live(frozen_before.union(past_subclasses(find_frozen)))
        try:
            yield
        finally:
            self._freeze_live(before)

    def _freeze_live(self, frozen: frozenset[int]) -> None:
        if frozen != self.frozen:
            self.frozen = frozen
            for parameters in self._live.values():
                self._mark(parameters)

    def _mark(self, parameters: dict[int, nn.Parameter]) -> None:
        for index in self._trainable:
            parameters[index].requires_grad_(index not in self.frozen)

    def has(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """True if `parameter` views weights on the device in this dtype, as in a resident unit."""
        return parameter.dtype == dtype and not isinstance(parameter, OffloadedTensor) and self._slots.holds(parameter)

    def drop_gradients(self) -> None:
        """Drop gradients left by autograd after an exception prevented the gradient hooks."""
        for parameters in self._live.values():
            for parameter in parameters.values():
                take_gradient(parameter)

    def forget_live(self) -> None:
        """Drop the views after the device weight memory was allocated anew."""
        self._live.clear()

    # -- the module's forward --------------------------------------------------------------------------------

    def route(self, receiver: CallReceiver) -> None:
        """Redirect module calls to `receiver.target(unit, args, kwargs)`. The forward signature stays readable."""
        self._own_forward = self.module.__dict__.get("forward")
        self.forward = self.module.forward
        self.compute = with_fitted_attention(self.forward, self._slots.torch_device)
        self._is_routed = True

        @functools.wraps(self.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return receiver.target(self, args, kwargs)

        self.module.forward = self._routed = forward

    def warn_of_residency(self, num_bytes: int) -> None:
        """Warn about `num_bytes` weight bytes staying on the device. A cut layer raises ConfigError instead."""
        warn(
            f"unit {self.name} is read from outside (other modules use its weights), so its weights stay on the device "
            f"({format_bytes(num_bytes)})."
        )

    def keep_on_device(self) -> None:
        """Keep the weights on the device and restore the module forward."""
        self.unroute()
        self.resident = True

    def unroute(self) -> None:
        """Restore the forward of the module."""
        if self._is_routed:
            self._put_own_forward()
            self._is_routed = False

    @contextmanager
    def unrouted(self) -> Iterator[None]:
        """Context in which a call of the module runs the original forward."""
        if not self._is_routed:
            yield
            return
        routed: Any = self._routed
        self._put_own_forward()
        try:
            yield
        finally:
            self.module.forward = routed

    def settle(self) -> None:
        """Restore the forward again if a snapshot from before `unroute` has put the redirection back."""
        if self._is_routed or self._routed is None:
            return
        if vars(self.module).get("forward") is self._routed:
            self._put_own_forward()

    def _put_own_forward(self) -> None:
        if self._own_forward is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self._own_forward

    def install_live(self) -> bool:
        """Install the device weights unless installed already; return True if anything was installed.

        Raises ConfigError if the module has foreign parameters (`functional_call` on the module alone), because their
        gradients would be lost.
        """
        placeholders, installed = self.placeholders, self._installed
        num_placeholders = 0
        for place in self.places:
            parameter = place.module._parameters[place.key]
            if parameter is placeholders[place.parameter]:
                num_placeholders += 1
            elif parameter is not installed[place.parameter] and (
                parameter is None or not self.has(parameter, parameter.dtype)
            ):
                raise ConfigError(
                    f"unit {self.name} was called with its {place.key} replaced (as functional_call does), but its "
                    "weights are in an engine, which would not see the gradient of the replacement. Change the model "
                    "before Engine(), or after engine.close(restore=True)."
                )
        if num_placeholders:
            self.install(self.live())
        return num_placeholders > 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the device weights during the context; afterwards, undo the installation, if any."""
        has_installed = self.install_live()
        try:
            yield
        finally:
            if has_installed:
                self.install(self.placeholders)


class CutLayer(Unit):
    """A layer with row blocks as separate units.

    The layer has no own weights: the module runs over a stand-in weight, and the stand-in delegates operations to the
    blocks.
    """

    def route(self, receiver: CallReceiver) -> None:
        pass

    def warn_of_residency(self, num_bytes: int) -> NoReturn:  # noqa: ARG002
        raise ConfigError(
            f"the weight of {self.name} is larger than the device memory per unit and is split into row blocks, but "
            "the model reads it with an operation other than linear and embedding, which needs the whole weight. "
            "Raise --offload.device_memory until the weight fits, or let the model call the layer (or "
            "functional.linear)."
        )


def open_units(
    candidates: Iterable[UnitCandidate], regions: Sequence[Region], slots: Slots, make_live: MakeLive
) -> Iterator[Unit]:
    """Yield the units in candidate order. The other arguments go to `Unit`."""
    for number, candidate in enumerate(candidates):
        unit_class = Unit
        if candidate.is_cut:
            unit_class = CutLayer
        yield unit_class(number, candidate, regions_of(candidate, regions), slots, make_live)


def put_parameters(places: Iterable[ParameterPlace], parameters: Mapping[int, nn.Parameter]) -> None:
    """Put Parameters (keyed by model index) into their places.

    Writes `_parameters` directly, unless the module class defines `__setattr__` and keeps references (torch RNNs).
    """
    for place in places:
        module, parameter = place.module, parameters[place.parameter]
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[place.key] = parameter
        else:
            setattr(module, place.key, parameter)
