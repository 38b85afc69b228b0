"""Building of regions: parameters with equal users, dtype and update rule, put into flat arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from offload.errors import ConfigError
from offload.layout.codecs import EXACT
from offload.layout.planes import PARAMETER_ALIGNMENT, Factor, Plane, table
from offload.layout.regions import SHARD_MULTIPLE, ParameterInfo, Piece, Region, align

_MOST_PADDING = 1 << 21
"""Elements. With more padding than this, a region by matrix may not exceed four times the size of the parameters."""


def build_regions(
    parameters: Sequence[ParameterInfo],
    units: Mapping[str, Sequence[int | Piece]],
    moments: Sequence[Sequence[Plane]],
    world_size: int = 1,
    *,
    delays: bool = False,
    factors: Mapping[int, Sequence[Factor]] | None = None,
    num_ranges: int = 1,
    without_low: Collection[int] = (),
) -> tuple[Region, ...]:
    """Lay out parameters in regions.

    `units` maps each unit name, in module order, to pieces, or to indices for whole parameters. `moments` has the
    planes for each update rule, by rule index. `delays`: see `table`. `without_low` has the indices of rules without a
    low half.

    Pieces share a region if the same units use them, in the same dtype, with the same training and storage properties.
    No element is in two pieces. `factors` has the factors for rules by matrix, by rule index. Each parameter with such
    a rule is one piece, and no border between the `num_ranges` update ranges splits a parameter. Raises ConfigError if
    padding to these borders makes a region too large.
    """
    users: dict[Piece, list[str]] = {}
    for unit, unit_parameters in units.items():
        # A unit may have a parameter under two names.
        for piece in dict.fromkeys(_as_piece(entry, parameters) for entry in unit_parameters):
            users.setdefault(piece, []).append(unit)
    # One region for all pieces that are copied, stored and updated alike.
    groups: dict[tuple, list[Piece]] = {}
    for piece, names in users.items():
        info = parameters[piece.parameter]
        codec = info.codec
        if info.trainable:
            rule, link = info.rule, info.link
            is_alone = rule in without_low  # some rules round to bf16 without a low half
        else:
            # Frozen parameters share a region whatever rule or link their groups name: neither is used.
            rule, link = 0, EXACT
            # Of bf16 values nothing would be in a low half; a frozen fp16 weight needs no master.
            is_alone = info.bf16_source or info.compute == "fp16"
        has_low = info.compute != "fp32" and not is_alone and not codec.decodes
        groups.setdefault((tuple(names), info.compute, info.trainable, has_low, rule, codec, link), []).append(piece)
    regions: list[Region] = []
    for (names, compute, trainable, has_low, rule, codec, link), members in groups.items():
        border = math.lcm(PARAMETER_ALIGNMENT, codec.block, link.block)  # no record is over two parameters
        # Neighbours with equal factors are updated by one kernel call.
        members = sorted(
            members, key=lambda piece: (parameters[piece.parameter].lr_scale, parameters[piece.parameter].weight_decay)
        )
        region_factors: tuple[Factor, ...] = ()
        bins = [members]
        by_matrix = trainable and factors is not None and rule in factors
        if by_matrix and factors:
            region_factors = tuple(factors[rule])
            bins = _balanced(members, num_ranges)
        lengths = [_length(members, border, codec.block) for members in bins]
        # Every rank has an equally long share, so gathers and reductions need no lengths.
        step = align(max(lengths), math.lcm(SHARD_MULTIPLE, border) * world_size // len(bins))
        _check_padding(names, parameters, members, step, len(bins))
        offsets = [
            number * step + _length(members[:position], border, codec.block) + piece.begin % codec.block
            for number, members in enumerate(bins)
            for position, piece in enumerate(members)
        ]
        suffix = ""
        if compute == "fp32" and any(p.compute != "fp32" for p in parameters):  # not a run in fp32 alone
            suffix = " (fp32)"
        if rule:
            suffix += f" (rule {rule + 1})"
        if not trainable:
            suffix += f" ({', '.join(filter(None, ('frozen', codec.title)))})"
        if link.title:
            suffix += f" ({link.title})"
        regions.append(
            Region(
                index=len(regions),
                name=" = ".join(names) + suffix,
                compute=compute,
                trainable=trainable,
                has_low=has_low,
                pieces=tuple(piece for members in bins for piece in members),
                offsets=tuple(offsets),
                numel=step * len(bins),
                units=names,
                table=table(compute, moments[rule], delays, codec, link),
                rule=rule,
                factors=region_factors,
                by_matrix=by_matrix,
                codec=codec,
                link=link,
            )
        )
    return tuple(regions)


def _as_piece(entry: int | Piece, parameters: Sequence[ParameterInfo]) -> Piece:
    if isinstance(entry, Piece):
        return entry
    return Piece.whole(parameters[entry])


def _length(members: Sequence[Piece], border: int = PARAMETER_ALIGNMENT, block: int = 1) -> int:
    """Return the total length of `members` in elements, each in whole blocks and aligned to `border`."""
    return sum(align(piece.begin % block + piece.numel, border) for piece in members)


def _balanced(members: Sequence[Piece], num_ranges: int) -> list[list[Piece]]:
    """Distribute pieces over ranges with a small maximum: largest piece first, always to the range with the fewest
    elements.
    """
    # The largest first: small pieces then fill the gaps.
    bins: list[list[Piece]] = [[] for _ in range(num_ranges)]
    for piece in sorted(members, key=lambda piece: -piece.numel):
        min(bins, key=_length).append(piece)
    # In the order of `members` again, for neighbours with equal factors.
    return [[piece for piece in members if piece in bin_pieces] for bin_pieces in bins]


def _check_padding(
    names: Sequence[str], parameters: Sequence[ParameterInfo], members: Sequence[Piece], step: int, num_ranges: int
) -> None:
    """Raise ConfigError if ranges with whole parameters are mostly padding."""
    numel = _length(members)
    if num_ranges > 1 and step * num_ranges > max(4 * numel, numel + _MOST_PADDING):
        largest = parameters[max(members, key=lambda piece: piece.numel).parameter]
        raise ConfigError(
            f"the update rule of {largest.name} {list(largest.shape)} needs whole matrices, and the matrices of unit "
            f"{' = '.join(names)} cannot be divided equally over {num_ranges} ranks: the nearest division gives each "
            f"rank {step} elements, an equal share is {numel // num_ranges}. Set --offload.zero_stage 0, or choose an "
            "elementwise rule for this parameter with --optimizer.groups."
        )
