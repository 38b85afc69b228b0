"""Export check: the written folder is loaded like any other and must reproduce the engine's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.app.hf.deferred_init import DeferredInit
from offload.app.hf.read import build_empty
from offload.errors import ConfigError, OffloadError, counted, format_bytes
from offload.layout.planes import DTYPES
from offload.machine.limits import memory
from offload.modules import in_eval_mode

Batch = dict[str, torch.Tensor]
SAMPLE_TOKENS = 48

# Largest allowed logit difference, relative to the largest logit. Sum order differs between devices and kernels.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class LogitsProbe:
    """A few tokens and their logits from the engine's model, fp32 on the CPU. Without a head: the hidden states."""

    batch: Batch
    logits: torch.Tensor


def _logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits, or without a head the hidden states, fp32 on the CPU."""
    logits: torch.Tensor | None = getattr(outputs, "logits", None)
    if logits is None:
        logits = outputs["last_hidden_state"]
    return logits.detach().to("cpu", torch.float32)


def take_probe(engine: Any, batch: Batch, *, num_tokens: int = 32) -> LogitsProbe:
    """Run the engine's model in eval mode on the first tokens in the first row of a batch.

    The tokens count as one document: the model reloaded with a cache ignores restarted positions. A batch with pictures
    must have one row and is used whole.
    """
    shapes = {value.shape for value in batch.values()}
    short = {key: value[:1, :num_tokens] for key, value in batch.items() if key != "position_ids"}
    if len(shapes) != 1:
        short = dict(batch)
    with in_eval_mode(engine.model):
        outputs = engine.model(**{key: value.to(engine.device) for key, value in short.items()})
    return LogitsProbe(short, _logits_of(outputs))


def check_buffers(engine: Any, batch: Callable[[], Batch], precision: str) -> None:
    """Raise ConfigError if the model computes with other buffers than a model loaded from its export.

    Concerned are buffers in no file, for example a scale rounded to the dtype at build time. If any differ, the engine
    runs on `batch` with both versions. Collective.
    """
    model, dtype = engine.model, DTYPES[precision]
    try:
        with DeferredInit(0):
            rebuilt = build_empty(type(model)._from_config, model.config, dtype, dtype)
    except Exception:  # The class needs more than a configuration. The export check covers this case.
        return
    loaded = dict(rebuilt.named_modules())
    # Buffers in the files are equal by the check of the files.
    differing = {
        f"{name}.{key}": (module, key, loaded[name]._buffers[key])
        for name, module in model.named_modules()
        for key in module._non_persistent_buffers_set & module._buffers.keys()
        if name in loaded and not _is_same(module._buffers[key], loaded[name]._buffers.get(key))
    }
    if not differing:
        return
    rows, before = batch(), {name: module._buffers[key] for name, (module, key, _) in differing.items()}
    probe = take_probe(engine, rows)
    try:
        for module, key, value in differing.values():
            module._buffers[key] = value.to(module._buffers[key].device)
        reloaded = take_probe(engine, rows)
    finally:
        for name, (module, key, _) in differing.items():
            module._buffers[key] = before[name]
    distance, allowed = _distance(reloaded.logits, probe, precision)
    if distance <= allowed:
        return
    dtype_name = str(dtype).removeprefix("torch.")
    name, (_, _, value) = next(iter(differing.items()))
    raise ConfigError(
        f"the given model computes with another {name} ({_describe_buffer(before[name])}) than the model loaded from "
        f"its export ({_describe_buffer(value)}; {dtype_name}): logits differ by {distance:.3g}, of {allowed:.1e} "
        f"allowed. Make it with from_pretrained(..., dtype=torch.{dtype_name}), or set --train.precision to the dtype "
        "in which it was made."
    )


def _is_same(buffer: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two buffers are equal, or one is missing."""
    return buffer is None or other is None or (buffer.dtype == other.dtype and torch.equal(buffer.cpu(), other))


def _describe_buffer(buffer: torch.Tensor) -> str:
    if buffer.numel() == 1:
        return f"{buffer.item():.6g}"
    return f"{list(buffer.shape)}, {buffer.dtype}"


def reason_not_to_reload(folder: Path, base_bytes: int, budget_bytes: int | None) -> str | None:
    """Return the reason against loading an export whole on this machine. None: enough memory.

    `base_bytes`: memory for the base under an adapter. `budget_bytes`: host memory limit for the run.
    """
    num_bytes = base_bytes + sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if budget_bytes is not None and num_bytes > budget_bytes:
        return f"it needs {format_bytes(num_bytes)} of memory, and offload.host_memory is {format_bytes(budget_bytes)}"
    available = memory().get("available_bytes")
    # Loading takes some memory beside the weights.
    if available is not None and num_bytes * 1.2 > available:
        return f"it needs {format_bytes(num_bytes)}, and {format_bytes(available)} of memory are free"
    return None


def reload(folder: Path, auto: Any) -> Any:
    """Load an exported folder with transformers, in eval mode. Raises OffloadError."""
    try:
        model, info = auto.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:
        raise OffloadError(
            f"the exported folder {folder} cannot be loaded again: {type(error).__name__}: {error}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise OffloadError(
            f"the exported folder {folder} lacks {counted(len(missing), 'parameter')}, for example {missing[0]}."
        )
    return model.eval()


def check_logits(model: Any, probe: LogitsProbe, precision: str) -> str:
    """Compare the reloaded model's logits with the probe. Return the result as text.

    Raises OffloadError if the difference is too large.
    """
    with torch.no_grad():
        logits = _logits_of(model(**probe.batch))
    if torch.equal(logits, probe.logits):  # the usual case on a CPU
        return "logits bit-equal"
    difference, allowed = _distance(logits, probe, precision)
    scale = probe.logits.abs().max().item()
    if not difference <= allowed:  # also for NaN
        raise OffloadError(
            f"the exported model gives other logits than the trained one: they differ by {difference:.3g}, with "
            f"{scale:.3g} as the largest logit (allowed for {precision}: {TOLERANCE[precision]:g} of that). Do not use "
            "the export."
        )
    return f"logits equal within {difference:.1e} (largest {scale:.3g}; allowed {allowed:.1e})"


def _distance(logits: torch.Tensor, probe: LogitsProbe, precision: str) -> tuple[float, float]:
    """Return the largest logit difference from a probe, and the allowed one."""
    scale = probe.logits.abs().max().item()
    return (logits - probe.logits).abs().max().item(), TOLERANCE[precision] * max(scale, 1.0)


def sample_text(
    model: Any, tokenizer: Any, prompt_ids: torch.Tensor, *, seed: int, num_tokens: int = SAMPLE_TOKENS
) -> str:
    """Return a sampled continuation for a prompt [1, sequence], at temperature 0.8."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        written = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=0.8,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        )
    return str(tokenizer.decode(written[0, prompt_ids.shape[1] :], skip_special_tokens=True))
