"""The database of a sweep. Its messages never contain the password of the URL."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.files import check_database

HEARTBEAT, GRACE = 5, 60  # seconds between heartbeats, and without one until a trial is taken over
ATTEMPTS = 10  # to create the tables, one per second


def database_url(storage: str | None, folder: Path) -> URL:
    """Return the URL of a database, by default a file in the sweep's folder; raise UsageError if it is invalid."""
    if storage is None:
        return URL.create("sqlite", database=str(folder / "sweep.db"))
    try:
        url = make_url(storage)
        url = url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url
        url.get_dialect().import_dbapi()
    except (ArgumentError, ValueError):
        raise UsageError("--storage is not the URL of a database, such as postgresql://user@host/name") from None
    except ImportError as error:
        raise Failure(
            f"--storage needs a missing package ({error.name}), such as psycopg[binary]: install it"
        ) from None
    if "password" in url.query:  # SQLAlchemy would print it
        raise UsageError("--storage: put the password into ~/.pgpass, not behind a question mark")
    return url


def open_storage(url: URL) -> RDBStorage:
    """Connect to a database, and create the tables of Optuna."""
    if url.get_backend_name() == "sqlite" and url.database:
        check_database(Path(url.database).resolve())
    options: dict[str, Any] = {"timeout": 60}  # seconds, while another process writes to a file
    if url.get_backend_name() == "postgresql":
        options = {"connect_timeout": 10, "tcp_user_timeout": 30_000}  # seconds, milliseconds
    engine = {"connect_args": options, "pool_pre_ping": True}
    attempts = 0
    while True:
        try:
            text = url.render_as_string(hide_password=False)
            return RDBStorage(text, engine, heartbeat_interval=HEARTBEAT, grace_period=GRACE)
        except SQLAlchemyError as error:
            attempts += 1
            if attempts == ATTEMPTS or not re.search("already exists|[Dd]uplicate|UNIQUE", str(error)):
                raise
            time.sleep(1)  # another command is creating the tables


@contextmanager
def storage_errors(url: URL) -> Iterator[None]:
    """Raise a Failure that names the database instead of SQLAlchemy's errors."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        cause: Any = error.__cause__ if isinstance(error, StorageInternalError) else error
        line = first_line(getattr(cause, "orig", None) or cause).replace(url.password or "\0", "***")
        place = f"the database at {url.host}" if url.host else url.database
        raise Failure(f"{place}: {line}. Fix that, then repeat the command: the sweep continues.") from None
