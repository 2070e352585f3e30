from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import cifar_lit
from cifar_lit.inference.novelty import choose, learn_novelty, novelty
from cifar_lit.runs.model_file import load_model_file, save_weights

NONE = torch.tensor([], dtype=torch.int64)


def embed(images: Tensor) -> tuple[Tensor, Tensor]:
    """A net whose embedding is the image's mean colour."""
    means = images.float().mean((2, 3))
    return means[:, :2], means


def coloured(count: int, red: int, green: int, spread: int = 20) -> Tensor:
    """Images uint8 (count, 4, 4, 3) of about one colour."""
    noise = torch.randint(-spread, spread + 1, (count, 1, 1, 3), generator=torch.Generator().manual_seed(red + 1000 * green))
    return (torch.tensor([red, green, 30]) + noise).clamp(0, 255).to(torch.uint8).expand(count, 4, 4, 3)


def distances(images: Tensor, learned: tuple[dict[str, Tensor], dict[str, object]] | None) -> Tensor:
    assert learned is not None
    return novelty(embed(images.permute(0, 3, 1, 2))[1], *learned)


def test_the_distance_is_that_to_the_fifth_nearest_and_5_percent_of_the_held_out_are_above_the_threshold() -> None:
    images = coloured(600, 200, 60)
    learned = learn_novelty(embed, images, torch.arange(400), torch.arange(400, 600))
    assert learned is not None
    known, new = (normalize(embed(part.permute(0, 3, 1, 2))[1]) for part in (images[:400], images[400:]))
    assert torch.allclose(distances(images[400:], learned), torch.cdist(new, known).sort(1).values[:, 4], atol=2e-3)
    threshold = learned[1]["threshold"]
    assert (distances(images[400:], learned) > threshold).float().mean() == pytest.approx(0.05, abs=0.006)
    assert (distances(coloured(100, 60, 200), learned) > threshold).all()


def test_without_validation_images_training_images_that_are_not_in_the_sample_are_held_out() -> None:
    known, held_out, source = choose(torch.arange(10, 210), NONE)
    assert (len(known), len(held_out), source) == (150, 50, "train")
    assert sorted([*known.tolist(), *held_out.tolist()]) == list(range(10, 210))
    known, held_out, source = choose(torch.arange(50_000), torch.arange(50_000, 55_000))
    assert (len(known), len(held_out), source) == (1500, 500, "validation")
    assert held_out.min() >= 50_000 > known.max()


def test_a_threshold_takes_twenty_held_out_images_and_embeddings_that_differ() -> None:
    images = coloured(100, 90, 90)
    assert learn_novelty(embed, images, torch.arange(79), NONE) is None  # a quarter, 19, would be held out
    learned = learn_novelty(embed, images, torch.arange(80), NONE)
    assert learned is not None and learned[1]["images"] == [60, 20]
    assert choose(torch.arange(80), torch.arange(80, 99))[2] == "train"
    assert choose(torch.arange(80), torch.arange(80, 100))[2] == "validation"
    assert learn_novelty(embed, images, torch.arange(9), torch.arange(50, 100)) is None  # too few to have neighbours
    for factor in (0.0, float("nan")):
        assert (
            learn_novelty(lambda images, factor=factor: (images, embed(images)[1] * factor), images, torch.arange(80), NONE)
            is None
        )


def test_weights_keep_novelty_data_apart_from_the_nets_own(novelty_run: Path, run: Path, tmp_path: Path) -> None:
    net = load_model_file(novelty_run)
    assert list(net.novelty) == ["known"] and not [name for name in net.state_dict() if "novelty" in name]
    marking, plain = cifar_lit.load(novelty_run), cifar_lit.load(run)
    noise = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    images = torch.cat([noise, noise[:, :, :1, :1].expand(100, 3, 32, 32)])  # the net knows noise, not plain colours
    predictions = marking.predict_batch(images)
    for marked, unmarked in zip(predictions, plain.predict_batch(images), strict=True):
        assert (unmarked.novelty, unmarked.unlike) == (None, None)
        assert marked.novelty is not None and marked.unlike == (marked.novelty > net.card.novelty["threshold"])
        assert marked.top == unmarked.top
    assert sum(bool(prediction.unlike) for prediction in predictions[:100]) < 20
    assert sum(bool(prediction.unlike) for prediction in predictions[100:]) > 90
    assert marking.predict_batch(images[:0]) == []
    save_weights(tmp_path / "bare.safetensors", net.net.state_dict(), net.card)  # settings whose tensors are gone
    assert cifar_lit.load(tmp_path / "bare.safetensors").predict_batch(images[:1])[0].unlike is None
