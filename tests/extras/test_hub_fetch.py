"""Models of the Hugging Face hub, served by a stand-in for the hub, and read like any stranger's file."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest
import torch
from contract.command_line import assert_refused, run_command
from PIL import Image

from cifar_lit import load
from cifar_lit.errors import Failure, UsageError
from cifar_lit.extras.hub import fetch
from cifar_lit.runs.model_file import load_model_file, save_weights

constants = pytest.importorskip("huggingface_hub.constants", reason="pip install -e '.[hub]'")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
IMAGES = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


class Hub(BaseHTTPRequestHandler):
    """Answer requests for files of `ada/net` as the hub does. Its revisions are main, v1.0 and refs/pr/2."""

    folder: Path
    requests: list[str]

    def do_HEAD(self) -> None:
        if "/resolve/" in self.path:  # and not a request of huggingface_hub for itself
            self.requests.append(self.path)
        repository, _, place = self.path[1:].partition("/resolve/")
        revision, _, name = place.partition("/")
        refusal = None
        if repository == "ada/gated":
            refusal = 403, "GatedRepo"
        elif repository != "ada/net":
            refusal = 404, "RepoNotFound"
        elif unquote(revision) not in ("main", "v1.0", "refs/pr/2", COMMIT):
            refusal = 404, "RevisionNotFound"
        elif not (self.folder / name).is_file():
            refusal = 404, "EntryNotFound"
        content = b""
        if refusal is None:
            content = (self.folder / name).read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{len(content)}"')
        else:
            self.send_response(refusal[0])
            self.send_header("X-Error-Code", refusal[1])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """Serve a folder with the model file of a run."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files/model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    handler = type("Served", (Hub,), {"folder": tmp_path / "files", "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("revision", ["", "@v1.0", "@refs/pr/2"])
def test_a_model_is_loaded_from_one_file_and_its_commit_is_named(
    hub: type[Hub], run: Path, revision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch.equal(load(f"hf://ada/net{revision}")(IMAGES), load(run)(IMAGES))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf://")]
    assert lines == [f"hf://ada/net{revision} is now hf://ada/net@{COMMIT}"]
    assert {path.rpartition("/")[2] for path in hub.requests} == {"model.safetensors"}
    assert hub.requests[-1] == f"/ada/net/resolve/{COMMIT}/model.safetensors"  # a branch may move in between


def test_a_commit_is_loaded_in_silence_and_without_the_hub_once_it_is_in_the_cache(
    hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    first = load(f"hf://ada/net@{COMMIT}")(IMAGES)
    assert "hf://" not in capsys.readouterr().err
    hub.requests.clear()
    assert torch.equal(load(f"hf://ada/net@{COMMIT}")(IMAGES), first)
    assert hub.requests == []


def test_classify_takes_a_model_of_the_hub(
    hub: type[Hub], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "teal").save("picture.png")
    expected = run_command("classify", run, "picture.png", "--csv")
    answer = run_command("classify", "hf://ada/net", "picture.png", "--csv")
    assert (answer.code, answer.out) == (0, expected.out), answer.err
    assert_refused(run_command("classify", "hf://ada/net"), 2, "classify needs images")


@pytest.mark.parametrize(
    "name",
    [
        "hf://",
        "hf://net",
        "hf://ada/net/file",
        "hf://ada/../net",
        "hf://ada/net@../../x",
        "hf://ada/net@",
        "hf://a b/c",
    ],
)
def test_an_invalid_name_is_refused_without_a_request(hub: type[Hub], name: str) -> None:
    with pytest.raises(UsageError, match="names no model: write hf://USER/NAME"):
        load(name)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf://ada/none", "there is no such repository, or it is private"),
        ("hf://ada/gated", "its owner must grant access first"),
        ("hf://ada/net@v2", "it has no such revision"),
    ],
)
def test_what_the_hub_refuses_is_explained_in_one_line(hub: type[Hub], name: str, reason: str) -> None:
    assert_refused(run_command("classify", name, "picture.png"), 1, f"{name} cannot be loaded: {reason}")


def test_a_repository_without_our_file_is_refused_and_a_pickle_in_it_is_not_fetched(hub: type[Hub]) -> None:
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    with pytest.raises(Failure, match=r"it has no model\.safetensors"):
        load("hf://ada/net")
    assert not any(path.endswith(".bin") for path in hub.requests)


def test_a_hub_that_cannot_be_reached_is_explained(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"  # the discard port refuses connections
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.1, raising=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between its retries
    with pytest.raises(Failure, match="the hub cannot be reached, and its cache lacks the file"):
        load("hf://ada/net")


def test_a_file_that_is_too_large_is_not_downloaded(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    with pytest.raises(Failure, match=r"its model\.safetensors is empty or larger than"):
        load("hf://ada/net")
    assert len(hub.requests) == 1


@pytest.mark.parametrize("fault", ["pickle", "code", "shapes", "bytes"])
def test_a_tampered_file_is_refused_in_one_line_and_runs_nothing(
    hub: type[Hub], run: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("import os; os.mkdir('ran')")
    net, file = load_model_file(run), hub.folder / "model.safetensors"
    if fault == "pickle":
        file.write_bytes(pickle.dumps({}))
    elif fault == "code":
        save_weights(file, net.net.state_dict(), replace(net.card, net="evil.Evil"))
    elif fault == "shapes":
        save_weights(file, net.net.state_dict(), replace(net.card, classes=["cat", "dog"]))
    else:
        file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    reasons = {"pickle": "is not a model.safetensors", "code": "evil.Evil would run code of its module",
               "shapes": "its weights do not fit its net", "bytes": "its checksum differs"}  # fmt: skip
    answer = run_command("classify", f"hf://ada/net@{COMMIT}", "picture.png")
    errors = [line for line in answer.error_lines if line.startswith("cifar-lit: ")]
    assert answer.code in (1, 2) and len(errors) == 1 and reasons[fault] in errors[0], answer.err
    assert not Path("ran").exists()


def test_a_run_is_loaded_without_huggingface_hub_and_a_model_of_the_hub_names_its_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert load(run).classes
    with pytest.raises(
        Failure, match=r'hf:// needs missing packages \(huggingface_hub\): pip install "cifar-lit\[hub\]"'
    ):
        load("hf://ada/net")
