"""Labels that a net and the neighbours reject, and test images that training images repeat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs import label_errors
from cifar_lit.runs.label_errors import (
    NEIGHBOURS,
    Suspects,
    find_duplicates,
    find_neighbours,
    neighbours_of_all,
    suspect_labels,
    with_votes,
)

PIXELS = torch.randint(0, 256, (6, 4, 5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def suspects(probabilities: list[list[float]], labels: list[int]) -> Suspects:
    images = ImageSet(PIXELS[: len(labels)], torch.tensor(labels), ("a", "b", "c"))
    return suspect_labels(images, torch.tensor(probabilities), "Test", {1})


def test_labels_are_suspected_the_less_probable_they_are_where_another_class_is_likelier() -> None:
    found = suspects([[0.2, 0.4, 0.4], [0.25, 0.75, 0], [0.1, 0.45, 0.45], [0.4, 0.3, 0.3], [0.3, 0.7, 0]], [0, 0, 0, 0, 1])
    assert [picture.lines for picture in found.pictures] == [
        ("label a 0.100", "predicted b 0.450", "no. 2"),
        ("label a 0.200", "predicted b 0.400", "no. 0"),
        ("label a 0.250", "predicted b 0.750", "no. 1 · held out"),
    ]
    assert (found.images, found.rejected) == (5, 3)


@pytest.mark.parametrize(("images", "rejected", "confident"), [(5, 3, 2), (4, 2, 1)])
def test_confident_learning_counts_those_that_are_at_least_as_sure_as_the_other_classs_own_images(
    images: int, rejected: int, confident: int
) -> None:
    # Class 1's own images have 0.75 on average with the fifth left out, 0.5417 with it. A class without images counts nothing.
    probabilities = [[0.25, 0.75, 0], [0.375, 0.625, 0], [0.125, 0.875, 0], [0.375, 0.625, 0], [0, 0.125, 0.875]]
    found = suspects(probabilities[:images], [0, 0, 1, 1, 1][:images])
    assert (found.rejected, found.confident) == (rejected, confident)


def clustered(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Embeddings (count, 8) in four clusters, and the cluster of each."""
    generator = torch.Generator().manual_seed(seed)
    clusters = torch.arange(count) % 4
    return 4 * F.one_hot(clusters, 8) + torch.randn(count, 8, generator=generator), clusters


def test_planted_errors_that_the_net_has_learned_by_heart_are_found_by_their_neighbours() -> None:
    embeddings, clusters = clustered(400, 0)
    labels = clusters.clone()
    wrong = torch.arange(0, 400, 20)  # 5 %
    labels[wrong] = (labels[wrong] + 1) % 4
    by_heart = 0.9 * F.one_hot(labels, 4) + 0.025
    images = ImageSet(PIXELS[:1].expand(400, -1, -1, -1), labels, ("a", "b", "c", "d"))
    assert suspect_labels(images, by_heart, "Training").rejected == 0
    sure = by_heart.clone()
    sure[wrong] = 0.1 * F.one_hot(clusters[wrong], 4) + 0.2 + 0.1 * F.one_hot(labels[wrong], 4)  # half by heart
    found = suspect_labels(images, with_votes(sure, neighbours_of_all(embeddings, lambda _: None), labels), "Training")
    assert {int(picture.lines[2].removeprefix("no. ")) for picture in found.pictures} == set(wrong.tolist())


def test_no_image_votes_for_itself_and_the_votes_are_those_of_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, clusters = clustered(200, 1)
    own = torch.arange(200)  # each image a class of its own
    votes = 2 * with_votes(torch.zeros(200, 200), neighbours_of_all(embeddings, lambda _: None), own)
    assert votes.diag().count_nonzero() == 0
    torch.testing.assert_close(votes.sum(1), torch.ones(200))
    assert (votes > 0).sum(1).tolist() == [NEIGHBOURS] * 200
    monkeypatch.setattr(label_errors, "MAX_VOTERS", 50)
    votes = 2 * with_votes(torch.zeros(200, 200), neighbours_of_all(embeddings, lambda _: None), own)
    assert len((votes > 0).any(0).nonzero()) <= 50 and votes.diag().count_nonzero() == 0
    few = with_votes(torch.zeros(3, 4), neighbours_of_all(embeddings[:3], lambda _: None), clusters[:3])
    torch.testing.assert_close(few.sum(1), torch.full((3,), 0.5))


def test_the_nearest_is_found_by_the_angle_from_the_mean_in_whatever_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    train = torch.randn(50, 8, generator=generator) + 100
    test = (train.mean(0) + 3 * (train[[4, 9, 30]] - train.mean(0))).repeat(100, 1)
    advanced: list[int] = []
    cosines, rows = find_neighbours(train, test, 2, advanced.append)
    assert rows[:, 0].tolist() == [4, 9, 30] * 100
    assert torch.allclose(cosines[:, 0], torch.ones(300), atol=1e-4)
    assert (cosines[:, 1] < cosines[:, 0]).all() and advanced == [256, 44]


def test_twins_are_counted_and_the_others_shown_the_nearest_first_with_their_difference() -> None:
    pixels = PIXELS.clone()
    pixels[5] = pixels[3]
    train = ImageSet(pixels, torch.tensor([0, 0, 0, 1, 1, 1]), ("a", "b"))
    images = [pixels[2].flip(1), pixels[5], (pixels[4].int() - torch.where(pixels[4] > 99, 10, -10)).byte()]
    test = ImageSet(torch.stack(images), torch.tensor([0, 0, 1]), ("a", "b"))
    nearest = torch.tensor([[0.5, 0.1], [1.0, 0.1], [0.75, 0.1]]), torch.tensor([[2, 0], [5, 0], [4, 0]])
    pairs, twins, contrary = find_duplicates(train, test, nearest)
    assert (twins, contrary) == (1, 1)
    assert [(pair.test.lines, pair.train.lines, pair.lines) for pair in pairs] == [
        (("test 2", "b"), ("train 4", "b"), ("cosine 0.7500", "difference 10.0")),
        (("test 0", "a"), ("train 2", "a"), ("cosine 0.5000", "difference 0.0")),  # its mirror image
    ]
