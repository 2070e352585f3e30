"""The database of a sweep. Its messages never contain the password of the URL."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.pruners import BasePruner
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial
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
        if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
            raise ValueError("workers cannot share a database in memory")
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
        except RuntimeError as error:  # tables of another version
            raise Failure(f"{url.render_as_string()}: {first_line(error)}") from None


def open_study(storage: RDBStorage, name: str, directions: Sequence[Any], pruner: BasePruner) -> optuna.Study:
    """Create or load a study. Raise Failure if its rows are not those of such a sweep: Optuna does not check them.

    directions: "maximize" or "minimize" for each objective.
    """
    try:
        study = optuna.create_study(
            study_name=name, storage=storage, directions=directions, pruner=pruner, load_if_exists=True
        )
        _check_rows(study, directions)
    except (SQLAlchemyError, StorageInternalError):
        raise
    except Exception as error:  # a wrong type or damaged JSON may raise any error
        fault = first_line(error).rstrip(".") or type(error).__name__
        remedy = "restore it, or give this sweep a name of its own (name: …)"
        raise Failure(f"the sweep {name} in the database is damaged ({fault}): {remedy}") from None
    return study


def _check_rows(study: optuna.Study, directions: Sequence[str]) -> None:
    """Raise an error of any type for a row with another type or value than a sweep writes."""
    if [direction.name.lower() for direction in study.directions] != [*directions]:
        raise ValueError("its objectives have other directions")
    if not isinstance(study.user_attrs.get("sweep", {}), dict):
        raise TypeError("its settings are not a mapping")
    math.isfinite(study.user_attrs.get("seconds", 0))
    for number, trial in enumerate(study.get_trials(deepcopy=False)):
        attributes = trial.user_attrs
        numbers = [*(trial.values or ()), *trial.intermediate_values.values(), attributes.get("kills", 0)]
        texts = [attributes.get(key) or "" for key in ("worker", "run", "error")]
        if trial.number != number or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"trial {trial.number} has other columns")
        are_finite = [math.isfinite(value) for value in numbers]
        is_complete = trial.state == TrialState.COMPLETE
        if is_complete and not (all(are_finite) and len(trial.values) == len(directions)):
            raise ValueError(f"trial {trial.number} is complete without finite values")
        create_trial(state=trial.state, values=trial.values, params=trial.params, distributions=trial.distributions)


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
