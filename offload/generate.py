"""`python -m offload.generate`: continue a text with a model possibly larger than memory."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from offload.app.config.command_line import as_path, as_utf8, parse_options, run_command, say
from offload.app.telemetry.lasting_output import is_unread
from offload.errors import ConfigError, counted, format_bytes
from offload.sizes import parse_size

if TYPE_CHECKING:
    from offload.extras.generate.sampler import GeneratedTokens, Sampler

DESCRIPTION = (
    "Continue a text with a causal or an encoder-decoder model. Weights that do not fit the memory are read again for "
    "every token, ahead of compute. Text goes to stdout as it comes. --chat without --prompt is a conversation: a line "
    "is a turn, from a terminal or a pipe. What is not given is as generation_config.json "
    "says. Exit codes: 0 fine, 1 failed or damaged, 2 bad arguments, 130 interrupted."
)


_OF_MODEL = "(default: the model's)"
_ABOUT_MEMORY = (
    "for weights on the device; two units are there in any case, none: no limit, auto: what is free but for a tenth, "
    "at least 1 GiB"
)


@dataclasses.dataclass
class Options:
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER|CHECKPOINT")]
    """a Hugging Face folder, RUN/checkpoints/step-N, or RUN for its newest whole checkpoint (all are read)"""
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """what to continue; - reads it from stdin"""
    max_new_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 128
    """tokens to write at most"""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T", help_behavior_hint=_OF_MODEL)] = None
    """0 takes the likeliest token"""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P", help_behavior_hint=_OF_MODEL)] = None
    """draw from the likeliest tokens that have this probability together"""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K", help_behavior_hint=_OF_MODEL)] = None
    """draw from so many of the likeliest tokens; 0 for all"""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """the same seed draws the same text"""
    memory: Annotated[str, tyro.conf.arg(metavar="SIZE", help=_ABOUT_MEMORY)] = "auto"
    adapter: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """an adapter of the model, a folder as PEFT saves it, to write with"""
    device: Annotated[str, tyro.conf.arg(metavar="{auto,cpu,...}")] = "auto"
    """a kind of device, such as cuda; auto: the GPU if there is one"""
    chat: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """put the prompt into the tokenizer's chat template; without a prompt, a conversation until /exit or Ctrl-D"""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """of the weights: auto is that of the folder, or what a checkpoint was trained in"""
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """show tracebacks"""


def main(words: list[str]) -> int:
    options = parse_options(Options, words, prog="python -m offload.generate", description=DESCRIPTION)
    _check(options)
    memory_bytes: int | None = -1  # measured below, because torch is needed for it
    if options.memory != "auto":
        memory_bytes = parse_size(options.memory, "--memory")
    prompt = options.prompt
    if prompt == "-":
        prompt = sys.stdin.read().rstrip("\n")
    prompts = _typed_lines()
    if prompt is not None:
        prompts = iter([as_utf8(prompt, "--prompt")])

    from offload.accelerators import own_accelerator
    from offload.app.checkpoint_folder import choose_model
    from offload.app.hf.models import quiet_transformers
    from offload.app.stored_model import DTYPES
    from offload.app.telemetry.progress import work_progress
    from offload.extras.generate.conversation import Conversation
    from offload.extras.generate.sampler import Sampler, SamplingOptions, free_memory

    quiet_transformers()
    own = own_accelerator(None if options.device == "auto" else options.device, flag="--device")
    path = choose_model(Path(options.model).expanduser(), say)
    if memory_bytes == -1:
        memory_bytes = free_memory(own)
    choices = SamplingOptions(options.max_new_tokens, options.temperature, options.top_p, options.top_k, options.seed)
    num_tokens = 0
    seconds = 0.0
    bytes_read = 0
    with (
        contextlib.ExitStack() as reading,
        Sampler(
            path,
            dtype=DTYPES[options.dtype],
            memory_bytes=memory_bytes,
            accelerator=own,
            adapter=as_path(options.adapter),
            tell=reading.enter_context(work_progress()),
        ) as sampler,
    ):

        def show(text: str) -> None:
            reading.close()  # the text takes its place
            _show(text)

        total = sampler.stream.total_bytes
        if prompt is None:
            reading.close()  # the user types now
        conversation = Conversation(sampler, choices) if options.chat else None
        for text in prompts:
            if conversation is not None:
                generation = conversation.answer(text, show)
            else:
                generation = sampler.write(sampler.encode(text), choices, show)
            reading.close()
            print()
            _comment(sampler, generation, options)
            num_tokens += len(generation.token_ids)
            seconds += generation.seconds
            bytes_read += generation.bytes_read
    rate = num_tokens / seconds if seconds else 0.0
    say(
        f"{counted(num_tokens, 'token')} in {seconds:.1f} s, {rate:.3g} a second; {format_bytes(total)} of weights, "
        f"{format_bytes(bytes_read)} read while writing"
    )
    return 0


def _show(text: str) -> None:
    """Print a piece of the text. Without a reader, no more text is needed: exit with 0."""
    print(text, end="", flush=True)
    if is_unread(sys.stdout):
        sys.exit(0)


def _typed_lines() -> Iterator[str]:
    """Yield the lines of stdin with a text, until the end or /exit. A terminal shows a prompt."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # lines can be edited
        say("a conversation: a line is a turn; /exit or Ctrl-D ends it")
    question = "> " * is_terminal  # a pipe has nobody to ask
    while (line := _line(question)) not in (None, "/exit"):
        if line and line.strip():
            yield line


def _line(question: str) -> str | None:
    """Return a line of stdin; None at the end."""
    try:
        return as_utf8(input(question), "the line")
    except EOFError:
        if question:
            print()  # Ctrl-D leaves the cursor behind the question
        return None


def _comment(sampler: Sampler, generation: GeneratedTokens, options: Options) -> None:
    """Print notes about an empty text, and about a text at the last position of the model."""
    if not sampler.decode(generation).strip():
        advice = ""
        if sampler.tokenizer.chat_template and not options.chat:
            advice = " The folder has a chat template, and a chat model expects a prompt in it: add --chat."
        say(f"note: the model returned no text.{advice}")
    if generation.num_positions is not None:
        say(
            f"note: the text ends after {counted(len(generation.token_ids), 'token')} of --max-new-tokens "
            f"{options.max_new_tokens}: with the prompt, it fills the {generation.num_positions} positions of the "
            "model."
        )


def _check(options: Options) -> None:
    """Raises ConfigError."""
    if options.prompt is None and not options.chat:
        raise ConfigError("--prompt is missing; write --prompt TEXT, or --chat for a conversation.")
    for name, value, allowed, is_right in (
        ("max-new-tokens", options.max_new_tokens, "1 or more", options.max_new_tokens >= 1),
        ("temperature", options.temperature, "0 or more", (options.temperature or 0) >= 0),
        ("top-p", options.top_p, "above 0 and at most 1", options.top_p is None or 0 < options.top_p <= 1),
        ("top-k", options.top_k, "0 or more", (options.top_k or 0) >= 0),
    ):
        if not is_right:
            raise ConfigError(f"--{name} is {value}; it should be {allowed}.")


if __name__ == "__main__":
    run_command(main)
