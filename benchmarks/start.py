"""Time from the command to the first step: `python -m offload.train` against a plain PyTorch script.

python benchmarks/start.py --pairs 7 > benchmarks/results/start.json     # about two minutes

Fresh processes alternate, on a folder with a Llama's config.json and a byte-level tokenizer, and on one text file. Each
makes the model with random weights, tokenizes the text (without a token cache) and does one step: forward, backward,
clip, AdamW. The time runs from the process start to the output line with the loss of this step; later work is not
timed. Ours streams the states through a smaller device budget, and writes a run folder.

Ours imports without Python's garbage collector, as any script could, so the script is also timed in this way. OpenMP
threads do not spin in any contender, because ours never do, and spinning would slow the others on a busy machine. Rows
and random weights differ, so losses differ a little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.extras.tools.benches.blocks import rotate
from offload.extras.tools.benches.report import BenchmarkOutput, Result

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
ROWS, SEQUENCE = 8, 256
TEXT_BYTES = 200_000
DEVICE_MEMORY = "12MiB"  # for 20 MB of states
FIRST_STEP = "step 1"  # the start of the first step's line, in both
OURS, SCRIPT, UNCOLLECTED = "offload", "plain PyTorch", "plain PyTorch, imported without the garbage collector"

PLAIN = """
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

folder, source, rows, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = AutoTokenizer.from_pretrained(folder)(open(source, encoding="utf-8").read(), verbose=False)["input_ids"]
tokens = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
batch = tokens[torch.randperm(len(tokens))[:rows]]
loss = model(input_ids=batch, labels=batch).loss
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
print(f"step 1  loss {loss.item():.4f}", flush=True)
"""


@dataclass(frozen=True)
class Started:
    """Seconds from the process start to the first line and to the first step's line, and the loss of the step."""

    first_line_s: float
    first_step_s: float
    loss: float


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="rounds, after one to warm up (default %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as inside:
        folder = Path(inside)
        prepare(folder)
        rounds: list[dict[str, Started]] = []
        loads: list[float] = []
        for number in range(arguments.pairs + 1):
            loads.append(round(os.getloadavg()[0], 2))
            found = {
                name: started(command, folder / f"cache-{number}")
                for name, command in rotate(list(commands(folder, number).items()), number)
            }
            print(f"{number} of {arguments.pairs}:", json.dumps(found, default=vars), file=sys.stderr, flush=True)
            rounds.append(found)
    print(BenchmarkOutput(summarise(rounds[1:], loads[1:])).document())


def prepare(folder: Path) -> None:
    """Write the model folder, the text and the plain PyTorch script."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    library = Path(os.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))[:TEXT_BYTES]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=SHAPE["vocab_size"], special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "model")
    LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "model")
    (folder / "plain.py").write_text(PLAIN)
    without, made = "import gc\n\ngc.disable()\n", "model.train()\n"  # the model class is imported at construction
    (folder / "uncollected.py").write_text(without + PLAIN.replace(made, f"{made}gc.freeze()\ngc.enable()\n"))


def commands(folder: Path, number: int) -> dict[str, list[str]]:
    """Return the commands by name."""
    model, text = str(folder / "model"), str(folder / "text.txt")
    ours = {
        "model.path": model,
        "model.init": "random",
        "data.source": text,
        "data.sequence_length": SEQUENCE,
        "train.batch_size": ROWS,
        "train.steps": 1,
        "offload.device_memory": DEVICE_MEMORY,
        "run.dir": folder / f"run-{number}",
    }
    words = [word for key, value in ours.items() for word in (f"--{key}", str(value))]
    given = [model, text, str(ROWS), str(SEQUENCE)]
    return {
        OURS: [sys.executable, "-m", "offload.train", *words],
        SCRIPT: [sys.executable, str(folder / "plain.py"), *given],
        UNCOLLECTED: [sys.executable, str(folder / "uncollected.py"), *given],
    }


def started(command: list[str], cache: Path) -> Started:
    """Run a command to its end, without cached data."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_WAIT_POLICY": "PASSIVE"}
    lines: list[tuple[float, str]] = []  # each with its time
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines.extend((time.perf_counter() - begin, line) for line in process.stdout)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    first_step_s, line = next(each for each in lines if each[1].startswith(FIRST_STEP))
    return Started(lines[0][0], first_step_s, float(line.split("loss")[1].split()[0]))


def summarise(rounds: list[dict[str, Started]], loads: list[float]) -> list[Result]:
    """Return median seconds, and for contenders compared with ours the medians and quartiles of the ratios, round by
    round; above 1, ours takes longer. `loads`: machine load at the start of each round.
    """
    results = []
    for name in (SCRIPT, UNCOLLECTED):
        ratios = [each[OURS].first_step_s / each[name].first_step_s for each in rounds]
        low, middle, high = (round(each, 3) for each in statistics.quantiles(ratios, n=4, method="inclusive"))
        more = {"slowdown": middle, "lower_quartile": low, "upper_quartile": high, "loads": loads}
        results.append(_median(f"{OURS}, to the first step", [each[OURS].first_step_s for each in rounds], name, more))
    results += [
        _median(f"{name}, to the first step", [each[name].first_step_s for each in rounds])
        for name in (SCRIPT, UNCOLLECTED)
    ]
    return [*results, _median(f"{OURS}, to the first line", [each[OURS].first_line_s for each in rounds])]


def _median(
    name: str, seconds: list[float], reference: str | None = None, more: dict[str, Any] | None = None
) -> Result:
    details = {**(more or {}), "pairs": len(seconds), "all": [round(each, 3) for each in seconds]}
    return Result(name, round(statistics.median(seconds), 3), "s", reference, details=details)


if __name__ == "__main__":
    main()
