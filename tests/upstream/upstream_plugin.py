"""A pytest plugin for the suite of another project: installs stand-ins, and records the training in each test.

UPSTREAM_MODE is `plain`, `engine` (trainers, accelerators and PEFT models over engines) or `twin` (plain, with the
engine kernel in the Trainer's AdamW, for tests with differing values). The plugin is a top-level module, because a
suite has its own package `tests`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import stand_ins
import torch
import transformers
from plain import SameBits, decays

from offload.errors import OffloadError
from offload.integrations.accelerate import OffloadAccelerator
from offload.integrations.transformers import OffloadMixin

MODE, OUT = os.environ["UPSTREAM_MODE"], Path(os.environ["UPSTREAM_OUT"])
SUITE, TEST_SECONDS = os.environ.get("UPSTREAM_SUITE", ""), int(os.environ.get("UPSTREAM_TEST_SECONDS", "120"))
PLAIN_TRAINER, PLAIN_ACCELERATOR = transformers.Trainer, accelerate.Accelerator
CLOCKS = re.compile(r"runtime|preparation_time|mem_|per_second|flos|offload/|step_time|seconds|memory|num_tokens_seen_")
seen: list[Any] = []  # trainers, accelerators and PEFT probes in the current test
before: dict[int, dict[str, torch.Tensor]] = {}  # weights at the start of training


def pytest_configure(config: pytest.Config) -> None:
    for name in ("trl", "trl.trainer", "peft") if SUITE in ("trl", "peft") else ():
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        stand_ins.answer_datasets()
    for file in {near for given in config.args for near in Path(given.split("::")[0]).parent.glob("*.py")}:
        _fill_in_names(file)
    _note_all(PLAIN_TRAINER, "train", lambda trainer: [trainer.model])
    _note_all(PLAIN_ACCELERATOR, "backward", lambda accelerator: accelerator._models)
    if SUITE == "trl":
        _train_in_fp32()
    if SUITE == "peft":
        _probe_adapters()
    if MODE == "twin":
        _share_arithmetic()
    if MODE == "engine":
        _put_engines_in()


def _fill_in_names(file: Path) -> None:
    """Add missing names to a library of another version than the suite: decorators without effect."""

    def gone(*args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else gone

    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and re.match(r"(transformers|trl|peft|accelerate)\b", node.module or ""):
            with contextlib.suppress(ImportError):
                module = importlib.import_module(node.module or "")
                for name in [each.name for each in node.names]:
                    is_file = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                    if not hasattr(module, name) and not is_file:
                        setattr(module, name, gone)


def _note_all(kind: Any, begins: str, models_of: Any) -> None:
    """Record each object of a class, and its initial weights."""
    make, begin = kind.__init__, getattr(kind, begins)

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(self)
        make(self, *args, **kwargs)

    @functools.wraps(begin)
    def started(self: Any, *args: Any, **kwargs: Any) -> Any:
        if MODE != "engine" and id(self) not in before:
            before[id(self)] = weights_of(*models_of(self))
        return begin(self, *args, **kwargs)

    kind.__init__ = init
    setattr(kind, begins, started)


def weights_of(*models: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for each in models for name, p in each.named_parameters() if not p.is_meta}


def _train_in_fp32() -> None:
    """Turn off TRL's bf16 default: autocast and the engine round in different places."""
    config = importlib.import_module("trl.trainer.base_config")._BaseConfig
    begin = config.__post_init__

    def post_init(self: Any) -> None:
        if self.bf16 is None:
            self.bf16 = False
        begin(self)

    config.__post_init__ = post_init


def _share_arithmetic() -> None:
    create = PLAIN_TRAINER.create_optimizer

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        made, a = create(self, *args, **kwargs), self.args
        if type(made) is torch.optim.AdamW and (a.adam_beta1, a.adam_beta2) == (0.9, 0.999):
            made = SameBits(self.model, clip=a.max_grad_norm, decayed=decays(self.model), eps=a.adam_epsilon)
            for group in made.param_groups:
                group["lr"] = a.learning_rate
                group["weight_decay"] = a.weight_decay if group["weight_decay"] else 0.0
            self.optimizer, a.max_grad_norm = made, 0.0
        return made

    PLAIN_TRAINER.create_optimizer = create_optimizer


def _put_engines_in() -> None:
    """Add OffloadMixin to each importable Trainer, and replace Accelerator by OffloadAccelerator."""
    made: dict[type, type] = {}
    packages = ("transformers", "transformers.trainer", "transformers.trainer_seq2seq", "trl", "trl.trainer")
    modules = [sys.modules[name] for name in packages if name in sys.modules]
    for module in modules:
        for name in [name for name in dir(module) if name.endswith("Trainer")]:
            kind = getattr(module, name, None)
            if isinstance(kind, type) and issubclass(kind, PLAIN_TRAINER) and not issubclass(kind, OffloadMixin):
                alike = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
                made.setdefault(kind, type(name, (OffloadMixin, kind), alike))
                setattr(sys.modules[kind.__module__], name, made[kind])
                setattr(module, name, made[kind])
    accelerate.Accelerator = accelerate.accelerator.Accelerator = OffloadAccelerator


# -- PEFT: the tests train in bare loops, so the probe trains on the model and batch of the first forward pass -----


class Probe:
    """Two updates on a PEFT model copy, over an engine or in plain PyTorch with the same kernel."""

    def __init__(self, model: Any, args: Any, kwargs: Any) -> None:
        self.model = copy.deepcopy(model).train()
        self.args, self.kwargs = copy.deepcopy((args, kwargs))
        self.losses: list[dict[str, float]] = []
        self.engine: Any = None
        self.accelerator: Any = None

    def train(self) -> None:
        rate = 1e-2
        self.before = weights_of(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            return
        optimizer: Any = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        if MODE == "engine":
            self.accelerator = OffloadAccelerator(cpu=True)
            self.model, optimizer = self.accelerator.prepare(self.model, optimizer)
            self.engine = self.accelerator.engine
        else:
            optimizer = SameBits(self.model, clip=0.0, decayed=lambda name: False)
            optimizer.param_groups[0]["lr"] = rate
        transformers.set_seed(0)
        for _ in range(2):
            out = self.model(*self.args, **self.kwargs)
            given = getattr(out, "loss", None)
            out = out if isinstance(out, torch.Tensor) else out[0] if given is None else given
            loss = out.float().square().mean()
            self.accelerator.backward(loss) if self.accelerator else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append({"loss": loss.item()})


def _probe_adapters() -> None:
    """Record a copy of each PEFT model, with the inputs of the first forward pass with gradients."""
    peft = sys.modules["peft"]
    real = peft.get_peft_model

    @functools.wraps(real)
    def get_peft_model(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)

        def note(module: Any, inputs: Any, named: Any) -> None:
            handle.remove()
            if torch.is_grad_enabled() and not any(isinstance(each, Probe) for each in seen):
                with contextlib.suppress(Exception):  # no probe for models without copy support
                    seen.append(Probe(module, inputs, named))

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        return model

    peft.get_peft_model = get_peft_model


class AlwaysKnown(Counter):
    """Contains every key, so PEFT's suite looks up no name on the hub."""

    def __contains__(self, key: object) -> bool:
        return True


def pytest_collection_finish(session: pytest.Session) -> None:
    for module in [module for module in sys.modules.values() if "_HUB_MODEL_ACCESSES" in vars(module)]:
        module._HUB_MODEL_ACCESSES = AlwaysKnown()  # type: ignore[attr-defined]


# -- a test --------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: Any) -> Iterator[None]:
    seen.clear()
    before.clear()
    transformers.set_seed(0)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run the test with a time limit, then the probe."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"the test took more than {TEST_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(TEST_SECONDS)
    try:
        result = yield
        for each in [each for each in seen if isinstance(each, Probe)]:
            each.train()
        return result
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record the outcome, and after the call the trained weights."""
    report = yield  # unittest tests store the error in the call only here
    noted = {
        "test": item.nodeid,
        "when": call.when,
        "outcome": report.outcome,
        "said": "",
        "place": "",
        "refused": "",
        "file": "",
    }
    if call.when == "call":
        noted["file"] = _save()
    if call.excinfo:
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else call.excinfo.exconly()
        noted["said"] = next((line for line in str(said).splitlines() if line.strip()), "")
        noted["place"] = "{0.path}:{0.lineno}".format(call.excinfo.traceback[-1])
    error = call.excinfo.value if call.excinfo else None
    while error is not None and not noted["refused"]:
        if isinstance(error, OffloadError):
            noted["refused"] = f"{type(error).__name__}: {error}".splitlines()[0]
        error = error.__cause__ or error.__context__
    with (OUT / "outcomes.jsonl").open("a") as file:
        file.write(json.dumps(noted) + "\n")
    return report


def _save() -> str:
    """Write the final trainer, accelerator and probe weights. Return the file name."""
    inner = {id(getattr(each, "accelerator", None)) for each in seen}
    found = []
    for each in [each for each in seen if id(each) not in inner]:
        engine = getattr(each, "engine", None)
        is_open = engine is not None and not engine.closed
        logs = each.losses if isinstance(each, Probe) else getattr(getattr(each, "state", None), "log_history", [])
        models = getattr(each, "_models", []) if isinstance(each, PLAIN_ACCELERATOR) else [getattr(each, "model", None)]
        if not models or models[0] is None:
            continue  # failed constructor, or no prepared object
        weights: dict[str, torch.Tensor] = {}
        with contextlib.suppress(OffloadError):  # a closed engine has no weights
            weights = dict(engine.named_parameters()) if is_open else weights_of(*models)
        own = getattr(each, "before", None) or before.get(id(each), {})
        kept = [{k: v for k, v in row.items() if isinstance(v, (int, float)) and not CLOCKS.search(k)} for row in logs]
        found.append({"logs": kept, "weights": weights, "before": own, "engine": engine is not None})
        if is_open:
            engine.close()
    if not found:
        return ""
    name = f"{len(list(OUT.glob('*.pt')))}.pt"
    torch.save(found, OUT / name)
    return name
