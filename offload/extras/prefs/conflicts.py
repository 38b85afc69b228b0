"""Refused settings beside preference training, and beside training on single texts."""

from offload.app.config.sections import PAIR_METHODS, ROW_FORMATS, TrainSection
from offload.conflicts import Conflict, is_set, is_unset, other_than

SINGLE = other_than(*ROW_FORMATS)
CONFLICTS = (
    *(
        Conflict(f"train.{key}", other_than(TrainSection.model_fields[key].default),
            "train.method", other_than(*methods),
            "train.method {train.method} has no such setting",
            f"leave it out, or set --train.method {' or '.join(methods)}")
        for key, methods in (("beta", ("dpo", "orpo")), ("center_rewards_coefficient", ("reward",)))
    ),
    Conflict("prefs.reference", is_set, "train.method", other_than("dpo"),
        "train.method {train.method} has no reference", "leave it out, or set --train.method dpo"),
    Conflict("prefs.way", ("beside",), "prefs.reference", is_unset,
        "prefs.reference is not set, and the initial model is no longer in memory",
        "set --prefs.reference to a folder, or leave prefs.way out"),
    Conflict("train.method", SINGLE, "data.formats", lambda formats, _: "preference" in formats,
        "data.format preference has pairs of a chosen and a rejected answer, and {train.method} learns from single "
        "texts",
        "set --train.method dpo, orpo or reward"),
    Conflict("train.method", PAIR_METHODS, "data.formats", lambda formats, _: bool(set(formats) - {"preference"}),
        "data.format is {data.formats}, and {train.method} learns from pairs of answers",
        "set --data.format preference (rows of prompt, chosen, rejected), or --train.method sft"),
    Conflict("data.train_on_prompt", is_set, "train.method", ("dpo", "reward"),
        "train.method {train.method} compares only answers", "leave it out"),
)  # fmt: skip
