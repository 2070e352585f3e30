"""Gone on with on another number of devices: forked by a process of their own, as pytest must not be forked."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from real_runs import SETTINGS, STEPS_PER_EPOCH, environment

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these trainings are forked")

# 99 images in batches of 8: the last one of 3, which are too few for two or three devices to share
WORDS = ["train", *SETTINGS, "--data.count", "119", "--epochs", "2", "--checkpoint-every", "4"]
MANY, SUMMED = ["--data.chunk", "4"], ["--data.chunk", "1", "--trainer.accumulate_grad_batches", "2"]
HOST = ["--data.placement", "host", "--data.workers", "1"]
# name: flags, those of the undisturbed run in one process, (processes, optimizer step of the stop, signal) one after another
Stop = tuple[int, int, int]
CASES: dict[str, tuple[list[str], list[str], list[Stop]]] = {
    "two, then three, then one": ([*MANY, *HOST], MANY, [(2, 4, 15), (3, STEPS_PER_EPOCH + 8, 15), (1, -1, 0)]),
    "one, then two": (SUMMED, SUMMED, [(1, 12, 9), (2, -1, 0)]),
}

SCRIPT = """
import json, sys
from pathlib import Path
from stress.forked import Forked, warm
from stress.compare_runs import differences, run_in
from cifar_lit.training.checkpoint import read_checkpoint

folder, words, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
warm()
found = {}

def done(words, place, processes, step, number):
    command = Forked(words, place, place / "log.txt", processes, {"AT_STEP": str(step), "AT_STEP_SIGNAL": str(number)})
    return command.wait(), run_in(place / "lightning_logs")

for name, (flags, alone, stops) in cases.items():
    place, whole = folder / name, folder / (name + ", whole")
    ended, expected = done([*words, *alone], whole, 1, -1, 0)
    assert ended == [0], (whole / "log.txt").read_text()
    stages = []
    for number, (processes, step, signal) in enumerate(stops):
        line = ["train", "--resume", "--devices", str(processes)] if number else [*words, *flags]
        codes, run = done(line, place, processes, step, signal)
        checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
        stages.append([codes, checkpoint["epoch"], checkpoint["global_step"], len(checkpoint["random_state"][0])])
    said = (place / "log.txt").read_text()
    assert stages[-1][0] == [0] * processes, said
    devices = json.loads((run / "metrics.json").read_text())["devices"]
    found[name] = {"stages": stages, "differences": differences(run, expected, 1e-5), "devices": devices, "said": said}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each case."""
    line = [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("others")), json.dumps(WORDS), json.dumps(CASES)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("case", "stages"),
    [
        (
            "two, then three, then one",  # stopped at the end of a call, the second time before the last, smaller batch
            [([143] * 2, 0, 8, 2), ([143] * 3, 1, STEPS_PER_EPOCH + 12, 3), ([0], 1, 2 * STEPS_PER_EPOCH, 1)],
        ),
        ("one, then two", [([-9], 1, 11, 1), ([0] * 2, 1, 14, 2)]),  # from what --checkpoint-every had left
    ],
)
def test_a_training_stopped_in_mid_epoch_goes_on_with_other_devices_to_the_same_result_up_to_rounding(
    case: str, stages: list[tuple[list[int], int, int, int]], found: dict[str, Any]
) -> None:
    one = found[case]
    assert [tuple(stage) for stage in one["stages"]] == stages
    assert one["differences"] == []
    assert one["devices"] == CASES[case][2][-1][0]
    cards = [line.split()[1] for line in one["said"].splitlines() if line.startswith("devices ")]
    assert cards == [str(processes) for processes, _, _ in CASES[case][2]]
