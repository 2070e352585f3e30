import csv
from pathlib import Path

import pytest
import torch

from cifar_lit.results.predictions import write_predictions

CLASSES = ("cat", "dog", 'a "quoted", name')


def batch(*rows: tuple[int, int, list[float]]) -> dict[str, torch.Tensor]:
    indices, labels, probabilities = zip(*rows, strict=True)
    return {"indices": torch.tensor(indices), "labels": torch.tensor(labels), "probabilities": torch.tensor(probabilities)}


def test_each_image_is_a_row_with_its_label_and_the_likeliest_class(tmp_path: Path) -> None:
    batches = [batch((0, 1, [0.2, 0.7, 0.1]), (1, 2, [0.25, 0.25, 0.5])), batch((2, 0, [0.1, 0.15, 0.75]))]
    assert write_predictions(tmp_path / "predictions.csv", CLASSES, batches) == 3
    with (tmp_path / "predictions.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["index", "label", "predicted", "probability"],
            ["0", "dog", "dog", "0.700000"],
            ["1", CLASSES[2], CLASSES[2], "0.500000"],
            ["2", "cat", CLASSES[2], "0.750000"],
        ]
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.csv"]


def test_predictions_that_break_off_leave_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv"
    write_predictions(path, CLASSES, [batch((0, 1, [0.2, 0.7, 0.1]))])
    before = path.read_text()

    def breaking():  # type: ignore[no-untyped-def]
        yield batch((5, 1, [0.2, 0.7, 0.1]))
        raise RuntimeError("the net broke")

    with pytest.raises(RuntimeError, match="broke"):
        write_predictions(path, CLASSES, breaking())
    assert path.read_text() == before
