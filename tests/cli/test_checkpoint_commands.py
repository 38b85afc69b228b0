"""`export`, `verify` and `generate` as user commands: output, exit code and files."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload import export, generate, verify
from offload.errors import CheckpointError, ConfigError
from offload.extras.generate.sampler import GeneratedTokens, Sampler
from tests import forks
from tests.checkpoint.trained import tokenizer, train
from tests.run_folder import flip
from tests.zoo.families import families

Call = Callable[..., "tuple[int | None, str]"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with steps 1, 2 and 3, and an export in at least two files."""
    folder = tmp_path_factory.mktemp("commands")
    family = families()["llama"]
    trained = train(family.build(calm=True), family.batch(), folder / "run", precision="bf16")
    for step in (2, 3):
        shutil.copytree(trained.checkpoint, trained.checkpoint.with_name(f"step-{step}"))
    (folder / "run" / "checkpoints" / "latest").write_text("step-3\n")
    AutoModelForCausalLM.from_pretrained(trained.export).save_pretrained(folder / "hf", max_shard_size=60_000)
    tokenizer(64).save_pretrained(folder / "hf")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Copy the run folder for damage tests."""
    return shutil.copytree(made / "run", tmp_path / "run")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs a command in the test process and returns (exit code, stdout)."""

    def do(command: Any, *words: object) -> tuple[int | None, str]:
        capsys.readouterr()
        code = command.main([str(word) for word in words])
        return code, capsys.readouterr().out

    return do


@pytest.mark.parametrize("name", ["export", "verify", "generate"])
def test_a_run_without_a_checkpoint_names_the_trained_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    command, more = {"export": (export, ["out"]), "verify": (verify, []), "generate": (generate, ["--prompt", "a"])}[
        name
    ]
    with pytest.raises(ConfigError, match=f"the trained model is {tmp_path / 'hf'}"):
        command.main([str(tmp_path), *more])


# -- export ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["run", "run/checkpoints"])
def test_export_takes_the_newest_that_is_whole_and_says_which(given: str, run: Path, capsys: Any) -> None:
    flip(run / "checkpoints" / "step-3" / "rank-0.bin")
    code = export.main([str(run.parent / given), str(run.parent / "out")])
    printed = capsys.readouterr()
    assert code == 0
    assert "step-3 is skipped: " in printed.err
    assert "rank-0.bin is damaged" in printed.err
    assert f"undamaged checkpoint: {run / 'checkpoints' / 'step-2'}" in printed.err
    assert "in 1 file, read back and unchanged" in printed.out
    model = AutoModelForCausalLM.from_pretrained(run.parent / "out")
    assert model.num_parameters() > 0
    assert AutoTokenizer.from_pretrained(run.parent / "out").chat_template


def test_export_in_shards_and_another_dtype(run: Path, call: Call) -> None:
    out = run.parent / "out"
    step = run / "checkpoints" / "step-1"
    assert call(export, step, out, "--dtype", "fp32", "--shard-size", "100KiB")[0] == 0
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_export_of_what_is_damaged_leaves_nothing(run: Path, call: Call) -> None:
    out = run.parent / "out"
    flip(run / "checkpoints" / "step-2" / "rank-0.bin", 800)
    with pytest.raises(CheckpointError, match=r"rank-0\.bin is damaged.*The last good one is .*step-3"):
        call(export, run / "checkpoints" / "step-2", out)
    for step in (1, 3):
        (run / "checkpoints" / f"step-{step}" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="all 3 checkpoints"):
        call(export, run, out)
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


def test_export_to_where_something_is_is_refused(run: Path, call: Call) -> None:
    step = run / "checkpoints" / "step-1"
    with pytest.raises(ConfigError, match="is there already"):
        call(export, step, run)
    with pytest.raises(ConfigError, match="lies in the checkpoint"):
        call(export, step, step / "hf")
    with pytest.raises(ConfigError, match="--shard-size is 'much'"):
        call(export, step, run.parent / "out", "--shard-size", "much")
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


# -- verify ------------------------------------------------------------------------------------------------------


def test_verify_names_what_is_damaged_in_a_run(run: Path, made: Path, call: Call) -> None:
    """tests/checkpoint/test_damage.py has every kind of damage."""
    steps = [run / "checkpoints" / f"step-{number}" for number in (1, 2, 3)]
    for given in (*steps, run, run / "checkpoints"):
        assert call(verify, given)[0] == 0
    flip(steps[2] / "rank-0.bin")
    for given in (run, run / "checkpoints"):
        code, printed = call(verify, given)
        lines = printed.splitlines()
        assert code == 1
        assert all(line.startswith(f"{step}: OK: ") for line, step in zip(lines[:2], steps, strict=False))
        assert lines[2].startswith(f"{steps[2]}: DAMAGED: ")
        assert "rank-0.bin is damaged" in lines[2]
        assert lines[3:] == [f"the newest undamaged one: {steps[1]}"]
    code, printed = call(verify, run, "--json")
    found = json.loads(printed)
    assert code == 1
    assert [(each["path"], each["whole"]) for each in found["checked"]] == [
        *[(str(steps[0]), True), (str(steps[1]), True), (str(steps[2]), False)]
    ]
    assert "rank-0.bin is damaged" in found["checked"][2]["found"]
    assert found["newest_whole"] == str(steps[1])
    code, printed = call(verify, made / "hf", "--json")
    assert code == 0
    assert [each["whole"] for each in json.loads(printed)["checked"]] == [True]
    assert [call(verify, step)[0] for step in steps] == [0, 0, 1]


def test_verify_of_nothing(tmp_path: Path, call: Call) -> None:
    with pytest.raises(
        ConfigError, match=r"^--prompt is missing; write --prompt TEXT, or --chat for a conversation\.$"
    ):
        call(generate, tmp_path)
    with pytest.raises(ConfigError, match="nowhere does not exist; give a Hugging Face folder, RUN"):
        call(generate, tmp_path / "nowhere", "--prompt", "a")
    with pytest.raises(ConfigError, match="does not exist"):
        call(verify, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds neither checkpoints nor"):
        call(verify, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        call(verify, tmp_path / "file")


def in_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def in_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def first(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


NORM = "model.norm.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "header": (lambda folder: flip(first(folder), 8 * 12), "damaged or not a safetensors file"),
    "truncated": (lambda folder: first(folder).write_bytes(first(folder).read_bytes()[:-4]), "its header describes"),
    "missing": (lambda folder: first(folder).unlink(), "which model.safetensors.index.json names"),
    "moved": (lambda folder: in_index(folder, lambda names: names.update({NORM: first(folder).name})), f"lacks {NORM}"),
    "unnamed": (lambda folder: in_index(folder, lambda names: names.pop(NORM)), f"does not list {NORM}"),
    "shape": (lambda folder: in_config(folder, intermediate_size=8), "do not fit"),
    "layers": (lambda folder: in_config(folder, num_hidden_layers=9), "of the parameters of LlamaForCausalLM"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_verify_of_a_hugging_face_folder(name: str, made: Path, tmp_path: Path, call: Call) -> None:
    damage, words = FAULTS[name]
    folder = shutil.copytree(made / "hf", tmp_path / "hf")
    code, printed = call(verify, folder)
    assert code == 0
    assert "OK: 21 tensors" in printed
    assert "shapes are those of LlamaForCausalLM" in printed
    damage(folder)
    code, printed = call(verify, folder)
    assert code == 1
    assert printed.startswith(f"{folder}: DAMAGED: ")
    assert words in printed
    assert printed.count("\n") == 1


def test_verify_tells_what_it_cannot_compare(made: Path, tmp_path: Path, call: Call) -> None:
    folder = shutil.copytree(made / "hf", tmp_path / "hf")
    in_config(folder, architectures=["LlamaForSequenceClassification"])
    code, printed = call(verify, folder)
    assert code == 0
    assert "not compared with the configuration: LlamaForSequenceClassification" in printed
    in_config(folder, architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    code, printed = call(verify, folder)
    assert code == 0
    assert "but 9 tensors are not used" in printed


# -- generate ----------------------------------------------------------------------------------------------------


def test_generate_writes_to_stdout_the_same_from_everywhere(made: Path, call: Call, monkeypatch: Any) -> None:
    words = ["--prompt", "the weights", "--temperature", "1.5", "--max-new-tokens", "12", "--memory"]
    texts = {
        call(generate, folder, *words, memory, *more)[1]
        for folder, more in (
            (made / "hf", ()),
            (made / "run", ()),
            (made / "run" / "checkpoints" / "step-1", ("--dtype", "auto", "--device", "cpu")),
        )
        for memory in ("0", "300KiB", "none", "auto")
    }
    assert len(texts) == 1
    assert len(texts.pop().strip()) > 5
    seeds = {call(generate, made / "hf", *words, "0", "--seed", seed)[1] for seed in (0, 1, 2)}
    assert len(seeds) == 3
    monkeypatch.setattr(sys, "stdin", io.StringIO("the weights\n"))
    assert call(generate, made / "hf", "--prompt", "-", *words[2:], "0", "--seed", "1")[1] in seeds
    chat = call(generate, made / "hf", *words, "0", "--chat")[1]
    assert chat not in seeds
    # only the end token, typical for a chat model without --chat
    monkeypatch.setattr(Sampler, "write", lambda *_: GeneratedTokens([0], 1.0, 0))
    monkeypatch.setattr(generate, "say", (told := []).append)
    for more in ((), ("--chat",)):
        call(generate, made / "hf", *words, "0", *more)
    assert ["add --chat" in text for text in told if "no text" in text] == [True, False]
    monkeypatch.setattr(Sampler, "write", lambda *_: GeneratedTokens([0], 1.0, 0, num_positions=64))
    call(generate, made / "hf", *words, "0")
    assert "ends after 1 token of --max-new-tokens 12: with the prompt, it fills the 64 positions" in " ".join(told)


TALK = ("the weights", "a block", "next")


def conversation(folder: Path) -> list[str]:
    """Return the answers of transformers to TALK, with all turns before in the template."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    words = AutoTokenizer.from_pretrained(folder)
    turns: list[dict[str, str]] = []
    answers = []
    for text in TALK:
        turns.append({"role": "user", "content": text})
        asked = words.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**asked, max_new_tokens=3, do_sample=False, eos_token_id=words.eos_token_id)
        answers.append(words.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
        turns.append({"role": "assistant", "content": answers[-1]})
    assert any(answers)
    return answers


TALKING = ("--chat", "--max-new-tokens", "3", "--temperature", "0", "--memory", "none")


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_conversation_answers_each_line_before_the_next(kind: str, made: Path) -> None:
    """A terminal ends with Ctrl-D, a pipe with `/exit`."""
    words, expected = ["-m", "offload.generate", made / "hf", *TALKING], conversation(made / "hf")
    if kind == "pipe":
        process = forks.start(words, stdin=subprocess.PIPE)
        writer, reader = process.stdin.fileno(), process.stdout.fileno()
    else:
        writer, theirs = pty.openpty()
        reader = writer
        process = forks.start(words, stdin=theirs, stdout=theirs)
    said = ""

    def read_until(text: str) -> None:
        nonlocal said
        while text not in said:
            assert select.select([reader], [], [], forks.PATIENCE_S)[0], said
            data = os.read(reader, 1000)
            assert data, said
            said += data.decode().replace("\r\n", "\n")
        said = said.partition(text)[2]

    for text, answer in zip(TALK, expected, strict=True):
        if kind == "terminal":
            read_until("> ")
        os.write(writer, f"{text}\n".encode())
        read_until(f"{text}\n{answer}\n" if kind == "terminal" else f"{answer}\n")
    if kind == "terminal":
        read_until("> ")
        os.write(writer, b"\x04")
    else:
        os.write(writer, b"\n/exit\nnot a turn\n")
    assert process.wait() == 0
    assert kind == "terminal" or process.stdout.read() == ""
    assert "tokens in " in process.stderr.read()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; it should be 1 or more"),
        (["--temperature", "-1"], "--temperature is -1.0; it should be 0 or more"),
        (["--temperature", "hot"], "--temperature is 'hot'; it should be a number."),
        (["--top-k=1.5"], "--top-k is '1.5'; it should be a whole number."),
        (["--dtype", "fp8"], "--dtype is 'fp8'; it should be one of auto, bf16, fp32."),
        (["--seed"], "--seed is given without a value; write --seed VALUE."),
        (["--top-p", "0"], "--top-p is 0.0; it should be above 0"),
        (["--top-k", "-2"], "--top-k is -2"),
        (["--memory", "lots"], "--memory is 'lots'"),
    ],
)
def test_generate_refuses_what_cannot_be(words: list[str], said: str, made: Path, call: Call) -> None:
    with pytest.raises(ConfigError) as error:
        call(generate, made / "hf", "--prompt", "a", *words)
    assert said in str(error.value)
