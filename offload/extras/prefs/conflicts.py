"""Refused settings beside preference training, and beside training on single texts."""

from offload.app.config.sections import PAIR_METHODS, TrainSection
from offload.conflicts import Conflict, is_parallel, is_set, other_than

SINGLE = other_than(*PAIR_METHODS)
CONFLICTS = (
    Conflict("train.sequence_parallel", is_parallel, "train.method", PAIR_METHODS,
        "the loss of train.method {train.method} compares whole sequences, which cannot be split over ranks",
        "set --train.sequence_parallel 1, or --train.method sft"),
    *(
        Conflict(f"train.{key}", other_than(TrainSection.model_fields[key].default),
            "train.method", other_than(*methods),
            "train.method {train.method} has no such setting",
            f"leave it out, or set --train.method {' or '.join(methods)}")
        for key, methods in (("beta", ("dpo", "orpo")), ("center_rewards_coefficient", ("reward",)))
    ),
    Conflict("prefs.reference", is_set, "train.method", other_than("dpo"),
        "train.method {train.method} has no reference", "leave it out, or set --train.method dpo"),
    Conflict("train.method", SINGLE, "data.formats", lambda formats, _: "preference" in formats,
        "data.format preference has pairs of a chosen and a rejected answer, and {train.method} learns from single "
        "texts",
        "set --train.method dpo, orpo or reward"),
    Conflict("train.method", PAIR_METHODS, "data.formats", lambda formats, _: bool(set(formats) - {"preference"}),
        "data.format is {data.formats}, and {train.method} learns from pairs of answers",
        "set --data.format preference (rows of prompt, chosen, rejected), or --train.method sft"),
    Conflict("data.packing", True, "train.method", PAIR_METHODS,
        "train.method {train.method} compares pairs of answers, each in a separate row",
        "leave it out, or set it to false", {"origin.data.packing": other_than("default", "resolved")}),
    Conflict("data.packing_isolated", True, "train.method", PAIR_METHODS,
        "train.method {train.method} does not pack rows", "leave it out"),
    Conflict("data.group_by_length", True, "train.method", PAIR_METHODS,
        "train.method {train.method} needs the pairs of rows in a mixed order", "leave it out"),
    Conflict("data.train_on_prompt", is_set, "train.method", ("dpo", "reward"),
        "train.method {train.method} compares only answers", "leave it out"),
)  # fmt: skip
