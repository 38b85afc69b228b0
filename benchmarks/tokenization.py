"""Text to tokens on disk: speed against `tokenizers` itself, and memory.

python benchmarks/tokenization.py > benchmarks/results/tokenization.json     # about half an hour on two cores

Both sides have equal texts, threads and tokenizer, a byte-level BPE with 16,384 tokens. Ours reads a file, tokenizes,
writes the store and syncs it to disk. `tokenizers` has all texts in memory and returns Python lists, by `encode_batch`
and by the faster `encode_batch_fast`. Ours uses the latter where no answer has to be located. Both alternate in one
process. A ratio is the reference seconds divided by ours. The results also have processor seconds, more reliable on a
shared machine.

For conversations, rendered by a Python template, the comparison is one process against one for each core, start-up
included.

Memory is the peak resident size of a process that only builds the dataset of a large file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from offload.extras.tools.benches.blocks import rotate
from offload.extras.tools.benches.report import BenchmarkOutput, Result
from offload.machine.limits import usable_cores

VOCABULARY = 16384
BATCH_CHARS = 2 << 20
"""Characters in one `tokenizers` batch, equal to ours."""
FORMATS = ("text", "parquet")
TURN_CHARS = 600
OURS, REFERENCES = "offload", ("encode_batch", "encode_batch_fast")
CHILD = """
import re, sys
from pathlib import Path
from offload.extras.data.dataset import build_dataset
from offload.extras.data.sources import Source
built = build_dataset(sources=[Source((sys.argv[1],))], tokenizer=sys.argv[2], vocab_size=int(sys.argv[3]),
                      sequence_length=1024, batch_size=1, cache_dir=Path(sys.argv[4]))
peak = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]  # getrusage's counts what began it
print(int(peak) << 10, built.sources[0].contents, sep="\\n")
"""


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="rounds, after one to warm up (default %(default)s)")
    parser.add_argument("--rate-megabytes", type=int, default=16, help="of each file of a round (default %(default)s)")
    parser.add_argument("--chat-megabytes", type=int, default=32, help="of conversations (default %(default)s)")
    parser.add_argument("--megabytes", type=int, default=300, help="of the large files (default %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as inside:
        folder = Path(inside)
        results = []
        small = write(folder / "small", arguments.rate_megabytes)
        train_tokenizer(folder / "tokenizer", small["text"])
        results += peaks(write(folder / "large", arguments.megabytes), folder)
        for name in FORMATS:
            results += beside_tokenizers(name, small[name], folder, arguments.pairs)
        results += beside_one_process(
            write_chats(folder / "chats.jsonl", arguments.chat_megabytes), folder, arguments.pairs
        )
    print(BenchmarkOutput(results).document())


def drawn(megabytes: int) -> list[str]:
    """Return this much text, sampled from the sources of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.glob("*.py"))]
    draw, texts, num_bytes = random.Random(0), [], 0
    while num_bytes < megabytes * 1_000_000:
        source = draw.choice(sources)
        begin = draw.randrange(len(source) + 1)
        texts.append(source[begin : begin + draw.randrange(200, 6000)])
        num_bytes += len(texts[-1].encode()) + 1
    return texts


def write(folder: Path, megabytes: int) -> dict[str, Path]:
    """Write files with this much text; return them by format."""
    import pyarrow
    import pyarrow.parquet

    texts = drawn(megabytes)
    folder.mkdir()
    found = {"text": folder / "text.txt", "parquet": folder / "rows.parquet"}
    found["text"].write_text("\n".join(texts), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), found["parquet"])  # one row group, the default
    return found


def write_chats(path: Path, megabytes: int) -> Path:
    """Write this much text as conversations of two to ten turns."""
    with path.open("w", encoding="utf-8") as stream:
        for text in drawn(megabytes):
            turns = [text[at : at + TURN_CHARS] for at in range(0, len(text) - TURN_CHARS, TURN_CHARS)]
            messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
            stream.write(json.dumps({"messages": messages}) + "\n" if len(turns) > 1 else "")
    return path


def train_tokenizer(folder: Path, text: Path) -> None:
    """Train a tokenizer on a text and save it."""
    from offload.extras.data.tokenizer import train_bpe

    train_bpe(text.read_text(encoding="utf-8").splitlines(keepends=True), VOCABULARY).save_pretrained(folder)


def beside_tokenizers(name: str, path: Path, folder: Path, pairs: int) -> list[Result]:
    """Return the tokenizing speed for a file, against each `tokenizers` call on the same texts."""
    from transformers import AutoTokenizer

    batches, num_bytes = texts_of(path)
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    rules = tokenizer.backend_tokenizer
    ways: dict[str, Callable[[], object]] = {
        f"tokenizers' {reference}": partial(ids_by, getattr(rules, reference), batches) for reference in REFERENCES
    }
    ways[OURS] = partial(built, path, tokenizer, folder, 0)
    return rates(name, ways, num_bytes, pairs)


def beside_one_process(path: Path, folder: Path, pairs: int) -> list[Result]:
    """Return the tokenizing speed for conversations with one process for each core, against a single process."""
    from transformers import AutoTokenizer

    tokenizer, num_workers = AutoTokenizer.from_pretrained(str(folder / "tokenizer")), len(usable_cores())
    ways: dict[str, Callable[[], object]] = {
        "one process": partial(built, path, tokenizer, folder, 0),
        OURS: partial(built, path, tokenizer, folder, num_workers),
    }
    return rates(f"conversations by {num_workers} processes", ways, path.stat().st_size, pairs)


def rates(name: str, ways: dict[str, Callable[[], object]], num_bytes: int, pairs: int) -> list[Result]:
    """Return our speed against each other method."""
    rounds = []
    for number in range(pairs + 1):
        rounds.append({way: timed(call) for way, call in rotate(list(ways.items()), number)})
        print(f"{name} {number} of {pairs}:", json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    results = []
    for reference in [each for each in ways if each != OURS]:
        walls, works = ([each[reference][i] / each[OURS][i] for each in rounds[1:]] for i in (0, 1))
        seconds = statistics.median(each[OURS][0] for each in rounds[1:])
        low, middle, high = (round(each, 3) for each in statistics.quantiles(walls, n=4, method="inclusive"))
        details = {
            "lower_quartile": low,
            "upper_quartile": high,
            "processor_ratio": round(statistics.median(works), 3),
            "pairs": pairs,
            "load": round(os.getloadavg()[0], 2),
        }
        rate = round(num_bytes / seconds / 1e6, 2)
        results.append(Result(f"{name} to tokens", rate, "MB/s", reference, middle, details))
    return results


def texts_of(path: Path) -> tuple[list[list[str]], int]:
    """Return the texts in a file's records, in batches, and their total bytes."""
    from dataclasses import replace

    from offload.extras.data.formats import detect_format, read_records
    from offload.extras.data.records import Text
    from offload.extras.data.sources import Source, find_files

    (file,) = find_files(Source((str(path),)))
    records = read_records(replace(file, format=detect_format(file)), VOCABULARY)
    texts = [record.text for record in records if isinstance(record, Text)]
    batches: list[list[str]] = [[]]
    num_chars = 0
    for text in texts:
        if num_chars >= BATCH_CHARS:
            batches.append([])
            num_chars = 0
        batches[-1].append(text)
        num_chars += len(text)
    return batches, sum(len(text.encode()) for text in texts)


def ids_by(encode: Callable[..., Any], batches: list[list[str]]) -> list[list[int]]:
    """Return the ids of all texts from a `tokenizers` call."""
    return [each.ids for batch in batches for each in encode(batch, add_special_tokens=False)]


def built(path: Path, tokenizer: Any, folder: Path, num_workers: int) -> object:
    """Tokenize a file with an empty cache."""
    from offload.extras.data.encoder import Encoder
    from offload.extras.data.prepare import prepare
    from offload.extras.data.row_source import RowSource
    from offload.extras.data.sources import Source

    source = RowSource(Source((str(path),)), VOCABULARY, eval_share=0.0, on_bad_row="error")
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        return prepare(source, Encoder(tokenizer), Path(cache), lambda *_: None, num_workers)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall seconds of a call, and the processor seconds of all its threads and processes."""
    begin, work = time.perf_counter(), sum(os.times()[:4])
    call()
    return time.perf_counter() - begin, sum(os.times()[:4]) - work


def peaks(files: dict[str, Path], folder: Path) -> list[Result]:
    """Return the peak resident sizes of processes that tokenize one file each, side by side."""
    children = {}
    for name, path in files.items():
        words = [str(path), str(folder / "tokenizer"), str(VOCABULARY), str(folder / f"cache-large-{name}")]
        children[name] = subprocess.Popen([sys.executable, "-c", CHILD, *words], stdout=subprocess.PIPE, text=True)
    results = []
    for name, child in children.items():
        told, _ = child.communicate()
        if child.returncode:
            sys.exit(f"the process of {files[name]} ended with {child.returncode}")
        num_bytes, contents = told.splitlines()
        about = {"file_bytes": files[name].stat().st_size, "contents": contents.replace(f"{files[name].parent}/", "")}
        results.append(Result(f"{name}: largest resident size", round(int(num_bytes) / 2**20, 1), "MiB", details=about))
    return results


if __name__ == "__main__":
    main()
