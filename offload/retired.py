"""Settings removed since earlier versions.

Old configurations still run if they name such a setting with the former default. Another value is an error with a
replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from offload.errors import ConfigError


class Retirement(NamedTuple):
    """A removed setting."""

    default: Any
    """Former default, accepted and ignored."""
    replacement: str
    """Advice in the error."""
    resumes: bool
    """True if a run with another value can be resumed without the setting."""


RETIRED: Mapping[str, Retirement] = {
    "train.noise_scale": Retirement(
        default=False,
        replacement="measure the gradient noise scale with two runs at different batch sizes (arXiv:1812.06162, "
        "appendix A.1)",
        resumes=True,
    ),
    "train.loss_type": Retirement(
        default="sigmoid",
        replacement="the loss of DPO is sigmoid; for hinge, ipo and others give TRL's DPOTrainer the mixin of "
        "OffloadTrainer, as in `class DPO(OffloadMixin, trl.DPOTrainer)` (docs/how-to/trainer.md)",
        resumes=False,
    ),
}
"""Removed settings by full key."""


def refusal(key: str) -> str:
    """Return the error text for a removed setting, by full key."""
    return f"{key} is no longer a setting: {RETIRED[key].replacement}."


def without_retired(settings: Mapping[str, Any], *, resumes: bool = False) -> dict[str, Any]:
    """Return the settings without removed ones.

    Keys are full ("train.noise_scale") or engine keywords ("noise_scale"). `resumes`: the settings belong to a run to
    resume. Raises ConfigError for a removed setting with another value than the former default.
    """
    kept = dict(settings)
    for key, retirement in RETIRED.items():
        for name in kept.keys() & {key, key.partition(".")[2]}:
            value = kept.pop(name)
            # As text: the command line has not parsed a setting that is unknown by now.
            if str(value).lower() != str(retirement.default).lower() and not (resumes and retirement.resumes):
                raise ConfigError(refusal(key))
    return kept
