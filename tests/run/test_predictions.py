"""predictions.csv and probabilities.npy of a data set, and predictions of files as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from cifar_lit.data.image_set import ImageSet
from cifar_lit.inference.classify import Row, csv_rows, json_rows
from cifar_lit.run.predictions import prediction_table, write_predictions
from cifar_lit.run.results import fingerprint

CLASSES = ("a, b", 'quo"ted', "日本")
PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.85, 0.05], [0.3, 0.3, 0.4], [0.9, 0.05, 0.05]])
PREDICTIONS = {"indices": torch.arange(4), "labels": torch.tensor([0, 0, 2, 1]), "probabilities": PROBABILITIES}
IMAGES = ImageSet(torch.zeros(4, 1, 1, 3, dtype=torch.uint8), PREDICTIONS["labels"], CLASSES)


def test_predictions_of_every_image_are_written_in_order_with_a_mark_for_excel(tmp_path: Path) -> None:
    later, earlier = ({name: values[rows] for name, values in PREDICTIONS.items()} for rows in ([3, 2], [1, 0]))
    assert write_predictions(tmp_path / "predictions.csv", [later, earlier], IMAGES) == 4
    assert (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines() == [
        '\ufeffindex,label,predicted,probability,"probability_a, b","probability_quo""ted",probability_日本',
        '0,"a, b","a, b",0.700000,0.700000,0.200000,0.100000',
        '1,"a, b","quo""ted",0.850000,0.100000,0.850000,0.050000',
        "2,日本,日本,0.400000,0.300000,0.300000,0.400000",
        '3,"quo""ted","a, b",0.900000,0.900000,0.050000,0.050000',
    ]
    array = np.load(tmp_path / "probabilities.npy")
    assert array.dtype == np.float32
    assert np.array_equal(array, PROBABILITIES.numpy())
    write_predictions(tmp_path / "p.csv", [{**PREDICTIONS, "probabilities": torch.full((4, 3), torch.nan)}], IMAGES)
    assert (tmp_path / "p.csv").read_text().splitlines()[1].endswith(",nan,nan,nan,nan")  # from a diverged net


def test_predictions_of_own_images_have_groups_and_paths_with_special_characters_escaped(tmp_path: Path) -> None:
    paths = ["test/a/1.jpg", "=cmd().png", "a,b\x1b[31m.png", "half \udcff.png"]
    columns = {"camera": ["east", "=1+1", "", "a,b"], "=site": ["x"] * 4}
    backwards = {name: values.flip(0) for name, values in PREDICTIONS.items()}
    write_predictions(tmp_path / "predictions.csv", [backwards], replace(IMAGES, names=paths, columns=columns))
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = [*csv.DictReader(file)]
    assert [*rows[0]][-3:] == ["group_camera", "group_=site", "path"]
    assert [row["path"] for row in rows] == ["test/a/1.jpg", "'=cmd().png", "a,b\\x1b[31m.png", "half \\udcff.png"]
    assert [row["group_camera"] for row in rows] == ["east", "'=1+1", "", "a,b"]


def test_with_more_than_20_classes_a_row_has_the_five_most_probable_and_ascii_has_no_mark(tmp_path: Path) -> None:
    names = tuple(f"c{number}" for number in range(21))
    probabilities = torch.arange(1, 22).double()[None] / 231
    predictions = {"indices": torch.tensor([0]), "labels": torch.tensor([3]), "probabilities": probabilities}
    write_predictions(tmp_path / "predictions.csv", [predictions], replace(IMAGES, classes=names))
    header, row = (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()
    ranks = ",".join(f"class_{rank},probability_{rank}" for rank in range(2, 6))
    assert header == f"index,label,predicted,probability,{ranks}"
    assert row.startswith("0,c3,c20,0.090909,c19,0.086580,c18,") and row.endswith(",c16,0.073593")
    assert np.load(tmp_path / "probabilities.npy").shape == (1, 21)
    write_predictions(tmp_path / "p.csv", [predictions], replace(IMAGES, classes=names, names=["bär.png"]))
    assert (tmp_path / "p.csv").read_text(encoding="utf-8").startswith("\ufeff")


def test_a_table_ranks_mistakes_by_confidence() -> None:
    table = prediction_table(PREDICTIONS)
    assert table.hits.tolist() == [True, False, True, False]
    assert table.confusion(3).tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert table.confident_mistakes(9).tolist() == [3, 1]


def test_a_fingerprint_is_the_sha256_of_the_images_followed_by_the_labels() -> None:
    images, labels = torch.randint(0, 256, (2500, 4, 4, 3), dtype=torch.uint8), torch.arange(2500) % 7
    expected = sha256(images.numpy().tobytes() + labels.numpy().astype(np.int64).tobytes()).hexdigest()
    assert fingerprint(images, labels) == expected
    assert fingerprint(images, labels.flip(0)) != expected


def test_csv_and_json_agree_on_readable_and_unreadable_files() -> None:
    rows = [
        Row(
            0,
            [("cat", 0.5), ("dog", 0.25), ("emu", 0.2)],
            path="a\udce9.png",
            novelty=1.5,
            unknown=True,
            prediction_set=("=a", "b"),
        ),
        Row(1, (), path="b,c.png", error="cut short"),
    ]
    as_csv, as_json = io.StringIO(), io.StringIO()
    csv_rows(as_csv, 2)(rows)
    json_rows(as_json, 2)(rows)
    assert as_csv.getvalue().splitlines() == [
        "index,label,probability,class_2,probability_2,path,novelty,unknown,prediction_set,error",
        r"0,cat,0.500000,dog,0.250000,a\udce9.png,1.500000,yes,'=a|b,",  # escaped; JSON has the exact path
        '1,,,,,"b,c.png",,,,cut short',
    ]
    first, second = map(json.loads, as_json.getvalue().splitlines())
    assert first == {
        "index": 0, "label": "cat", "probability": 0.5, "class_2": "dog", "probability_2": 0.25,
        "path": "a\udce9.png", "novelty": 1.5, "unknown": True, "prediction_set": ["=a", "b"], "error": None,
    }  # fmt: skip
    assert [second[name] for name in ("label", "unknown", "error")] == [None, None, "cut short"]
