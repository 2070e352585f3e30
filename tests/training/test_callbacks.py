"""Time, random states, and the lines of each epoch."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import classifier, fitted, shapes_data

from cifar_lit.data.loaders import Batch
from cifar_lit.training import callbacks
from cifar_lit.training.callbacks import Clock, EpochLines, LiveBar, NoProfiler, RandomState


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until the test moves it."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now.seconds)
    return now


def batch(count: int, loss_weight: float = 1.0) -> Batch:
    return Batch(torch.zeros(count, 3, 2, 2), torch.zeros(count).long(), torch.zeros(count).long(), loss_weight)


def test_the_clock_tells_training_from_validation_and_goes_on_when_resumed(time: SimpleNamespace) -> None:
    clock: Any = Clock()
    fit = SimpleNamespace(world_size=1)
    clock.on_validation_start(fit, None)
    time.seconds += 7
    clock.on_validation_end(fit, None)
    assert (clock.seconds, clock.training_seconds) == (0, 0)  # of a validation without a fit

    def pass_an_epoch(clock: Any) -> None:
        time.seconds += 10
        clock.on_train_batch_end(fit, None, None, batch(16), 0)
        clock.on_validation_start(fit, None)
        time.seconds += 3
        clock.on_validation_end(fit, None)

    time.seconds += 5  # set-up
    clock.on_train_start(fit, None)
    pass_an_epoch(clock)
    assert (clock.seconds, clock.training_seconds, clock.images) == (13, 10, 16)
    saved = clock.state_dict()
    pass_an_epoch(clock)
    clock.on_train_end(fit, None)
    time.seconds += 100  # the test
    assert (clock.seconds, clock.training_seconds, clock.images) == (26, 20, 32)

    resumed: Any = Clock()
    resumed.load_state_dict(saved)
    resumed.on_train_start(fit, None)
    pass_an_epoch(resumed)
    assert (resumed.seconds, resumed.training_seconds, resumed.images) == (26, 20, 32)


@pytest.mark.parametrize(("parts", "total"), [((4, 4), 8), ((3, 2), 5), ((34, 33, 33), 100)])
def test_the_clock_counts_the_global_batch_on_every_device_and_nothing_where_there_is_no_part_of_it(
    parts: tuple[int, ...], total: int
) -> None:
    fit: Any = SimpleNamespace(world_size=len(parts))
    for part in parts:
        clock: Any = Clock()
        clock.on_train_batch_end(fit, None, None, batch(part, part * len(parts) / total), 0)
        clock.on_train_batch_end(fit, None, None, batch(2, 0.0), 0)
        assert clock.images == total


class FakeStrategy:
    def reduce(self, rows: torch.Tensor, reduce_op: str) -> torch.Tensor:
        """As if the other of two devices had put its state, all sevens, into the second row."""
        rows[1] = 7
        return rows


def test_each_device_gets_its_own_random_state_back() -> None:
    own = torch.get_rng_state()
    pair: Any = SimpleNamespace(world_size=2, global_rank=0, strategy=FakeStrategy())
    model: Any = SimpleNamespace(device=own.device)
    checkpoint: dict[str, Any] = {}
    RandomState().on_save_checkpoint(pair, model, checkpoint)
    (states,) = checkpoint["random_state"]
    assert torch.equal(states[0], own)
    assert (states[1] == 7).all()

    expected = torch.rand(3)
    restored = RandomState()
    restored.on_load_checkpoint(pair, model, checkpoint)
    torch.manual_seed(99)
    restored.on_train_start(pair, model)
    assert torch.equal(torch.rand(3), expected)


def test_on_another_number_of_devices_the_random_state_follows_from_the_checkpoint_and_the_device() -> None:
    def drawn(state: int, rank: int, world: int) -> list[float]:
        device: Any = SimpleNamespace(world_size=world, global_rank=rank)
        restored: Any = RandomState()
        restored.on_load_checkpoint(device, None, {"random_state": [torch.full((2, 5056), state, dtype=torch.uint8)]})
        torch.rand(int(torch.randint(5, ())))  # whatever set-up has drawn
        restored.on_train_start(device, None)
        return torch.rand(3).tolist()

    first = drawn(0, 0, 1)
    assert drawn(0, 0, 1) == first
    others = [drawn(1, 0, 1), drawn(0, 1, 3), drawn(0, 2, 3)]
    assert all(other != first for other in others) and others[1] != others[2]


@pytest.mark.parametrize("val_size", [20, 0])
def test_each_epoch_is_one_line(capsys: pytest.CaptureFixture[str], val_size: int) -> None:
    expected: list[str] = []

    def note(trainer: pl.Trainer, model: Any) -> None:
        loss, accuracy = model.running.epoch_means()
        expected.append(f"epoch {trainer.current_epoch + 1}/3 · train loss {loss:.4f} accuracy {accuracy:.4f}")
        if val_size:
            loss, accuracy = (float(trainer.callback_metrics[f"val/{name}"]) for name in ("loss", "accuracy"))
            expected[-1] += f" · val loss {loss:.4f} accuracy {accuracy:.4f}"

    callbacks = [clock := Clock(), EpochLines(clock), LambdaCallback(on_train_epoch_end=note)]
    fitted(classifier(), shapes_data(val_size=val_size), *callbacks, max_epochs=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
        assert " s · " in line and line.endswith(" images/s")


def test_the_live_bar_shows_what_was_logged_last(capsys: pytest.CaptureFixture[str]) -> None:
    model, bar = classifier(), LiveBar()
    done = fitted(model, shapes_data(), bar, max_epochs=2, enable_progress_bar=True, log_every_n_steps=3)
    shown = bar.get_metrics(done, model)
    assert {"loss", "accuracy"} <= shown.keys()
    assert all(isinstance(value, float) for value in shown.values())
    assert "epoch 2/2" in capsys.readouterr().out


def test_profiling_that_is_off_costs_one_context_manager() -> None:
    profiler = NoProfiler()
    with profiler.profile("one") as first, profiler.profile("another") as second:
        assert first is second is None
    assert profiler.profile("one") is profiler.profile("another")
