"""Labels that a net rejects, and test images that training images repeat."""

from __future__ import annotations

import torch

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.label_errors import exact_twins, inspect_labels, nearest_embeddings, pixel_difference, suspected_labels


def test_labels_are_suspected_in_the_order_in_which_another_class_outweighs_them() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.05, 0.95], [0.3, 0.7], [0.1, 0.9]])
    suspects = suspected_labels(probabilities, torch.tensor([0, 0, 0, 1, 1]))
    assert suspects.rows.tolist() == [2, 1]
    assert suspects.suggested.tolist() == [1, 1]
    assert torch.allclose(suspects.label_probability, torch.tensor([0.05, 0.2]))
    assert torch.allclose(suspects.suggested_probability, torch.tensor([0.95, 0.8]))


def test_confident_learning_counts_those_that_are_at_least_as_sure_as_the_other_classs_own_images() -> None:
    # Class 1's own images have 0.75 on average, class 0's have 0.3125. A class without images makes nothing count.
    probabilities = torch.tensor([[0.25, 0.75, 0], [0.375, 0.625, 0], [0.125, 0.875, 0], [0.375, 0.625, 0], [0, 0.125, 0.875]])
    suspects = suspected_labels(probabilities, torch.tensor([0, 0, 1, 1, 1]))
    assert dict(zip(suspects.rows.tolist(), suspects.counted.tolist(), strict=True)) == {0: True, 1: True, 4: False}
    suspects = suspected_labels(probabilities[:4], torch.tensor([0, 0, 1, 1]))
    assert dict(zip(suspects.rows.tolist(), suspects.counted.tolist(), strict=True)) == {0: True, 1: False}


def test_the_nearest_is_found_by_the_angle_from_the_mean_in_whatever_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(50, 8, generator=generator) + 100
    test = (train.mean(0) + 3 * (train[[4, 9, 30]] - train.mean(0))).repeat(100, 1)
    advanced: list[int] = []
    cosines, rows = nearest_embeddings(train, test, advanced.append)
    assert rows.tolist() == [4, 9, 30] * 100
    assert torch.allclose(cosines, torch.ones(300), atol=1e-4)
    assert advanced == [256, 44]


def test_the_difference_of_an_image_and_its_mirror_is_none() -> None:
    image = torch.randint(0, 256, (6, 5, 3), dtype=torch.uint8)
    assert pixel_difference(image, image.flip(1)) == 0.0
    assert pixel_difference(torch.zeros_like(image), torch.full_like(image, 10)) == 10.0


def test_twins_are_counted_and_the_others_shown_the_nearest_first() -> None:
    pixels = torch.randint(0, 256, (6, 4, 4, 3), dtype=torch.uint8)
    pixels[5] = pixels[3]
    train = ImageSet(pixels, torch.tensor([0, 0, 0, 1, 1, 1]), ("a", "b"))
    test = ImageSet(torch.stack([255 - pixels[0], pixels[5], 255 - pixels[1]]), torch.tensor([0, 0, 1]), ("a", "b"))
    assert exact_twins(train.images, test.images).tolist() == [-1, 3, -1]  # the first of equal ones
    probabilities = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.9, 0.1], [0.1, 0.9], [0.3, 0.7], [0.1, 0.9]])
    nearest = torch.tensor([0.5, 1.0, 0.75]), torch.tensor([2, 5, 4])
    findings = inspect_labels(train, test, {1}, probabilities, nearest)
    assert (findings.train_images, findings.test_images, findings.rejected, findings.confident) == (6, 3, 1, 0)
    assert (findings.twins, findings.contrary) == (1, 1)
    assert [picture.lines for picture in findings.suspects] == [("label a 0.400", "said b 0.600", "no. 1 · held out")]
    assert [(pair.test.lines, pair.train.lines, pair.lines[0]) for pair in findings.pairs] == [
        (("test 2", "b"), ("train 4", "b"), "cosine 0.7500"),
        (("test 0", "a"), ("train 2", "a"), "cosine 0.5000"),
    ]
