"""Definition and sampling of a case: plain data, determined by kind and seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload import LOMO, AdaLomo, AdamW
from offload.optim.rule import UpdateRule
from tests.cases.features import FUZZED
from tests.fuzz import habits, models

KINDS = {
    "engine": 8,
    "loops": 3,
    "saves": 3,
    "interrupts": 4,
    "forwards": 4,
    "ranks2": 5,
    "ranks3": 2,
    "forwards2": 2,
    "commands": 3,
    "scripts": 1,
}
"""Case kinds with their sampling weights."""
WORLDS = {"ranks2": 2, "ranks3": 3, "forwards2": 2}

RULES: dict[str, UpdateRule] = {
    "smooth": AdamW(lr=0.05, betas=(0.9, 0.99), eps=1.0, weight_decay=0.1, groups=(("up|q_proj", {"lr_scale": 0.5}),)),
    "groups": AdamW(
        lr=3e-3,
        weight_decay=0.1,
        decay_1d=True,
        groups=(("norm|bias", {"weight_decay": 0.0}), ("0", {"lr_scale": 0.3})),
    ),
    "lomo": LOMO(lr=0.05, groups=(("0", {"lr_scale": 0.3}),)),
    "adalomo": AdaLomo(lr=0.02),
    **{name: case.settings["optimizer"] for name, case in FUZZED.items() if "optimizer" in case.settings},
}
"""Update rules by name. A case without a name uses AdamW.

smooth: an update as precise as the gradients (see tests/engine/ranks_child.py).
"""
STAGES = [name for name, case in FUZZED.items() if case.stage is not None]
"""Stages of one's own, by the names of their cases."""
_BY_MATRIX = [name for name, rule in RULES.items() if rule.by_matrix]

Op = dict[str, Any]


@dataclass
class Case:
    """A model, settings, layouts and operations for one test case.

    The engine under test and its resident twin share `settings`. The tested engine starts with the first of `layouts`.
    The twin keeps all states on the device, without prefetch and delay.

    - plain: plain PyTorch runs too.
    - one: for a case over several ranks, one rank repeats the run on all rows.
    - words: words of a command line.
    - forwards: training with forward passes alone (MeZO); the `MeZO` arguments beyond the fuzzer defaults.
    """

    kind: str
    seed: int
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    layouts: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    ops: list[Op] = field(default_factory=list)
    plain: bool = False
    one: bool = False
    restore: bool = False
    words: list[str] = field(default_factory=list)
    forwards: dict[str, Any] | None = None
    without: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return WORLDS.get(self.kind, 1)

    @property
    def name(self) -> str:
        """Name that repeats the case."""
        return ",".join([f"{self.kind}:{self.seed}", *(f"-{part}" for part in self.without)])

    def parts(self) -> list[str]:
        """Return the names of removable parts, the largest first."""
        names = [f"op{number}" for number, op in enumerate(self.ops) if op]
        for number, op in enumerate(self.ops):
            names += [f"op{number}.{key}" for key in op | op.get("batch", {}) if key in habits.HABITS]
        names += [f"word{number}" for number, word in enumerate(self.words) if word]
        if self.plain:
            names.append("plain")
        for number, layout in enumerate(self.layouts):
            names += [f"layout{number}.{key}" for key in layout]
        names += [f"settings.{key}" for key in self.settings]
        names += [f"forwards.{key}" for key in self.forwards or ()]
        names += [f"model.{key}" for key in self.model if key not in ("make", "name", "width", "words", "tiles")]
        names += [f"tile{number}" for number, kind in enumerate(self.model.get("tiles", ())) if kind != "narrow"]
        return names

    def cut(self, *names: str) -> Case:
        """Return the case without some parts."""
        case = copy.deepcopy(self)
        case.without = (*self.without, *names)
        for name in names:
            head, _, key = name.partition(".")
            if head == "plain":
                case.plain = False
            elif head in ("settings", "model", "forwards"):
                getattr(case, head).pop(key, None)
            elif head.startswith("layout"):
                case.layouts[int(head[6:])].pop(key, None)
            elif head.startswith("tile"):
                case.model["tiles"][int(head[4:])] = "narrow"
            elif head.startswith("op") and key:
                op = case.ops[int(head[2:])]
                for holder in (op, op.get("batch", {})):
                    holder.pop(key, None)
            elif head.startswith("op"):
                case.ops[int(head[2:])] = {}  # the other operations keep their numbers
            elif head.startswith("word"):
                case.words[int(head[4:])] = ""
            else:
                raise ValueError(f"{name!r} is no part of a case")
        return case

    @property
    def habits(self) -> set[str]:
        """Names from habits.HABITS in this case."""
        return {part.rpartition(".")[2] for part in self.parts()} & habits.HABITS.keys()

    def leave_out(self, left_out: Collection[str]) -> Case:
        """Return the case without some habits."""
        return self.cut(*(part for part in self.parts() if part.rpartition(".")[2] in left_out))


def parse(name: str) -> Case:
    """Return the case for a `Case.name`."""
    first, *cuts = name.split(",")
    kind, _, seed = first.partition(":")
    return draw(kind, int(seed)).cut(*(cut.removeprefix("-") for cut in cuts))


def draw(kind: str, seed: int) -> Case:
    """Return the case for a kind and a seed."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    dice = random.Random(f"{kind} {seed}")
    case = Case(kind, seed)
    if kind == "commands":
        from tests.fuzz.commands import draw_words

        case.words = draw_words(dice)
        return case
    if kind == "scripts":
        from tests.fuzz.scripts import draw_script

        case.settings = draw_script(dice)
        return case
    if kind in ("forwards", "forwards2") or (kind == "interrupts" and dice.random() < 0.25):
        case.forwards = _forwards(dice)
    case.one = case.world > 1 and case.forwards is None and dice.random() < 0.3
    case.model = models.draw(dice, gentle=case.one)
    if case.one and "tiles" in case.model:  # the expert choice of a row must not depend on the last bit
        case.model["tiles"] = ["tile" if kind == "experts" else kind for kind in case.model["tiles"]]
    case.settings = _settings(dice, case)
    if case.settings.get("precision") == "bf16" and "tiles" in case.model:  # torch keeps these buffers in fp32 too
        case.model["tiles"] = ["wide" if kind in ("spectral", "orthogonal") else kind for kind in case.model["tiles"]]
    is_speculative = case.settings.get("clip") == "speculative"
    case.layouts = [
        _layout(dice, case.world, is_speculative) for _ in range(1 + 2 * (kind in ("saves", "forwards", *WORLDS)))
    ]
    if case.settings.get("precision") == "bf16" and models.is_random(case.model):
        for layout in case.layouts:  # a compiled dropout has one more rounding in 16 bits
            layout.pop("compile", None)
    case.ops = _ops(dice, case)
    case.plain = case.world == 1 and kind in ("engine", "loops") and dice.random() < 0.5
    case.plain = case.plain or kind in ("forwards", "forwards2")
    case.restore = dice.random() < 0.2
    _give_habits(random.Random(f"habits of {kind} {seed}"), case)
    if case.forwards is None:
        _give_products(random.Random(f"products of {kind} {seed}"), case)
        _give_stage(random.Random(f"stage of {kind} {seed}"), case)
        _give_teacher(random.Random(f"teacher of {kind} {seed}"), case)
    _give_parks(random.Random(f"parks of {kind} {seed}"), case)
    if case.settings.get("optimizer") in _BY_MATRIX:
        for layout in case.layouts:  # these rules update whole parameters, not pieces
            layout.pop("update", None)
    return case


def _give_habits(dice: random.Random, case: Case) -> None:
    """Add habits to half of the cases, with plain PyTorch as a second reference, because the twin can have the same
    error.
    """
    if case.world > 1 or dice.random() < 0.5:
        return
    habits.give(case, dice)
    if not case.habits:
        return
    case.plain = case.plain or case.kind in ("engine", "loops")
    if "odd" in case.habits and case.forwards is None and case.settings.get("clip") != "speculative":
        case.settings["optimizer"] = dice.choice(list(RULES))
        if dice.random() < 0.5:
            layout = case.layouts[0]
            layout |= {"parameters": "nvme", "optimizer": "nvme"}
            if layout.pop("optimizer_memory", None) is not None:  # no optimizer state is on the device now
                del layout["update"]


def _give_products(dice: random.Random, case: Case) -> None:
    """Keep the outputs of products in some layouts, and multiply in FP8 in half of the cases in bf16."""
    for layout in case.layouts:
        if dice.random() < 0.25 and "sequence_tile" not in case.settings and "compile" not in layout:
            layout["recompute"] = "products"
    tiles = case.model.get("tiles", ["tile"])
    is_other = case.model["make"] in ("gpt2", "handmade") or "odd" in case.model
    has_layers = not is_other and ("tile" in tiles or "wide" in tiles)
    if case.settings.get("precision") != "bf16" or not has_layers or dice.random() < 0.5:
        return
    # With one scale for a matrix, a row depends on the others, which ranks do not share.
    case.settings["matmul"] = dice.choice(["fp8_rowwise", *["fp8_tensorwise"] * (case.world == 1)])
    case.model |= {"width": 32, "inner": dice.choice([32, 48])}
    if case.kind in ("engine", "loops") and dice.random() < 0.5:  # sums in the order of plain PyTorch
        case.plain = True
        for key in ("micro_batch_size", "head_chunk_bytes", "sequence_tile"):
            case.settings.pop(key, None)


def _give_stage(dice: random.Random, case: Case) -> None:
    """Run a stage of one's own in some cases. Its blocks take and return one tensor, which a mosaic has."""
    if case.model["make"] == "mosaic" and not case.habits and dice.random() < 0.1:
        case.settings["stage"] = dice.choice(STAGES)
        case.plain = False  # the twin runs the stage too


def _give_teacher(dice: random.Random, case: Case) -> None:
    """Put a teacher beside some causal models, for the losses of some steps and evaluations. A twin is reference
    enough.
    """
    if not models.is_family(case.model) or not models.shifts(case.model) or case.habits or dice.random() < 0.6:
        return
    case.model["teacher"] = dice.choice(models.TEACHERS)
    case.plain = False
    for op in case.ops:
        for each in (op, op.get("of", {})):
            # By the seed: a failing operation runs before without its fault.
            if each.get("do") in ("step", "evaluate") and each["seed"] % 10 < 7:
                each["loss_fn"] = "teacher"


def _give_parks(dice: random.Random, case: Case) -> None:
    """Park the engine before some operations. A twin is reference enough."""
    for op in case.ops:
        if op.get("do") in ("step", "own", "evaluate") and dice.random() < 0.1:
            op["parks"] = True


# -- settings --------------------------------------------------------------------------------------------------------


def _settings(dice: random.Random, case: Case) -> dict[str, Any]:
    clip, norm = dice.choice(
        [("deferred", 1.0), ("speculative", 0.3), ("speculative", 1e-3), ("deferred", 1e-3), (0, 0)]
        if case.forwards is None
        else [(0, 0)]
    )
    settings: dict[str, Any] = {"clip": clip, "max_grad_norm": norm} if clip else {"max_grad_norm": None}
    if dice.random() < 0.35 and not case.one:
        settings["precision"] = "bf16"
    if dice.random() < 0.4:
        settings["micro_batch_size"] = dice.choice([1, 1, 2, 3])
    if dice.random() < 0.3:
        settings["head_chunk_bytes"] = dice.choice([512, 2048, 8192])
    if dice.random() < 0.1:
        settings["on_nonfinite"] = "skip"
    if dice.random() < 0.2:
        settings["seed"] = dice.randrange(1000)
    if case.forwards is not None:
        return settings
    if case.one or dice.random() < (0.6 if clip == "speculative" else 0.3):
        settings["optimizer"] = dice.choice(["smooth", "smooth", "groups"]) if not case.one else "smooth"
    if clip != "speculative" and not case.one and dice.random() < 0.3:
        # Over ranks, rules by matrix sum the norm from other parts in stage 0.
        settings["optimizer"] = dice.choice(["lomo", *(_BY_MATRIX if case.world == 1 else [])])
    if dice.random() < 0.15:
        settings["sequence_tile"] = dice.choice([1, 2, 4])
    if dice.random() < 0.15 and not case.one:
        settings["passes"] = dice.choice([2, 3])
    return settings


def _forwards(dice: random.Random) -> dict[str, Any]:
    """Sample `MeZO` arguments."""
    chances = {
        "num_perturbations": (0.4, lambda: dice.choice([2, 2, 3])),
        "layer_fraction": (0.5, lambda: dice.choice([0.01, 0.3, 0.5, 0.75])),
        "magnitude_quantile": (0.4, lambda: dice.choice([0.001, 0.3, 0.7, 0.99])),
        "weight_decay": (0.5, lambda: dice.choice([0.1, 3.0])),
        "decay_1d": (0.3, lambda: True),
        "eps": (0.3, lambda: dice.choice([1e-3, 0.1])),
        "lr": (0.2, lambda: dice.choice([0.0, 1e-5, 1e-2])),
        "groups": (0.3, lambda: (("norm|bias", {"weight_decay": 0.5}), ("0|embed", {"lr_scale": 0.25}))),
    }
    return {key: make() for key, (chance, make) in chances.items() if dice.random() < chance}


def _layout(dice: random.Random, world: int, is_speculative: bool) -> dict[str, Any]:
    """Sample the placement and the transfer settings."""
    low = ["cpu", "nvme"] if is_speculative else ["cpu", "cpu", "nvme", "nvme", "auto", "device"]
    layout: dict[str, Any] = {
        "parameters": dice.choice([*low, "device"] if is_speculative else low),
        "optimizer": dice.choice(low),
        "gradients": dice.choice(["auto", "auto", "cpu", "nvme"]),
        "activations": dice.choice(["device", "device", "cpu", "nvme"]),
        "graphs": dice.choice(["device", "device", "cpu", "nvme"]),
    }
    if layout["optimizer"] == "device":  # states above the parameters, or apart from the gradients, are refused
        layout["gradients"] = "auto"
        if layout["parameters"] in ("cpu", "nvme"):
            layout["parameters"] = "device"
    chances = {
        "debug": (0.5, lambda: dice.randrange(1, 10**6)),
        "recompute": (0.6, lambda: dice.choice(["never", "never", "auto"])),
        "prefetch": (0.5, lambda: dice.choice([0, 1, 1, 2, 3, 9])),
        "compile": (0.06, lambda: "always"),
        "throttle": (0.25, lambda: _throttle(dice)),
        "update": (0.4, lambda: dice.choice(["device", "device", "both"])),
        "small_tiles": (0.6, lambda: True),
        "device_extra": (0.2, lambda: dice.choice([0, 0, 1024, 8192, 65536])),
        "host_extra": (0.1, lambda: dice.choice([0, 0, 4096, 65536])),
        "zero_stage": (0.6 if world > 1 else 0.1, lambda: dice.randrange(4)),
    }
    drawn = {key: value for key, (chance, make) in chances.items() if dice.random() < chance for value in [make()]}
    if drawn.get("update") == "both":  # some optimizer states are on the device
        layout |= {"optimizer": "auto", "optimizer_memory": dice.choice([1, 1 << 14, 1 << 16, 1 << 18])}
        if is_speculative:  # unsupported with all states on the device
            layout["parameters"] = "cpu"
    return layout | drawn


def _throttle(dice: random.Random) -> dict[str, Any]:
    lanes = dice.sample(["h2d", "d2h", "update", "nvme_read", "nvme_write"], dice.choice([1, 1, 2]))
    return {lane: {"latency_seconds": dice.choice([1e-4, 5e-4, 2e-3])} for lane in lanes}


# -- operations ------------------------------------------------------------------------------------------------------

_WEIGHTS: dict[str, dict[str, int]] = {
    "engine": {"step": 12, "evaluate": 2, "own": 2, "read": 1, "lr": 1, "forward": 1, "ungraded": 1, "empty": 1},
    "loops": {"own": 10, "step": 3, "evaluate": 2, "forward": 2, "ungraded": 2, "lr": 1, "read": 1},
    "saves": {"step": 6, "own": 2, "reopen": 4, "save": 2, "load": 2, "evaluate": 1, "forward": 1},
    "interrupts": {"step": 3, "fail": 8, "own": 1, "evaluate": 1},
    "ranks2": {
        "step": 10,
        "evaluate": 2,
        "own": 3,
        "reopen": 2,
        "world": 1,
        "read": 1,
        "lr": 1,
        "empty": 1,
        "forward": 1,
    },
    "forwards": {
        "step": 14,
        "evaluate": 2,
        "replay": 2,
        "reopen": 3,
        "save": 2,
        "load": 2,
        "export": 1,
        "forward": 1,
        "ungraded": 1,
        "read": 1,
        "lr": 2,
        "empty": 1,
    },
    "forwards2": {"step": 10, "evaluate": 2, "replay": 2, "reopen": 2, "world": 1, "save": 1, "load": 1, "lr": 1},
}
_WEIGHTS["ranks3"] = _WEIGHTS["ranks2"]
_ONE = {"step": 6, "evaluate": 1, "reopen": 1}


def _ops(dice: random.Random, case: Case) -> list[Op]:
    weights = _ONE if case.one else _WEIGHTS[case.kind]
    shapes = [models.draw_batch(dice, case.world, alike=case.one) for _ in range(dice.choice([1, 2, 2, 3]))]
    ops: list[Op] = []
    saved = False
    for _ in range(dice.choice([2, 3, 3, 4, 5, 6, 8])):
        (do,) = dice.choices(list(weights), list(weights.values()))
        if do == "own" and case.forwards is not None:
            do = "step"
        if do == "load" and not saved:
            do = "save"
        saved = saved or do == "save"
        op = _op(dice, case, do, shapes)
        if do == "fail":
            ops.append({**op["of"], "counted": True})  # a counted run first, to place the fault
        ops.append(op)
    if ops[-1]["do"] in ("reopen", "world", "load"):
        ops.append(_op(dice, case, "step", shapes))
    return ops


def _op(dice: random.Random, case: Case, do: str, shapes: Sequence[dict[str, Any]]) -> Op:
    op: Op = {"do": do, "seed": dice.randrange(10**6)}
    if dice.random() < (0.9 if case.kind == "interrupts" else 0.5):
        op["look"] = True  # read the weights; this waits for all updates
    if do in ("step", "evaluate", "own", "forward", "ungraded", "empty"):
        op["batch"] = dice.choice(list(shapes)) | {"seed": dice.randrange(10**6)}
        if not models.has_own_loss(case.model) or dice.random() < 0.15:
            op["loss_fn"] = True
    if do == "own":
        op["passes"] = dice.choice([1, 1, 2, 3])
        if dice.random() < 0.15:
            op["lost_forward"] = True
    if do == "lr":
        op["factor"] = dice.choice([0.1, 0.5, 2.0, 0.0])
    if do in ("reopen", "replay"):
        op["layout"] = dice.randrange(len(case.layouts))
    if do == "fail":
        own = 4 if case.forwards is None else 0
        of = dice.choices(["step", "own", "evaluate", "read", "save"], [8, own, 1, 1, 1])[0]
        op["of"] = _op(dice, case, of, shapes) | {"look": True}
        where = ["lines", "lines", "lines", "time", "forward", "backward", "lane"]
        op["where"] = dice.choice(where if of in ("step", "own", "evaluate") else ["lines", "time"])
        op["share"] = dice.random() * 1.02
        lanes = ["h2d", "d2h", "update", "update", "update_up", "update_down", "fetch_read", "update_read"]
        op["lane"] = dice.choice([*lanes, "update_write"])
    return op
