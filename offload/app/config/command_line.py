"""Command-line parsing (`--section.field VALUE` over a YAML file) and a common exit path for all commands.

tyro parses the words and prints the help. Values stay text until pydantic validates them, so a YAML file and the
command line share the same checks and the same error messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import itertools
import os
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload import __version__
from offload.app.telemetry.lasting_output import make_output_last
from offload.errors import (
    ConfigError,
    InterruptedRun,
    OffloadError,
    is_left_to_another_rank,
    leave_to_another_rank,
    nearest,
    shorten,
)
from offload.interrupts import STOP_SIGNALS, is_wanted

if TYPE_CHECKING:
    from offload.app.config.config import Config

_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)
_Options = typing.TypeVar("_Options")
_MAX_WORD = 1000  # longest word printed in full: room for any readable path


def run_command(main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> typing.NoReturn:
    """Run `main(argv)` and exit the process: 0 success, 1 failure, 2 bad input, 3 does not fit, 130 interrupted.

    An error is one paragraph on stderr; `--debug` (or --run.debug) adds the traceback. Every command answers --version.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    make_output_last()
    if words == ["--version"]:
        print(versions())
        sys.exit(0)
    for stream in (sys.stdout, sys.stderr):
        # Escape characters unknown to the stream encoding: printing must not end a run.
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    for number in filter(is_wanted, STOP_SIGNALS):
        signal.signal(number, _interrupt)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # asks a training run to save; would kill other commands
    debug = wants_debug(words)
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # app/launch.py starts ranks with these blocked
            sys.exit(main(words) or 0)
        finally:
            _ignore_late_signals()
    except OffloadError as error:
        _complain(error, str(error), debug)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        _leave_to_first_local_rank(error)  # all ranks received the interrupt
        _complain(error, "interrupted; nothing was saved.", debug)
        sys.exit(InterruptedRun.exit_code)
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not _has_working_directory():
            _complain(error, "the working directory is gone: change to a folder that exists.", debug)
            sys.exit(ConfigError.exit_code)
        hint = ""
        if not debug:
            hint = "; run with --debug for the traceback"
        _complain(error, f"failed: {type(error).__name__}: {' '.join(str(error).split())}{hint}", debug)
        sys.exit(1)


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - the call that fails
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import torch and dependent libraries with the garbage collector off.

    Otherwise the collector scans the growing heap again and again, a fifth of the import time. Afterwards the imported
    objects are frozen and stay out of later collections, since they live as long as the process.

    If torch is already imported there is no time to save, and the heap belongs to other code too: then do nothing.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def versions() -> str:
    """Return the versions of offload, Python, torch and transformers, without an import of torch or transformers."""
    import importlib.metadata

    texts = [f"offload {__version__}", f"python {sys.version.split()[0]}"]
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            texts.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(texts)


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _ignore_late_signals() -> None:
    """Ignore SIGTERM and SIGHUP in an exiting process. torchrun sends SIGTERM to a rank after another rank has exited,
    and a terminal that closes sends SIGHUP more than once.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        for handler in (lambda *_: None, signal.SIG_IGN):  # the first handler consumes a pending signal
            # A pending signal interrupts the call itself, so repeat until the handler is set.
            while signal.getsignal(number) != handler:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.signal(number, handler)


def _leave_to_first_local_rank(error: BaseException) -> None:
    """Leave printing to the first rank on this machine if all ranks have the same error."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        leave_to_another_rank(error)


def _complain(error: BaseException, message: str, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    if not is_left_to_another_rank(error):
        rank = os.environ.get("RANK", "0")
        who = ""
        if rank != "0":
            who = f"[rank {rank}] "
        # One paragraph. A word may be a file's whole content, given in place of a name.
        text = " ".join(word if len(word) <= _MAX_WORD else shorten(word) for word in message.split())
        print(f"offload: {who}{text}", file=sys.stderr)


def say(text: str) -> None:
    """Print a message on stderr. Results go to stdout."""
    print(text, file=sys.stderr)


def say_nothing(text: str) -> None:
    """Drop a message: another rank prints it, or the command was asked for its result alone."""


def wants_debug(words: Sequence[str]) -> bool:
    """Tell whether the command line asks for tracebacks, even if the remaining words are invalid."""
    # By hand: the words may be the fault.
    for word, follows in itertools.pairwise([*words, "true"]):
        name, _, value = word.partition("=")
        if name == "--debug" or name == "--run.debug":
            value = value or follows
            return value.lower() not in ("false", "no", "0")
    return False


def parse_options(options_class: type[_Options], words: Sequence[str], *, prog: str, description: str) -> _Options:
    """Parse the options of a command into a `kind`, a dataclass read by tyro.

    Raises ConfigError for an unknown option, and for a missing or impossible value. --help ends the process with exit
    code 0.
    """
    import tyro

    from offload.app.config.help_text import plain_help

    asks_for_help = {"--help", "-h"} & set(words)
    # Checked before tyro: tyro's messages about both are boxes of several lines.
    if not asks_for_help and (missing := _missing(options_class, words)):
        raise ConfigError(f"--{missing} is missing; see --help.")
    if not asks_for_help:
        _check_values(options_class, words)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), plain_help():
            options, unknown = tyro.cli(
                options_class, args=words, prog=prog, description=description, return_unknown_args=True
            )
    except SystemExit as left:
        if not left.code:
            raise
        # tyro draws a box: the message first, advice below a line.
        lines = itertools.takewhile(lambda line: "────" not in line, box.getvalue().splitlines()[1:])
        text = " ".join(" ".join(line.strip("│ ") for line in lines).split()).rstrip(".")
        raise ConfigError(f"{text}; see --help.") from None
    if unknown:
        names = [field.name.replace("_", "-") for field in dataclasses.fields(options_class)]  # type: ignore[arg-type]
        close = nearest(unknown[0].lstrip("-"), [*names, "help"]).replace("mean ", "mean --")
        raise ConfigError(f"unknown option {shorten(unknown[0])}{close}; see --help.")
    return options


def _check_values(options_class: type[Any], words: Sequence[str]) -> None:
    """Raise ConfigError for an option without a value, or with a value that is no number or no choice."""
    hints = typing.get_type_hints(options_class)
    for word, follows in itertools.pairwise([*words, "--"]):
        name, equals, value = word.partition("=")
        hint = hints.get(name.removeprefix("--").replace("-", "_"))
        types = {hint, *typing.get_args(hint)}
        # A flag may stand without a value.
        if not name.startswith("--") or hint in (None, bool):
            continue
        if not equals:
            value = follows
            if value.startswith("--") and " " not in value:
                raise ConfigError(f"{name} is given without a value; write {name} VALUE.")
        if typing.get_origin(hint) is typing.Literal and value not in types:
            raise ConfigError(f"{name} is {value!r}; it should be one of {', '.join(typing.get_args(hint))}.")
        for kind, noun in ((int, "a whole number"), (float, "a number")):
            if kind in types and not (value == "None" and type(None) in types) and not _is_a(kind, value):
                raise ConfigError(f"{name} is {value!r}; it should be {noun}.")


def _is_a(kind: type[int] | type[float], value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def as_path(word: str | None) -> Path | None:
    """Return a path given by the user, with ~ as the home folder. None: not given."""
    if word is None:
        return None
    return Path(word).expanduser()


def as_utf8(word: str, option: str) -> str:
    """Return a word decoded as UTF-8. Under an ASCII locale, Python keeps undecoded bytes in the word. Raises
    ConfigError.
    """
    try:
        return word.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise ConfigError(f"{option} is not UTF-8 text: {error}.") from error


def _missing(options_class: type[Any], words: Sequence[str]) -> str | None:
    """Return the name of a required option absent from the words; None if all are present."""
    import tyro

    set_options = {word.partition("=")[0].replace("_", "-") for word in words}
    hints = typing.get_type_hints(options_class, include_extras=True)
    for each in dataclasses.fields(options_class):
        name, is_required = each.name.replace("_", "-"), each.default is each.default_factory is dataclasses.MISSING
        is_option = tyro.conf.Positional not in getattr(hints[each.name], "__metadata__", ())
        if is_option and is_required and f"--{name}" not in set_options:
            return name
    return None


def take_gpus(words: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of ranks from --gpus (1 without the option) and the remaining words. Raises ConfigError."""
    rest: list[str] = []
    values: list[str] = []
    remaining = iter(words)  # also for a value in a separate word
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == "--gpus":
            values.append(value if equals else next(remaining, ""))
        else:
            rest.append(word)
    if not values or {"--help", "-h"} & set(words):  # help comes even beside a wrong value
        return 1, rest
    if not values[-1].isdecimal() or int(values[-1]) < 1:
        raise ConfigError(f"--gpus is {values[-1]!r}; it should be a whole number of ranks, at least 1.")
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        where = f"RANK is {os.environ['RANK']} of WORLD_SIZE {os.environ['WORLD_SIZE']}"
        raise ConfigError(
            f"--gpus {values[-1]} is given inside a process that torchrun started ({where}), and would start "
            f"{values[-1]} ranks in each torchrun process: leave out --gpus, or torchrun."
        )
    return int(values[-1]), rest


class CommandOption(typing.NamedTuple):
    """An option of one command, in addition to the configuration."""

    metavar: str
    """Value shown in the help. With a leading "{true" the option may appear without a value."""
    default: str
    """Default shown in the help."""
    help: str


HOST_MEMORY = CommandOption(
    "SIZE",
    "(default: as described)",
    "All host memory of the described machine, such as 64GiB; the system keeps 4 GiB.",
)


def parse_config(words: Sequence[str], *, prog: str, description: str) -> Config:
    """Return the checked configuration of `train` from the command line.

    Raises ConfigError, printed by one rank per machine. --help exits with 0.
    """
    return parse_command(words, prog=prog, description=description, may_go_on=True)[0]


def parse_command(
    words: Sequence[str],
    *,
    prog: str,
    description: str,
    own: Mapping[str, CommandOption] | None = None,
    may_go_on: bool = False,
) -> tuple[Config, dict[str, str | None]]:
    """Return the checked configuration and the text of each option in `own` by name, for example same-order; None: not
    given.

    may_go_on: see `Config.check`. Raises ConfigError, printed by one rank per machine. --help exits with 0.
    """
    try:
        from offload.app.config.options import read_command

        return read_command(words, prog, description, own or {}, may_go_on)
    except ConfigError as error:
        _leave_to_first_local_rank(error)
        raise


def is_on(own: Mapping[str, str | None], name: str) -> bool:
    """Tell whether a flag from `parse_command` is on; a flag alone counts as true. Raises ConfigError."""
    text = own[name]
    if text not in (None, "true", "false"):
        raise ConfigError(f"--{name} is {text!r}; write it without a value, or with true or false.")
    return text == "true"
