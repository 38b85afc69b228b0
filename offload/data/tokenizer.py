"""The tokenizer: the one of a folder, or a byte-level BPE trained on the data and kept in the cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from offload.data.cache import cached
from offload.data.chat import BUILTIN_TEMPLATE, ROLE_MARKERS
from offload.data.sources import hash_text
from offload.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
_VERSION = "1"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_TRAINING_CHARS = 256 << 20  # a sample is enough: merges beyond this much text are rare words


def tokenizer_folder(model_path: str | None) -> str | None:
    """Return where a model's tokenizer is: its folder, a hub name, or None when the folder has no tokenizer files."""
    if model_path is None:
        return None
    path = Path(model_path).expanduser()
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        return model_path
    return str(folder) if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None


def as_files(tokenizer: Any) -> dict[str, bytes]:
    """Return the files that `save_pretrained` makes of a tokenizer or a processor, by name; of none, none."""
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


_seen: dict[tuple[Any, ...], Any] = {}
"""At most one tokenizer that was loaded to be counted alone, by its folder and the files there. To load one may take
seconds, so the next one who needs it has it.
"""


def see_tokenizer(path: str) -> Any:
    """Load a tokenizer that is not changed; `load_tokenizer` gives it to the next one who loads it."""
    tokenizer = load_tokenizer(path)
    _seen.clear()
    if mark := _mark(_folder_of(path)):
        _seen[mark] = tokenizer
    return tokenizer


def _folder_of(path: str) -> Path:
    folder = Path(path).expanduser()
    return folder.parent if folder.is_file() else folder


def _mark(folder: Path) -> tuple[Any, ...]:
    """Return what tells that a folder holds what it held; nothing of a name of the hub."""
    if not folder.is_dir():
        return ()
    found = ((file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file())
    return (folder.resolve(), *((name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for name, at in found))


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a folder, or of a hub name that was downloaded before. Nothing is downloaded here."""
    from transformers import AutoTokenizer

    folder = _folder_of(path)
    if _seen and (seen := _seen.pop(_mark(folder), None)) is not None:
        return seen
    try:
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a folder that is not a tokenizer
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"data.tokenizer: no tokenizer can be loaded from {path!r} ({reason}). Give data.tokenizer the folder that "
            "holds its tokenizer.json."
        ) from error


def check_vocabulary(tokenizer: Any, vocab_size: int, name: str) -> None:
    """Raise ConfigError unless every token fits the model's embedding of `vocab_size` rows.

    Special tokens beyond it that mark nothing here are tolerated (Gemma 3's text models ship an image token of that
    kind): the data is checked id by id when it is encoded.
    """
    if all(_marks_nothing(tokenizer, index) for index in _beyond(tokenizer, vocab_size)):
        return
    num_tokens = _num_tokens(tokenizer)
    raise ConfigError(
        f"The tokenizer {name} has {num_tokens} tokens, the model's vocabulary has {vocab_size}. Choose another "
        f"data.tokenizer, or a model with vocab_size of at least {num_tokens}."
    )


def grown_vocabulary(tokenizer: Any, vocab_size: int, is_given: bool) -> int:
    """Return how many rows a model's embedding of `vocab_size` rows needs for the tokens that were added to its
    tokenizer: `vocab_size`, or more.

    Where others lie beyond it, the tokenizer is another model's, which `check_vocabulary` refuses. A token that marks
    nothing, nor is in the chat template, needs a row only where the tokenizer `is_given` by the user.
    """
    beyond = _beyond(tokenizer, vocab_size)
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template)
    if any(index not in added for index in beyond):
        return vocab_size
    needs = any(is_given or not _marks_nothing(tokenizer, each) or str(added[each]) in template for each in beyond)
    return _num_tokens(tokenizer) if needs else vocab_size


def _beyond(tokenizer: Any, vocab_size: int) -> list[int]:
    return [index for index in tokenizer.get_vocab().values() if index >= vocab_size]


def _marks_nothing(tokenizer: Any, index: int) -> bool:
    """True for a special token that is not one of those that packing and padding use."""
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    added = tokenizer.added_tokens_decoder
    return index in added and added[index].special and index not in used


def _num_tokens(tokenizer: Any) -> int:
    return max([len(tokenizer), *(index + 1 for index in tokenizer.get_vocab().values())])


def hash_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that decides how text becomes ids."""
    import tokenizers
    import transformers

    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    parts = (rules, type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map)
    return hash_text(repr((*parts, transformers.__version__, tokenizers.__version__)))


def trained_tokenizer(
    texts: Callable[[], Iterable[str]],
    vocab_size: int,
    key: str,
    cache_dir: Path,
    progress: Callable[[str, float], None],
) -> Any:
    """Return a byte-level BPE of at most `vocab_size` tokens trained on `texts()`, from the cache when `key` was
    trained before."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    name = hash_text(repr((_VERSION, key, vocab_size, tokenizers.__version__)))

    def build(folder: Path) -> None:
        progress("training the tokenizer", 0.0)
        train_bpe(texts(), vocab_size).save_pretrained(folder)
        progress("training the tokenizer", 1.0)

    def load(folder: Path) -> Any:
        if not (folder / "tokenizer.json").is_file():  # transformers would take the path for a hub name
            raise FileNotFoundError(folder)
        try:
            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # tokenizers raises plain Exception for a file it cannot parse
            raise ValueError(f"{folder}: {error}") from error

    return cached(cache_dir / "tokenizers", name, build, load)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE [Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2] of at most `vocab_size`
    tokens.

    Special are the end of text, which also pads, and the chat markers. A vocabulary too small for all 256 bytes keeps
    the most frequent ones and turns the rest into an unknown token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_TEXT, *ROLE_MARKERS]
    all_bytes = len(special) + 256 <= vocab_size
    if not all_bytes:
        special.append(UNKNOWN)
    if vocab_size < len(special) + 2:
        raise ConfigError(
            f"The model's vocabulary has {vocab_size} tokens, too few to train a tokenizer ({len(special)} are "
            "special). Give data.tokenizer a folder with a tokenizer, or choose a model with a larger vocab_size."
        )
    bpe = Tokenizer(models.BPE() if all_bytes else models.BPE(unk_token=UNKNOWN))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if all_bytes else [],
        limit_alphabet=256 if all_bytes else vocab_size - len(special),
        show_progress=False,
    )
    bpe.train_from_iterator(_first_chars(texts), trainer)
    wrap: Any = PreTrainedTokenizerFast  # its constructor has no types
    return wrap(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        unk_token=None if all_bytes else UNKNOWN,
        additional_special_tokens=list(ROLE_MARKERS),
        chat_template=BUILTIN_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def sampling_rate(num_bytes: int) -> float:
    """Return the share of documents to train a tokenizer on, for data of `num_bytes`."""
    return min(1.0, _TRAINING_CHARS / max(num_bytes, 1))


def _first_chars(texts: Iterable[str]) -> Iterator[str]:
    """Stop after twice the intended sample: sampling is by document, and a few can be very long."""
    num_chars = 0
    for text in texts:
        yield text
        num_chars += len(text)
        if num_chars > 2 * _TRAINING_CHARS:
            return
