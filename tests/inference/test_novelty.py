from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_net import write_net
from torch import Tensor
from torch.nn.functional import normalize

import cifar_lit
from cifar_lit.inference.novelty import choose, learn_novelty, novelty
from cifar_lit.runs.model_file import load_model_file, save_weights


def looking(images: Tensor) -> tuple[Tensor, Tensor]:
    """A net whose embedding is the image's mean colour."""
    means = images.float().mean((2, 3))
    return means[:, :2], means


def coloured(count: int, red: int, green: int, spread: int = 20) -> Tensor:
    """Images uint8 (count, 4, 4, 3) of about one colour."""
    draw = torch.Generator().manual_seed(red + 1000 * green)
    noise = torch.randint(-spread, spread + 1, (count, 1, 1, 3), generator=draw)
    return (torch.tensor([red, green, 30]) + noise).clamp(0, 255).to(torch.uint8).expand(count, 4, 4, 3)


def distances(images: Tensor, learned: tuple[dict[str, Tensor], dict[str, object]]) -> Tensor:
    return novelty(looking(images.permute(0, 3, 1, 2))[1], *learned)


def test_images_of_another_kind_are_further_than_the_threshold() -> None:
    images = coloured(600, 200, 60)
    learned = learn_novelty(looking, images, torch.arange(400), torch.arange(400, 600))
    assert learned is not None
    threshold = learned[1]["threshold"]
    assert (distances(images[400:], learned) > threshold).float().mean() == pytest.approx(0.05, abs=0.006)
    assert (distances(coloured(100, 60, 200), learned) > threshold).all()


def test_the_distance_is_that_to_the_fifth_nearest_known_image() -> None:
    images = coloured(200, 120, 120, spread=90)
    learned = learn_novelty(looking, images, torch.arange(150), torch.arange(150, 200))
    assert learned is not None
    known, asked = (normalize(looking(part.permute(0, 3, 1, 2))[1]) for part in (images[:150], images[150:]))
    assert torch.allclose(distances(images[150:], learned), torch.cdist(asked, known).sort(1).values[:, 4], atol=2e-3)


def test_without_validation_images_training_images_that_are_not_in_the_sample_are_held_out() -> None:
    known, held_out, source = choose(torch.arange(10, 210), torch.tensor([], dtype=torch.int64))
    assert (len(known), len(held_out), source) == (150, 50, "train")
    assert sorted([*known.tolist(), *held_out.tolist()]) == list(range(10, 210))
    known, held_out, source = choose(torch.arange(50_000), torch.arange(50_000, 55_000))
    assert (len(known), len(held_out), source) == (1500, 500, "validation")
    assert held_out.min() >= 50_000 > known.max()


def test_few_images_and_embeddings_that_say_nothing_give_no_mark() -> None:
    none = torch.tensor([], dtype=torch.int64)
    assert learn_novelty(looking, coloured(60, 9, 9), torch.arange(60), none) is None  # 15 would be held out
    assert learn_novelty(looking, torch.full((200, 4, 4, 3), 7, dtype=torch.uint8), torch.arange(200), none) is None

    def lost(images: Tensor) -> tuple[Tensor, Tensor]:
        return looking(images)[0], looking(images)[1] * float("nan")

    assert learn_novelty(lost, coloured(200, 9, 9), torch.arange(200), none) is None


def test_weights_keep_what_tells_novelty_apart_from_the_nets_own(telling_run: Path, tmp_path: Path) -> None:
    net = load_model_file(telling_run)
    assert list(net.novelty) == ["known"] and not [name for name in net.state_dict() if "novelty" in name]
    told, plain = cifar_lit.load(telling_run), cifar_lit.load(write_net(tmp_path / "plain"))
    images = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8)
    for with_mark, without in zip(told.predictions(images), plain.predictions(images), strict=True):
        assert (without.novelty, without.unlike) == (None, None)
        assert with_mark.novelty is not None and with_mark.unlike == (with_mark.novelty > net.card.novelty["threshold"])
        assert with_mark.top == without.top
    assert told.predictions(images[:0]) == []
    # settings whose tensors are gone, as when the bare net was written again
    save_weights(tmp_path / "bare.safetensors", net.net.state_dict(), replace(net.card))
    assert cifar_lit.load(tmp_path / "bare.safetensors").predictions(images[:1])[0].unlike is None


def test_noise_is_known_to_a_net_that_has_seen_noise_and_plain_colours_are_not(telling_run: Path) -> None:
    classifier = cifar_lit.load(telling_run)
    noise = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    plain = noise[:, :, :1, :1].expand(100, 3, 32, 32)
    assert sum(bool(found.unlike) for found in classifier.predictions(noise)) < 20
    assert sum(bool(found.unlike) for found in classifier.predictions(plain)) > 90
