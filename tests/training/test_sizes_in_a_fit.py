"""A fit on smaller images first: what the net is shown, and resume while the images are small."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Rows, StopAt, classifier, fitted, same, shapes_data, weights

from cifar_lit.training.callbacks import Interrupted, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import last_checkpoint, read_checkpoint

pytestmark = pytest.mark.usefixtures("dropout_net")

BATCHES = 7  # of an epoch
SIZES = {8: 0.4, 12: 0.2}  # of five epochs: two, one, and two at the full 16 pixels


@pytest.mark.parametrize("chunk", [1, 3, 0])
def test_the_net_sees_the_sizes_in_their_order_and_is_evaluated_at_full_size(chunk: int) -> None:
    model, seen = classifier(net="dropout"), []
    model.net.register_forward_pre_hook(lambda net, images: seen.append((net.training, tuple(images[0].shape[2:]))))
    done = fitted(model, shapes_data(resolutions=SIZES, chunk=chunk), max_epochs=5)
    evaluated = (False, (16, 16))
    expected = []
    for side in (8, 8, 12, 16, 16):
        expected += [(True, (side, side))] * BATCHES + [evaluated]
    assert seen == expected
    done.test(model, datamodule=shapes_data(resolutions=SIZES), verbose=False)
    assert seen[len(expected) :] == [evaluated]


def test_sizes_train_the_same_net_however_batches_are_handed_over() -> None:
    ends = []
    for settings in ({"chunk": 1}, {"chunk": 4}, {"chunk": 4, "placement": "host", "workers": 1}):
        model = classifier(net="dropout", momentum=0.9)
        fitted(model, shapes_data(resolutions=SIZES, crop=2, flip="random", **settings), max_epochs=5)
        ends.append(weights(model))
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])
    full = classifier(net="dropout", momentum=0.9)
    fitted(full, shapes_data(crop=2, flip="random"), max_epochs=5)
    assert not same(ends[0], weights(full))


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_a_run_stopped_while_images_are_small_goes_on_at_their_size(epoch: int, tmp_path: Path) -> None:
    def run(folder: str, stop_at: int = 0, resume: bool = False) -> tuple[Any, list[Any], list[int]]:
        rows, last, sides = Rows(), last_checkpoint(), []
        last.dirpath = str(tmp_path / folder)
        stop, model = OrderlyStop(last), classifier(net="dropout", momentum=0.9, schedule="triangular")
        model.net.register_forward_pre_hook(lambda net, images: sides.append(images[0].shape[2]) if net.training else None)
        data, path = (
            shapes_data(
                resolutions=SIZES,
            ),
            tmp_path / folder / "last.ckpt" if resume else None,
        )
        options: dict[str, Any] = {"logger": rows, "max_epochs": 5, "enable_checkpointing": True}
        torch.manual_seed(7 if resume else 0)
        try:
            fitted(model, data, RandomState(), last, StopAt(stop, stop_at), stop, resume=path, **options)
        except Interrupted:
            assert stop_at
        return weights(model), rows.rows, sides

    expected, rows, sides = run("whole")
    _, first, before = run("parts", stop_at=epoch * BATCHES + 1)
    assert read_checkpoint(tmp_path / "parts" / "last.ckpt")["global_step"] == epoch * BATCHES + 3
    found, rest, after = run("parts", resume=True)
    assert same(found, expected)
    assert before + after == sides
    assert [*first, *rest] == rows
