"""Run configuration, read from YAML, the command line or Python and validated once.

Every value records where the value came from (`Config.origin`), and the resolved configuration can be written and read
back. This module never imports torch: `--help` and a misspelled option must get an answer at once.
"""

from __future__ import annotations

import os
import re
import reprlib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from offload.app.config import conflicts
from offload.app.config.other_trainers import current_name, equivalent_setting
from offload.app.config.sections import (
    DOCUMENTS,
    ROW_FORMATS,
    CheckpointSection,
    ContrastiveSection,
    DataSection,
    DistillSection,
    LoraSection,
    ModelSection,
    OffloadSection,
    OptimizerSection,
    PrefsSection,
    RunSection,
    Section,
    TrainSection,
    read_yaml,
)
from offload.conflicts import CONFLICTS, refuse
from offload.errors import ConfigError, nearest, plural, shorten, too_few_rows
from offload.retired import without_retired

_FILE_KEYS = (
    "run.dir",
    "run.name",
    "model.path",
    "data.source",
    "data.sources",
    "data.eval_source",
    "data.tokenizer",
    "lora.config",
    "lora.adapter",
    "prefs.reference",
    "distill.teacher",
    "offload.nvme_dir",
    "checkpoint.resume",
)


class Config(BaseModel):
    """Configuration of a run. `Config()` is the built-in run; `Config.load` reads a file."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: dict[str, str] = PrivateAttr(default_factory=dict)
    _changes: list[str] = PrivateAttr(default_factory=list)

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    lora: LoraSection = LoraSection()
    prefs: PrefsSection = PrefsSection()
    distill: DistillSection = DistillSection()
    contrastive: ContrastiveSection = ContrastiveSection()
    offload: OffloadSection = OffloadSection()
    checkpoint: CheckpointSection = CheckpointSection()

    SECTIONS: ClassVar[dict[str, type[Section]]] = {}

    def __init__(self, /, **sections: Any) -> None:
        # Names of earlier versions are no unknown keys, also for a configuration made in Python.
        for name, values in sections.items():
            if isinstance(values, Mapping):
                flat = _with_current_names({f"{name}.{field}": value for field, value in values.items()})
                sections[name] = {key.partition(".")[2]: value for key, value in flat.items()}
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        origin: str = "python",
        may_go_on: bool = False,
    ) -> Config:
        """Read a YAML file (optional) and apply `overrides`: {"train.steps": 10} or {"train": {"steps": 10}}.

        `origin` is the source recorded for the overrides in the written configuration. `may_go_on`: see `check`. Raises
        ConfigError.
        """
        values = {}
        if path is not None:
            values = _with_current_names(_flatten(_read_yaml(Path(path))))
        origins = dict.fromkeys(values, "file")  # the overrides come later, and win
        override_values = _with_current_names(_flatten(overrides or {}))
        values.update(override_values)
        origins.update(dict.fromkeys(override_values, origin))
        sections: dict[str, Any] = {}
        for key, value in values.items():
            section, _, field = key.partition(".")
            if not field:
                sections[section] = value
            elif isinstance(sections.setdefault(section, {}), dict):  # not a section: the model below rejects the value
                sections[section][field] = value
        config = cls(**sections)
        config._origins.update({key: where for key, where in origins.items() if "." in key})
        config.check(may_go_on=may_go_on)
        return config

    def items(self) -> Iterator[tuple[str, Any]]:
        """Return ("section.field", value) for every setting, in declaration order."""
        return ((key, self.get(key)) for key in all_keys())

    def get(self, key: str) -> Any:
        return attrgetter(key)(self)

    def origin(self, key: str) -> str:
        """Return the source of a value: default, file, command line, python or resolved."""
        section, field = key.split(".")
        # pydantic notes the fields set, also by an assignment after `load`.
        assigned = field in getattr(self, section).model_fields_set
        return self._origins.get(key, "python" if assigned else "default")

    def is_default(self, *keys: str) -> bool:
        """Tell whether all given sections ("model") and keys ("train.batch_size") still have their defaults."""
        return all(self.origin(key) == "default" for key, _ in self.items() if _is_one_of(key, keys))

    def with_resolved(self, **values: Any) -> Config:
        """Return a copy with values decided by the program. The arguments are named section__field."""
        named = {name.replace("__", "."): value for name, value in values.items()}
        # An equal value keeps the old origin: the program has decided nothing.
        return self.with_settings({key: (value, "resolved") for key, value in named.items() if self.get(key) != value})

    def with_settings(self, settings: Mapping[str, tuple[Any, str]], changes: Iterable[str] = ()) -> Config:
        """Return a copy with values and their origins, by key as in `to_dict`, and with further `changes`."""
        copy = self.model_copy(deep=True)
        copy._changes.extend(changes)
        for key, (value, origin) in settings.items():
            section, field = key.split(".")
            setattr(getattr(copy, section), field, value)
            copy._origins[key] = origin
        return copy

    def to_dict(self) -> dict[str, tuple[Any, str]]:
        """Return {key: (value, origin)} for all keys, ready for JSON and for a resumed run."""
        return {key: (value, self.origin(key)) for key, value in self.items()}

    @property
    def changes(self) -> Sequence[str]:
        """Settings with other values than in the resumed run, as "KEY is A and was B". Empty for a new run."""
        return self._changes

    def with_note(self, key: str, text: str) -> Config:
        """Return a copy with an extra comment on one value in the YAML output."""
        copy = self.model_copy(deep=True)
        copy._notes[key] = f"; {text}"
        return copy

    def check(self, *, may_go_on: bool = False) -> None:
        """Reject impossible file names and impossible combinations. Raises ConfigError.

        may_go_on: skip the combinations if a run to resume may exist, because the saved settings can still change them;
        the resume checks the combinations then.
        """
        if not self.data.source:
            raise ConfigError("data.source is empty; name builtin:stdlib, or files or globs.")
        refuse(conflicts.DATA, self._setting)  # first: these do not depend on a run to resume
        weights = [source.get("weight") for source in self.data.sources]
        if None in weights and any(weights):
            path = self.data.sources[weights.index(None)]["path"]
            raise ConfigError(
                f"data.sources gives no weight to {path}, but weights to others: give each source a weight, or none."
            )
        for key in _FILE_KEYS:
            for name in names_in(self.get(key)):
                if not _can_be_a_file(name):
                    raise ConfigError(
                        f"{key} is {show_value(name)}, which is not a valid file name: a part of a path has at most "
                        f"255 bytes, and no zero byte; set --{key} to another one."
                    )
        resume, folder = self.checkpoint.resume, self.run.dir
        may_find_run = resume != "never"  # a named checkpoint, or a run folder with a `checkpoints` folder
        if resume == "auto":
            may_find_run = folder is not None and os.path.isdir(os.path.expanduser(f"{folder}/checkpoints"))  # noqa: PTH111, PTH112 - any name
        if not (may_go_on and may_find_run):
            for pattern in self.optimizer.freeze:  # names are known with the model; a wrong pattern shows now
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ConfigError(
                        f"optimizer.freeze has {pattern!r}, which is not a valid regular expression: {error}."
                    ) from None
            of_rows = conflicts.ROWS if self.knows_rows else ()
            refuse(chain(of_rows, conflicts.RUN, *CONFLICTS.values()), self._setting)

    def _setting(self, key: str) -> Any:
        """Return a value for a table of conflicts. The value of "origin.KEY" is the origin of KEY."""
        owner, _, name = key.partition(".")
        if owner == "origin":
            return self.origin(name)
        return self.get(key)

    @property
    def has_own_data(self) -> bool:
        """True if the training data is the user's, not the built-in text."""
        return bool(self.data.sources) or not all(name.startswith("builtin:") for name in self.data.source)

    @property
    def knows_rows(self) -> bool:
        """False if train.batch_size is still to be decided, from train.tokens_per_step."""
        return self.train.tokens_per_step is None or self.origin("train.batch_size") == "resolved"

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, padding included; of all rows learned together, if several."""
        return int(self.data.sequence_length or 0) * self.group

    @property
    def group(self) -> int:
        """Rows learned together: a pair, or a query with its answer and negatives; else 1."""
        if self.train.method in ROW_FORMATS:
            return 2 + self.contrastive.negatives
        return 1

    @property
    def num_rows(self) -> int:
        """Rows per step over all ranks."""
        return self.train.batch_size * self.group

    @property
    def micro_rows(self) -> int | None:
        """Rows per forward and backward pass on each rank; None: all."""
        if self.train.micro_batch_size is None:
            return None
        return self.train.micro_batch_size * self.group

    @property
    def is_isolated(self) -> bool:
        """True if documents in packed rows do not attend to each other, as far as known without data."""
        return self.data.packing and self.data.packing_isolated is True

    @property
    def has_many_lengths(self) -> bool:
        """True if batches are by length, unless blocks are compiled and data.group_by_length is auto."""
        return not self.data.packing and self.data.group_by_length is not False

    @property
    def attends_documents(self) -> bool:
        """True if attention may run within each document of packed rows, instead of under a mask."""
        return self.is_isolated and self.train.sequence_parallel == 1 and self.model.attention in ("auto", DOCUMENTS)

    def check_source(self) -> None:
        """Require an explicit data source for a user model and for preference training. Raises ConfigError."""
        refuse(conflicts.SOURCES, self._setting)

    def check_ranks(self, world_size: int) -> None:
        """Reject a batch or sequence-parallel size impossible for `world_size` ranks. Raises ConfigError."""
        num_groups, size = self.train.num_groups(world_size), self.train.sequence_parallel
        if num_groups * size != world_size:
            raise ConfigError(
                f"train.sequence_parallel is {size}, but {world_size} ranks cannot be divided into groups of {size}: "
                f"set --train.sequence_parallel to a divisor of {world_size}, or start a multiple of {size}, by --gpus "
                "or --nproc-per-node."
            )
        if self.knows_rows and self.train.batch_size < num_groups:
            raise ConfigError(too_few_rows(self.train.batch_size, world_size, size))

    def to_yaml(self, *, defaults: bool = True) -> str:
        """Return YAML from which `Config.load` reads the same values. A comment on each line gives the origin.

        defaults: also list values that nobody has set.
        """
        lines = []
        previous = ""
        for key, value in self.items():
            section, field = key.split(".")
            if not defaults and self.is_default(key):
                continue
            if section != previous:
                lines.append(f"{section}:")
                previous = section
            # One line a setting: the origin goes behind. YAML ends a document of a plain value with dots.
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            text = text.strip().removesuffix("...").strip()
            lines.append(f"  {field}: {text}  # {self.origin(key)}{self._notes.get(key, '')}")
        return "\n".join(lines) + "\n"


Config.SECTIONS = {name: typing.cast("type[Section]", field.annotation) for name, field in Config.model_fields.items()}


def _can_be_a_file(name: str) -> bool:
    try:
        parts = os.fsencode(name).split(b"/")  # limits are in bytes
    except UnicodeEncodeError:
        return False
    return b"\0" not in b"".join(parts) and max(map(len, parts)) <= 255


def names_in(value: Any) -> list[str]:
    """Return the file names in a setting: a single name, several names, or data sources."""
    if not value:
        return []
    if isinstance(value, str):
        return [value]
    return [each if isinstance(each, str) else each["path"] for each in value]


def _is_one_of(key: str, names: Iterable[str]) -> bool:
    """Tell whether `key` is one of `names`, or lies in a section among them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def all_keys() -> list[str]:
    """Return every key of the configuration as section.field."""
    return [f"{name}.{field}" for name, section in Config.SECTIONS.items() for field in section.model_fields]


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {shorten(str(path))} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except ValueError as error:
        raise ConfigError(f"--config {shorten(str(path))}: {error}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path} holds a {type(values).__name__}; it should hold sections: {', '.join(Config.SECTIONS)}."
        )
    return values


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, content in values.items():
        if content is None and section in Config.SECTIONS:
            continue  # an empty section
        # A mapping under a full name is the value of a setting, for example offload.throttle.
        own = {str(section): content}
        if isinstance(content, Mapping) and content and "." not in str(section):
            own = {f"{section}.{field}": value for field, value in content.items()}
        if twice := flat.keys() & own.keys():
            raise ConfigError(
                f"{twice.pop()} is set twice, within its section and by its full name; leave one of them out."
            )
        flat.update(own)
    return flat


def _with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under current key names, without retired settings. Raises ConfigError."""
    for key in values:
        if current_name(key) != key and current_name(key) in values:
            raise ConfigError(
                f"{key} is the earlier name of {current_name(key)}, and both are set; leave one of them out."
            )
    return without_retired({current_name(key): value for key, value in values.items()})


_REPR = reprlib.Repr()  # a value from a file may be nested deeply or contain itself
_REPR.maxlevel = 4
_REPR.maxstring = 10_000
_REPR.maxother = 10_000
_REPR.maxlong = 10_000


def show_value(value: Any) -> str:
    """Format any value in the form a user would write."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(_REPR.repr(value))


def _explain(error: ValidationError) -> str:
    """Turn pydantic errors into one paragraph: key, value, allowed values."""
    problems = error.errors()
    unknown = [".".join(map(str, item["loc"][:2])) for item in problems if item["type"] == "extra_forbidden"]
    wrong = [item for item in problems if item["type"] != "extra_forbidden"]
    sentences = []
    if unknown:
        sentences.append(unknown_keys(unknown))
    groups = _by_setting(wrong)
    for items in groups[:3]:  # one paragraph on a screen
        item, place = items[0], [str(part) for part in items[0]["loc"]]
        key = ".".join(place[:2])
        if len(place) == 1:
            sentences.append(
                f"{key} is {show_value(item['input'])}; it should be a section with keys "
                f"{', '.join(Config.SECTIONS[key].model_fields)}."
            )
            continue
        first, *others = dict.fromkeys(map(_reason, items))  # each reason once, in order
        reason = ", or ".join([first, *(each.removeprefix("it should be ") for each in others)])
        inner = ""
        if len(place) > 2 and len(items) == 1 and item["type"] != "missing":
            inner = f" ({'.'.join(place[2:])})"
        sentences.append(f"{key}{inner} is {show_value(item['input'])}{_meant_value(key, item)}; {reason}.")
    if len(groups) > 3:
        sentences.append(f"{len(groups) - 3} more like these.")
    return " ".join(sentences)


def _by_setting(errors: Sequence[Any]) -> list[list[Any]]:
    """Return the errors of each value together: a setting of several types has one error for each type."""
    groups: dict[str, list[Any]] = {}
    for item in errors:
        groups.setdefault(repr((item["loc"][:2], item["input"])), []).append(item)
    return list(groups.values())


def _reason(item: Mapping[str, Any]) -> str:
    """Return the reason of one error, without pydantic's words."""
    text = str(item["msg"]).removeprefix("Value error, ").partition(", unable to parse")[0]
    return text.replace("Input should be", "it should be").replace("Field required", "there are too few values")


def _meant_value(key: str, item: Mapping[str, Any]) -> str:
    """Return ` (did you mean VALUE?)`: a value known to another key, else the nearest allowed value for this key."""
    value = str(item["input"])
    meant = equivalent_setting(value)
    if meant and meant != key:
        return f" (did you mean {meant}?)"
    return nearest(value, re.findall(r"'([^']*)'", str(item.get("ctx", {}).get("expected", ""))), cutoff=0.6)


def unknown_keys(unknown: Iterable[str]) -> str:
    """Return sentences about unknown keys, each with the probably intended key."""
    sections = [key for key in dict.fromkeys(unknown) if key in Config.SECTIONS]
    sentences = [
        f"{section} is a section; its keys are {', '.join(k for k in all_keys() if k.startswith(section + '.'))}."
        for section in sections
    ]
    if others := [key for key in dict.fromkeys(unknown) if key not in Config.SECTIONS]:
        named = ", ".join(f"{shorten(key)}{_meant_key(key)}" for key in others)
        owners = {key.partition(".")[0] for key in others}
        section = owners.pop()
        # With all unknown keys in one section, list the keys there. Else list the sections.
        if not owners and section in Config.SECTIONS:
            allowed = f"{section} has {', '.join(Config.SECTIONS[section].model_fields)}"
        else:
            allowed = f"the sections are {', '.join(Config.SECTIONS)}"
        sentences.append(f"unknown {plural('key', len(others))} {named}; {allowed}.")
    return " ".join(sentences)


def _meant_key(key: str) -> str:
    """Return ` (did you mean KEY?)`: the same name in another section, the equivalent in another trainer, or the
    nearest key.
    """
    section, _, field = key.partition(".")
    keys = all_keys()
    name = field or section
    owners = (other for other in keys if other.split(".")[1] == name)
    if meant := next(owners, None) or equivalent_setting(name):
        return f" (did you mean {meant}?)"
    if section in Config.SECTIONS:
        near = nearest(field, Config.SECTIONS[section].model_fields).replace("mean ", f"mean {section}.")
        return near or nearest(key, keys)
    if field:
        return nearest(key, keys)
    return nearest(key, Config.SECTIONS)
