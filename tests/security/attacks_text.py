"""Attacks by text: names and values with terminal controls, spreadsheet formulas, markup or huge numbers."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from security.attack import Attack, harmless
from security.hostile_models import Maker

from cifar_lit.cli import main
from cifar_lit.runs.model_file import load_model_file, save_weights

CLEAR = "\x1b[2J\x1b]0;gone\x07"
TRAIN = ["train", "--recipe", "small.yaml", "--logs", "runs"]
FOLDER = [*TRAIN, "--dataset", "folder", "--data-dir", "images", "--data.num_classes=null", "--data.val_size=1"]
SKIP = [*FOLDER, "--data.skip_bad=true"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(*line: str) -> Callable[[], int]:
    """Run a command on a terminal without colours or cursor, where rich prints no control sequences."""

    def run() -> int:
        os.environ["TERM"] = "dumb"
        with redirect_stdout(Terminal()) as screen:
            code = main(list(line))
        print(screen.getvalue())
        return code

    return run


def and_print(line: list[str], pattern: str) -> Callable[[], int]:
    """Run a command and print the files that it wrote."""

    def run() -> int:
        code = main(line)
        for file in Path.cwd().glob(pattern):
            print(file.read_text().replace("\x00", "\ufffd"))
        return code

    return run


def renamed(name: str) -> Maker:
    return lambda folder: (folder / "run").rename(folder / name)


def second(settings: dict[str, Any] | None = None, /, **metrics: Any) -> Maker:
    """A copy of the run, `run2`, with other settings and metrics."""

    def prepare(folder: Path) -> None:
        run = shutil.copytree(folder / "run", folder / "run2")
        config, values = run / "config.yaml", run / "metrics.json"
        config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | (settings or {})))
        old = json.loads(values.read_text())
        values.write_text(json.dumps({**old, **metrics, "test": {**old["test"], **metrics.get("test", {})}}))

    return prepare


def curve(*columns: str) -> Maker:
    """The run with columns of these names in its metrics.csv."""
    rows = (("step", *columns), *((str(step), *("1",) * len(columns)) for step in range(3)))
    return lambda folder: (folder / "run/metrics.csv").write_text("".join(",".join(row) + "\n" for row in rows))


def seed(text: str) -> Maker:
    """A second run with this text as the seed in its config.yaml."""

    def prepare(folder: Path) -> None:
        second()(folder)
        config = folder / "run2/config.yaml"
        config.write_text(re.sub("(?m)^seed_everything: .*", f"seed_everything: {text}", config.read_text()))

    return prepare


def disputed_images(folder: Path) -> None:
    """Two runs that disagree on 400,000 images."""
    count = 400_000
    metrics = {"recipe": "a", "test": {"accuracy": 0.5, "loss": 1.0, "images": count, "fingerprint": "same"}}
    for number in range(2):
        run = folder / f"large-{number}"
        run.mkdir()
        (run / "metrics.json").write_text(json.dumps(metrics))
        rows = (f"{index},a,{'ab'[(index + number) % 2]},0.5\n" for index in range(count))
        (run / "predictions.csv").write_text("index,label,predicted,probability\n" + "".join(rows))


def compare_cheaply() -> int:
    """Compare the large runs and print whether that takes less than 5 s of CPU time."""
    start = time.process_time()
    code = main(["compare", "large-*"])
    print("cheap" if time.process_time() - start < 5 else "expensive")
    return code


def picture(path: str) -> Maker:
    def prepare(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16)).save(folder / path, "PNG")

    return prepare


def classes(*names: str, beside: str = "") -> Maker:
    """A folder of images of class `a` and the given classes, and a file `beside` that is no image."""

    def prepare(folder: Path) -> None:
        for name in ("a", *names):
            for number in range(5):
                picture(f"images/{name}/{number}.png")(folder)
        if beside:
            (folder / "images/a" / beside).write_text("no image")

    return prepare


def config(text: str) -> Maker:
    return lambda folder: (folder / "own.yaml").write_text(text)


def card(**values: Any) -> Maker:
    """The run's model.safetensors with other values on its card, and an image."""

    def prepare(folder: Path) -> None:
        net = load_model_file(folder / "run")
        save_weights(folder / "run/model.safetensors", net.net.state_dict(), replace(net.card, **values))
        picture("a.png")(folder)

    return prepare


COMPARE = ["compare", "run", "run2"]
CSV = [*COMPARE, "--csv", "-"]
JSON = [*COMPARE, "--json", "-"]
REPORT = ["report", "run", "--accelerator", "cpu"]
REPORT2 = ["report", "run2", "--accelerator", "cpu"]
CLASSIFY = ["classify", "run", "a.png", "--csv", "--top=4"]
PICTURES = ["classify", "run", "p", "--csv"]
OWN = ["train", "--config", "small.yaml", "--config", "own.yaml", "--logs", "runs"]
RECALL = """model:
  metrics:
    accuracy: {class_path: torchmetrics.classification.MulticlassRecall, init_args: {num_classes: 4}}
"""
HUGE = "epoch,step,train/loss,val/accuracy\n0,1,1e308,0.5\n1,1e300,-1e308,nan\n2,inf,inf,1e9\n"
TEMPERATURE = {"calibration": {"error": 0.1, "temperature": 10**400, "tempered_error": 0.1}}
GROUPS = {
    "groups": {CLEAR: [{"value": CLEAR, "images": 1, "accuracy": 0.1, "interval": [0.1, 0.2], "calibration_error": 0.1,
                        "coverage": None}], "site": [{"value": CLEAR, "interval": [0, "x"]}]},
    "coverage": [{"coverage": 0.9, "measured": "x", "set_size": 1, "per_class": {}}],
}  # fmt: skip
LOGS = "'import cifar_lit; print(cifar_lit.load(\"$(mkdir ran)"

ATTACKS: dict[str, Attack] = {
    # a run from elsewhere, compared with others
    "a setting that clears the terminal and sets its title": harmless(second({"recipe": CLEAR}), COMPARE, r"\x1b[2J"),
    "a setting with a forged result on its second line": harmless(
        second({"recipe": "x\nrun 99.99%"}), COMPARE, r"x\nrun"
    ),
    "a setting's name that clears the terminal": harmless(second({CLEAR: 1}), COMPARE, r"\x1b[2J"),
    "a setting that is a date": harmless(second({"when": yaml.safe_load("2026-01-01")}), COMPARE, "2026-01-01"),
    "a recipe called [/b]": harmless(second({"recipe": "[/b]"}, recipe="[/b]"), COMPARE, "[/b]"),
    "a run folder that clears the terminal": harmless(renamed(f"run{CLEAR}"), ["compare", "run*"], r"run\x1b[2J"),
    "a run folder with an emoji and markup": harmless(renamed("run:skull:[b]"), ["compare", "."], "run:skull:[b]"),
    "a run folder that reverses the line": harmless(renamed("run\u202e1"), ["compare", "."], r"run\u202e1"),
    "a run folder with a TeX formula": harmless(
        renamed(r"run$\frac$"), ["compare", ".", "--plot", "curves.png"], "wrote curves.png"
    ),
    "a test of 10¹⁰ images": harmless(second(test={"images": 10**10, "fingerprint": "same"}), COMPARE, "run2"),
    **{
        f"{name} that is {value}": harmless(second(test={name: value}), COMPARE, "damaged")
        for name, value in (("accuracy", 1e300), ("accuracy", float("nan")), ("images", -5))
    },
    "a time that is text": harmless(second(train_seconds=CLEAR), COMPARE, "damaged"),
    "a setting that is a spreadsheet formula": harmless(second({"recipe": "=cmd|' /C calc'!A0"}), CSV, "'=cmd|"),
    "a setting's name that is a spreadsheet formula": harmless(second({"+1+cmd": 1}), CSV, "'+1+cmd"),
    "a setting in JSON that reverses the line": harmless(second({"recipe": "\u202e\x9bx"}), JSON, r"\u202e\u009bx"),
    "an integer of 8,000 hexadecimal digits": harmless(seed("0x" + "f" * 8000), COMPARE, "run2"),
    "an integer of 4,000 sexagesimal digits": harmless(seed(":".join("1" * 4000)), COMPARE, "run2"),
    "an integer of 30,000 bits, as JSON": harmless(seed("0b" + "1" * 30_000), JSON, "run2"),
    "an integer of 4,000 digits in a run to report": Attack(
        seed("0x" + "f" * 4000), REPORT2, says="an integer of more than 64 bits at line"
    ),
    "400,000 disputed images": harmless(disputed_images, compare_cheaply, "cheap"),
    # its report
    "curves with huge values": harmless(
        lambda folder: (folder / "run/metrics.csv").write_text(HUGE), REPORT, "report run"
    ),
    "a temperature of 10⁴⁰⁰": harmless(second(test=TEMPERATURE), REPORT2, "report run"),
    "groups that clear the terminal, and invalid results": harmless(
        second(test=GROUPS), and_print(REPORT2, "run2/report.html"), r"by \x1b[2J"
    ),
    "groups that clear the terminal, compared": harmless(second(test=GROUPS), COMPARE, "run2"),
    "a number of devices that formats to 400 GB": harmless(second(devices="{:>400000000000}"), REPORT2, "report run"),
    "a curve's name with a group reference": harmless(curve(r"val/\g<9>"), REPORT, "report run"),
    "a curve's name that is a TeX formula": harmless(curve(r"$\frac$", r"val/$\frac$"), REPORT, "report run"),
    "a version that reverses a line of the report": harmless(
        second(versions={"torch": "\u202e\x1b[2J"}), and_print(REPORT2, "run2/report.html"), r"\u202e\x1b[2J"
    ),
    # its net
    "class names that reverse the line": harmless(card(classes=["\u202egnp", *"bcd"]), CLASSIFY, r"\u202egnp"),
    "class names that are spreadsheet formulas": harmless(card(classes=["=1+1", *"bcd"]), CLASSIFY, "'=1+1"),
    # images
    "an image name that clears the terminal": harmless(picture(f"p/{CLEAR}.png"), PICTURES, r"p/\x1b[2J"),
    "an image name that is a spreadsheet formula": harmless(
        picture("=1+1.png"), ["classify", "run", "=1+1.png", "--csv"], "'=1+1.png"
    ),
    "an image name that is not UTF-8": harmless(
        picture(os.fsdecode(b"p/\x9b2J\xff.png")), and_print([*PICTURES[:-1], "--csv=r.csv"], "r.csv"), r"\udc9b"
    ),
    "a damaged image whose name clears the terminal": harmless(
        classes("b", beside=f"{CLEAR}.png"), SKIP, "test accuracy"
    ),
    "a text file whose name clears the terminal": harmless(
        classes("b", beside=f"{CLEAR}.txt"), FOLDER, "test accuracy"
    ),
    # classes
    "a class folder that clears the terminal": Attack(classes(CLEAR), FOLDER, says=r"'\x1b[2J"),
    "a class folder whose name is not UTF-8": Attack(
        classes(os.fsdecode(b"b\xff")), FOLDER, says=r"'b\udcff' has to be renamed"
    ),
    "class folders with markup, formulas and right-to-left text": harmless(
        classes("[x]", ":cat:", "=1+1", r"$\frac$", "\u202eb"), on_terminal(*FOLDER), r"\u202eb"
    ),
    "class folders named as options, patterns, images and hidden files": harmless(
        classes("-r", "*", "a.png", ".hidden", "__MACOSX", "con"), FOLDER, "test accuracy"
    ),
    "a class folder that is a spreadsheet formula": harmless(
        classes("=1+1"), and_print(FOLDER, "runs/*/predictions.csv"), "'=1+1"
    ),
    # a configuration
    "a recipe's name that clears the terminal": Attack(config('recipe: "\\e[2J"\n'), OWN, says=r"\x1b[2J"),
    "a recipe's name that is invalid as a file name": Attack(
        config('recipe: "\\uD800"\n'), OWN, says="invalid Unicode"
    ),
    "a recipe's name that is markup": harmless(config("recipe: '[red]x'\n"), on_terminal(*OWN), "[red]x"),
    "an infinite standard deviation": Attack(config("data: {std: .inf}\n"), OWN, says="its std cannot be"),
    "a metric that replaces the accuracy": Attack(config(RECALL), OWN, says="rename it"),
    "images of 3,000 pixels a side": Attack(classes("b"), [*FOLDER, "--data.image_size=3000"], says="2,048"),
    "logs that inject a shell command into the printed lines": harmless(
        lambda folder: None, [*TRAIN[:-1], "$(mkdir ran)'"], LOGS
    ),
    "logs with markup": harmless(lambda folder: None, on_terminal(*TRAIN[:-1], "x[bold]y[/z]"), "run x[bold]y[/z]"),
}
