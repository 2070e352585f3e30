"""A copy of the run in a bucket: `RunCopy` uploads it during the training, `fetch_run` gets it to resume it.

Each file of the run folder is an object below `URL/NAME-OF-THE-RUN/`, with its SHA-256 as an attribute.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import Any

import lightning.pytorch as pl
import obstore
from lightning.pytorch.callbacks import Callback
from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore

from cifar_lit.data.download import file_lock
from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure, UsageError
from cifar_lit.extras.cloud.store import SHA256, WRITABLE, Reader, check_space, check_url, explained_errors
from cifar_lit.files import PART, check_regular, read_text, without_links, write_text
from cifar_lit.runs.run_folder import CHECKPOINTS, PREVIOUS, RunFolder, display_path
from cifar_lit.text import is_file_name, note

OWNER = ".copy"  # file and object with a random text, which tells the copies of two runs of the same name apart
LAST = "last.ckpt metrics.json"  # uploaded after what they refer to, in this order
PERIOD = 2.0  # seconds between looks at the run folder
MAX_PAUSE = 60.0  # seconds until a failed upload is tried again, 4 at first
FINAL_SECONDS = 60.0  # how long the end of a training waits for the copy
PART_BYTES = 8 << 20  # larger files are uploaded in parts


class RunCopy(Callback):
    """Copy the finished files of a run folder to a bucket, after each checkpoint and at the end.

    The copy is below `url`, in a folder with the name of the run. A thread of the first process uploads, so no step
    waits. An unreachable bucket does not end the training: a note says so, and the upload is tried again.
    """

    def __init__(self, url: str, folder: RunFolder) -> None:
        check_url(url, WRITABLE)
        self._url, self._folder = url.rstrip("/"), folder
        self._thread: Thread | None = None
        self._ending = Event()
        self._copied: dict[str, tuple[int, int]] = {}  # files with size and time at their upload
        self._fault = ""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the thread."""
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._url = f"{self._url}/{self._folder.path.name}"
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()

    def finish_copy(self) -> None:
        """Upload what is left, for at most `FINAL_SECONDS`. Say where the copy is, or why it is incomplete."""
        if self._thread is None:
            return
        self._ending.set()
        self._thread.join(FINAL_SECONDS)
        if self._thread.is_alive():
            self._fault = self._fault or f"{self._url} takes more than {FINAL_SECONDS:.0f} s"
        note(f"the copy of the run is incomplete: {self._fault}" if self._fault else f"run copied to {self._url}")

    def _run(self) -> None:
        pause, is_ending = PERIOD, False
        while not is_ending:
            is_ending = self._ending.wait(pause)
            try:
                self._upload(is_ending)
                self._fault, pause = "", PERIOD
            except Exception as error:  # whatever it is, the training goes on
                if not self._fault:
                    note(f"the run is not copied to {self._url} for now, the training continues: {error}")
                self._fault, pause = str(error), min(2 * pause, MAX_PAUSE)

    def _upload(self, is_ending: bool) -> None:
        """Upload the files that have changed, if a checkpoint has, or at the end."""
        run = self._folder.path
        files = {name: state for name, state in run_files(run).items() if self._copied.get(name) != state}
        if not is_ending and not any(name.startswith("checkpoints/") for name in files):
            return
        store = Reader(self._url, WRITABLE).store  # new each time, because credentials may have been renewed
        with explained_errors(self._url):
            claim(store, run / OWNER, self._url)
            for name, state in files.items():
                upload(store, name, run / name, state[0])
                self._copied[name] = state


def run_files(run: Path) -> dict[str, tuple[int, int]]:
    """Return the files of a run in the order of their upload, with size and time, without hidden and linked files."""
    files = {}
    for path in sorted(run.rglob("[!.]*"), key=lambda path: (LAST.find(path.name), path)):
        name = path.relative_to(run).as_posix()
        if path.is_file() and not path.is_symlink() and name != PREVIOUS and not name.endswith(PART):
            files[name] = (path.stat().st_size, path.stat().st_mtime_ns)
    return files


def claim(store: ObjectStore, owner: Path, url: str) -> None:
    """Mark a copy as that of this run. Raise Failure if it is the copy of another one."""
    if not owner.exists():
        write_text(owner, secrets.token_hex(16))
    check_regular(owner)
    text = read_text(owner, 1 << 10).encode()
    try:
        obstore.put(store, OWNER, text, mode="create")
    except AlreadyExistsError:
        if bytes(obstore.get(store, OWNER).bytes()) != text:
            raise Failure(f"{url} is the copy of another run: choose another place with --copy-to") from None


def upload(store: ObjectStore, name: str, file: Path, size: int) -> None:
    """Upload the first `size` bytes of a file, which may grow meanwhile. Verify the size of the object."""

    def blocks() -> Iterator[bytes]:
        stream.seek(0)
        return iter(lambda: stream.read(min(PART_BYTES, size - stream.tell())), b"")

    with open(file, "rb", opener=without_links) as stream:
        digest = hashlib.sha256()
        for block in blocks():
            digest.update(block)
        data: Any = blocks()
        if size <= PART_BYTES:
            data = b"".join(data)
        obstore.put(store, name, data, attributes={SHA256: digest.hexdigest()}, chunk_size=PART_BYTES)
    stored = obstore.head(store, name)["size"]
    if stored != size:
        raise Failure(f"{name} has {stored:,} bytes in the bucket instead of {size:,}")


def fetch_run(url: str, logs: Path) -> Path:
    """Copy a run from a bucket to a folder in `logs`, and return it. Its files are as untrusted as those of others.

    A folder of this name that has the last checkpoint of the copy, and perhaps later ones, is returned as it is. Raise
    UsageError if it has others, or the URL has no run, and Failure if an object cannot be read or copied.
    """
    reader = Reader(url.rstrip("/"), WRITABLE)
    run = logs / PurePosixPath(reader.url).name
    part = logs / f".{run.name}{PART}"
    with file_lock(logs / f".{run.name}.lock", "gets the same run"):
        items = {item.path: item for page in reader.pages() for item in page if item.size}
        for path in [path for path in items if "/." in f"/{path}" and path != OWNER]:
            del items[path]
        if not is_file_name(run.name) or not {"config.yaml", CHECKPOINTS[0]} <= items.keys():
            raise UsageError(f"{url} is no copy of a run: it has no config.yaml and {CHECKPOINTS[0]}")
        if run.exists():
            _check_not_behind(run, reader)
            return run
        needed = sum(item.size for item in items.values())
        check_space(logs, needed, url)
        shutil.rmtree(part, ignore_errors=True)
        items["config.yaml"] = items.pop("config.yaml")  # the last one, because it makes a folder a run
        with progress(f"copying {url}", needed, "MB", 1e-6) as advance:
            for path, item in items.items():
                (part / path).parent.mkdir(parents=True, exist_ok=True)
                reader.read(item, part / path)
                advance(item.size)
        part.rename(run)
    return run


def _check_not_behind(run: Path, reader: Reader) -> None:
    """Raise UsageError unless a checkpoint of the local run is the last one of its copy."""
    with explained_errors(reader.url):
        copied = obstore.get(reader.store, CHECKPOINTS[0], options={"head": True}).attributes.get(SHA256)
    for file in (run / "checkpoints").glob("*.ckpt"):
        with open(file, "rb", opener=without_links) as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() == copied:
                return
    here = display_path(run)
    raise UsageError(f"{here} has other checkpoints than {reader.url}: use --resume {here}, or move it away")
