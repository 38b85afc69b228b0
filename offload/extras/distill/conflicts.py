"""Refused settings beside distillation."""

from offload.app.config.sections import DistillSection
from offload.conflicts import Conflict, is_parallel, is_unset, other_than

CONFLICTS = (
    Conflict("train.method", "distill", "distill.teacher", is_unset,
        "distill.teacher is not set, and the model learns the probabilities of a teacher",
        "set --distill.teacher to the folder of a model with the same tokenizer"),
    Conflict("train.method", "distill", "train.sequence_parallel", is_parallel,
        "train.sequence_parallel is {train.sequence_parallel}, and a teacher does not share rows over ranks",
        "set --train.sequence_parallel 1"),
    Conflict("distill.way", "stored", "distill.top_k", is_unset,
        "distill.top_k is not set, and the probabilities of each token of the vocabulary would be stored",
        "set --distill.top_k 64, or --distill.way beside", given={"train.method": "distill"}),
    *(
        Conflict(f"distill.{key}", other_than(field.default), "train.method", other_than("distill"),
            "train.method {train.method} has no teacher", "leave it out, or set --train.method distill")
        for key, field in DistillSection.model_fields.items()
    ),
)  # fmt: skip
