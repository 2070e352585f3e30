from pathlib import Path

import pytest
import torch
from real_runs import only_run
from small_runs import classifier, shapes_data, trainer
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.predictions import prediction_table, write_predictions
from cifar_lit.training.metrics import PredictionCollector, total_norm


def test_each_image_is_there_once_in_the_order_of_the_set_and_padding_is_not() -> None:
    outcomes = PredictionCollector()
    logits = torch.randn(6, 3)
    outcomes.update(logits[[4, 1, 0]], torch.tensor([2, 1, 0]), torch.tensor([4, 1, 0]))
    outcomes.update(logits[[0, 0]], torch.tensor([-1, -1]), torch.tensor([0, 0]))
    outcomes.update(logits[[5, 2]].bfloat16(), torch.tensor([0, 2]), torch.tensor([5, 2]))
    found = outcomes.compute()
    assert found["indices"].tolist() == [0, 1, 2, 4, 5]
    assert found["labels"].tolist() == [0, 1, 2, 2, 0]
    torch.testing.assert_close(found["probabilities"][[0, 1, 3]], F.softmax(logits[[0, 1, 4]].double(), 1))


def test_the_likeliest_class_is_the_one_that_is_counted_even_where_float32_would_round_both_to_1() -> None:
    outcomes = PredictionCollector()
    logits = torch.tensor([[0.0, 30.0, -90.0], [1e-6, 2e-6, 0.0]])
    outcomes.update(logits, torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert outcomes.compute()["probabilities"].argmax(1).tolist() == logits.argmax(1).tolist() == [1, 1]


def test_a_batch_is_only_noted_so_that_the_device_is_not_waited_for() -> None:
    outcomes, logits = PredictionCollector(), torch.randn(2, 3)
    outcomes.update(logits, torch.tensor([0, -1]), torch.tensor([0, 1]))
    assert outcomes.logits[0].data_ptr() == logits.data_ptr()


def test_a_test_keeps_the_outcome_of_each_image_and_a_fit_keeps_none() -> None:
    model, data = classifier(), shapes_data(count=100, eval_batch_size=7)
    running = trainer(max_epochs=1)
    running.fit(model, datamodule=data)
    assert model.outcomes is None
    assert model._outcomes.logits == []
    running.test(model, datamodule=data, verbose=False)
    found = model.outcomes
    assert found is not None
    assert model.score is not None
    assert torch.equal(found["labels"], data.test_images.labels)
    assert (found["probabilities"].argmax(1) == found["labels"]).double().mean() == pytest.approx(model.score.accuracy)


def test_an_average_is_not_put_in_the_place_of_weights_that_are_scored_after_the_fit() -> None:
    model, data = classifier(ema_decay=0.5), shapes_data(count=100)
    running = trainer(max_epochs=1)
    running.fit(model, datamodule=data)
    for parameter in model.net.parameters():
        parameter.data.zero_()
    running.validate(model, datamodule=data, verbose=False)
    assert model.outcomes is not None
    assert torch.allclose(model.outcomes["probabilities"], torch.tensor(0.1, dtype=torch.float64))


def test_two_processes_write_the_rows_that_one_writes_for_the_same_net(alone: Path, pair: Path) -> None:
    one, two = ((only_run(folder) / "predictions.csv").read_text().splitlines() for folder in (alone, pair))
    assert [row.split(",")[:2] for row in two] == [row.split(",")[:2] for row in one]
    assert [row.split(",")[0] for row in two[1:]] == [str(number) for number in range(24)]


def test_the_norm_is_of_all_numbers_together() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2).bfloat16()]
    flat = torch.cat([tensor.float().flatten() for tensor in tensors])
    assert total_norm(tensors) == pytest.approx(float(flat.norm()), rel=1e-2)


def test_a_set_of_one_image_has_outcomes_of_one_row() -> None:
    outcomes = PredictionCollector()
    outcomes.update(torch.tensor([[0.0, 2.0]]), torch.tensor([1]), torch.tensor([0]))
    found = prediction_table(outcomes.rows())
    assert (found.indices.tolist(), found.labels.tolist(), found.predicted.tolist()) == ([0], [1], [1])
    assert found.probability.shape == (1,)


def test_a_test_of_one_image_can_be_written_down(tmp_path: Path) -> None:
    model, data = classifier(), shapes_data(count=10)
    whole = data.test_images
    data.test_images = ImageSet(whole.images[:1], whole.labels[:1], whole.classes)
    trainer().test(model, datamodule=data, verbose=False)
    assert model.outcomes is not None
    assert write_predictions(tmp_path / "predictions.csv", data.classes, [model.outcomes]) == 1
