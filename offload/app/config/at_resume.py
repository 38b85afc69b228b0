"""Settings of a resumed run: its own, completed by the earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from glob import glob
from pathlib import Path
from typing import Any

from offload.app.config.config import Config, names_in, show_value
from offload.app.config.other_trainers import current_name
from offload.app.config.rules import RULE_SETTINGS
from offload.errors import ConfigError
from offload.retired import without_retired


class AtResume(Enum):
    """Value of a setting in a resumed run that is not given the setting."""

    KEPT = "as in the earlier run"
    FIXED = "as in the earlier run; another value is refused, because data, data order or model would change"
    ANEW = "as given to the earlier run; a value decided there, by machine or number of steps, is decided again"
    STATE = "FIXED; with optimizer.reset OF_RULE, because the rule then starts with new states"
    OF_RULE = "as in the earlier run, unless optimizer.reset comes with another update rule"
    OWN = "the default: each process has its own"


_KEYS = {
    AtResume.KEPT: "optimizer.decay_1d optimizer.groups optimizer.schedule",
    AtResume.FIXED: "contrastive data distill lora prefs model.path model.preset optimizer.freeze run.seed "
    "train.method train.beta train.center_rewards_coefficient train.batch_size train.tokens_per_step "
    "train.precision train.matmul",
    AtResume.ANEW: "data.num_workers optimizer.warmup_steps train.recompute train.sequence_parallel "
    "offload.parameters offload.optimizer offload.gradients offload.activations offload.graphs "
    "offload.prefetch offload.zero_stage offload.replicas offload.dispatch",
    AtResume.STATE: "optimizer.name optimizer.states optimizer.master",
    AtResume.OF_RULE: "optimizer",
    AtResume.OWN: "run.dir run.name run.debug checkpoint.resume optimizer.reset",
}
AT_RESUME = {key: rule for rule, keys in _KEYS.items() for key in keys.split()}
"""Rule of a key, or of a section for its other keys. All others are `KEPT`."""


def at_resume(key: str) -> AtResume:
    """Return the rule for a setting."""
    return AT_RESUME.get(key) or AT_RESUME.get(key.partition(".")[0], AtResume.KEPT)


def resumed(given: Config, saved: Mapping[str, tuple[Any, str]], where: str) -> Config:
    """Return the settings of a resumed run: `given`, and each unset value by `AT_RESUME`.

    saved: `Config.to_dict` of the earlier run, stored in the checkpoint at `where`. Raises ConfigError with the keys if
    a value fixed for the run was set differently.
    """
    # A checkpoint from an earlier version has other names, and settings since retired.
    saved = {current_name(key): each for key, each in saved.items()}
    earlier = Config.load(None, without_retired({key: value for key, (value, _) in saved.items()}, resumes=True))
    taken: dict[str, tuple[Any, str]] = {}
    changes: list[str] = []
    refused: list[str] = []
    for key, own in given.items():
        value = earlier.get(key)
        _, origin = saved.get(key, (None, "default"))
        rule = _rule(key, given, earlier, was_decided=origin == "resolved")
        is_set, is_fixed = given.origin(key) != "default", rule is AtResume.FIXED
        # With auto the user leaves the decision to the program, and a fixed setting is decided already.
        is_open = own in (None, "auto") and (is_fixed or origin == "resolved")
        if not is_set or (is_fixed and is_open):
            if rule in (AtResume.FIXED, AtResume.KEPT) and origin != "default":
                taken[key] = value, origin
        elif own != value and not is_open and rule is not AtResume.OWN:
            # Names of files may differ and mean the same: later checks compare contents.
            differences = changes
            if is_fixed and not _may_be_the_same(key, own, value):
                differences = refused
            differences.append(f"{key} is {show_value(own)} and was {show_value(value)}")
    if refused:
        hint = ""
        if any(at_resume(each.partition(" ")[0]) is AtResume.STATE for each in refused):
            hint = " Another update rule or state format starts from the weights with --optimizer.reset."
        these, them = "these", "them"
        if len(refused) == 1:
            these, them = "this", "it"
        raise ConfigError(
            f"{'; '.join(refused)} in the run of {where}: a resumed run cannot change {these}. Leave {them} out to "
            f"resume that run, or set --run.dir to a new folder to begin another one.{hint}"
        )
    config = given.with_settings(taken, changes)
    config.check()
    return config


def _rule(key: str, given: Config, earlier: Config, *, was_decided: bool) -> AtResume:
    """Return the rule for a setting in this resume: FIXED, KEPT, OWN, or ANEW.

    OWN stands also for a setting that is decided again. ANEW means: the earlier value has no effect, but is told.
    """
    rule = at_resume(key)
    optimizer, was = given.optimizer, earlier.optimizer.name
    if rule is AtResume.ANEW:
        # A user's value stands; a value decided by the machine may differ on this machine.
        if was_decided:
            return AtResume.OWN
        return AtResume.KEPT
    if rule is AtResume.STATE:
        rule = AtResume.FIXED
        if optimizer.reset:
            rule = AtResume.OF_RULE
    if was_decided and key in RULE_SETTINGS[was].defaults:  # a default of the rule, also in other sections
        rule = AtResume.OF_RULE
    if rule is AtResume.OF_RULE:
        changes_rule = optimizer.reset and given.origin("optimizer.name") != "default" and optimizer.name != was
        if changes_rule:
            return AtResume.ANEW
        return AtResume.KEPT
    # Epochs given now mean another number of steps than in the earlier run.
    counts_epochs = given.train.epochs is not None and given.origin("train.epochs") != "default"
    if key == "train.steps" and counts_epochs:
        return AtResume.ANEW
    return rule


def _may_be_the_same(key: str, own: Any, previous: Any) -> bool:
    """Tell whether two names may mean the same files: in another spelling, or because the files are gone from there.

    Later checks decide: the data are compared by their tokens, and models by their files.
    """
    models = "model.path", "prefs.reference", "distill.teacher", "data.tokenizer"
    is_path = key in (*models, "data.source", "data.sources", "data.eval_source")
    if not is_path or not previous:
        return False
    paths = [str(Path(name).expanduser()) for name in names_in(previous)]
    # Gone from there: the user may have moved them, and only the contents can tell.
    has_moved = not any(path.startswith("builtin:") or glob(path) for path in paths)  # noqa: PTH207 - absolute ones, too
    return has_moved or _spelled_out(own) == _spelled_out(previous)


def _spelled_out(value: Any) -> list[Any]:
    """Return sources with absolute paths, without links."""
    names = [str(Path(name).expanduser().resolve()) for name in names_in(value)]
    if isinstance(value, str):
        value = [value]
    # A text is a path without further keys.
    sources = [{} if isinstance(each, str) else each for each in value]
    return [{**source, "path": name} for source, name in zip(sources, names, strict=True)]
