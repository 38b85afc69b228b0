"""Refused settings beside preference training, and beside training on single texts."""

from offload.app.config.sections import TrainSection
from offload.conflicts import Conflict, is_parallel, is_set, other_than

PAIRS = other_than("sft")
CONFLICTS = (
    Conflict("train.sequence_parallel", is_parallel, "train.method", PAIRS,
        "the loss of train.method {train.method} compares whole sequences, which cannot be split over ranks",
        "set --train.sequence_parallel 1, or --train.method sft"),
    *(
        Conflict(f"train.{key}", other_than(TrainSection.model_fields[key].default),
            "train.method", other_than(*methods),
            "train.method {train.method} has no such setting",
            f"leave it out, or set --train.method {' or '.join(methods)}")
        for key, methods in (("beta", ("dpo", "orpo")), ("center_rewards_coefficient", ("reward",)))
    ),
    Conflict("train.method", "sft", "data.formats", lambda formats, _: "preference" in formats,
        "data.format preference has pairs of a chosen and a rejected answer, and sft learns from single texts",
        "set --train.method dpo, orpo or reward"),
    Conflict("train.method", PAIRS, "data.formats", lambda formats, _: bool(set(formats) - {"preference"}),
        "data.format is {data.formats}, and {train.method} learns from pairs of answers",
        "set --data.format preference (rows of prompt, chosen, rejected), or --train.method sft"),
    Conflict("data.packing", True, "train.method", PAIRS,
        "train.method {train.method} compares pairs of answers, each in a separate row",
        "leave it out, or set it to false", {"origin.data.packing": other_than("default", "resolved")}),
    Conflict("data.packing_isolated", True, "train.method", PAIRS,
        "train.method {train.method} does not pack rows", "leave it out"),
    Conflict("data.group_by_length", True, "train.method", PAIRS,
        "train.method {train.method} needs the pairs of rows in a mixed order", "leave it out"),
    Conflict("data.train_on_prompt", is_set, "train.method", ("dpo", "reward"),
        "train.method {train.method} compares only answers", "leave it out"),
)  # fmt: skip
