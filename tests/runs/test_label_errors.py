"""Likely label errors, and duplicates between training and test images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_lit.data.image_set import ImageSet
from cifar_lit.inference.logits import OUT_OF_FOLD
from cifar_lit.runs.label_errors import (
    Suspects,
    find_duplicates,
    list_training_labels,
    listed_images,
    rank_labels,
    read_list,
    suspect_labels,
)

PIXELS = torch.randint(0, 256, (6, 4, 5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def suspects(probabilities: list[list[float]], labels: list[int]) -> Suspects:
    images = ImageSet(PIXELS[: len(labels)], torch.tensor(labels), ("a", "b", "c"))
    ranking = rank_labels(images.labels, torch.tensor(probabilities))
    return suspect_labels(images, listed_images(images, torch.arange(5), ranking, ["train"] * 5), "Training")


def test_labels_less_probable_than_another_class_are_listed_by_the_ratio_of_both_probabilities() -> None:
    probabilities = [[0.2, 0.4, 0.4], [0.25, 0.75, 0], [0.1, 0.45, 0.45], [0.4, 0.3, 0.3], [0.3, 0.7, 0]]
    result = suspects(probabilities, [0, 0, 0, 0, 1])
    assert [picture.lines for picture in result.pictures] == [
        ("label a 10.0 %", "predicted b 45.0 %", "#2"),
        ("label a 25.0 %", "predicted b 75.0 %", "#1"),
        ("label a 20.0 %", "predicted b 40.0 %", "#0"),
    ]
    assert (result.images, result.rejected) == (5, 3)


def test_the_list_names_every_label_with_its_part_and_is_found_again_in_a_set_that_has_changed(tmp_path: Path) -> None:
    labels, names = torch.tensor([0, 0, 1, 0]), ("-1.png", "=b.png", "c.png", "unused.png")
    images = ImageSet(PIXELS[:4], labels, ("+cat", "dog"), names=names)
    assert read_list(tmp_path, images) is None
    list_training_labels(tmp_path, images, ["train", "val", "train", "unused"])
    assert read_list(tmp_path, images) is None  # nobody has predicted the images without learning them
    nan = float("nan")
    np.save(tmp_path / OUT_OF_FOLD, np.array([[0.9, 0.1], [0.25, 0.75], [0.6, 0.4], [nan, nan]], np.float32))
    list_training_labels(tmp_path, images, ["train", "val", "train", "unused"])
    lines = [
        "index,path,label,probability_of_label,suggested,probability_of_suggested,score,part,suspected,confident",
        "1,'=b.png,+cat,0.250000,dog,0.750000,0.000000,val,yes,yes",
        "2,c.png,dog,0.400000,+cat,0.600000,0.333333,train,yes,yes",
        "0,-1.png,+cat,0.900000,+cat,0.900000,0.666667,train,no,no",
    ]
    assert (tmp_path / "label_errors.csv").read_text().splitlines() == lines
    now = ImageSet(PIXELS[:3], labels[:3], ("+cat", "dog"), names=("a-new.png", "-1.png", "=b.png"))
    found = read_list(tmp_path, now)
    assert found is not None and [(row, cells["index"]) for row, cells in found] == [(2, "1"), (1, "0")]
    without_names = read_list(tmp_path, ImageSet(PIXELS[:3], labels[:3], ("+cat", "dog")))
    assert without_names is not None and [row for row, _ in without_names] == [1, 2, 0]


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


def test_missing_and_surplus_labels_are_listed_as_pairs_of_an_image_and_a_label() -> None:
    labels = torch.tensor([[1.0, 0, 1], [0.0, -1, 1], [0.0, 0, 0]])
    images = ImageSet(PIXELS[:3], labels, ("cat", "dog", "owl"))
    probabilities = torch.tensor([[0.3, 0.8, 0.7], [0.2, 0.9, 0.05], [0.1, 0.3, 0.2]])
    listed = listed_images(images, torch.arange(3), rank_labels(labels, probabilities), ["train"] * 3)
    assert [(row, cells["label"], cells["suggested"]) for row, cells in listed] == [
        (1, "owl", "no owl"), (0, "no dog", "dog"), (0, "cat", "no cat"), (2, "no dog", "no dog")
    ]  # fmt: skip
    assert [cells["suspected"] for _, cells in listed] == ["yes", "yes", "yes", "no"]
    assert float(listed[0][1]["probability_of_label"]) == pytest.approx(0.05)
    result = suspect_labels(images, listed, "Training")
    assert (result.images, result.rejected) == (3, 3)
