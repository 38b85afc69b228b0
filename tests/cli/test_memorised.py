"""A small model memorises chats: from a conversation file to `offload.generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload.generate import main as generate
from offload.train import main as train
from tests.cli.conftest import LLAMA

ANSWERS = {
    **{f"What is {number} and {number}?": f"It is {2 * number}." for number in range(12)},
    "Who jumps?": "The fox, over the dog.",
    "Who are you?": "I am a small model.",
    "Say it in German.": "Es ist schön.",
    "Where is the capital of France?": "In Paris; it is Paris.",
    "What is fetched?": "The weights of a block.",
    "And then?": "They are given back.",
    "What is kept?": "Bits are kept exact.",
    "How many planes?": "Two planes.",
}


@pytest.mark.slow
def test_twenty_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "llama.json").write_text(json.dumps({**LLAMA, "hidden_size": 64, "intermediate_size": 128}))
    turns = [[("user", question), ("assistant", answer)] for question, answer in ANSWERS.items()]
    rows = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in turns]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    given = {
        "model.path": str(tmp_path / "llama.json"),
        "data.source": str(tmp_path / "chats.jsonl"),
        "data.eval_share": "0",
        "data.sequence_length": "64",
        "train.batch_size": "5",
        "train.steps": "240",
        "optimizer.lr": "1e-2",
        "optimizer.weight_decay": "0",
        "run.dir": str(run),
    }
    assert train([word for key, value in given.items() for word in (f"--{key}", value)]) == 0
    capsys.readouterr()
    for question, answer in ANSWERS.items():
        assert (
            generate([str(run / "hf"), "--prompt", question, "--chat", "--temperature", "0", "--max-new-tokens", "40"])
            == 0
        )
        assert capsys.readouterr().out.strip() == answer
