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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 5, 3
_BYTES = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
"""Element size in bytes. Dtypes not listed have one byte."""
_BACKEND = "offload.extras.large.compiled_forwards.BACKEND offload.engine.units.compiled_forwards.BACKEND"


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
    from tests.cases.features import HASHED, TRAINER_RUNS

    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "numpy")]
    return {
        "cases": {**{name: cell.ranks for name, (_, cell) in HASHED.items()}, **dict.fromkeys(TRAINER_RUNS, 1)},
        "machine": ", ".join([*versions, f"plain {plain()}"]),
        "core": getattr(core, "__file__", None),
    }


def shrink() -> None:
    """Set small limits, so that tiny models are cut like large ones, and a fast compiler backend."""
    from tests.cases.features import CASES, LIMITS, limits_of

    backend = {_BACKEND: lambda graph, inputs: _compiler()(graph, inputs)}
    for limits in (LIMITS, *(case.limits for case in CASES.values()), backend):
        for limit in limits_of(limits):
            setattr(*limit)


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

    from tests.cases import models as m

    # A new model makes all file sections unknown machines.
    families = (m.llama, m.wide_llama, m.table, m.gemma2, m.gpt2, *m.EAGER.values(), m.mamba, m.bert, m.t5)
    found = xxhash.xxh32()
    for make, precision, length in itertools.product(families, ("fp32", "bf16"), (10, 24)):
        model, batch = m.build(make), m.table_tokens if make is m.table else m.tokens
        if precision == "bf16":
            model.bfloat16()
        for rows in (1, 3, 4):
            torch.manual_seed(rows)
            loss = model(**batch(rows, rows, length)).loss
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

    def numbers(self, *numbers: float) -> None:
        self.steps.update(" ".join(float(number).hex() for number in numbers).encode())

    def step(self, step: Any) -> None:
        """Add a `Step` of tests/cases/run.py."""
        if step.early_norm is not None:
            self.numbers(step.early_norm)
        self.numbers(step.loss, step.norm)
        if step.slopes:
            self.numbers(*step.slopes)

    def parameters(self, engine: Any) -> None:
        """Add the fp32 master weights, also those of a companion, which stay as they are."""
        from tests.engine.inside import parts_of

        for name, value in engine.named_parameters(names=[info.name for info in parts_of(engine).infos]):
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
    from tests.cases.features import CASES, HASHED, TRAINER_RUNS
    from tests.cases.run import Training, registered

    ranks, child = HASHED[name][1].ranks if name in HASHED else 1, None
    if ranks > 2:
        child = os.fork()
        rank += 2 * (child == 0)
    try:
        with tempfile.TemporaryDirectory() as own, _environment(ranks, rank, port, own):
            if name in TRAINER_RUNS:
                return str(_train_run(TRAINER_RUNS[name], Path(own)))
            of, cell = HASHED[name]
            with registered(CASES[of]):
                return str(_train(Training(CASES[of], cell, Path(own), rank), Path(folder or own)))
    finally:
        if child == 0:
            if (error := sys.exc_info()[1]) is not None:
                traceback.print_exception(error)
            os._exit(error is not None)
        if child is not None and os.waitpid(child, 0)[1]:
            raise RuntimeError(f"rank {rank + 2} failed")


@contextmanager
def _environment(ranks: int, rank: int, port: int, folder: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    if ranks > 1:
        local = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {key: str(value) for key, value in (local | {"MASTER_PORT": port}).items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _train(training: Any, shared: Path) -> Hashes:
    """Train a `Training` of tests/cases/run.py with an engine. `shared`: a folder shared by all ranks."""
    found, engine = Hashes(), training.engine()
    steps = training.train(engine, range(SAVED))
    if training.cell.resumes:
        engine.save_checkpoint(shared / "saved")
        engine.close()
        engine = training.engine(seed=1)
        engine.load_checkpoint(shared / "saved")
    for step in steps + training.train(engine, range(SAVED, STEPS)):
        found.step(step)
    found.numbers(engine.evaluate(training.batch(STEPS), training.case.loss(engine.model)).item())
    found.parameters(engine)
    engine.save_checkpoint(shared / "final", **training.case.saves)
    engine.close()
    if training.rank == 0:
        found.checkpoint(shared / "final")
    return found


def _train_run(own_settings: Mapping[str, Any], own: Path) -> Hashes:
    """Train with `Trainer`."""
    import torch
    import transformers as t

    from offload import Trainer

    words = ("apple", "plum", "rose", "stone", "sea", "snow")
    method = own_settings.get("train.method", "sft")
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
        "train.precision": "fp32",
        "train.clip": "deferred",
        "optimizer.lr": 1e-2,
        "offload.parameters": "cpu",
        "offload.optimizer": "cpu",
        "checkpoint.every": STEPS,
        "checkpoint.export": False,
        **own_settings,
    }
    nested: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    result = Trainer(nested).run()
    found = Hashes()
    for line in (result.dir / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        found.numbers(*(told[key] for key in ("loss", "grad_norm", "eval_loss") if told.get(key) is not None))
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
