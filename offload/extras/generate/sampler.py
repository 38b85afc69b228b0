"""Generate text token by token from a model folder or checkpoint while the weights stream through memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, TextStreamer

from offload.accelerators import Accelerator, device_of
from offload.amounts import Tell, tell_nobody
from offload.app.checkpoint_folder import is_checkpoint, suggesting_alternative
from offload.app.hf.models import folder_config, max_positions, model_kind, vocab_size
from offload.app.hf.read import read_model
from offload.app.stored_model import read_stored
from offload.errors import ConfigError, OffloadError, counted, warn
from offload.extras.adapters.adapters import insert_adapter
from offload.extras.data.text_encoder import find_frame
from offload.extras.data.tokenizer import end_token_ids, load_tokenizer, tokenizer_folder
from offload.extras.generate.streamed_model import ReadFromOutside, StreamedModel
from offload.machine.limits import memory

_LEAST_MARGIN_BYTES = 1 << 30


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options. None: the value from generation_config.json.

    temperature: 0 selects the likeliest token.
    top_p: sample from the likeliest tokens up to this total probability.
    top_k: sample from this many likeliest tokens; 0: all.
    """

    max_new_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class GeneratedTokens:
    """Generated tokens, seconds taken, and weight bytes read.

    num_positions: positions of the model, if the text ended at the last one; else None.
    """

    token_ids: list[int]
    seconds: float
    bytes_read: int
    num_positions: int | None = None


class Sampler:
    """A streamed model with tokenizer. Context manager."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype | None,
        memory_bytes: int | None,
        accelerator: Accelerator | None,
        adapter: Path | None = None,
        tell: Tell = tell_nobody,
    ) -> None:
        """Open a Hugging Face folder or a checkpoint.

        dtype: compute dtype; None: the dtype of the weights.
        memory_bytes: as in StreamedModel.
        adapter: PEFT adapter folder to apply to the model.
        tell: as in StreamedModel.

        Raises ConfigError for a model without text output or tokenizer, CheckpointError, DiskError.
        """
        config = folder_config(path)
        self.model_kind = model_kind(config)
        if self.model_kind.name not in ("causal", "seq2seq"):
            class_name = (config.architectures or [config.model_type])[0]
            raise ConfigError(
                f"{path} holds {class_name}, of the kind {self.model_kind.name}, which writes no text; give a "
                "causal or an encoder-decoder model."
            )
        # An adapter with new tokens has a tokenizer in the folder.
        has_own_tokenizer = adapter is not None and adapter.is_dir() and tokenizer_folder(str(adapter)) is not None
        tokenizer_path = adapter if has_own_tokenizer else path
        if tokenizer_folder(str(tokenizer_path)) is None:
            raise ConfigError(
                f"{path} has no tokenizer; put the model's tokenizer.json and tokenizer_config.json there."
            )
        self.path = path
        self.tokenizer = load_tokenizer(str(tokenizer_path))
        with ExitStack() as opened:
            weights: Any
            if is_checkpoint(path):
                opened.enter_context(suggesting_alternative(path))
                self.model, weights = read_stored(path, dtype)
                # Weights stay open: their files are read in each pass.
                opened.callback(weights.close)
            else:
                config.dtype = dtype or config.dtype
                self.model, weights = read_model(self.model_kind.auto, path, config)
                opened.callback(weights.close)
                if weights.report.missing:
                    missing = sorted(weights.report.missing)
                    raise ConfigError(
                        f"the weights in {path} lack {counted(len(missing), 'parameter')} of "
                        f"{type(self.model).__name__}, for example {missing[0]}: it cannot continue a text."
                    )
            source = weights.source
            if adapter is not None:
                self.model, source = insert_adapter(self.model, source, adapter)
            self.stream = StreamedModel(
                self.model, source, memory_bytes=memory_bytes, accelerator=accelerator, tell=tell
            )
            opened.callback(self.stream.close)
            self._opened = opened.pop_all()
        self._device = device_of(accelerator)

    def encode(self, prompt: str) -> torch.Tensor:
        """Return the prompt tokens, [1, n]. Raises ConfigError."""
        begin, _ = find_frame(self.tokenizer)
        ids = self.tokenizer(prompt)["input_ids"]
        # As in training: a prompt from a chat template brings the BOS itself.
        if begin and ids[len(begin) :][: len(begin)] == begin:
            ids = ids[len(begin) :]
        return self._checked(ids)

    def encode_turns(self, turns: list[dict[str, str]]) -> torch.Tensor:
        """Return the tokens before the next answer in a conversation, [1, n]. Raises ConfigError."""
        encoded = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        return self._checked(encoded["input_ids"])

    def decode(self, generation: GeneratedTokens) -> str:
        """Return generated text without special tokens."""
        text: str = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        return text

    def _checked(self, token_ids: list[int]) -> torch.Tensor:
        """Return prompt tokens as a row, [1, n]; the token to begin a text in place of none. Raises ConfigError."""
        if not token_ids:
            start = self.tokenizer.bos_token_id
            if start is None:
                start = self.tokenizer.eos_token_id
            if start is None:
                raise ConfigError("--prompt is empty, and the tokenizer has no token to begin a text; give a prompt.")
            token_ids = [start]
        rows = vocab_size(self.model.config)
        if max(token_ids) >= rows:
            raise ConfigError(
                f"the tokenizer of {self.path} returns token {max(token_ids)}, but the model has only {rows}: the "
                "tokenizer belongs to another model."
            )
        return torch.tensor([token_ids])

    def write(self, tokens: torch.Tensor, choices: SamplingOptions, show: Callable[[str], None]) -> GeneratedTokens:
        """Continue `tokens`, [1, n]. `show` receives the text as it is generated.

        Raises ConfigError, CheckpointError, DiskError, and OffloadError if the model returns NaN.
        """
        config = self._generation_config(choices, tokens.shape[1])
        first, begin = self.stream.bytes_read, time.perf_counter()
        while True:
            # In each attempt, so a repeated pass gives the same text.
            torch.manual_seed(choices.seed)
            try:
                output = self._generate(tokens.to(self._device), config, show)
                break
            except ReadFromOutside as error:  # in the pass before the first token
                self.stream.keep(error.unit)
        new_tokens = output[0]
        if self.model_kind.name != "seq2seq":  # a separate decoder returns no prompt
            new_tokens = new_tokens[tokens.shape[1] :]
        num_positions = None
        if config.max_new_tokens < choices.max_new_tokens and len(new_tokens) == config.max_new_tokens:
            num_positions = max_positions(self.model.config)
        seconds, bytes_read = time.perf_counter() - begin, self.stream.bytes_read - first
        return GeneratedTokens(new_tokens.tolist(), seconds, bytes_read, num_positions)

    def _generate(self, tokens: torch.Tensor, config: GenerationConfig, show: Callable[[str], None]) -> torch.Tensor:
        model: Any = self.model
        watched = [model]
        if self.model_kind.name == "seq2seq":  # `generate` calls the encoder itself
            watched.append(model.get_encoder())
        with self.stream.watching(watched):
            return model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=config,
                streamer=_TextForwarder(self.tokenizer, show),
                logits_processor=[_NaNCheck()],
            )

    def _generation_config(self, choices: SamplingOptions, num_tokens: int) -> GenerationConfig:
        """Return the generation config: model defaults updated with the choices. Raises ConfigError."""
        config: Any = copy.deepcopy(self.model.generation_config)
        # One beam: text is shown token by token. `max_length` would count the prompt.
        config.num_beams = 1
        config.max_length = None
        config.max_new_tokens = choices.max_new_tokens
        limit = None
        if self.model_kind.name == "causal":  # the encoder's positions for the prompt are separate
            limit = max_positions(self.model.config)
        if limit is not None:
            if num_tokens >= limit:
                raise ConfigError(
                    f"the prompt has {counted(num_tokens, 'token')}, but the model has positions for only {limit}."
                )
            config.max_new_tokens = min(choices.max_new_tokens, limit - num_tokens)
        # Any of these asks for sampling, also where the model's own configuration is greedy.
        options = {"temperature": choices.temperature, "top_p": choices.top_p, "top_k": choices.top_k}
        options = {key: value for key, value in options.items() if value is not None}
        if options:
            config.do_sample = True
            config.update(**options)
        if choices.temperature == 0:
            config.do_sample = False
            # transformers warns of sampling values beside greedy decoding.
            config.temperature = None
            config.top_p = None
            config.top_k = None
        config.eos_token_id = self._end_token_ids(config.eos_token_id)
        if config.pad_token_id is None:
            config.pad_token_id = config.eos_token_id[0] if config.eos_token_id else 0
        return config

    def _end_token_ids(self, config_ids: int | list[int] | None) -> list[int] | None:
        """Return the tokens that end generation. Warns if other programs would not end there."""
        model_ids, own_id = config_ids if isinstance(config_ids, list) else [config_ids], self.tokenizer.eos_token_id
        if own_id is not None and own_id not in model_ids and not is_checkpoint(self.path):  # an export adds the end
            warn(
                f"generation ends at token {own_id} of the tokenizer, but the generation_config.json of {self.path} "
                f"has eos_token_id {config_ids}: other programs would not end there. Add {own_id} to that file."
            )
        return end_token_ids(self.tokenizer, config_ids) or None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)


class _TextForwarder(TextStreamer):
    """Forwards text once its tokens are final."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
        self._show(text)


class _NaNCheck(LogitsProcessor):
    def __call__(self, _tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if torch.isnan(scores).any():
            raise OffloadError(
                "the model returns NaN instead of probabilities: its weights contain NaN, its numbers overflow (try "
                "--dtype fp32), or a module reads the weights of another module, which are not in memory then (try "
                "--memory none)."
            )
        return scores


def free_memory(accelerator: Accelerator | None) -> int:
    """Return the default weight budget in bytes: free memory minus room for KV cache and activations.

    This room is a tenth, at least 1 GiB.
    """
    if accelerator is None:
        free = memory().get("available_bytes", 0)
    else:
        free = accelerator.free_bytes
    return max(0, free - max(_LEAST_MARGIN_BYTES, free // 10))
