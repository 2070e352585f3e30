import csv
import io
import json
from pathlib import Path

import pytest
import torch

from cifar_lit.runs.predictions import CsvRows, JsonRows, Row, columns, write_predictions

CLASSES = ("cat", "dog", 'a "quoted", name')


def batch(*rows: tuple[int, int, list[float]]) -> dict[str, torch.Tensor]:
    indices, labels, probabilities = zip(*rows, strict=True)
    return {"indices": torch.tensor(indices), "labels": torch.tensor(labels), "probabilities": torch.tensor(probabilities)}


def test_each_image_is_a_row_with_its_label_and_the_likeliest_class(tmp_path: Path) -> None:
    batches = [batch((0, 1, [0.2, 0.7, 0.1]), (1, 2, [0.15, 0.25, 0.6])), batch((2, 0, [0.1, 0.15, 0.75]))]
    assert write_predictions(tmp_path / "predictions.csv", CLASSES, batches) == 3
    with (tmp_path / "predictions.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["index", "label", "predicted", "probability", "class_2", "probability_2", "class_3", "probability_3"],
            ["0", "dog", "dog", "0.700000", "cat", "0.200000", CLASSES[2], "0.100000"],
            ["1", CLASSES[2], CLASSES[2], "0.600000", "dog", "0.250000", "cat", "0.150000"],
            ["2", "cat", CLASSES[2], "0.750000", "dog", "0.150000", "cat", "0.100000"],
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


def test_rows_of_two_classes_name_two(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.csv", ("cat", "dog"), [batch((0, 1, [0.25, 0.75]))])
    assert (tmp_path / "p.csv").read_text() == (
        "index,label,predicted,probability,class_2,probability_2\n0,dog,dog,0.750000,cat,0.250000\n"
    )


def test_rows_of_files_have_the_columns_of_a_data_sets_and_then_their_own() -> None:
    assert columns(3, files=True)[: len(columns(3, files=False))] == columns(3, files=False)
    assert columns(1, files=True) == ("index", "label", "predicted", "probability", "path", "novelty", "unlike", "error")


def test_csv_and_json_say_the_same_of_files_read_and_not() -> None:
    rows = [
        Row(0, [("cat", 0.5), ("dog", 0.25)], path="a\udce9.png", novelty=1.5, unlike=True),
        Row(1, (), path="b,c.png", error="cut short"),
    ]
    as_csv, as_json = io.StringIO(), io.StringIO()
    CsvRows(as_csv, 2, files=True).write(rows)
    JsonRows(as_json, 2, files=True).write(rows)
    assert as_csv.getvalue().splitlines()[1:] == [
        "0,,cat,0.500000,dog,0.250000,a\udce9.png,1.500000,yes,",
        '1,,,,,,"b,c.png",,,cut short',
    ]
    first, second = map(json.loads, as_json.getvalue().splitlines())
    assert first == {
        "index": 0, "label": None, "predicted": "cat", "probability": 0.5, "class_2": "dog", "probability_2": 0.25,
        "path": "a\udce9.png", "novelty": 1.5, "unlike": True, "error": None,
    }  # fmt: skip
    assert (second["probability"], second["unlike"], second["error"]) == (None, None, "cut short")
