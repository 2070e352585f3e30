"""Likely label errors, and duplicates between training and test images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.label_errors import (
    Suspects,
    evidence,
    find_duplicates,
    rank_labels,
    read_array,
    suspect_labels,
    write_ranking,
)

PIXELS = torch.randint(0, 256, (6, 4, 5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def suspects(probabilities: list[list[float]], labels: list[int]) -> Suspects:
    images = ImageSet(PIXELS[: len(labels)], torch.tensor(labels), ("a", "b", "c"))
    ranking = rank_labels(images.labels, torch.tensor(probabilities))
    return suspect_labels(images, ranking, "Training", ["train", "val", *["train"] * 3])


def test_labels_less_probable_than_another_class_are_listed_by_the_ratio_of_both_probabilities() -> None:
    probabilities = [[0.2, 0.4, 0.4], [0.25, 0.75, 0], [0.1, 0.45, 0.45], [0.4, 0.3, 0.3], [0.3, 0.7, 0]]
    result = suspects(probabilities, [0, 0, 0, 0, 1])
    assert [picture.lines for picture in result.pictures] == [
        ("label a 0.100", "predicted b 0.450", "#2"),
        ("label a 0.250", "predicted b 0.750", "#1 · held out"),
        ("label a 0.200", "predicted b 0.400", "#0"),
    ]
    assert (result.images, result.rejected) == (5, 3)


def test_margins_of_the_training_add_memorised_errors_and_count_as_much_as_the_net() -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    own = torch.tensor([0.9, 0.4, 0.3, 0.95])
    probabilities = torch.stack((own, 1 - own), 1)
    ranking = rank_labels(labels, probabilities)
    assert (ranking.rows.tolist(), ranking.suspects) == ([2, 1, 0, 3], 2)
    margins = torch.tensor([-2.0, -1.0, torch.nan, 1.0])  # image 0 was memorised; image 2 was held out
    ranking = rank_labels(labels, probabilities, margins)
    # Quantiles of the net: 2, 1, 0 and 3 quarters; of the training: 0, 1 and 2 thirds of images 0, 1 and 3.
    assert ranking.scores.tolist() == pytest.approx([1 / 4, 7 / 24, 0, 17 / 24])
    assert (ranking.rows.tolist(), ranking.suspects) == ([2, 0, 1, 3], 3)


def test_margins_of_a_run_are_read_only_if_they_fit_its_images(tmp_path: Path) -> None:
    assert read_array(tmp_path / "margins.npy", (3,)) is None
    np.save(tmp_path / "margins.npy", np.array([0.5, np.nan, -1.0], np.float32))
    read = read_array(tmp_path / "margins.npy", (3,))
    assert read is not None and read[[0, 2]].tolist() == [0.5, -1.0] and read[1].isnan()
    assert read_array(tmp_path / "margins.npy", (4,)) is None


def test_predictions_out_of_fold_replace_those_of_the_net_beside_its_margins(tmp_path: Path) -> None:
    own = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], dtype=torch.float64)
    margins = np.array([1.0, 2.0, 3.0, np.nan], np.float32)
    np.save(tmp_path / "margins.npy", margins)
    probabilities, read = evidence(tmp_path, own)
    assert torch.equal(probabilities, own) and read is not None and read[2] == 3
    unseen = np.array([[0.3, 0.7], *[[np.nan, np.nan]] * 3], np.float32)
    np.save(tmp_path / "out_of_fold.npy", unseen)
    probabilities, read = evidence(tmp_path, own)
    assert torch.equal(probabilities, torch.cat((torch.tensor([[0.3, 0.7]]), own[1:].float())))
    assert read is not None and read[:3].tolist() == [1, 2, 3]


def test_the_list_names_every_label_with_its_part(tmp_path: Path) -> None:
    labels, names = torch.tensor([0, 0, 1]), ("-1.png", "=b.png", "c.png")
    images = ImageSet(PIXELS[:3], labels, ("+cat", "dog"), names=names)
    ranking = rank_labels(labels, torch.tensor([[0.9, 0.1], [0.25, 0.75], [0.6, 0.4]]))
    write_ranking(tmp_path / "list.csv", images, ranking, ["train", "val", "unused"])
    assert (tmp_path / "list.csv").read_text().splitlines() == [
        "index,path,label,probability_of_label,suggested,probability_of_suggested,score,part,suspected,confident",
        "1,'=b.png,'+cat,0.250000,dog,0.750000,0.000000,val,yes,yes",
        "2,c.png,dog,0.400000,'+cat,0.600000,0.333333,unused,yes,yes",
        "0,'-1.png,'+cat,0.900000,'+cat,0.900000,0.666667,train,no,no",
    ]


@pytest.mark.parametrize(("images", "rejected", "confident"), [(5, 3, 2), (4, 2, 1)])
def test_confident_learning_counts_images_at_least_as_probable_as_the_average_of_the_predicted_class(
    images: int, rejected: int, confident: int
) -> None:
    # Images of class 1 average 0.75 without the fifth image and 0.5417 with it. Class 2 has no images.
    probabilities = [[0.25, 0.75, 0], [0.375, 0.625, 0], [0.125, 0.875, 0], [0.375, 0.625, 0], [0, 0.125, 0.875]]
    result = suspects(probabilities[:images], [0, 0, 1, 1, 1][:images])
    assert (result.rejected, result.confident) == (rejected, confident)


def test_identical_images_are_counted_and_near_duplicates_listed() -> None:
    rows, columns = torch.meshgrid(torch.arange(40.0), torch.arange(40.0), indexing="ij")
    drawings = [rows * columns / 8, (rows - columns).abs() * 5, (rows - 20) ** 2 / 2, columns * 6]
    pixels = torch.stack([drawing[..., None].expand(-1, -1, 3).clamp(0, 255).byte() for drawing in drawings])
    train = ImageSet(pixels[:3], torch.tensor([0, 1, 1]), ("a", "b"), names=("1.png", "2.png", "3.png"))
    test_pixels = torch.stack([pixels[1], pixels[0] // 8 * 8 + 3, pixels[3]])  # identical, requantised, another one
    test = ImageSet(test_pixels, torch.tensor([0, 0, 1]), ("a", "b"))
    pairs, identical, conflicting = find_duplicates(train, test)
    assert (identical, conflicting) == (1, 1)
    assert [(pair.test.lines, pair.train.lines) for pair in pairs] == [(("test #1", "a"), ("train 1.png", "a"))]
