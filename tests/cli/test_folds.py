"""`train --folds`: each image is tested once, and the results of all folds are combined."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.command_line import (
    OWN_IMAGES,
    SMALL,
    assert_refused,
    config_of,
    draw_folder,
    metrics_of,
    rows_of,
    run_command,
)

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.settings import Split


def test_each_image_of_a_folder_is_tested_once_by_a_net_not_trained_on_it() -> None:
    draw_folder(Path("animals"), {"cat": 12, "dog": 12, "owl": 9})
    Path("animals/cat/0.png").rename("animals/dog/wrong.png")
    words = (*SMALL, *OWN_IMAGES, "--data-dir", "animals", "--data.val_size", "0", "--epochs", "40")
    answer = run_command(*words, "--folds", "3")
    assert answer.code == 0, answer.err
    runs = [Path(f"lightning_logs/small-{number}") for number in (1, 2, 3)]
    assert [config_of(run)["data"]["split"]["fold"] for run in runs] == [0, 1, 2]
    assert sum(metrics_of(run)["test"]["images"] for run in runs) == 33

    folder = Path("lightning_logs/small-folds-1")
    rows, results = rows_of(folder / "predictions.csv"), json.loads((folder / "folds.json").read_text())
    assert [int(row["index"]) for row in rows] == list(range(33))
    data = ImageData("folder", root="animals", split=Split(folds=3))
    assert [row["label"] for row in rows] == [data.classes[label] for label in data.train_images.labels]
    correct = sum(row["label"] == row["predicted"] for row in rows)
    assert results["test"]["accuracy"] == pytest.approx(correct / 33) and results["test"]["images"] == 33
    assert results["accuracy"]["mean"] == pytest.approx(np.mean([metrics_of(run)["test"]["accuracy"] for run in runs]))
    assert f"accuracy over all folds {correct / 33:.4f} · 33 images" in answer.lines
    assert answer.lines[-4:] == [
        "results lightning_logs/small-folds-1", "", "next:", "  cifar-lit review lightning_logs/small-folds-1"
    ]  # fmt: skip
    for number, run in enumerate(runs, 1):
        accuracy = f"test accuracy {metrics_of(run)['test']['accuracy']:.4f}"
        assert f"fold {number} of 3: {accuracy} · {run}" in answer.lines

    labels = rows_of(folder / "label_errors.csv")
    assert (labels[0]["path"], labels[0]["suggested"], labels[0]["part"]) == ("dog/wrong.png", "cat", "test")
    assert [row["suspected"] for row in labels] == ["yes"] * (33 - correct) + ["no"] * correct
    assert results["test"]["suspected_labels"] == 33 - correct
    for row in labels:  # the probabilities are those of the image, although the folds have other orders
        prediction = rows[int(row["index"])]
        assert (row["path"], row["label"]) == (prediction["path"], prediction["label"])
        own = prediction[f"probability_{row['label']}"]
        assert float(row["probability_of_label"]) == pytest.approx(float(own), abs=2e-6)


def test_a_logs_folder_in_a_configuration_file_applies_to_folds_and_to_resume() -> None:
    Path("place.yaml").write_text("logs: experiments\n")
    words = (*SMALL, "--config", "place.yaml", "--epochs", "1")
    assert run_command(*words, "--folds", "2").code == 0
    assert sorted(path.name for path in Path("experiments").iterdir()) == ["small-1", "small-2", "small-folds-1"]
    assert not Path("lightning_logs").exists()
    answer = run_command("train", *words, "--resume")
    assert answer.code == 2 and "is finished" in answer.err


def test_folds_keep_groups_together_and_do_not_use_the_test_set() -> None:
    draw_folder(Path("animals"), {f"{part}/{name}": 10 for part in ("train", "test") for name in ("cat", "dog")})
    lines = [f"train/{name}/{number}.png,{name},{number // 2}" for name in ("cat", "dog") for number in range(10)]
    Path("animals/labels.csv").write_text("\n".join(["path,label,group", *lines]))
    for root in ("animals", "animals/labels.csv"):
        parts = [ImageData("folder", root=root, split=Split(folds=4, fold=fold), val_size=4) for fold in range(4)]
        for data in parts:
            train, val = data.split
            assert torch.equal(data.test_images.images, data.train_images.images[data.parts.fold_rows])
            if (groups := data.train_images.groups) is not None:
                sides = [set(groups[rows].tolist()) for rows in (torch.cat((train, val)), data.parts.fold_rows)]
                assert sides[0].isdisjoint(sides[1])
    assert ImageData("folder", root="animals/labels.csv").train_images.groups is not None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train", "--folds", "one"), "--folds must be a number of at least 2, such as 5, not 'one'"),
        (("fit", "--folds", "5"), "--folds trains and tests: use it with `train`"),
        (
            ("train", "--data.split.folds", "5", "--data.split.fold", "5"),
            "data.split.fold 5 of data.split.folds 5 is invalid",
        ),
    ],
)
def test_invalid_settings_of_folds_are_refused(words: tuple[str, ...], line: str) -> None:
    assert_refused(run_command(*words, *SMALL), 2, line)
