"""A conversation with a model: each turn continues all turns before, through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable

from offload.errors import ConfigError
from offload.extras.generate.sampler import GeneratedTokens, Sampler, SamplingOptions


class Conversation:
    """Turns of a user and a model.

    turns: all turns so far, each with `role` and `content`.
    """

    def __init__(self, sampler: Sampler, choices: SamplingOptions) -> None:
        """Raises ConfigError for a tokenizer without chat template."""
        if not sampler.tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {sampler.path} has no chat template; leave out --chat.")
        self._sampler = sampler
        self._choices = choices
        self.turns: list[dict[str, str]] = []

    def answer(self, text: str, show: Callable[[str], None]) -> GeneratedTokens:
        """Add the user's `text`, and the answer of the model. `show` receives the answer as it is generated.

        Raises ConfigError for a conversation longer than the positions of the model, and the errors of `Sampler.write`.
        """
        self.turns.append({"role": "user", "content": text})
        # All turns are encoded again: a template may rewrite earlier ones (reasoning models).
        generation = self._sampler.write(self._sampler.encode_turns(self.turns), self._choices, show)
        self.turns.append({"role": "assistant", "content": self._sampler.decode(generation)})
        return generation
