from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_lit.runs.predictions import PredictionTable, fingerprint, read_outcomes, table_of, write_predictions

CLASSES = ("a, b", 'quo"ted', "日本")


def gathered() -> dict[str, torch.Tensor]:
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.85, 0.05], [0.3, 0.3, 0.4], [0.9, 0.05, 0.05]])
    return {"indices": torch.arange(4), "labels": torch.tensor([0, 0, 2, 1]), "probabilities": probabilities}


def test_a_matrix_counts_labels_down_and_predictions_across() -> None:
    assert table_of(gathered()).confusion(3).tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_mistakes_are_ranked_by_their_certainty_and_hits_by_their_doubt() -> None:
    outcomes = table_of(gathered())
    assert outcomes.confident_mistakes(9).tolist() == [3, 1]
    assert outcomes.doubtful_hits(9).tolist() == [2, 0]
    assert outcomes.confident_mistakes(1).tolist() == [3]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "predictions.csv"
    write_predictions(file, CLASSES, [gathered()])
    found, expected = read_outcomes(file, CLASSES), table_of(gathered())
    assert found is not None
    for name in ("indices", "labels", "predicted"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(found.probability, expected.probability, atol=1e-6, rtol=0)


HEAD = "index,label,predicted,probability\n"


@pytest.mark.parametrize(
    "text", ["", HEAD, f"{HEAD}0,dog,cat,0.5\n", "index,label\n0,日本\n", f"{HEAD}0,日本,日本,\n", "\x00\x00"]
)
def test_rows_of_another_kind_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "predictions.csv").write_text(text, encoding="utf-8")
    assert read_outcomes(tmp_path / "predictions.csv", CLASSES) is None
    assert read_outcomes(tmp_path / "none.csv", CLASSES) is None


def test_a_fingerprint_is_the_sha256_of_images_and_labels_one_after_the_other() -> None:
    images, labels = torch.randint(0, 256, (2500, 4, 4, 3), dtype=torch.uint8), torch.arange(2500) % 7
    expected = sha256(images.numpy().tobytes() + labels.numpy().astype(np.int64).tobytes()).hexdigest()
    assert fingerprint(images, labels) == expected
    assert fingerprint(images, labels.flip(0)) != expected


def test_an_outcome_counts_as_a_hit_when_label_and_prediction_agree() -> None:
    numbers = torch.tensor([1, 2])
    assert PredictionTable(numbers, numbers, torch.tensor([1, 0]), torch.tensor([0.5, 0.5])).hits.tolist() == [True, False]
