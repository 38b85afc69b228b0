"""Command options: the class parsed by tyro, and the help text.

Separate from `command_line`, so an interrupt during the import of tyro and pydantic already meets a working exit path.
"""

from __future__ import annotations

import dataclasses
import shutil
import typing
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic.fields import FieldInfo

from offload.app.config.config import Config, all_keys, unknown_keys
from offload.app.config.help_text import plain_help
from offload.app.config.other_trainers import current_name, equivalent_setting
from offload.app.config.sections import nested_types
from offload.app.telemetry.progress import wrapped
from offload.conflicts import show
from offload.errors import ConfigError, nearest, shorten
from offload.retired import RETIRED, refusal

_ABOUT_GPUS = (
    "Train with N processes on this machine, one for each GPU; without any GPU all of them on the CPU. Several "
    "machines need torchrun."
)
_Own = Mapping[str, tuple[str, str, str]]
"""Options of a single command by name, each a `command_line.OwnOption`."""
_COMMON_OPTIONS = {
    "config": ("FILE.yaml", "", "Read settings from this file; the command line overrides it."),
    "debug": ("{true,false}", "", "Show tracebacks; the same as --run.debug."),
    "gpus": ("N", "(default: 1)", _ABOUT_GPUS),
    "help-extra": ("", "", "Show all settings, with full texts."),
}
"""Options by name: (value in the help, default in the help, help text)."""
_WIDTHS, _INDENT = (80, 110), 33  # columns of the first help (fewest, most), and of the names in it
_UNSET = "\0"  # tyro parses the word None as None, so an absent option needs a value impossible to type


def read_command(
    words: Sequence[str], prog: str, description: str, own: _Own, may_go_on: bool
) -> tuple[Config, dict[str, str | None]]:
    """Implement `command_line.parse_command`."""
    words = _normalise(words, own)
    if words == ["--help"]:
        print(first_help(prog, description, own))
        raise SystemExit(0)
    arguments = words
    if words == ["--help-extra"]:  # tyro's own help has all settings
        arguments = ["--help"]
    parsed: Any
    with plain_help():
        parsed, unknown = tyro.cli(
            _command_line(own),
            args=arguments,
            prog=prog,
            description=description,
            return_unknown_args=True,
            use_underscores=True,
        )
    if unknown:
        raise ConfigError(_unknown_words(unknown, own))
    overrides = {}
    for key in all_keys():
        value = attrgetter(key)(parsed)
        if value not in (_UNSET, (_UNSET,)):
            overrides[key] = list(value) if isinstance(value, tuple) else value
    if parsed.debug != _UNSET:
        overrides["run.debug"] = parsed.debug
    path = None if parsed.config == _UNSET else Path(parsed.config)
    texts = {name: getattr(parsed, name.replace("-", "_")) for name in own}
    config = Config.load(path, overrides, origin="command line", may_go_on=may_go_on)
    return config, {name: None if text == _UNSET else text for name, text in texts.items()}


def first_help(prog: str, description: str, own: _Own) -> str:
    """Return the options, and the main settings of each section: default, first sentence, choices."""
    fewest, most = _WIDTHS
    width = min(max(shutil.get_terminal_size((most, 60)).columns, fewest), most)
    lines = [*wrapped(f"usage: {prog} [OPTIONS] [--SECTION.SETTING VALUE ...]", width), ""]
    lines.extend([*wrapped(description, width), ""])

    def show_option(word: str, text: str) -> None:
        first, *more = wrapped(text, width - _INDENT)
        lines.append(f"{word:<{_INDENT - 1}} {first}")
        lines.extend(" " * _INDENT + each for each in more)

    # Options of this command first: its user looks for them.
    for name, (metavar, default, about) in {**own, **_COMMON_OPTIONS}.items():
        show_option(f"  --{name} {metavar.removeprefix('{true,false}')}", f"{about} {default}")
    for name, section in Config.SECTIONS.items():
        if not section.main:  # all of it is in --help-extra: the first help has the settings of most runs
            continue
        more = f"({len(section.model_fields) - len(section.main)} more)"
        lines.extend(wrapped(f"{name}: {_first_sentence(section.__doc__)}. {more}", width))
        for key in section.main:
            field = section.model_fields[key]
            sentence = _first_sentence(field.description)
            hint = value_hint(key, field)
            if hint.startswith("{") and "true" not in hint:
                sentence += f" ({', '.join(hint.strip('{}').split(','))})"
            show_option(f"  --{name}.{key} {show(field.get_default())}", f"{sentence}.")
    return "\n".join(lines)


def _first_sentence(text: str | None) -> str:
    return str(text).partition(". ")[0].rstrip(".")


def _normalise(words: Sequence[str], own: _Own) -> list[str]:
    """Add the implied value to flags (`--run.debug` means true), and reject an option without a value."""
    own_flags = {name.replace("-", "_") for name, option in own.items() if option[0].startswith("{true")}
    flags = {"debug"} | own_flags | {key for key in all_keys() if _field(key).annotation is bool}
    values = {"config"} | {name.replace("-", "_") for name in own} | set(all_keys())
    result: list[str] = []
    for word, follows in pairwise([*words, "--"]):
        if word in ("--help", "-h"):
            return ["--help"]
        if word == "--help-extra":
            return [word]
        if word.startswith("--"):
            key, *value = word.removeprefix("--").split("=", 1)
            # Names of earlier versions go on to work.
            if (setting := key.replace("-", "_")) != current_name(setting):
                word = "=".join([f"--{current_name(setting)}", *value])
        result.append(word)
        name = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or "=" in word:
            continue
        if follows.startswith("--"):  # no value begins so
            if name in flags:
                result.append("true")
            elif name in values:
                raise ConfigError(f"{word} is given without a value; write {word} VALUE.")
    return result


def _unknown_words(unknown: Sequence[str], own: Iterable[str]) -> str:
    sentences, keys = [], []
    for word in dict.fromkeys(word for word in unknown if word.startswith("--")):
        key = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if key in RETIRED:  # a similar name would be wrong advice
            sentences.append(refusal(key))
            continue
        is_option = "." not in key and not equivalent_setting(key)
        if is_option and (close := nearest(key.replace("_", "-"), [*_COMMON_OPTIONS, "help", *own])):
            sentences.append(f"unknown option {shorten(word)}{close}; see --help.")
        else:
            keys.append(key)
    if keys:
        sentences.append(unknown_keys(keys))
    return " ".join(sentences) or (
        f"{shorten(unknown[0])!r} is not an option; settings are given as --section.field VALUE, see --help."
    )


def _field(key: str) -> FieldInfo:
    section, field = key.split(".")
    return Config.SECTIONS[section].model_fields[field]


def value_hint(name: str, field: FieldInfo) -> str:
    """Return the value shown in the help: the choices, or the type."""
    if "none" in str(field.description) and name.endswith(("_memory", "_bytes")):
        return "SIZE"
    choices = [
        show(word)
        for part in nested_types(field.annotation)
        if typing.get_origin(part) is typing.Literal
        for word in typing.get_args(part)
    ]
    types = {typing.get_origin(part) or part for part in nested_types(field.annotation)}
    if choices:
        if int in types:
            choices.append("N")
        return "{" + ",".join(choices) + "}"
    for value_type, name in ((dict, "YAML"), (bool, "{true,false}"), (float, "NUMBER"), (int, "N"), (str, "TEXT")):
        if value_type in types:
            if types >= {int, str}:
                return "{auto,N}"
            return name
    return "VALUE"


def _command_line(own: _Own) -> type:
    """Build the dataclass for tyro: a few options, and the configuration sections with every value as text."""
    options: list[tuple[str, Any, Any]] = []
    for name, (metavar, default, about) in {**_COMMON_OPTIONS, **own}.items():
        aliases = [f"--{name}"] if "-" in name else None
        argument = tyro.conf.arg(metavar=metavar, help=about, help_behavior_hint=default, aliases=aliases)
        options.append((name.replace("-", "_"), Annotated[str, argument], dataclasses.field(default=_UNSET)))
    for name, section in Config.SECTIONS.items():
        settings: list[tuple[str, Any, Any]] = []
        for key, field in section.model_fields.items():
            metavar, hint = value_hint(key, field), f"(default: {show(field.get_default())})"
            many = metavar != "YAML" and any(
                typing.get_origin(each) is tuple for each in nested_types(field.annotation)
            )
            value_type: Any = str
            unset: Any = _UNSET
            if many:
                value_type = tuple[str, ...]
                unset = (_UNSET,)
            argument = tyro.conf.arg(metavar=metavar, help=field.description, help_behavior_hint=hint)
            settings.append((key, Annotated[value_type, argument], dataclasses.field(default=unset)))
        # A mirror with texts alone: pydantic checks the values, with the same errors as for a file.
        mirror = dataclasses.make_dataclass(name, settings)
        mirror.__doc__ = section.__doc__
        argument = tyro.conf.arg(help=section.__doc__)  # otherwise tyro searches this source file for a comment
        options.append((name, Annotated[mirror, argument], dataclasses.field(default_factory=mirror)))
    return dataclasses.make_dataclass("CommandLine", options)
