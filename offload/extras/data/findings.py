"""What a pass over a source finds beside documents, for messages to the user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from offload.errors import counted
from offload.extras.data.rows import BadRow

_NUM_EXAMPLES = 3


@dataclass
class Findings:
    """Counts and names from a pass."""

    on_bad_row: str = "error"
    """`error` or `skip`, as `data.on_bad_row`."""
    num_bad: int = 0
    """Skipped bad rows."""
    bad: list[str] = field(default_factory=list)
    """Error messages for the first ones."""
    num_empty: int = 0
    """Skipped documents without a token."""
    num_split: int = 0
    """Conversations split into several documents."""
    num_open: int = 0
    """Answers before another turn, without a token that ends generation."""
    num_extended: int = 0
    """Conversations that the chat template ends by a special token, not known to end generation, before the EOS."""
    num_dropped: int = 0
    """Messages with a text that the chat template drops or changes without an error, and `documents` of rows."""
    first_dropped: str = ""
    """The place of the first one."""
    streams: bool = False
    """True if some tokens came from a file without document borders."""
    unread: list[str] = field(default_factory=list)
    """Columns without effect on the data."""
    roles: list[str] = field(default_factory=list)
    """Roles in conversations without the role assistant and without a trained message."""

    @property
    def no_answers(self) -> str:
        """The reason why conversations have no trained message, in words. Empty without such conversations."""
        if not self.roles:
            return ""
        return f"No message has the role assistant (roles: {', '.join(sorted(self.roles))})"

    def handle(self, bad: BadRow) -> None:
        """Count a bad row, or raise it."""
        if self.on_bad_row != "skip":
            raise BadRow(f"{bad} (--data.on_bad_row skip leaves such rows out, and counts them.)") from bad
        self.num_bad += 1
        if len(self.bad) < _NUM_EXAMPLES:
            self.bad.append(str(bad))

    def drop(self, place: str) -> None:
        """Count a text that the chat template drops."""
        self.num_dropped += 1
        self.first_dropped = self.first_dropped or place

    def add(self, batch: Findings) -> None:
        """Add the counts of a batch."""
        for name in ("num_empty", "num_split", "num_open", "num_extended", "num_dropped"):
            setattr(self, name, getattr(self, name) + getattr(batch, name))
        self.first_dropped = self.first_dropped or batch.first_dropped

    def notes(self) -> Iterator[str]:
        """Yield messages about rows and texts left out or changed."""
        if self.num_bad:
            bad, examples = counted(self.num_bad, "row"), " ".join(self.bad)
            yield f"left out, since unreadable (data.on_bad_row skip): {bad}. {examples}"
        if self.num_empty:
            yield f"left out, without text: {counted(self.num_empty, 'document')}."
        if self.num_split:
            yield (
                "split into one document for each answer, since the chat template rewrites earlier turns: "
                f"{counted(self.num_split, 'conversation')}."
            )
        if self.num_open:
            yield (
                "without a token behind them that ends generation, so a model does not learn to stop there: "
                f"{counted(self.num_open, 'answer')} before other turns. Name the token at the end of an answer, or "
                "the role marker behind it, in eos_token_id of the model's generation_config.json."
            )
        if self.num_extended:
            yield (
                "with the EOS behind the special token by which the chat template ends a conversation, since that "
                f"token is not known to end generation: {counted(self.num_extended, 'document')}. To end there without "
                "the EOS, name the token in eos_token_id of the model's generation_config.json."
            )
        if self.num_dropped:
            yield (
                "dropped or changed by the tokenizer's chat template, so no token has them as they are: "
                f"{counted(self.num_dropped, 'text')}, the first one is {self.first_dropped}. Use a tokenizer with "
                "another chat template, or write the text into another message."
            )
