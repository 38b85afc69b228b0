"""Refused settings beside contrastive learning."""

from offload.app.config.sections import ContrastiveSection
from offload.conflicts import Conflict, is_parallel, is_set, other_than

OTHERS = other_than("contrastive")
CONFLICTS = (
    Conflict("train.method", "contrastive", "data.formats", lambda formats, _: bool(set(formats) - {"contrastive"}),
        "data.format is {data.formats}, and contrastive learns from queries with answers",
        "set --data.format contrastive (rows of query, positive, negatives), or --train.method sft"),
    Conflict("train.method", OTHERS, "data.formats", lambda formats, _: "contrastive" in formats,
        "data.format contrastive has queries with answers to compare, and {train.method} learns from other rows",
        "set --train.method contrastive"),
    Conflict("train.passes", is_parallel, "train.method", "contrastive",
        "train.method contrastive compares all rows of a batch",
        "set --train.passes 1, and --train.micro_batch_size if memory is short"),
    Conflict("data.train_on_prompt", is_set, "train.method", "contrastive",
        "train.method contrastive has no prompts", "leave it out"),
    *(
        Conflict(f"contrastive.{key}", other_than(field.default), "train.method", OTHERS,
            "train.method {train.method} has no such setting", "leave it out, or set --train.method contrastive")
        for key, field in ContrastiveSection.model_fields.items()
    ),
)  # fmt: skip
