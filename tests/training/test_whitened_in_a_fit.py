"""A whitened net in a fit: its first layer from the training images, once; and its test with several views."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import best_and_last, classifier, fitted, same, shapes_data, trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader

from cifar_lit.data.augment import normalise
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import Batch
from cifar_lit.errors import UsageError
from cifar_lit.models.tta import view_logits
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training import classifier as classifier_module
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.metrics import Evaluation

SMALL: dict[str, Any] = {"net": "whitened", "net_options": {"widths": [8, 12]}, "optimizer": "muon", "momentum": 0.6, "lr": 0.1}


def augmented_data(**settings: Any) -> ImageData:
    return shapes_data(crop=3, flip="random", cutout=4, mean=None, std=None, **settings)


def normalised(data: ImageData, rows: Tensor) -> Tensor:
    return normalise(rows, *(torch.tensor(values) for values in data.statistics))


@pytest.mark.parametrize("most", [5000, 30])
def test_the_first_layer_is_computed_once_from_training_images_as_they_are(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert classifier_module.WHITENING_IMAGES == 5000  # as the records take
    monkeypatch.setattr(classifier_module, "WHITENING_IMAGES", most)
    model, data, alone = classifier(**SMALL), augmented_data(resolutions={8: 0.5}), classifier(**SMALL)
    fitted(model, data)
    fitted(model, shapes_data(count=60, split_seed=5), max_epochs=1)
    net, expected = model.net, alone.net
    assert isinstance(net, WhitenedNet) and isinstance(expected, WhitenedNet) and bool(net.whitened)
    expected.initialise(data.plain_images(most))
    assert torch.equal(net.whiten.weight, expected.whiten.weight)
    assert torch.equal(data.plain_images(5000), normalised(data, data.train_images.images[data.split[0]]))


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_the_average_is_of_whitened_weights_and_a_resumed_net_keeps_its_first_layer(
    ema_decay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, compute = list[int](), WhitenedNet.initialise

    def counted(net: WhitenedNet, images: Tensor) -> None:
        calls.append(len(images))
        compute(net, images)

    def run(epochs: int, resume: Path | None = None) -> dict[str, Tensor]:
        model = classifier(**SMALL, ema_decay=ema_decay)
        fitted(model, augmented_data(), best_and_last(tmp_path)[1], resume=resume, max_epochs=epochs)
        return weights(model)

    monkeypatch.setattr(WhitenedNet, "initialise", counted)
    expected = run(epochs=2)
    run(epochs=1)
    assert calls == [100, 100]
    state = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]  # the average where there is one
    torch.testing.assert_close(state["net.whiten.weight"], expected["net.whiten.weight"])
    assert bool(state["net.whitened"])
    assert same(run(epochs=2, resume=tmp_path / "last.ckpt"), expected)
    assert calls == [100, 100]


def test_a_net_without_images_to_start_from_is_refused_in_one_line() -> None:
    rows = torch.arange(4)
    loader = DataLoader([Batch(torch.zeros(4, 3, 16, 16), rows, rows)], batch_size=None, collate_fn=lambda batch: batch)
    with pytest.raises(UsageError, match=r"^whitened is initialised from training images: fit it with a datamodule$"):
        trainer(max_epochs=1).fit(classifier(**SMALL), loader)


def test_views_are_scored_beside_the_plain_images() -> None:
    trained, data, scored, plain_scores = classifier(**SMALL), shapes_data(eval_batch_size=50), [], set[float]()
    fitted(trained, data)
    for views in ("none", "mirror", "full"):
        model, looks = classifier(**SMALL, tta=views), list[int]()
        model.load_state_dict(trained.state_dict())
        scored.append(trainer().test(model, datamodule=data, verbose=False))
        assert model.score is not None
        plain_scores.add(model.score.loss)
        if views == "none":
            assert model.views_score is None
            continue
        evaluation, labels = Evaluation(10), data.test_images.labels
        with torch.no_grad():
            evaluation.update(view_logits(model.net.eval(), normalised(data, data.test_images.images), views), labels)
        score, expected = model.views_score, evaluation.compute()
        assert score is not None
        assert (score.accuracy, score.confusion, score.images) == (expected.accuracy, expected.confusion, 24)
        assert score.loss == pytest.approx(expected.loss, abs=2e-6) != model.score.loss
        model.net.register_forward_pre_hook(lambda net, images, looks=looks: looks.append(len(images[0])))
        trainer().validate(model, datamodule=data, verbose=False)
        assert looks == [20]  # as they are
    assert scored[0] == scored[1] == scored[2] and len(plain_scores) == 1
