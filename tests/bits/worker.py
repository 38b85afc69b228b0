"""Worker process for tests/bits/__main__.py: trains configurations and returns hashes.

python -m tests.bits.worker TREE: reads a JSON line per job from stdin, and writes a JSON line per reply to stdout.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 5, 3
_BYTES = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
"""Element size in bytes. Dtypes not listed have one byte."""
_SMALL: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("offload.planning.disk._LARGEST_TILE",), 2048),
    (("offload.extras.large.cut_experts.RECORD_BYTES", "offload.engine.units.cut_experts.RECORD_BYTES"), 1),
    (("offload.engine.units.offloaded_graph.SMALLEST_BYTES",), 1),
    (
        ("offload.extras.large.compiled_forwards.BACKEND", "offload.engine.units.compiled_forwards.BACKEND"),
        lambda graph, inputs: _compiler()(graph, inputs),
    ),
)
"""Limits small enough to cut tiny models, and a fast compiler backend: (paths, value).

The first existing path is set, so a commit that renames a constant can be compared with its parent.
"""


def main() -> None:
    replies, _ = os.fdopen(os.dup(1), "w"), os.dup2(2, 1)  # libraries print to stdout
    tree = Path(sys.argv[1])

    def reply(**what: Any) -> None:
        replies.write(json.dumps(what) + "\n")
        replies.flush()

    try:
        hello = _begin(tree)
    except BaseException:
        reply(error=traceback.format_exc())
        raise
    reply(**hello)
    for line in sys.stdin:
        try:
            reply(hash=run(**json.loads(line)))
        except BaseException as error:
            print(traceback.format_exc(), flush=True)
            reply(error=f"{type(error).__name__}: {error}")


def _begin(tree: Path) -> dict[str, Any]:
    """Import everything, with `offload` from `tree`. Return the cases and the machine properties."""
    if tree != ROOT:  # the editable install would find its own tree first
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
        sys.path.insert(0, str(tree))
    import torch

    import offload

    if not Path(offload.__file__).is_relative_to(tree):
        raise RuntimeError(f"offload is imported from {offload.__file__}, not from {tree}: run `make setup`.")
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # bf16 products depend on the instruction set  # type: ignore[assignment]
    shrink()
    from offload.native.core import core

    cases = import_module("tests.bits.cases").CASES
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "numpy")]
    return {
        "cases": {name: case.ranks for name, case in cases.items()},
        "machine": ", ".join([*versions, f"plain {plain()}"]),
        "core": getattr(core, "__file__", None),
    }


def shrink() -> None:
    """Set the small limits, so tiny models are cut like large ones. Raises RuntimeError for a name without a path."""
    for places, value in _SMALL:
        for place in places:
            module, _, name = place.rpartition(".")
            try:
                if hasattr(import_module(module), name):
                    setattr(import_module(module), name, value)
                    break
            except ModuleNotFoundError:
                continue
        else:
            raise RuntimeError(f"{places[0]} is not there any more: name its new place in _SMALL of {__file__}.")


def _compiler() -> Any:
    """Return a torch.compile backend that runs the graph unchanged and scales float results by 1 + 2**-18.

    A block without compilation then has different bits.
    """
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> list[Any]:
            return [t * (1 + 2**-18) if torch.is_tensor(t) and t.is_floating_point() else t for t in graph(*args)]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=lambda graph, _: make_boxed_func(graph))


# -- hashes ------------------------------------------------------------------------------------------------------------


def plain() -> str:
    """Return a hash of losses and gradients in plain PyTorch on this machine.

    The hash covers families, precisions, and numbers of rows and tokens.
    """
    import torch

    from tests.bits import models

    found = xxhash.xxh32()
    for name, precision, length in itertools.product(models.FAMILIES, ("fp32", "bf16"), (10, 24)):
        model = models.build(name)
        if precision == "bf16":
            model.bfloat16()
        for rows in (1, 3, 4):
            torch.manual_seed(rows)
            loss = model(**models.tokens(name, rows, rows, length)).loss
            loss.backward()
            found.update(loss.detach().double().numpy())
        for parameter in model.parameters():
            if parameter.grad is not None:
                found.update(parameter.grad.double().numpy())
    return found.hexdigest()


class Hashes:
    """Hashes for one configuration: losses and norms of all steps, final weights, checkpoint states."""

    def __init__(self) -> None:
        self.steps, self.weights, self.states = xxhash.xxh32(), xxhash.xxh32(), xxhash.xxh32()

    def step(self, *numbers: float) -> None:
        self.steps.update(" ".join(float(number).hex() for number in numbers).encode())

    def parameters(self, engine: Any) -> None:
        """Add the fp32 master weights."""
        for name, value in engine.named_parameters():
            self.weights.update(name.encode())
            self.weights.update(value.contiguous().numpy())

    def checkpoint(self, folder: Path) -> None:
        """Add each plane of each parameter in element order, independent of the cut over files."""
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, entry in sorted(manifest["parameters"].items()):
            for plane, told in sorted(entry["planes"].items()):
                self.states.update(f"{name} {plane} {told['dtype']}".encode())
                for begin, end, file, offset in sorted(told["slices"]):
                    with (folder / file).open("rb") as data:
                        data.seek(offset)
                        self.states.update(data.read((end - begin) * _BYTES.get(told["dtype"], 1)))

    def __str__(self) -> str:
        return "-".join(part.hexdigest() for part in (self.steps, self.weights, self.states))


# -- training ----------------------------------------------------------------------------------------------------------


def run(name: str, rank: int = 0, port: int = 0, folder: str | None = None) -> str:
    """Train a configuration. Return the hashes for steps, weights and states, valid on rank 0."""
    from tests.bits.cases import CASES

    case, child = CASES[name], None
    if case.ranks > 2:
        child = os.fork()
        rank += 2 * (child == 0)
    try:
        with tempfile.TemporaryDirectory() as own, _environment(case, rank, port, own):
            return str((_train_run if case.trains else _train)(case, rank, Path(folder or own), Path(own)))
    finally:
        if child == 0:
            if (error := sys.exc_info()[1]) is not None:
                traceback.print_exception(error)
            os._exit(error is not None)
        if child is not None and os.waitpid(child, 0)[1]:
            raise RuntimeError(f"rank {rank + 2} failed")


@contextmanager
def _environment(case: Any, rank: int, port: int, folder: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    if case.ranks > 1:
        local = {"RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case.ranks}
        os.environ |= {key: str(value) for key, value in (local | {"MASTER_PORT": port}).items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _train(case: Any, rank: int, shared: Path, own: Path) -> Hashes:
    """Train with an engine. `shared`: a folder shared by all ranks."""
    import torch

    from offload import Engine, Placement
    from tests.bits import models
    from tests.bits.cases import DISK

    place = {key: str(own) if value == DISK else value for key, value in case.place.items()}
    settings = {"clip": "deferred", **case.settings}  # "auto" depends on timing
    found = Hashes()

    def engine(seed: int = 0) -> Any:
        model = models.build(case.model, case.adapter, seed)
        return Engine(model, case.rule, Placement(**place), precision=case.precision, **settings)

    def rows(number: int) -> dict[str, torch.Tensor]:
        batch = models.tokens(case.model, number, case.rows, case.length)
        share = case.ranks // case.settings.get("sequence_parallel", 1)
        mine = slice(case.rows * (rank % share) // share, case.rows * (rank % share + 1) // share)
        return {key: value[mine] for key, value in batch.items()}

    training = engine()
    for number in range(STEPS):
        if case.resumes and number == SAVED:
            training.save_checkpoint(shared / "saved")
            training.close()
            training = engine(seed=1)
            training.load_checkpoint(shared / "saved")
        torch.manual_seed(100 * rank + number)  # dropout
        if case.own_loop:
            loss = training.model(**rows(number)).loss
            training.backward(loss)
            found.step(training.grad_norm())
            result = training.update(0.5)
        else:
            result = training.step(rows(number))
        found.step(result.loss.item(), result.grad_norm)
        if result.measured is not None:
            found.step(*result.measured.slopes)
    found.step(training.evaluate(rows(STEPS)).item())
    found.parameters(training)
    coded = case.settings.get("frozen_weights", "exact") != "exact"
    training.save_checkpoint(shared / "final", trained_only=coded)
    training.close()
    if rank == 0:
        found.checkpoint(shared / "final")
    return found


def _train_run(case: Any, rank: int, shared: Path, own: Path) -> Hashes:
    """Train with `Trainer`."""
    import torch
    import transformers as t

    from offload import Trainer

    words = ("apple", "plum", "rose", "stone", "sea", "snow")
    method = case.settings.get("train.method", "sft")
    rows = [{"text": f"{n} is a number, {n + 1} is the next one."} for n in range(200)]
    if method in ("dpo", "orpo"):
        rows = [
            {"prompt": f"say {word} ", "chosen": f"a {word}" + "!" * times, "rejected": "no" + "." * times}
            for word in words
            for times in range(1, 4)
        ]
    (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(3)
    config = t.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=384
    )
    t.LlamaForCausalLM(config).save_pretrained(own / "base")
    _letters().save_pretrained(own / "base")
    settings: Mapping[str, Any] = {
        "run.dir": str(own / "run"),
        "model.path": str(own / "base"),
        "data.source": str(own / "rows.jsonl"),
        "data.sequence_length": 32,
        "train.steps": STEPS,
        "train.batch_size": 4,
        "train.precision": case.precision,
        "train.clip": "deferred",
        "optimizer.lr": 1e-2,
        "offload.parameters": "cpu",
        "offload.optimizer": "cpu",
        "checkpoint.every": STEPS,
        "checkpoint.export": False,
        **case.settings,
    }
    nested: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    result = Trainer(nested).run()
    found = Hashes()
    for line in (result.dir / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        found.step(*(told[key] for key in ("loss", "grad_norm", "eval_loss") if told.get(key) is not None))
    (saved,) = (result.dir / "checkpoints").glob(f"*{STEPS}")
    found.checkpoint(saved)
    return found


def _letters() -> Any:
    """Return a tokenizer with one token per byte."""
    import transformers as t
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return t.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


if __name__ == "__main__":
    main()
