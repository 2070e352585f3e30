"""Generated images are determined by their seed, have balanced classes and correct figures."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from cifar_lit.data.settings import ImageSize
from cifar_lit.data.shapes import CLASSES, FIGURES, shapes


@pytest.mark.parametrize(
    ("size", "shape", "channels", "classes"),
    [(32, (32, 32), 3, 10), (28, (28, 28), 1, 12), ("8x20", (8, 20), 1, 2), ([40, 33], (40, 33), 3, 110)],
)
def test_any_shape_and_class_count_works(size: ImageSize, shape: tuple[int, int], channels: int, classes: int) -> None:
    drawn = shapes(True, image_size=size, channels=channels, num_classes=classes, count=classes)
    assert drawn.images.shape == (classes, *shape, channels)
    assert sorted(drawn.labels.tolist()) == list(range(classes))
    assert drawn.classes == (*FIGURES, "circle+circle", "circle+square", *CLASSES[12:])[:classes]
    assert drawn.images.float().std(dim=(1, 2, 3)).min() > 2  # no image is blank


def test_images_depend_on_seed_and_part_only_and_keep_the_global_random_state() -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    whole, part = (shapes(True, count=count, seed=3) for count in (300, 150))
    assert torch.equal(whole.images[:150], part.images) and torch.equal(whole.labels[:150], part.labels)
    for other in (shapes(True, count=150, seed=4), shapes(False, count=150, seed=3)):
        assert not (part.images == other.images).flatten(1).all(1).any()
    assert torch.equal(torch.get_rng_state(), states[0]) and np.array_equal(np.random.get_state()[1], states[1])


def test_a_linear_model_stays_below_35_percent() -> None:
    train, test = (shapes(part, count=count, image_size=16, channels=1) for part, count in ((True, 3000), (False, 500)))
    pixels = [part.images.flatten(1).float() / 128 - 1 for part in (train, test)]
    inputs, test_inputs = (torch.cat((rows, torch.ones(len(rows), 1)), 1) for rows in pixels)
    gram = inputs.T @ inputs + 30 * torch.eye(257)  # ridge regression in closed form
    weights = torch.linalg.solve(gram, inputs.T @ functional.one_hot(train.labels).float())
    assert ((test_inputs @ weights).argmax(1) == test.labels).float().mean() < 0.35


def test_the_images_of_a_seed_never_change() -> None:
    drawn = shapes(False, image_size=32, channels=3, num_classes=10, count=50, seed=0)
    assert drawn.labels[:10].tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    # Approximate: sine and cosine may differ in their last bit between processors.
    assert float(drawn.images.float().mean()) == pytest.approx(127.966, abs=0.01)


@pytest.mark.parametrize("size", [32, (17, 33)])
def test_an_image_with_several_figures_has_their_classes_as_labels(size: int | tuple[int, int]) -> None:
    images = shapes(True, image_size=size, count=200, num_classes=5, figures=3)
    height, width = (size, size) if isinstance(size, int) else size
    assert images.images.shape == (200, height, width, 3)
    numbers = images.labels.sum(1)
    assert {*numbers.tolist()} == {1, 2, 3} and images.labels.sum(0).min() > 40
    again = shapes(True, image_size=size, count=150, num_classes=5, figures=3)
    assert torch.equal(again.images, images.images[:150]) and torch.equal(again.labels, images.labels[:150])
