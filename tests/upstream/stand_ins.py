"""Small models, tokenizers and data in place of hub downloads, under the same names.

Models and tokenizers are written to a hub cache on disk, where `from_pretrained(name)` finds them offline. Data sets
are built in `datasets.load_dataset`.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

REVISION = "0" * 40
WORDS = 600
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {  # for names without a class name: the first matching part of the name
    "seqcls": "Qwen2ForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "gpt-neo": "GPTNeoForCausalLM",
    "opt": "OPTForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "roberta": "RobertaForMaskedLM",
    "bert": "BertForSequenceClassification",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "llama": "LlamaForCausalLM",
    "tinystories": "GPTNeoForCausalLM",
}
NAME = re.compile(r"""["']((?:[\w.-]+/)[\w.-]+)["']""")


def lines() -> list[str]:
    """Return sentences: the lines of `import this`."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return [line for line in codecs.decode(this.s, "rot13").splitlines()[2:] if line]


def class_of(name: str) -> str | None:
    """Return the transformers class for a hub name. None: no text model."""
    for found in re.findall(r"[A-Z]\w*?(?:For[A-Z][A-Za-z]+|LMHeadModel|Model)(?![a-z])", name):
        if hasattr(transformers, found):
            return found
    plain = name.lower()
    return next((kind for word, kind in FAMILIES.items() if word in plain), None)


def fill_cache(home: Path, folder: Path, shrink: Callable[..., Any]) -> dict[str, str]:
    """Write a model and a tokenizer for each hub name in the sources. Return the failed names with the error."""
    names = {name for file in folder.rglob("*.py") for name in NAME.findall(file.read_text(errors="replace"))}
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    failed = {}
    for name in sorted(names):
        kind = class_of(name)
        there = home / "hub" / f"models--{name.replace('/', '--')}"
        if kind is None or there.exists():
            continue
        place = there / "snapshots" / REVISION
        place.mkdir(parents=True)
        (there / "refs").mkdir()
        (there / "refs" / "main").write_text(REVISION)
        try:
            _write(name, kind, place, shrink)
        except Exception as error:  # some classes need more than a configuration
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return failed


def _write(name: str, kind: str, place: Path, shrink: Callable[..., Any]) -> None:
    spoken = tokenizer(name)
    spoken.save_pretrained(place)
    ids = {"vocab_size": WORDS, "pad_token_id": spoken.pad_token_id, "eos_token_id": spoken.eos_token_id}
    made = getattr(transformers, kind)
    config = shrink(made.config_class, ids | {"bos_token_id": spoken.bos_token_id, "num_labels": 1})
    for key in ("max_position_embeddings", "n_positions"):
        if hasattr(config, key):
            setattr(config, key, 512)
    torch.manual_seed(zlib.crc32(name.encode()))
    made(config).save_pretrained(place)


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with bytes, a few words and a chat template (TRL's template for this name, if installed)."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        lines(),
        trainers.BpeTrainer(vocab_size=WORDS, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False),
    )
    special = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "unk_token": SPECIAL[3]}
    spoken = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **special)
    spoken.chat_template = _chat_template(name)
    return spoken


def _chat_template(name: str) -> str:
    with contextlib.suppress(ImportError):
        import trl

        asked = re.sub(r"[^a-z0-9]", "", name.lower())
        known = {f.stem.replace("_", ""): f for f in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
        alike = "qwen25" if "qwen2" in asked else max((stem for stem in known if stem in asked), key=len, default="")
        if alike in known:
            return known[alike].read_text()
    return CHATML


# -- data --------------------------------------------------------------------------------------------------------


def _rows(name: str, config: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows in a TRL format: `standard_` or `conversational_`, followed by the purpose."""
    style, _, kind = config.partition("_")
    if not kind:
        style, kind = "conversational" if "chat" in name or "toolcall" in name else "standard", config
    text = lines()
    for number in range(count):
        asked, _, said = text[number % len(text)].partition(" ")
        said, wrong = " " + said, " " + text[(number + 7) % len(text)]
        if style == "conversational":
            whole: Any = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            asked, said, wrong = whole[:1], whole[1:], [{"role": "assistant", "content": wrong}]  # type: ignore[assignment]
        else:
            whole = asked + said
        tools = [{"type": "function", "function": {"name": "beautify", "description": said, "parameters": {}}}]
        kinds: dict[str, dict[str, Any]] = {
            "language_modeling": {"messages" if style == "conversational" else "text": whole},
            "prompt_only": {"prompt": asked},
            "prompt_completion": {"prompt": asked, "completion": said},
            "preference": {"prompt": asked, "chosen": said, "rejected": wrong},
            "implicit_prompt_preference": {"chosen": asked + said, "rejected": asked + wrong},
            "unpaired_preference": {"prompt": asked, "completion": said, "label": number % 3 > 0},
        }
        other = dict.fromkeys(("text", "quote", "question", "answer", "sentence"), whole) | {"label": number % 2}
        yield kinds.get(kind, other) | ({"tools": tools} if "toolcall" in name else {})


def answer_datasets() -> None:
    """Patch `datasets.load_dataset` to return built data for hub names."""
    import datasets

    real = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("data_files") or Path(path).exists() or "image" in path:
            return real(path, name, *args, **kwargs)
        rows = list(_rows(path, name or "language_modeling" * ("dolly-chat" in path), 19))
        whole = datasets.DatasetDict(
            train=datasets.Dataset.from_list(rows[:17]),
            test=datasets.Dataset.from_list(rows[17:]),
            validation=datasets.Dataset.from_list(rows[17:]),
        )
        split = kwargs.get("split")
        found: Any = whole if split is None else whole[re.split(r"[\[+]", split)[0]]
        some = re.search(r"\[:(\d+)(%?)\]", split or "")
        if some and not some[2]:
            found = found.select(range(min(int(some[1]), len(found))))
        return found.to_iterable_dataset() if kwargs.get("streaming") else found

    datasets.load_dataset = load_dataset
