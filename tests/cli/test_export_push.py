"""`offload export --push`, against a stand-in for the API of the hub on this machine."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from offload import export
from offload.errors import ConfigError, OffloadError
from tests.checkpoint.trained import train
from tests.zoo.families import families


class Hub(ThreadingHTTPServer):
    """The four calls of an upload. Files come in the commit itself."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.repositories: list[dict[str, Any]] = []
        self.refuses = ""
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses and self.server.refuses in self.path:
            self.answer({"error": "no room"}, 401)
        elif self.path == "/api/repos/create":
            self.server.repositories.append(json.loads(body))
            self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/me/{json.loads(body)['name']}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": "http://127.0.0.1/me/x/commit/abc", "commitOid": "abc"})
        else:
            self.answer({})

    def do_GET(self) -> None:
        self.answer({"id": "me/x", "sha": "abc", "siblings": []}, 401 if self.server.refuses else 200)

    def answer(self, value: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = families()["llama"]
    return train(family.build(calm=True), family.batch(), tmp_path_factory.mktemp("push")).checkpoint


def test_the_uploaded_files_are_those_of_the_export(
    hub: Hub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([str(checkpoint), str(tmp_path / "out"), "--push", "me/x", "--private"])
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    ((name, private),) = [(each["name"], each.get("visibility", each.get("private"))) for each in hub.repositories]
    assert (name, private) in (("x", "private"), ("x", True)), "by the version of huggingface_hub"
    assert re.search(r"uploaded to http://127\.0\.0\.1:\d+/me/x", capsys.readouterr().out)


def test_a_failed_upload_leaves_the_folder_and_says_how_to_go_on(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.refuses = "/commit/"
    with pytest.raises(OffloadError, match=r"is complete: `hf upload me/x .*out` uploads it later"):
        export.main([str(checkpoint), str(tmp_path / "out"), "--push", "me/x"])
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("case", ["name", "token", "offline", "refused", "network"])
def test_what_stops_an_upload_stops_before_the_export(
    case: str, hub: Hub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"name": "does not take this name", "token": "hf auth login", "offline": "HF_HUB_OFFLINE is set"}
    said |= {"refused": "the answer of the hub", "network": "no answer from"}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", case == "offline")
    if case == "token":
        monkeypatch.setattr("offload.app.hf.push.get_token", lambda: None)
    if case == "network":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.refuses = "/create" if case == "refused" else ""
    with pytest.raises(ConfigError, match=said[case]):
        export.main([str(checkpoint), str(tmp_path / "out"), "--push", "a name" if case == "name" else "me/x"])
    assert not (tmp_path / "out").exists()
