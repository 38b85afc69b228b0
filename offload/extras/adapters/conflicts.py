"""Refused settings of adapters."""

from offload.app.config.sections import LoraSection
from offload.conflicts import Conflict, is_above, is_set, is_unset, other_than

WHOLE = ("config", "adapter")
"""Settings with a complete description of an adapter."""
DEFAULTS = {name: field.default for name, field in LoraSection.model_fields.items() if name not in WHOLE}
WITHOUT_RESTARTS = "leave --lora.restart_every out"
# A default counts as given on the command line alone: a configuration file written by a run has all keys.
_GIVEN = [
    (name, key, value)
    for name, default in DEFAULTS.items()
    if not name.startswith("restart_")
    for key, value in ((f"lora.{name}", other_than(default)), (f"origin.lora.{name}", "command line"))
]

CONFLICTS = (
    *(
        Conflict(f"lora.{name}", other_than(default), "lora.adapts", False,
            "there is no adapter", "set --lora.rank, such as 8, or leave it out")
        for name, default in DEFAULTS.items()
    ),
    *(
        Conflict(f"lora.{whole}", is_set, key, value,
            f"lora.{name} is set too, beside this complete description of an adapter", "leave one of them out")
        for whole in WHOLE
        for name, key, value in _GIVEN
    ),
    Conflict("lora.config", is_set, "lora.adapter", is_set,
        "lora.adapter is set too, beside this complete description of an adapter", "leave one of them out"),
    *(
        Conflict(f"lora.{name}", value, "lora.restart_every", is_unset,
            "the adapter never restarts", "set --lora.restart_every, such as 1000, or leave it out", given)
        for name in DEFAULTS
        if name.startswith("restart_")
        for value, given in (
            (other_than(DEFAULTS[name]), {}),
            (DEFAULTS[name], {f"origin.lora.{name}": "command line", "lora.whole": is_set}),
        )
    ),
    *(
        Conflict("lora.restart_every", is_set, key, value,
            f"a restart changes base weights, and with {key} {{{key}}} these cannot be written",
            f"set --{key} {allowed}, or {WITHOUT_RESTARTS}")
        for key, value, allowed in (
            ("offload.frozen_weights", other_than("exact"), "exact"),
            ("offload.parameters", "files", "nvme"),
        )
    ),
    Conflict("lora.restart_every", is_set, "offload.link_weights", other_than("exact"),
        "with offload.link_weights {offload.link_weights} the run computes with a quantized adapter, while a restart "
        "and the export merge the exact one", f"set --offload.link_weights exact, or {WITHOUT_RESTARTS}"),
    Conflict("lora.restart_prune", lambda share, _: 0 < share < 1, "optimizer.states", "int8",
        "a part of int8 states cannot be set to zero (optimizer.states int8)",
        "set --lora.restart_prune 1, or --optimizer.states bf16", {"lora.restart_every": is_set}),
    Conflict("lora.restart_warmup_steps", is_above, "lora.restart_every", is_set,
        "lora.restart_every is {lora.restart_every}, so the learning rate would never reach its schedule again",
        "lower --lora.restart_warmup_steps"),
    Conflict("optimizer.reset_every", is_set, "lora.adapts", True,
        "an adapter resets its moments when it restarts", "set --optimizer.reset_every 0, or in its place "
        "--lora.restart_every and --lora.restart_prune 1"),
    Conflict("optimizer.freeze", is_set, "lora.adapts", True,
        "an adapter is configured, and all weights of its base are frozen anyway", "leave it out"),
    Conflict("checkpoint.export_best", True, "lora.restart_every", is_set,
        "the adapter restarts (lora.restart_every), and each restart changes the base, so an earlier adapter no longer "
        "fits it",
        "set --checkpoint.export_best false, and export that checkpoint by `python -m offload.export --merge`"),
)  # fmt: skip
