"""Own images from a bucket: list all objects, and keep a verified copy of them in the cache folder.

With `data.stream`, the copy has empty files, whose times stand for the versions of the objects. Each object is read
when it is decoded. Tables are complete. So the rest of the program works as with any folder.

Each URL has a folder below `data.cache_dir`, which one process at a time updates. Its database has the tables `listed`,
all objects in the bucket, and `copied`, the complete copies: millions of objects would take gigabytes of memory.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from cifar_lit.data.cache import Fetch
from cifar_lit.data.download import file_lock
from cifar_lit.data.formats import IMAGES, TABLES
from cifar_lit.data.progress import note_once, progress
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.errors import Failure
from cifar_lit.extras.cloud.store import Object, Reader, check_space
from cifar_lit.files import PART
from cifar_lit.text import nfc

CONNECTIONS = 16
BATCH = 16 * CONNECTIONS  # objects in one query
SINCE = "CIFAR_LIT_LISTED_SINCE"  # environment: child processes use the listing of the first process
SCHEMA = """
    CREATE TABLE IF NOT EXISTS listed (path TEXT PRIMARY KEY, size INTEGER, etag TEXT, key INTEGER) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS copied (path TEXT PRIMARY KEY, size INTEGER, etag TEXT) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS state (listed_at REAL);
"""
REMOVED = "SELECT path FROM copied WHERE NOT EXISTS (SELECT 1 FROM listed WHERE listed.path = copied.path)"
PENDING = """
    FROM listed WHERE NOT EXISTS (SELECT 1 FROM copied WHERE copied.path = listed.path
    AND copied.size = listed.size AND copied.etag = listed.etag)
"""


@cache
def local_copy(url: str, cache_dir: Path, stream: bool) -> Path:
    """Return the local copy of a folder of images, or of a table in one. The bucket is listed once per process."""
    table, place, since = "", _place(url, cache_dir, stream), float(os.environ.setdefault(SINCE, str(time.time())))
    if url.lower().endswith(TABLES):
        url, _, table = url.rpartition("/")
    try:
        with file_lock(place / "lock", "copies the same bucket"), closing(_database(place)) as database:
            reader = Reader(url.rstrip("/"))
            (listed_at,) = database.execute("SELECT max(listed_at) FROM state").fetchone()
            if (listed_at or 0) < since:
                update_list(database, reader, only_images=not table)
            update_copy(database, reader, place / "images", stream)
    except OSError as error:
        fault = f"{error.filename or place}: {error.strerror or error}"
        raise Failure(f"{fault}; fix that, or choose another folder with --data.cache_dir") from error
    except sqlite3.Error as error:
        raise Failure(f"{place} cannot be used ({error}): delete it, or make room on its disk") from error
    return place / "images" / table


def _place(url: str, cache_dir: Path, stream: bool) -> Path:
    name = sha256(url.encode()).hexdigest()[:16]
    return cache_dir / "buckets" / (f"{name}-stream" if stream else name)


def fetcher(settings: SourceSettings) -> Fetch:
    """Return the function that copies objects to a folder while they are decoded. Other files stay where they are."""
    url, folder = str(settings.root), settings.path
    place = _place(url, settings.cache_path, settings.stream)
    if url.lower().endswith(TABLES):
        folder, url = folder.parent, url.rpartition("/")[0]
    reader = Reader(url.rstrip("/"))

    def fetch(names: Sequence[str], target: Path) -> list[str]:
        def get(name: str) -> str:
            row = rows.get(name)
            if row is None:
                return str(folder / name)
            part = target / f"{secrets.token_hex(8)}{Path(name).suffix}"
            reader.read(Object(name, *row), part)
            return str(part)

        with closing(_database(place)) as database:
            query = "SELECT size, etag FROM copied WHERE path = ?"
            rows = {name: database.execute(query, (name,)).fetchone() for name in names}
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return [*pool.map(get, names)]

    return fetch


def _database(place: Path) -> sqlite3.Connection:
    database = sqlite3.connect(place / "objects.sqlite")
    database.executescript(SCHEMA)
    return database


def versions(settings: SourceSettings, names: Sequence[str]) -> Tensor:
    """Return a hash of size and ETag of the objects with these paths, int64 (N,); 0 for files from elsewhere."""
    hashes = []
    with closing(_database(_place(str(settings.root), settings.cache_path, settings.stream))) as database:
        for name in names:
            row = database.execute("SELECT size, etag FROM copied WHERE path = ?", (name,)).fetchone()
            hashes.append(_hash(*row) if row else 0)
    return torch.tensor(hashes, dtype=torch.int64)


def _hash(*values: object) -> int:
    text = " ".join(map(str, values))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big", signed=True)


def update_list(database: sqlite3.Connection, reader: Reader, only_images: bool) -> None:
    """Replace the table `listed` by the objects in the bucket now. only_images: leave out all but images and tables."""
    database.execute("DELETE FROM state")
    database.execute("DELETE FROM listed")
    folders: set[str] = set()
    others = 0
    with progress(f"listing {reader.url}", 0, "objects", min_seconds=5) as advance:
        for page in reader.pages():
            used = [each for each in page if not only_images or each.path.lower().endswith((*IMAGES, *TABLES))]
            others += len(page) - len(used)
            rows = ((*item, _hash(nfc(item.path).casefold())) for item in used)
            database.executemany("INSERT INTO listed VALUES (?, ?, ?, ?)", rows)
            for item in used:
                folder = item.path.rpartition("/")[0]
                while folder and folder not in folders:
                    folders.add(folder)
                    folder = folder.rpartition("/")[0]
            advance(len(page))
    for folder in folders:  # rows without a size, to compare with files; an empty object may stand for a folder
        database.execute("DELETE FROM listed WHERE path = ? AND size = 0", (folder,))
        database.execute("INSERT INTO listed VALUES (?, NULL, NULL, ?)", (f"{folder}/", _hash(nfc(folder).casefold())))
    equal = database.execute("SELECT min(path), max(path) FROM listed GROUP BY key HAVING count(*) > 1").fetchone()
    if equal:
        fault = f"{equal[0][:200]} and {equal[1][:200]} are one file on systems where case does not count"
        raise Failure(f"{reader.url}: {fault}: rename one of the objects")
    database.execute("DELETE FROM listed WHERE size IS NULL")
    if not database.execute("SELECT 1 FROM listed").fetchone():
        raise Failure(f"{reader.url} has no images: check the URL")
    if others:
        note_once(f"{reader.url}: {others:,} objects are neither images nor tables, and are not copied")
    database.execute("INSERT INTO state VALUES (?)", (time.time(),))
    database.commit()


def update_copy(database: sqlite3.Connection, reader: Reader, files: Path, stream: bool) -> None:
    """Make the folder `files` a copy of the listed objects: delete what is gone, copy what is new or was lost."""

    def is_empty(path: str) -> bool:
        return stream and not path.lower().endswith(TABLES)

    def is_lost(path: str, size: int) -> bool:
        return not (files / path).is_file() or (files / path).stat().st_size != (0 if is_empty(path) else size)

    for (path,) in database.execute(REMOVED).fetchall():
        (files / path).unlink(missing_ok=True)
        with suppress(OSError):  # Folders that are now empty would be classes without images.
            os.removedirs((files / path).parent)
    rows = database.execute("SELECT path, size FROM copied")
    lost = [(path,) for path, size in rows if is_lost(path, size)]
    database.executemany("DELETE FROM copied WHERE path = ?", lost)
    database.commit()
    count, needed = database.execute(f"SELECT count(*), total(size) {PENDING}").fetchone()
    if not count:
        return
    check_space(files.parent, (0 if stream else int(needed)) + 4096 * count, reader.url)

    def copy(item: Object) -> None:
        part = files.parent / f"{threading.get_ident()}{PART}"  # each thread overwrites its own
        if is_empty(item.path):
            part.write_bytes(b"")
            time_ns = _hash(item.size, item.etag) % 10**18
            os.utime(part, ns=(time_ns, time_ns))
        else:
            reader.read(item, part)
        target = files / item.path
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)

    last = ""
    page = f"SELECT path, size, etag {PENDING} AND path > ? ORDER BY path LIMIT {BATCH}"
    bar = progress(f"copying {reader.url}", int(needed), "MB", 1e-6)
    if stream:
        bar = progress(f"preparing {reader.url}", int(count), "objects", min_seconds=5)
    with ThreadPoolExecutor(CONNECTIONS) as pool, bar as advance:
        try:
            while batch := [Object(*row) for row in database.execute(page, (last,))]:
                for number, (item, _) in enumerate(zip(batch, pool.map(copy, batch), strict=True), 1):
                    database.execute("INSERT OR REPLACE INTO copied VALUES (?, ?, ?)", item)
                    advance(1 if stream else item.size)
                    if number % CONNECTIONS == 0:
                        database.commit()  # writes to the disk, so not for each object
                last = batch[-1].path
        finally:
            database.commit()
