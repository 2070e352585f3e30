"""W&B and MLflow: what they receive, resumed runs, errors, secrets."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import SMALL, Answer, Fork, rows_of

Curves = dict[str, list[tuple[float, float]]]  # (step, value) by name

SECRET = "hunter2-secret"
STEPS = ["--epochs", "3", "--trainer.log_every_n_steps", "1", "--checkpoint-every", "7"]  # five steps per epoch
KILLED = {"AT_STEP": "13", "AT_STEP_SIGNAL": str(int(signal.SIGKILL))}  # the last checkpoint is of step 10
RUN = Path("lightning_logs/small-1")


@pytest.fixture(autouse=True)
def own_variables(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no account and no server of this machine, and keep the caches of the trackers in the working folder."""
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(working_folder))
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "training"))


def train(*words: object, **variables: str) -> Answer:
    """Run a training in a forked process: a tracker keeps threads and connections."""
    return Fork([*SMALL, *words], Path.cwd(), "train", **variables).answer()


def killed_and_resumed(name: str, **variables: str) -> Answer:
    """Train in small-1, kill the process in step 14 and resume the run; train small-2 without a disturbance."""
    words = [*STEPS, "--logger", name]
    killed = train(*words, "--trainer.callbacks", "at_step.AtStep", **KILLED, **variables)
    assert killed.code == -signal.SIGKILL, killed.err
    assert int(rows_of(RUN / "metrics.csv")[-1]["step"]) == 13
    for further in (["--resume", RUN], []):
        answer = train(*words, *further, **variables)
        assert answer.code == 0, answer.err
        assert answer.err == ""
    return answer


def ids_of(run_dir: Path) -> dict[str, str]:
    return json.loads((run_dir / "trackers.json").read_text())


def csv_curves(run_dir: Path) -> Curves:
    """Return the curves in metrics.csv."""
    curves: Curves = {}
    for row in rows_of(run_dir / "metrics.csv"):
        for name in row.keys() - {"step", "epoch"}:
            if row[name]:
                curves.setdefault(name, []).append((int(row["step"]), float(row[name])))
    return curves


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """Yield the records of a run's .wandb files: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]

    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        data, place, record = file.read_bytes(), 7, b""
        while place + 7 < len(data):
            place += -place % 32768 if -place % 32768 < 7 else 0
            size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
            record += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                yield Record.FromString(record)
                record = b""


def wandb_curves(run_dir: Path) -> Curves:
    """Return the curves that W&B received, by `trainer/global_step`."""
    curves: Curves = {}
    for record in wandb_records(run_dir):
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        step = float(items.pop("trainer/global_step", 0))
        for name, value in items.items():
            if not name.startswith("_") and "/_" not in name and value[0] in "0123456789-":
                curves.setdefault(name, []).append((step, float(value)))
    return {name: points for name, points in curves.items() if not name.startswith(PICTURES)}


PICTURES = ("images/", "val/confusion_matrix", "test/confusion_matrix", "test/confident", "test/doubtful")


def without_final(curves: Mapping[str, Any]) -> dict[str, Any]:
    return {name: points for name, points in curves.items() if not name.startswith("final/")}


# ---- W&B


def test_wandb_without_an_account_has_one_gapless_curve_of_a_killed_and_resumed_run() -> None:
    pytest.importorskip("wandb")
    killed_and_resumed("wandb", WANDB_PROJECT="mine", WANDB_TAGS="a,b", WANDB_RUN_GROUP="grouped")
    resumed, other = RUN, RUN.with_name("small-2")
    assert without_final(wandb_curves(resumed)) == csv_curves(resumed)
    assert wandb_curves(resumed) == wandb_curves(other)
