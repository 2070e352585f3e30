from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import normalize

import cifar_lit
from cifar_lit.inference.load import Prediction
from cifar_lit.inference.novelty import learn_novelty, novelty, sample_rows
from cifar_lit.runs.model_file import load_model_file, save_weights

Learned = tuple[dict[str, Tensor], dict[str, Any]]


def around(count: int, *centre: float) -> Tensor:
    """Embeddings (count, 3) about one place."""
    generator = torch.Generator().manual_seed(count)
    return torch.tensor(centre) + 0.1 * torch.rand(count, 3, generator=generator)


def logits(count: int, sureness: float = 3.0) -> Tensor:
    """(count, 4), the largest up to `sureness` above the others."""
    top = torch.linspace(0, sureness, count)[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    return torch.cat([top[:, None], torch.zeros(count, 3)], 1)


def learned(known: Tensor, embeddings: Tensor) -> Learned:
    result = learn_novelty(known, embeddings, logits(len(embeddings)))
    assert result is not None
    return result


def test_it_is_the_distance_to_the_fifth_nearest_times_the_perplexity_and_5_percent_of_the_held_out_are_above() -> None:
    known, held_out = around(400, 0.8, 0.2, 0.1), around(200, 0.8, 0.2, 0.1)
    tensors, settings = learned(known, held_out)
    scores = novelty(held_out, logits(200), tensors, settings)
    distances = torch.cdist(normalize(held_out), normalize(known)).sort(1).values[:, 4]
    torch.testing.assert_close(scores, distances * Categorical(logits=logits(200)).perplexity(), atol=4e-3, rtol=0)
    assert (scores > settings["threshold"]).float().mean() == pytest.approx(0.05, abs=0.006)
    assert (novelty(around(100, 0.2, 0.8, 0.1), logits(100), tensors, settings) > settings["threshold"]).all()
    assert novelty(held_out, logits(200, 0.5), tensors, settings).mean() > scores.mean()  # of no clear class


def test_the_sample_is_of_training_images_and_the_same_each_time() -> None:
    assert sample_rows(torch.arange(10, 210)).tolist() == list(range(10, 210))
    rows = sample_rows(torch.arange(5000, 55_000))
    assert len(rows.unique()) == 1500 and rows.min() >= 5000
    assert torch.equal(rows, sample_rows(torch.arange(5000, 55_000))) and rows.diff().min() > 0


def test_a_threshold_takes_twenty_held_out_images_and_a_sample_ten_embeddings_that_differ() -> None:
    known = around(60, 0.8, 0.2, 0.1)
    assert learned(known, known[:20])[1]["threshold"] > 0
    tensors, settings = learned(known, known[:19])
    assert (settings["threshold"], settings["images"]) == (None, [60, 19])
    assert novelty(known, logits(60), tensors, settings).isfinite().all()
    for unusable in (known[:9], known[:0], known[:1].expand(60, -1), known * 0, known * torch.nan):
        assert learn_novelty(unusable, known, logits(60)) is None


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

    def loaded(settings: dict[str, Any], tensors: dict[str, Tensor], temperature: float | None = None) -> Prediction:
        card = replace(net.card, novelty=settings, temperature=temperature)
        save_weights(tmp_path / "net.safetensors", net.net.state_dict(), card, tensors)
        return cifar_lit.load(tmp_path / "net.safetensors").predict_batch(images[:1])[0]

    assert loaded(net.card.novelty, {}).unlike is None  # settings whose tensors are gone
    unsure = loaded({**net.card.novelty, "threshold": None}, net.novelty)  # no validation images
    assert (unsure.novelty, unsure.unlike) == (pytest.approx(predictions[0].novelty, rel=1e-3), None)
    tempered = loaded(net.card.novelty, net.novelty, temperature=4.0)  # for the probabilities alone
    assert tempered.probability < predictions[0].probability
    assert tempered.novelty == pytest.approx(predictions[0].novelty, rel=1e-3)
    assert tempered.unlike == predictions[0].unlike
    perplexity = float(Categorical(logits=marking(images[:1])).perplexity())
    before = loaded({"method": "nearest neighbours", "neighbour": 5, "threshold": 0.5, "held_out": "train"}, net.novelty)
    assert before.novelty == pytest.approx(predictions[0].novelty / perplexity, rel=1e-3)  # a file of before
