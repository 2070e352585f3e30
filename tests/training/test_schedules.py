"""Learning-rate schedules equal torch's, in steps and in epochs."""

import math

import pytest
import torch
from small_runs import Rows, classifier, fitted, shapes_data
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from cifar_lit.base.errors import UsageError
from cifar_lit.training.schedules import Schedule


def optimizer(lr: float = 1.0) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def whitened() -> SGD:
    """Return an optimizer with two groups and rates, the second with the role of the whitening."""
    others, whitening = ([torch.nn.Parameter(torch.zeros(1))] for _ in range(2))
    groups = [{"params": others, "lr": 2.0}, {"params": whitening, "lr": 3.0, "role": "whitening"}]
    return SGD(groups, lr=1.0, fused=True)


def all_rates(schedule: LRScheduler, steps: int) -> list[list[float]]:
    """Return the learning rates of the groups before each step and after the last."""
    values = []
    for _ in range(steps + 1):
        values.append([float(rate) for rate in schedule.get_last_lr()])
        schedule.optimizer.step()
        schedule.step()
    return values


def rates(schedule: LRScheduler, steps: int) -> list[float]:
    return [first for first, *_ in all_rates(schedule, steps)]


def test_each_schedule_equals_torchs_with_a_linear_warmup() -> None:
    theirs = CosineAnnealingLR(optimizer(0.3), 40)
    assert rates(Schedule(optimizer(0.3), "cosine", 40), 40) == pytest.approx(rates(theirs, 40))
    warmed_up = rates(Schedule(optimizer(), "triangular", 10, warmup=4), 12)
    assert warmed_up == pytest.approx([0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0, 0])
    assert rates(Schedule(optimizer(2.0), "constant", 6, warmup=2), 6) == pytest.approx([0, 1, 2, 2, 2, 2, 2])


@pytest.mark.parametrize(("warmup", "share"), [(0, 0.3), (25, 0.25)])
def test_one_cycle_equals_torchs_with_the_same_rise(warmup: float, share: float) -> None:
    ours = rates(Schedule(optimizer(), "one_cycle", 100, warmup=warmup), 100)
    steps = 101  # torch counts the start of the cycle as a step
    shape = {"pct_start": (100 * share + 1) / steps, "div_factor": 1e9, "final_div_factor": 1}
    theirs = OneCycleLR(optimizer(), max_lr=1.0, total_steps=steps, **shape)
    assert ours == pytest.approx(rates(theirs, 100), abs=1e-8)


@pytest.mark.parametrize("end", [4, 2.5, 20])
def test_the_rate_of_a_role_falls_linearly_to_zero_at_its_own_end(end: float) -> None:
    schedule = Schedule(whitened(), "cosine", 8, warmup=2)
    schedule.end_early("whitening", end)
    values = all_rates(schedule, 10)
    falling = [1 + math.cos(math.pi * step / 6) for step in range(7)]
    others = [0.0, 1.0, *falling, 0.0, 0.0]
    assert [first for first, _ in values] == pytest.approx(others)
    assert [second for _, second in values] == pytest.approx([max(0.0, 3 * (1 - step / end)) for step in range(11)])


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 14), (2, 8)])
def test_in_a_fit_the_schedule_spans_all_optimizer_steps(accumulate: int, steps: int) -> None:
    rows, model = Rows(), classifier(schedule="triangular", lr=0.1, schedule_options={"warmup_epochs": 0.5})
    # Seven batches per epoch: with two accumulated, the last update has one batch.
    done = fitted(model, shapes_data(), logger=rows, log_every_n_steps=1, accumulate_grad_batches=accumulate)
    assert done.global_step == steps
    top = steps / 4  # half of the first of two epochs
    expected = {step: 0.1 * min(step / top, (steps - step) / (steps - top)) for step in range(1, steps + 1)}
    assert rows.curve("lr") == pytest.approx(expected)


def test_a_schedule_ends_at_max_steps_and_needs_an_end() -> None:
    rows, model = Rows(), classifier(schedule="triangular", lr=0.1)
    fitted(model, shapes_data(), logger=rows, log_every_n_steps=1, max_epochs=-1, max_steps=10)
    assert rows.curve("lr") == pytest.approx({step: (10 - step) / 100 for step in range(1, 11)})
    with pytest.raises(UsageError, match=r"lower model\.schedule_options\.warmup_epochs"):
        Schedule(optimizer(), "cosine", 10, warmup=10)
    with pytest.raises(UsageError, match="a schedule needs an end: set --epochs or "):
        fitted(classifier(schedule="triangular", lr=0.1), shapes_data(), max_epochs=-1, max_time={"seconds": 60})


def test_in_a_fit_a_schedule_by_the_epoch_keeps_its_rate_within_each_epoch() -> None:
    used: list[float] = []
    model = classifier(schedule="cosine", schedule_options={"every": "epoch"}, lr=0.1)
    model.on_train_batch_start = lambda *_: used.append(model.trainer.optimizers[0].param_groups[0]["lr"])
    done = fitted(model, shapes_data(val_size=24), max_epochs=4)
    by_epoch = [0.05 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
    assert used == pytest.approx([rate for rate in by_epoch for _ in range(6)])
    assert done.optimizers[0].param_groups[0]["lr"] == pytest.approx(0)
