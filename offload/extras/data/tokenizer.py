"""The tokenizer: loaded from a folder, or a byte-level BPE trained on the data and cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.app.environment import version_of
from offload.errors import ConfigError, counted
from offload.extras.data.cache import load_or_build
from offload.extras.data.chat import BUILTIN_TEMPLATE, ROLE_MARKERS
from offload.extras.data.sources import hash_text
from offload.files.pointers import refuse_pointers
from offload.files.temporary_files import files_written
from offload.user_cache import class_hash, code_hash

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
LEFT_OUT: Mapping[str, str] = {
    "is_local": "It says whether a tokenizer came from a folder or a name on the hub.",
    "local_files_only": "It says whether the hub was asked for a tokenizer.",
    "name_or_path": "It says where a tokenizer came from.",
}
"""Tokenizer configuration items outside the tokenizer hash, each with the reason."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
SENTENCE_OPTIONS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with options of sentence-transformers for a model. The first that there is counts."""
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "jinja2", "datasets", "pyarrow", "pillow")
_TRAINING_CHARS = 256 << 20  # a sample is enough: merges beyond this much text are rare words


def tokenizer_folder(model_path: str | None) -> str | None:
    """Return the location of the model's tokenizer: a folder or a hub name. None: a folder without tokenizer files."""
    if model_path is None:
        return None
    folder = folder_of(model_path)
    # A name on the hub: the library knows about the tokenizer.
    if not folder.is_dir():
        return model_path
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return str(folder)
    return None


def as_files(tokenizer: Any) -> dict[str, bytes]:
    """Return the files written by `save_pretrained` for a tokenizer or processor, by name. Empty for None."""
    if tokenizer is None:
        return {}
    # The files name the way in which a tokenizer was loaded, and a reader may load it from the hub.
    getattr(getattr(tokenizer, "tokenizer", tokenizer), "init_kwargs", {})["local_files_only"] = False
    has_several = isinstance(getattr(tokenizer, "chat_template", None), dict)  # as files they would need a subfolder
    return files_written(lambda folder: tokenizer.save_pretrained(folder, save_jinja_files=not has_several))


_preloaded: dict[tuple[Any, ...], Any] = {}
"""At most one loaded tokenizer, by folder and file metadata.

`preload_tokenizer` stores it for the next `load_tokenizer` call, because loading a large tokenizer takes seconds.
"""


def preload_tokenizer(path: str) -> Any:
    """Load a tokenizer for reading only. The next `load_tokenizer` call for the same path returns this object."""
    tokenizer = load_tokenizer(path)
    _preloaded.clear()
    if mark := _folder_key(folder_of(path)):
        _preloaded[mark] = tokenizer
    return tokenizer


def folder_of(path: str) -> Path:
    """Return the folder for a folder, a file in it, or a hub name (a folder that does not exist)."""
    folder = Path(path).expanduser()
    if folder.is_file():
        return folder.parent
    return folder


def place_of(path: str) -> str:
    """Return the place that transformers reads from: the folder of `folder_of` if it exists, else the hub name."""
    folder = folder_of(path)
    # A file stands for its folder. A hub name is passed as it is: a Path would drop a slash at its end.
    if folder.is_dir():
        return str(folder)
    return path


def _folder_key(folder: Path) -> tuple[Any, ...]:
    """Return a key for the folder contents (names, sizes, times, inodes). Empty for a hub name."""
    if not folder.is_dir():
        return ()
    status = ((file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file())
    return (folder.resolve(), *((name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for name, at in status))


def load_tokenizer(path: str) -> Any:
    """Load a tokenizer from a folder or a downloaded hub name. Downloads nothing. Raises ConfigError."""
    from transformers import AutoTokenizer

    folder = folder_of(path)
    if _preloaded and (preloaded := _preloaded.pop(_folder_key(folder), None)) is not None:
        return preloaded
    try:
        return AutoTokenizer.from_pretrained(place_of(path), local_files_only=True)
    except Exception as error:  # transformers raises many exception types for a folder without a tokenizer
        # The most frequent cause has a separate error: pointers of git-lfs, never fetched.
        refuse_pointers(*(folder / name for name in _TOKENIZER_FILES))
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"data.tokenizer: no tokenizer can be loaded from {path!r} ({reason}). Give data.tokenizer the folder that "
            "holds its tokenizer.json."
        ) from error


def check_same_tokens(key: str, path: str | None, folder: Path | None, tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer in the folder of a model gives tokens other numbers than `tokenizer`. None:
    rows of token ids have no tokenizer.

    key, path: the setting that names the model, and its value, for the message.
    """
    if tokenizer is None or folder is None:
        return
    try:
        others = load_tokenizer(str(folder)).get_vocab()
    except ConfigError:  # a folder of weights alone
        return
    own = tokenizer.get_vocab()
    different = [token for token, number in own.items() if others.get(token) != number]
    if different:
        token = min(different, key=own.__getitem__)
        there = others.get(token, "none")
        raise ConfigError(
            f"{key} is {path}, whose tokenizer has other numbers for {counted(len(different), 'token')} of "
            f"{len(own):,}, such as {token!r} ({own[token]} here, {there} there): its probabilities would count for "
            f"other tokens. Set --{key} to a model with the same tokenizer, or --data.tokenizer to its tokenizer."
        )


def end_token_ids(tokenizer: Any, model_ids: int | list[int] | None) -> list[int]:
    """Return the tokens that end generation: the tokenizer EOS, and model EOS tokens known as special tokens.

    A config older than the tokenizer may list ordinary tokens.
    """
    ids: Sequence[int | None]
    if isinstance(model_ids, list):
        ids = model_ids
    else:
        ids = (model_ids,)
    # An ordinary token as an end would cut texts in the middle.
    candidates = [tokenizer.eos_token_id, *(each for each in ids if each in tokenizer.added_tokens_decoder)]
    return list(dict.fromkeys(each for each in candidates if each is not None))


def end_texts(tokenizer: Any, model_path: str | None) -> tuple[str, ...]:
    """Return the texts of the tokens that end generation with a model: a folder, a file in it, or a hub name."""
    return tuple(tokenizer.convert_ids_to_tokens(end_token_ids(tokenizer, _model_end_ids(model_path))))


def _model_end_ids(model_path: str | None) -> Any:
    """Return `eos_token_id` of a model: an id, a list, or None."""
    # transformers also reads the ends of generation from the first of these files that there is.
    return _read_first(model_path, "generation_config.json", "config.json").get("eos_token_id")


def _read_first(model_path: str | None, *names: str) -> dict[str, Any]:
    """Return the content of the first JSON file that a model has: a folder, a file in it, or a hub name."""
    from transformers.utils import cached_file

    if model_path is None:
        return {}
    for name in names:
        path = cached_file(
            place_of(model_path), name, local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        if path is not None:
            return dict(json.loads(Path(path).read_bytes()))
    return {}


def treat_as_sentences(tokenizer: Any, model_path: str | None) -> None:
    """Let a tokenizer write texts in small letters first, if sentence-transformers does so for the model.

    Raises ConfigError for a tokenizer without normalizer, and for one that cuts the beginning of a text.
    """
    from tokenizers.normalizers import Lowercase, Sequence

    if tokenizer.truncation_side != "right":
        raise ConfigError(
            "the tokenizer has truncation_side 'left', and a run cuts the end of a long text, so sentence-transformers "
            "would give other vectors: set it to 'right' in a copy of the folder (tokenizer_config.json)."
        )
    if not _read_first(model_path, *SENTENCE_OPTIONS).get("do_lower_case"):
        return
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{model_path} has do_lower_case, and its tokenizer has no normalizer: set it to false in a copy of the "
            "folder, and write the rows in small letters."
        )
    rules = tokenizer.backend_tokenizer
    if rules.normalizer is None or rules.normalizer.normalize_str("A") != "a":
        rules.normalizer = Sequence([each for each in (Lowercase(), rules.normalizer) if each is not None])


def check_vocabulary(tokenizer: Any, vocab_size: int, name: str) -> None:
    """Raise ConfigError unless every token fits the model embedding with `vocab_size` rows.

    Unused special tokens beyond the embedding are tolerated (text models of Gemma 3 have an unused image token). The
    encoder checks every id in the data.
    """
    if all(_is_unused_special(tokenizer, index) for index in _ids_beyond(tokenizer, vocab_size)):
        return
    num_tokens = _num_tokens(tokenizer)
    raise ConfigError(
        f"The tokenizer {name} has {num_tokens} tokens, the model's vocabulary has {vocab_size}. Choose another "
        f"data.tokenizer, or a model with vocab_size of at least {num_tokens}."
    )


def grown_vocabulary(tokenizer: Any, vocab_size: int, is_configured: bool) -> int:
    """Return the embedding rows needed for tokens added to the tokenizer: `vocab_size` or more.

    If other tokens lie beyond `vocab_size`, the tokenizer belongs to another model, and `check_vocabulary` refuses the
    tokenizer. An unused special token outside the chat template needs a row only if the user gave the tokenizer
    (`is_configured`).
    """
    beyond = _ids_beyond(tokenizer, vocab_size)
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template)
    # Words of the vocabulary itself lie beyond the rows.
    if any(index not in added for index in beyond):
        return vocab_size
    needs = any(
        is_configured or not _is_unused_special(tokenizer, each) or str(added[each]) in template for each in beyond
    )
    if not needs:
        return vocab_size
    return _num_tokens(tokenizer)


def _ids_beyond(tokenizer: Any, vocab_size: int) -> list[int]:
    return [index for index in tokenizer.get_vocab().values() if index >= vocab_size]


def _is_unused_special(tokenizer: Any, index: int) -> bool:
    """Return True for a special token without a role in packing or padding."""
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    added = tokenizer.added_tokens_decoder
    return index in added and added[index].special and index not in used


def _num_tokens(tokenizer: Any) -> int:
    return max([len(tokenizer), *(index + 1 for index in tokenizer.get_vocab().values())])


def hash_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that decides the ids for a text, for a tokenizer or a processor with one.

    Includes the files (without `LEFT_OUT` items), the class code, and the library versions.
    """
    contents = []
    for name, data in as_files(tokenizer).items():
        content: Any = data
        if name.endswith("_config.json") and isinstance(settings := json.loads(data), dict):
            # Items about the place of the files are left out: a moved folder has the same tokenizer.
            content = sorted((key, repr(value)) for key, value in settings.items() if key not in LEFT_OUT)
        contents.append((name, content))
    return hash_text(repr((contents, class_hash({type(tokenizer)}), versions())))


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries for reading and tokenizing. None: not installed."""
    return {name: version_of(name) for name in _LIBRARIES}


def load_or_train_tokenizer(
    texts: Callable[[], Iterable[str]],
    vocab_size: int,
    key: str,
    cache_dir: Path,
    progress: Callable[[str, float], None],
) -> Any:
    """Return a byte-level BPE with at most `vocab_size` tokens, trained on `texts()`, or cached under `key`."""
    from transformers import PreTrainedTokenizerFast

    name = hash_text(repr((code_hash("extras/data"), versions(), key, vocab_size)))

    def build(folder: Path) -> None:
        progress("training the tokenizer", 0.0)
        train_bpe(texts(), vocab_size).save_pretrained(folder)
        progress("training the tokenizer", 1.0)

    def load(folder: Path) -> Any:
        if not (folder / "tokenizer.json").is_file():  # transformers would take the path for a hub name
            raise FileNotFoundError(folder)
        try:
            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # tokenizers raises plain Exception for an unreadable file
            raise ValueError(f"{folder}: {error}") from error

    return load_or_build(cache_dir / "tokenizers", name, build, load)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE with at most `vocab_size` tokens. Raises ConfigError for a too small vocabulary.

    Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2. Special tokens are the end of text, also used
    for padding, and the chat markers. A vocabulary too small for all 256 bytes keeps the most frequent ones and maps
    the rest to an unknown token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_TEXT, *ROLE_MARKERS]
    # With all bytes in the vocabulary, also those absent from the sample, any text can be encoded.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    alphabet_size = len(alphabet)
    unknown = None
    if len(special) + alphabet_size > vocab_size:
        special.append(UNKNOWN)
        alphabet = []
        alphabet_size = vocab_size - len(special)
        unknown = UNKNOWN
    if vocab_size < len(special) + 2:
        raise ConfigError(
            f"The model's vocabulary has {vocab_size} tokens, too few to train a tokenizer ({len(special)} are "
            "special). Give data.tokenizer a folder with a tokenizer, or choose a model with a larger vocab_size."
        )
    bpe = Tokenizer(models.BPE(unk_token=unknown))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=alphabet_size,
        show_progress=False,
    )
    bpe.train_from_iterator(_first_chars(texts), trainer)
    wrap: Any = PreTrainedTokenizerFast  # the constructor has no types
    return wrap(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        unk_token=unknown,
        additional_special_tokens=list(ROLE_MARKERS),
        chat_template=BUILTIN_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def sampling_rate(num_bytes: int) -> float:
    """Return the share of documents for tokenizer training, for data with `num_bytes` bytes."""
    return min(1.0, _TRAINING_CHARS / max(num_bytes, 1))


def _first_chars(texts: Iterable[str]) -> Iterator[str]:
    """Stop after twice the intended sample. Sampling is per document, and single documents can be very long."""
    num_chars = 0
    for text in texts:
        yield text
        num_chars += len(text)
        if num_chars > 2 * _TRAINING_CHARS:
            return
