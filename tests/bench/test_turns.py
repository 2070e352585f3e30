"""What is counted and timed when trainings take turns, also where one call makes several steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cifar_lit.bench import clock, interleave
from cifar_lit.bench.clock import Lap, Stopwatch
from cifar_lit.bench.interleave import Interleave, Round

MODEL: Any = SimpleNamespace(device=torch.device("cpu"))


class Scene:
    """A Trainer that makes `chunk` steps of 10 images at each call, in 2 s a step, beside a loop that needs 3 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
        self.chunk, self.time = chunk, 0.0
        self.trainer: Any = SimpleNamespace(global_step=0, should_stop=False)
        for module in (clock, interleave):
            monkeypatch.setattr(module, "read_clock", lambda device: self.time)

    def plain(self) -> Iterator[int]:
        while True:
            self.time += 3.0
            yield 10

    def play(self, callback: Any) -> None:
        """Calls until the callback has the training stopped."""
        batch = SimpleNamespace(labels=torch.zeros(10 * self.chunk))
        while not self.trainer.should_stop:
            callback.on_train_batch_start(self.trainer, MODEL, batch, 0)
            self.time += 2.0 * self.chunk
            self.trainer.global_step += self.chunk
            callback.on_train_batch_end(self.trainer, MODEL, None, batch, 0)


@pytest.mark.parametrize(("chunk", "steps"), [(1, 4), (2, 4), (3, 6)])
def test_a_round_is_whole_calls_of_ours_and_as_many_steps_of_the_other(
    monkeypatch: pytest.MonkeyPatch, chunk: int, steps: int
) -> None:
    scene = Scene(monkeypatch, chunk)
    turns = Interleave(lambda trainer, model: scene.plain(), steps=4, rounds=2)
    scene.play(turns)
    assert turns.rounds == [Round(steps, 10 * steps, 2.0 * steps, 3.0 * steps)] * 2
    assert scene.trainer.global_step == 3 * steps  # the first round warms up


@pytest.mark.parametrize(("chunk", "warmup", "steps"), [(1, 2, 4), (3, 3, 6)])
def test_laps_start_after_the_warm_up_and_leave_out_what_is_done_between(
    monkeypatch: pytest.MonkeyPatch, chunk: int, warmup: int, steps: int
) -> None:
    scene = Scene(monkeypatch, chunk)
    between: list[tuple[int, int]] = []

    def pause(lap: int) -> None:
        scene.time += 100.0
        between.append((lap, scene.trainer.global_step))

    watch = Stopwatch(warmup=2, steps=4, laps=2, between=pause)
    scene.play(watch)
    assert watch.laps == [Lap(steps, 10 * steps, 2.0 * steps)] * 2
    assert between == [(0, warmup), (1, warmup + steps), (2, warmup + 2 * steps)]
