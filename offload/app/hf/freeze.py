"""Freeze parameters by name patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from offload.errors import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze each parameter with a name matched by one regular expression in `patterns` (`re.search`).

    All names of a tied parameter count. Raises ConfigError for a pattern without a match, or if all parameters would be
    frozen.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = [parameter for name, parameter in named if re.search(pattern, name)]
        if not matches:
            raise ConfigError(
                f"optimizer.freeze has {pattern!r}, but none of the {len(named)} parameter names (such as "
                f"{named[len(named) // 2][0]}) matches: fix the expression, or leave it out."
            )
        for parameter in matches:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"optimizer.freeze is {' '.join(patterns)}, which matches all {len(named)} parameter names, so nothing is "
            "left to train. Leave one of the expressions out."
        )
