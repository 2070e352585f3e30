"""docs/extending.md: write its files, run its commands, and check their results."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from contract.command_line import checkpoint_of, environment, metrics_of, rows_of
from doc_pages import Page
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cifar_lit

PAGE = Page("extending.md")
RUN = Path("lightning_logs/quickstart-1")


def test_a_net() -> None:
    PAGE.follow(PAGE.section("A net"))
    assert metrics_of(RUN)["net"] == "my_nets.MyNet"
    weights = checkpoint_of(RUN / "checkpoints/best.ckpt")["state_dict"]
    assert sum(name.endswith("running_mean") for name in weights) == 3  # one for each block
    assert cifar_lit.load(RUN).card.net == "my_nets.MyNet"
    Image.new("RGB", (16, 16)).save("black.png")
    classify = ["cifar-lit", "classify", str(RUN), "black.png"]
    PAGE.run(classify)
    with (RUN / "config.yaml").open("a") as config:
        config.write("# another user's run\n")
    with pytest.raises(AssertionError, match=r"my_nets\.MyNet would run code"):
        PAGE.run(classify)


def test_a_data_set() -> None:
    PAGE.follow(PAGE.section("A data set"))
    run = Path("lightning_logs/tudui-1")
    metrics = metrics_of(run)
    assert (metrics["dataset"], metrics["test"]["images"]) == ("my_data.stripes", 200)
    assert list(metrics["test"]["per_class"]) == ["across", "down"]
    assert "across" in (run / "report.html").read_text()
    assert cifar_lit.load("stripes.safetensors").classes == ("across", "down")


def test_an_augmentation_by_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    PAGE.follow(PAGE.section("An augmentation"))
    score = metrics_of(RUN)["val"]
    monkeypatch.setattr(sys.modules["my_augment"].Contrast, "on_train_batch_start", lambda *args: None)
    PAGE.follow(PAGE.section("An augmentation"))
    assert metrics_of(Path("lightning_logs/quickstart-2"))["val"] != score  # without augmentation


def test_a_metric() -> None:
    named, own = PAGE.follow(PAGE.section("A metric"))
    assert any(line.startswith("test top2 0.") for line in named.lines)
    metrics = metrics_of(RUN)
    for part in ("val", "test"):
        assert metrics[part]["accuracy"] <= metrics[part]["top2"] <= 1
        assert [float(row[f"{part}/top2"]) for row in rows_of(RUN / "metrics.csv") if row[f"{part}/top2"]] == [
            pytest.approx(metrics[part]["top2"])
        ]
    events = EventAccumulator(str(RUN))
    events.Reload()
    assert {"val/top2", "test/top2"} <= set(events.Tags()["scalars"])
    assert "top2" in (RUN / "report.html").read_text()
    assert any(line.startswith("test margin 0.") for line in own.lines)
    assert 0 < metrics_of(Path("lightning_logs/quickstart-2"))["test"]["margin"] < 1


def test_an_optimizer() -> None:
    (answer,) = PAGE.follow(PAGE.section("An optimizer"))
    assert any(line.startswith("optimizer") and "my_optim.SignSGD · lr 0.002" in line for line in answer.lines)
    (state,) = checkpoint_of(RUN / "checkpoints/last.ckpt")["optimizer_states"]
    assert set(state["state"][0]) == {"average"}
    assert [group["weight_decay"] for group in state["param_groups"]] == [
        0.01,
        0.0,
    ]  # the weights, then the biases
    PAGE.run(["cifar-lit", "test", "--ckpt_path", f"{RUN}/checkpoints/best.ckpt"])  # the run is this user's own


def test_a_loss() -> None:
    PAGE.follow(PAGE.section("A loss"))
    plain, distilled = (rows_of(Path(f"lightning_logs/quickstart-{run}/metrics.csv"))[0] for run in (1, 2))
    assert float(distilled["train/loss"]) < float(plain["train/loss"])  # a short training's predictions are easy


@pytest.mark.slow
def test_a_feature() -> None:
    """The patch is a file and a line, and gives flags, help and Python."""
    (patch,) = [block for block in PAGE.section("A feature") if block.kind == "patch"]
    shutil.copytree(Path(cifar_lit.__file__).parent, "cifar_lit", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], input=patch.text, text=True, check=True)
    line = [sys.executable, "-m", "cifar_lit", "fit", "--recipe", "quickstart", *PAGE.settings, "--loss_cap.most"]
    variables = environment(Path.cwd(), PYTHONPATH=str(Path.cwd()))
    trained = subprocess.run([*line, "1.5"], env=variables, check=False, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    losses = [float(row["train/loss"]) for row in rows_of(RUN / "metrics.csv") if row["train/loss"]]
    assert max(losses) <= 1.5
    refused = subprocess.run([*line, "0"], env=variables, check=False, capture_output=True, text=True)
    assert "loss_cap.most must be above 0, not 0" in refused.stderr


def test_a_callback_and_a_logger() -> None:
    PAGE.follow(PAGE.section("A callback or a logger"))
    for scores, log, run in (("scores.txt", "log.jsonl", 1), ("scores-from-yaml.txt", "log-from-yaml.jsonl", 2)):
        accuracy = metrics_of(Path(f"lightning_logs/quickstart-{run}"))["val"]["accuracy"]
        epoch, score = Path(scores).read_text().split()
        assert (int(epoch), float(score)) == (0, pytest.approx(accuracy))
        names = {name for line in Path(log).read_text().splitlines() for name in json.loads(line)}
        assert {"step", "lr", "train/loss", "val/accuracy", "test/accuracy"} <= names


def test_a_recipe() -> None:
    PAGE.follow(PAGE.section("A recipe"))
    assert metrics_of(Path("lightning_logs/mine-1"))["net"] == "lenet"


def test_every_example_is_followed() -> None:
    """Every section has a test here, and `follow` skips no block."""
    headings = re.findall(r"^## (.+)$", PAGE.text, re.MULTILINE)
    assert set(headings) == set(re.findall(r'PAGE\.section\("(.+?)"\)', Path(__file__).read_text()))
    kinds = {(block.language, block.kind) for block in PAGE.blocks()}
    assert kinds == {("python", "file"), ("yaml", "file"), ("bash", "run"), ("diff", "patch")}
