"""Speeds that other projects publish, beside our plans for the same job: model, card, tokens a step, length of rows,
and for adapters their modules and rank.

`python -m benchmarks.forecasts --only published` makes the plans, and `--again` plans them once more. One row by
command, here the last column of Qwen2.5 14B on an H100:

offload plan --model.path Qwen/Qwen2.5-14B --hardware h100 --host-memory 512GiB --data.sequence_length 1024 \\
    --train.tokens_per_step 524288 --train.matmul fp8_tensorwise
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.plan_tables import OLDER, scratch
from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.extras.plan.alternatives import apply_change, in_parts, place
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine

STORED = harness.RESULTS / "published.json"
_DISK = {"offload.nvme_dir": ["/nvme"]}
_STREAMED = {"offload.parameters": "cpu"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SEVEN = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")
_QWEN = PRESETS["qwen3-14b"] | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}


def _qwen(hidden: int, inner: int, layers: int, heads: int, shared: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return _QWEN | sizes | {"num_attention_heads": heads, "num_key_value_heads": shared}


SHAPES = {
    "Llama 3.1 8B": PRESETS["llama-3.1-8b"],
    "Qwen2.5 7B": _qwen(3584, 18944, 28, 28, 4),
    "Qwen2.5 14B": _qwen(5120, 13824, 48, 40, 8),
    "Qwen2.5 32B": _qwen(5120, 27648, 64, 40, 8),
    "Qwen3 14B": PRESETS["qwen3-14b"],
    "Qwen3 32B": PRESETS["qwen3-32b"],
    "Qwen3 8B": PRESETS["qwen3-8b"],
    "Qwen3 235B-A22B": PRESETS["qwen3-30b-a3b"]
    | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4},
    "gpt-oss-120b": PRESETS["gpt-oss-120b"],
}
_MASTERS = "fp32 masters, global clip"
_BF16 = "bf16 masters and moments; clip unknown"
_STALE = "fp16 sums, stale by a step; clip unknown"
_UNKNOWN = "unknown"
_ROWS = "their rows' length is unknown"
_MODULES = "their modules and rank are unknown"
_LAPTOP = "theirs is 128 tokens a step on an 8 GB laptop, modules and rank unknown"


@dataclass(frozen=True)
class Adapter:
    """The adapters of both sides.

    theirs: modules and rank in words, as they print them, or "unknown".
    modules, rank: of our plan.
    """

    theirs: str
    modules: tuple[str, ...]
    rank: int

    @property
    def ours(self) -> str:
        """Our modules and rank in words."""
        return f"{' '.join(name.removesuffix('_proj') for name in self.modules)}, rank {self.rank}"


@dataclass(frozen=True)
class Published:
    """A published speed, and the machine for the plan beside it.

    - who: project, with the letter of its note. "–": no published speed, our plan alone.
    - model: name in `SHAPES`. gpu: as described. host_gib: all of the machine's.
    - tokens, row_tokens: tokens of a step over all ranks, and of a row in our plan.
    - theirs: tokens a second in bf16 and in FP8, as printed. "–": not printed.
    - exact: their masters, moments and clipping; of adapters where the base lies.
    - num_ranks: GPUs.
    - adapter: None: all parameters are trained.
    - settings: of our plan, by key. in_fp8: more of them beside FP8 products.
    - differs: parts of their job that are unknown, or others than in our plan. Empty: none.
    """

    who: str
    model: str
    gpu: str
    host_gib: int
    tokens: int
    theirs: tuple[str, str] = ("–", "–")
    exact: str = "–"
    num_ranks: int = 1
    row_tokens: int = 4096
    adapter: Adapter | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    in_fp8: Mapping[str, Any] = field(default_factory=dict)
    differs: str = ""

    @property
    def trained(self) -> str:
        """What our plan trains, beside full training."""
        if self.adapter is None:
            return ""
        return f", LoRA ({self.adapter.ours})" + ", base on the host" * (
            self.settings.get("offload.parameters") == "cpu"
        )

    @property
    def title(self) -> str:
        """The row in words, by which its plans are stored."""
        cards = f"{self.num_ranks} x " * (self.num_ranks > 1)
        return (
            f"{self.who}: {self.model}{self.trained}, {cards}{self.gpu}, {self.host_gib} GiB, {self.tokens} tokens in "
            f"rows of {self.row_tokens}"
        )


STEP = 524288
ROWS = (
    Published("llmq [b]", "Qwen2.5 7B", "h100", 512, STEP, ("13,863", "19,194"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 14B", "h100", 512, STEP, ("6,321", "9,364"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 7B", "rtx-4090", 256, STEP, ("2,777", "4,328"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 14B", "rtx-4090", 256, STEP, ("1,348", "2,000"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 7B", "rtx-5060ti-16gb", 192, STEP, ("889", "1,456"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 7B", "rtx-5090", 256, STEP, ("3,100", "4,400"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 14B", "rtx-pro-6000", 256, STEP, ("4,035", "6,025"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 14B", "l40s", 512, STEP, ("1,500", "1,700"), _BF16, 1, 1024),
    Published("llmq [b]", "Qwen2.5 7B", "rtx-4090", 256, STEP, ("10,897", "16,487"), _BF16, 4, 1024),
    Published("llmq [b]", "Qwen2.5 32B", "rtx-4090", 768, STEP, ("2,208", "3,395"), _BF16, 4, 1024),
    Published(
        "RoundPipe [d]", "Llama 3.1 8B", "rtx-4090", 256, STEP, ("3,142", "–"), _STALE, differs=_ROWS,
    ),
    Published(
        "RoundPipe [d]", "Qwen3 32B", "rtx-4090", 768, 262144, ("740", "–"), _STALE, differs=_ROWS,
    ),
    Published(
        "DeepSpeed ZeRO-Offload [a]", "Llama 3.1 8B", "rtx-4090", 256, 8192, ("914", "–"), _MASTERS, differs=_ROWS,
    ),
    Published(
        "DeepSpeed ZeRO-Offload [a]", "Llama 3.1 8B", "rtx-4090", 256, 32768, ("1,791", "–"), _MASTERS, differs=_ROWS,
    ),
    Published("–", "Llama 3.1 8B", "rtx-4090", 256, 131072),
    Published(
        "MegaTrain [c]", "Qwen2.5 7B", "h100", 512, 32768, ("5,950", "–"), "fp32 masters; clip unknown",
        differs="their tokens a step and rows are unknown",
    ),
    Published("–", "Llama 3.1 8B", "h100", 512, 32768),
    Published("–", "Qwen2.5 14B", "h100", 512, 131072),
    Published("SuperOffload [e]", "Qwen3 14B", "gh200", 430, 16384, ("4,800 to 6,400", "–"), _MASTERS),
    Published(
        "Surogate [f]", "Llama 3.1 8B", "h100", 512, 16384, ("11,600", "12,900"), "base resident", row_tokens=2048,
        adapter=Adapter("q k v o gate up down, rank 16", _SEVEN, 16), settings=_STREAMED,
    ),
    Published(
        "Surogate [f]", "Llama 3.1 8B", "rtx-5090", 256, 16384, ("4,200", "6,400"), "base resident", row_tokens=2048,
        adapter=Adapter("q k v o gate up down, rank 16", _SEVEN, 16), settings=_STREAMED,
    ),
    Published(
        "Megatron-Bridge [i]", "Qwen3 8B", "h100", 512, 65536, ("15,146", "–"), "base resident", row_tokens=8192,
        adapter=Adapter("q k v o, rank 8", _ATTENTION, 8), settings=_STREAMED,
    ),
    Published(
        "Soup [g]", "Llama 3.1 8B", "h100", 512, 1024, ("1,077", "–"), "base streamed", row_tokens=128,
        adapter=Adapter(_UNKNOWN, _SEVEN, 16), settings=_STREAMED, in_fp8={"offload.frozen_weights": "fp8"},
        differs=_MODULES,
    ),
    Published(
        "RoundPipe [d]", "Qwen3 235B-A22B", "rtx-4090", 512, 131072, ("480", "–"), "base streamed; stale by a step",
        adapter=Adapter(_UNKNOWN, _ATTENTION, 16), settings={"offload.experts": "streamed"},
        differs=f"{_MODULES}, {_ROWS}",
    ),
    Published(
        "BlockStreamer [h]", "gpt-oss-120b", "rtx-4090", 128, 32768, ("1.6", "–"), "base streamed",
        adapter=Adapter(_UNKNOWN, _ATTENTION, 16), differs=_LAPTOP,
    ),
    Published(
        "BlockStreamer [h]", "gpt-oss-120b", "rtx-4090", 64, 32768, ("1.6", "–"), "base streamed",
        adapter=Adapter(_UNKNOWN, _ATTENTION, 16), settings=_DISK, differs=_LAPTOP,
    ),
)  # fmt: skip
COLUMNS = ("bf16", "FP8")
HEAD = """# Published rows beside our plans

Made by `python -m benchmarks.forecasts`, from the plans in [published.json](published.json), with seconds by part. Ours
are forecasts, not measurements: by the described machines (`offload/extras/plan/described/`), whose system keeps 4 GiB
of the host, compiled blocks, everything else `auto`. Both sides of a row have one job: model, card, tokens a step,
length of rows, and for adapters modules and rank. Unknown or other parts of theirs stand in the last column.
Ours has fp32 masters and moments, and clips by one norm over all gradients, in every row.

The share is of the products that the GPU could make in bf16. In brackets: passes × rows at a time on a card, found by
the plan. FP8 is `train.matmul fp8_tensorwise`: the head's products stay in bf16. "Ahead" divides the faster by the
other, in bf16 and in FP8. Each row names the commit that planned it.
"""
TITLES = (
    "published by",
    "model",
    "GPU, host",
    "tokens a step, of a row",
    "their states, clip",
    "theirs, bf16",
    "ours, bf16",
    "theirs, FP8",
    "ours, FP8",
    "ahead",
    "planned by",
    "not one job",
)
ADAPTER_TITLES = (*TITLES[:4], "trains, ours; theirs", "their base", *TITLES[5:])
ADAPTERS_HEAD = """## Adapters

LoRA. Ours trains the modules named first in "trains", over a base that lies on the host and streams; theirs
after it. Where theirs are unknown, ours has all linear layers, or those of attention in a mixture.
"""
PART_TITLES = ("step", "column", "step, s", "compute by part, s", "waits, s", "products and attention alone")
PART_HEAD = """## Where the seconds go

Compute and waits of a step in these plans. Last: tokens a second if nothing but products and attention took time, at
the described rates, nothing recomputed. A published speed above it needs faster products than the description has.
"""
NOTES = """
In tokens a second. Nothing of ours is stale; an adapter trains over the frozen base as the files have it. What they do
that we do not:

- [a] DeepSpeed, full training on one GPU, as others printed it; its rows lie on a line of 5.85 s and 0.38 ms a token.
  Nothing that we do not do: its update comes after the backward, and each micro-batch fetches the weights again.
- [b] [LLMQ](https://arxiv.org/abs/2512.15306), by the tables of its repository at b77d969: own kernels for everything
  beside products, each with the cast to FP8; weights quantized once a step and kept in FP8 on the host; moments and
  masters in bf16 with stochastic rounding; a choice of what is recomputed; CUDA graphs; a few families.
- [c] [MegaTrain](https://arxiv.org/abs/2604.05091): nothing that we do not do. The tokens of its step are not printed
  beside its figure; ours are for 32,768. On a GH200 its TFLOPS make 6,230 (7B), 2,970 (14B) and 1,270 (32B) tokens a
  second.
- [d] RoundPipe: gradients summed in fp16, updates one step late. Eight 4090s: 5,516 (32B) and 1,820 (235B).
- [e] SuperOffload, 600 TFLOPS printed: 4,800 tokens a second with recomputation counted, 6,400 without. It updates
  before the norm is known, and rolls back.
- [f] Surogate, LoRA with the base on the card: the bar for a streamed base. FP4 on the 5090: 8,500.
- [g] Soup 0.77, LoRA over a streamed base, equal bit for bit to resident: 8 rows of 128 tokens; 2,645 resident. Ours in
  FP8 streams the codes of these products (`offload.frozen_weights fp8`), with equal bits; with the base in bf16 3,010.
- [h] BlockStreamer 0.2, on a laptop with 8 GB on the card: 128 tokens a step, base in mxfp4 on the disk.
- [i] [Megatron-Bridge](https://github.com/NVIDIA-NeMo/Megatron-Bridge), by its verification card, "not tuned for
  performance": 4.327 s a step. Full training of the same model on 16 H100s: 10,760 tokens a second for each.

Without a speed for a language model: Fizgig 5.0 fully trains video models of 12.9 and 33 G parameters on 16 GB, a
window of blocks at a time.
"""


class Rows(harness.StoredRows):
    """The entries of the page: a row in both columns."""

    path = STORED
    page = STORED.with_suffix(".md")

    def names(self) -> dict[str, str]:
        """Return the described machine by title."""
        return {row.title: row.gpu for row in ROWS}

    def make(self, name: str) -> dict[str, Any]:
        """Return the plans of a row, with the commit."""
        (row,) = (row for row in ROWS if row.title == name)
        return {"commit": harness.head("")["commit"].removesuffix("-dirty")} | planned(row)

    def text(self, document: Mapping[str, Any], older: Collection[str]) -> str:
        """Return the page. older: rows to mark."""
        return page(document, older) + "\n"


def planned(row: Published) -> dict[str, Any]:
    """Return the plan of a row in each column, with the passes and micro-batches that the plan finds."""
    hardware = read_machine(row.gpu).with_host_memory(row.host_gib << 30)
    path = scratch() / "config.json"
    path.write_text(json.dumps(SHAPES[row.model]), encoding="utf-8")
    sizes = {"data.sequence_length": row.row_tokens, "train.tokens_per_step": row.tokens}
    adapter = row.adapter
    lora = {} if adapter is None else {"lora.rank": adapter.rank, "lora.target_modules": list(adapter.modules)}
    config = Config.load(None, {"model.path": str(path), **sizes, **lora, **row.settings})
    forecaster = Forecaster(config, row.num_ranks, plans_downloads=True)
    found = {}
    for column, settings in zip(COLUMNS, ({}, {"train.matmul": "fp8_tensorwise"} | row.in_fp8), strict=True):
        initial = forecaster.predict(apply_change(config, settings), hardware)
        found[column] = figures(place(forecaster, in_parts(forecaster, initial)))
    return found


def figures(plan: Forecast) -> dict[str, Any]:
    """Return the figures of a plan; of one that does not fit, what is missing."""
    if not plan.fits or plan.timing is None:
        return {"missing": plan.missing or plan.refusal}
    train, timing = plan.config.train, plan.timing
    return {
        "tokens_per_second": timing.tokens_per_second,
        "mfu": timing.mfu,
        "passes": train.passes,
        "micro_rows": train.micro_batch_size,
        "bound_by": timing.bound_by,
        "step_seconds": timing.step_seconds,
        "lane_seconds": dict(timing.lane_seconds),
        "compute_parts": dict(timing.compute_parts),
        "exposed": dict(timing.exposed),
        "placed": plan.placement_flags,
        "bytes": {tier: its["bytes"] for tier, its in plan.tiers.items()},
    }


def page(stored: Mapping[str, Any], older: Collection[str] = ()) -> str:
    """Return the page of the stored plans."""
    full = [list(cells(row, stored, older)) for row in ROWS if row.adapter is None]
    adapters = []
    for row in ROWS:
        if row.adapter is not None:
            first = list(cells(row, stored, older))
            adapters.append([*first[:4], f"{row.adapter.ours}; {row.adapter.theirs}", *first[4:]])
    tables = [harness.table(TITLES, *full), ADAPTERS_HEAD, harness.table(ADAPTER_TITLES, *adapters), NOTES, PART_HEAD]
    return "\n".join(
        [HEAD, *([f"{OLDER}\n"] if older else []), *tables, harness.table(PART_TITLES, *part_rows(stored))]
    )


def cells(row: Published, stored: Mapping[str, Any], older: Collection[str]) -> Iterator[str]:
    """Yield the cells of a row."""
    plans = stored.get(row.title, {})
    yield row.who
    yield row.model
    yield f"{row.num_ranks} × " * (row.num_ranks > 1) + f"{read_machine(row.gpu).name}, {row.host_gib} GiB"
    yield f"{row.tokens:,}, {row.row_tokens:,}"
    yield row.exact
    for theirs, column in zip(row.theirs, COLUMNS, strict=True):
        yield theirs
        yield cell(plans.get(column))
    yield ", ".join(filter(None, map(ahead, row.theirs, (plans.get(column) for column in COLUMNS)))) or "–"
    yield plans.get("commit", "–") + " †" * (row.title in older)
    yield row.differs


def ahead(theirs: str, plan: Mapping[str, Any] | None) -> str:
    """Return who is faster, and how much. Empty: a side has no figure. Of a range of theirs the upper end counts."""
    if theirs == "–" or plan is None or "missing" in plan:
        return ""
    ratio = plan["tokens_per_second"] / float(theirs.split(" to ")[-1].replace(",", ""))
    return f"ours {ratio:.2f}" if ratio >= 1 else f"theirs {1 / ratio:.2f}"


def part_rows(stored: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the rows of the table with seconds by part, for plans that have them."""
    for row in ROWS:
        for column in COLUMNS:
            plan = stored.get(row.title, {}).get(column, {})
            if not (parts := plan.get("compute_parts")):
                continue
            alone_s = parts["products"] + parts["attention"]
            yield [
                f"{row.model}{row.trained}, {read_machine(row.gpu).name}, {row.tokens:,} tokens",
                column,
                f"{plan['step_seconds']:.3g}",
                seconds_by_name(parts),
                seconds_by_name(plan["exposed"]) or "–",
                f"{row.tokens / alone_s:,.0f}",
            ]


def seconds_by_name(parts: Mapping[str, float]) -> str:
    """Return names with seconds, the largest first."""
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds:.3g}" for name, seconds in largest_first)


def cell(plan: Mapping[str, Any] | None) -> str:
    """Return the table cell of a plan."""
    if plan is None:
        return "not planned yet"
    if "missing" in plan:
        return "does not fit"
    rate, mfu = plan["tokens_per_second"], plan["mfu"]
    return f"{rate:,.0f} ({100 * mfu:.0f} %) [{plan['passes']} × {plan['micro_rows']}]"
