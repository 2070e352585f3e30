"""Own images on a web server that lists its files by WebDAV are the same as in a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from data.own_images import save_photo
from extras.cloud.spoiled_bucket import QuietHandler
from extras.cloud.test_stream import load
from werkzeug.serving import make_server

wsgidav_app = pytest.importorskip("wsgidav.wsgidav_app", reason="pip install wsgidav")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder on a web server, with names that URLs cannot hold as they are."""
    folder = tmp_path / "shared/my photos/ü"
    for seed in range(8):
        save_photo(folder / ("cät x", "dog")[seed % 2] / f"{seed} #1%20.jpg", seed)
    return folder


@pytest.fixture
def address(shared: Path, tmp_path: Path) -> Iterator[str]:
    settings = {"provider_mapping": {"/": str(tmp_path / "shared")}, "simple_dc": {"user_mapping": {"*": True}}}
    app = wsgidav_app.WsgiDAVApp({**settings, "verbose": 0, "logging": {"enable": False}})
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=QuietHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()


@pytest.mark.parametrize("path", ["my photos/ü", "my%20photos/%C3%BC/"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_folder_on_a_web_server_is_read_like_a_local_one(
    path: str, stream: bool, address: str, shared: Path, tmp_path: Path
) -> None:
    there = load(f"{address}/{path}", tmp_path / "cache", stream)
    here = load(shared, tmp_path / "cache", stream=False)
    assert torch.equal(there.images, here.images) and there.names == here.names


def test_all_of_a_web_server_is_read_and_gets_no_credentials_of_amazon(
    address: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    there = load(address, tmp_path / "cache", stream=False)
    here = load(tmp_path / "shared", tmp_path / "cache", stream=False)
    assert torch.equal(there.images, here.images) and len(there) == 6
