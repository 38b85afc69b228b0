"""Real processes without the seconds for torch and transformers imports.

`start` asks a server with the imported packages to fork a process. The process runs a module, code or a file, like
`python -m`, `python -c` and `python FILE`. It has a separate process id, signals, limits, exit code and standard
streams, and ends like any interpreter. It has no separate imports and no interpreter options. Tests of these start
`sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import logging
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from tests import accelerator, mutations
from tests.ports import free_port, rank_variables

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120
"""Seconds for work of about a second. Only ends a hanging test."""
MINUTES = 10 * PATIENCE_S
"""Seconds for work of about a minute. Only ends a hanging test."""
_MESSAGE_BYTES = 1 << 18
_SHARED = "OFFLOAD_TESTS_FORK_FROM"


class Forked:
    """A forked server process with the necessary part of the Popen interface."""

    def __init__(self, told: socket.socket, stdin: Any, stdout: Any, stderr: Any) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._told = told
        self.pid = int(told.recv(64))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = PATIENCE_S) -> int:
        """Return the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._told.recv(64))
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the process can end in the meantime
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = PATIENCE_S) -> tuple[str, str]:
        """Wait for the end. Return the remaining stdout and stderr. Raises subprocess.TimeoutExpired."""
        if self.stdin is not None:
            self.stdin.close()
        texts = {id(stream): "" for stream in (self.stdout, self.stderr)}

        def read(stream: IO[str]) -> None:
            texts[id(stream)] = stream.read()

        readers = [threading.Thread(target=read, args=[each]) for each in (self.stdout, self.stderr) if each]
        deadline = time.monotonic() + (PATIENCE_S if timeout is None else timeout)
        for each in readers:
            each.start()
        for each in readers:
            each.join(max(0.0, deadline - time.monotonic()))
            if each.is_alive():
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        self.wait(max(0.0, deadline - time.monotonic()))
        return texts[id(self.stdout)], texts[id(self.stderr)]

    def close(self) -> None:
        """Kill the process and close the pipes."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def start(
    words: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ROOT,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
    start_new_session: bool = False,
    rank: int = 0,
) -> Forked:
    """Start a forked process like `python WORDS`.

    WORDS are ["-m", module, ...], ["-c", code, ...] or [file, ...], after an optional "-u". Even and odd ranks come
    from two servers with different hash seeds, so that string sets have different orders.
    """
    asked = {
        "words": [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in words],
        "env": dict(os.environ if env is None else env),
        "cwd": os.fspath(cwd),
        "session": start_new_session,
    }
    told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given: list[int] = [theirs.fileno()]
    ours: list[IO[str] | None] = []
    opened: list[int] = []
    for number, stream in enumerate((stdin, stdout, stderr)):
        ours.append(None)
        if stream == subprocess.PIPE:
            reader, writer = os.pipe()
            ours[-1] = os.fdopen(writer if number == 0 else reader, "w" if number == 0 else "r", errors="replace")
            opened.append(reader if number == 0 else writer)
        elif stream == subprocess.DEVNULL:
            opened.append(os.open(os.devnull, os.O_RDWR))
        elif stream == subprocess.STDOUT:
            opened.append(os.dup(given[-1]))
        else:
            opened.append(os.dup(number if stream is None else stream if isinstance(stream, int) else stream.fileno()))
        given.append(opened[-1])
    with theirs:
        _server(rank % 2).send(asked, given)
    for descriptor in opened:
        os.close(descriptor)
    return Forked(told, *ours)


class Started(subprocess.Popen[str]):
    """A process with a new interpreter."""

    def close(self) -> None:
        """Kill the process and close the pipes."""
        self.kill()
        self.communicate()


def start_anew(words: Sequence[object], *, rank: int = 0, **how: Any) -> Started:
    """Start `python WORDS` in a new interpreter, in about four seconds. `how`: as for `start`."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Started([sys.executable, *map(str, words)], text=True, errors="replace", **{"cwd": ROOT, **streams, **how})


def run(
    words: Sequence[object], *, timeout: float = PATIENCE_S, begin: Callable[..., Any] = start, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Start a process and wait for the end. Return the output. Raises subprocess.TimeoutExpired."""
    process = begin(words, **how)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.close()
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)


def run_ranks(
    words: Sequence[object],
    size: int = 2,
    *,
    cwd: Any = ROOT,
    own: Callable[[int], Sequence[object]] = lambda rank: (),
    **variables: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python WORDS` in `size` ranks with the variables of torchrun, and wait for all.

    `cwd`: one folder, or one a rank. `own`: more words of a rank.
    """
    common, port = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}, free_port()
    started = list[Forked]()
    try:
        for rank in range(size):
            env = common | rank_variables(rank, size, port)
            folder = cwd[rank] if isinstance(cwd, list) else cwd
            started.append(start([*words, *own(rank)], env=env, cwd=folder, rank=rank))
        printed = [each.communicate() for each in started]
    finally:
        for each in started:
            each.close()
    return [subprocess.CompletedProcess(words, each.wait(), *text) for each, text in zip(started, printed, strict=True)]


def run_tests(words: Sequence[str], timeout: float) -> tuple[int, str]:
    """Run pytest in a forked process. Return the exit code and the output. Raises subprocess.TimeoutExpired."""
    how = ["--tb=line", "-rfE", "-p", "no:cacheprovider", "-W", "ignore"]
    done = run(["-m", "pytest", *how, *words], timeout=timeout, env={**os.environ, "COLUMNS": "200"})
    return done.returncode, done.stdout + done.stderr


class _Server:
    """A fork server for this test session. Ends with the creator; other processes can `connect`."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        self._folder = tempfile.TemporaryDirectory(prefix="tests-forks-")
        self.path = f"{self._folder.name}/socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.path)
        listener.listen()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        env["ROOM"] = " " * 20_000  # space for the environment of forked processes
        with theirs, listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno()), str(listener.fileno())],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), listener.fileno()],
            )

    def send(self, asked: Any, descriptors: Sequence[int]) -> None:
        socket.send_fds(self._ours, [json.dumps(asked).encode()], descriptors)

    def close(self) -> None:
        self._ours.close()
        self._process.wait()
        self._folder.cleanup()


class _Shared:
    """The server of another process."""

    def __init__(self, path: str) -> None:
        self._ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        self._ours.connect(path)

    send = _Server.send


@cache
def _server(number: int) -> _Server | _Shared:
    if _SHARED in os.environ:
        return _Shared(json.loads(os.environ[_SHARED])[number])
    server = _Server()
    atexit.register(server.close)
    return server


def share() -> None:
    """Start the servers for all later processes: separate servers would take ten seconds each."""
    if _SHARED not in os.environ:
        servers = [_server(number) for number in range(2)]
        os.environ[_SHARED] = json.dumps([server.path for server in servers if isinstance(server, _Server)])


def commands(folder: Path) -> dict[str, str]:
    """Make a folder with forking `python` and `offload` commands. Return the shell variables to find them."""
    share()
    folder.mkdir()
    for name, words in {"python": "", "offload": "-m offload "}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.forks {words}"$@"\n')
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# -- the server ------------------------------------------------------------------------------------------------------


def _preload() -> None:
    import torch
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler
    import torch.distributed.launcher.api
    import transformers.integrations.mistral
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.tokenization_utils_tokenizers
    import transformers.trainer_utils  # noqa: F401 - by an export; imports accelerate and peft

    import offload
    from offload.app.config.command_line import parse_config

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(offload.__path__, "offload."):
        if not module.name.startswith("offload.integrations") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    parse_config([], prog="", description="")  # loads the lazy imports and builds the section classes
    handler = torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler
    handler.Popen = _Rank


def _serve(owner: socket.socket, listener: socket.socket) -> None:
    """Fork two processes per message, until the owner is gone.

    The first is the parent of the second and sends the child's process id, then the exit code.
    """
    _preload()
    gc.collect()
    gc.freeze()  # children need not scan existing objects
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would not be there after a fork"
    heard = [listener, owner]
    while True:
        asks = select.select(heard, [], [])[0][0]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # `time make test` then counts processes that have ended
                pass
        if asks is listener:
            heard.append(listener.accept()[0])
            continue
        message, descriptors, _, _ = socket.recv_fds(asks, _MESSAGE_BYTES, 4)
        if not message:
            if asks is owner:
                return
            heard.remove(asks)
            asks.close()
            continue
        told, *streams = descriptors
        if os.fork():
            for each in descriptors:
                os.close(each)
            continue
        for other in heard:
            other.close()
        child = os.fork()
        if not child:
            os.close(told)
            _become(streams=streams, **json.loads(message))
        for each in streams:
            os.close(each)
        with socket.socket(fileno=told) as tells:
            with contextlib.suppress(OSError):  # the requester can be gone
                tells.send(str(child).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(OSError):
                tells.send(str(code).encode())
        os._exit(0)


def _become(words: list[str], env: dict[str, str], cwd: str, session: bool, streams: list[int]) -> NoReturn:
    """Turn this process into the requested one."""
    if session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # New streams, because the server's streams belong to a seekable file.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _show_environment()
    accelerator.load_if_told()
    mutations.apply_if_told()
    if words[0] == "-u":
        words = words[1:]
        for out in (sys.stdout, sys.stderr):
            assert isinstance(out, io.TextIOWrapper)
            out.reconfigure(write_through=True)
    how, *rest = words
    sys.argv = rest if how == "-m" else ["-c", *rest[1:]] if how == "-c" else words
    if how == "-m":
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(how).resolve().parent))
        runpy.run_path(how, run_name="__main__")
    sys.exit()


def _show_environment() -> None:
    """Write the environment to the memory shown in /proc/PID/environ.

    This memory held the environment of the server and is unused now.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    shown = b"".join(b"%s=%s\0" % (os.fsencode(name), os.fsencode(value)) for name, value in os.environ.items())
    assert len(shown) <= end - begin
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


class _Rank:
    """Replaces Popen in a forked torchrun agent: the ranks are forked from the agent."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._become([str(word) for word in args[1:]], env)

    def _become(self, words: list[str], env: dict[str, str]) -> NoReturn:
        """Run in the agent's thread.

        The agent's stack frames must not be unwound, so the necessary interpreter shutdown happens here.
        """
        logging.disable(logging.NOTSET)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code: Any = 1
        try:
            _become(words, env, str(Path.cwd()), True, [])
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(code or 0))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        until = time.monotonic() + (PATIENCE_S if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.01)
        return self.returncode


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        streams = {"stdin": None, "stdout": sys.stdout, "stderr": sys.stderr}
        # From the other server: a worker of pytest has another hash seed than the processes that its tests start.
        sys.exit(start(sys.argv[1:], cwd=Path.cwd(), rank=1, **streams).wait(None))
    _serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
