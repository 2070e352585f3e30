"""Several ranks in one training: they stop at the same step, start with equal weights and never wait in each step."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import BATCHES, MOMENTUM, best_and_last, classifier, fitted, same, shapes_data, weights
from stress.forked import Forked

from cifar_lit.features.whitening import Whitening
from cifar_lit.training.callbacks import RandomState
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.orderly_stop import Interrupted, NoSignalHandlers, OrderlyStop

TWO: dict[str, Any] = {"devices": 2, "strategy": "ddp"}


def two_ranks(command: Callable[[], int], folder: str) -> list[int]:
    """Return the exit codes of two processes that call `command`."""

    def run() -> int:
        try:
            return command()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    return Forked(run, Path(folder), Path(folder, "rank-{rank}.txt"), 2).wait()


def this_rank() -> int:
    return int(os.environ["RANK"])


# ---- stops


class Send(Callback):
    """Send signals to this process at one hook of one step.

    Args:
        hook: name of the hook.
        step: steps completed before it.
        numbers: the signals.
    """

    def __init__(self, hook: str, step: int, *numbers: int) -> None:
        self._left = 1

        def send(trainer: pl.Trainer, *_: Any) -> None:
            if self._left and trainer.global_step == step:
                self._left -= 1
                for number in numbers:
                    os.kill(os.getpid(), number)

        setattr(self, hook, send)


# Hook, steps before the signal, options of the Trainer; the step at which both ranks stop.
STOPS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "before the exchange": ("on_train_batch_start", 2, {}, 3),
    "within a step": ("on_after_backward", 2, {}, 4),
    "between accumulated batches": ("on_after_backward", 2, {"accumulate_grad_batches": 2}, 3),
    "in the last step of an epoch": ("on_after_backward", BATCHES - 1, {}, BATCHES),
    "in a validation within an epoch": ("on_validation_start", 3, {"val_check_interval": 3}, 3),
    "in the validation of an epoch": ("on_validation_start", BATCHES, {}, BATCHES),
    "in the last validation": ("on_validation_start", 2 * BATCHES, {}, 2 * BATCHES),
}


def stop_in_all_cases(folder: str) -> list[int]:
    """Send a signal to the second rank of each case, resume, and write the results of each rank."""

    def train(place: Path, *more: Callback, resume: bool = False, **options: Any) -> dict[str, Any]:
        model, last = classifier(**MOMENTUM), best_and_last(place)[1]
        callbacks = [NoSignalHandlers(), RandomState(), *more, last, OrderlyStop(last)]
        path = place / "last.ckpt" if resume else None
        fitted(model, shapes_data(), *callbacks, resume=path, **TWO, **options)
        return weights(model)

    def command() -> int:
        results, whole = {}, dict[str, Any]()
        for name, (hook, step, options, _) in STOPS.items():
            place, key = Path(folder, name), str(options)
            whole[key] = whole.get(key) or train(place / "whole", **options)
            sends = [Send(hook, step, signal.SIGTERM)] if this_rank() == 1 else []
            code = 0
            try:
                train(place, *sends, **options)
            except Interrupted as error:
                code = error.exit_code
            torch.distributed.barrier()
            reached = read_checkpoint(place / "last.ckpt")["global_step"]
            results[name] = [code, reached, same(train(place, resume=True, **options), whole[key])]
        Path(folder, f"{this_rank()}.json").write_text(json.dumps(results))
        return 0

    return two_ranks(command, folder)


def test_a_signal_to_one_rank_stops_both_at_the_same_step_and_the_run_resumes_bit_equal(
    forking: Callable[..., Any], tmp_path: Path
) -> None:
    assert forking(stop_in_all_cases, folder=str(tmp_path)) == [0, 0], (tmp_path / "rank-0.txt").read_text()
    expected = {name: [143, reached, True] for name, (*_, reached) in STOPS.items()}
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


def end_within_a_step(end: str, folder: str) -> list[int]:
    """End the second rank within a step, or send two signals to both, while their exchange is pending."""

    def die(*_: Any) -> None:
        os._exit(9)

    def command() -> int:
        last = best_and_last(Path(folder))[1]
        callback: Callback = Send("on_before_optimizer_step", 2, signal.SIGTERM, signal.SIGTERM)
        if end == "exit":
            callback = LambdaCallback(on_before_optimizer_step=die) if this_rank() == 1 else Callback()
        try:
            fitted(classifier(), shapes_data(), NoSignalHandlers(), callback, last, OrderlyStop(last), **TWO)
        except Interrupted as error:
            return error.exit_code
        except RuntimeError as error:
            return 1 if "Connection" in str(error) else 2
        return 0

    return two_ranks(command, folder)


@pytest.mark.parametrize(("end", "codes"), [("exit", [1, 9]), ("two signals", [143, 143])])
def test_an_end_within_a_step_ends_all_ranks_at_once(
    end: str, codes: list[int], forking: Callable[..., Any], tmp_path: Path
) -> None:
    assert forking(end_within_a_step, end=end, folder=str(tmp_path)) == codes, (tmp_path / "rank-0.txt").read_text()
    assert not (tmp_path / "last.ckpt").exists()


# ---- layers that the first rank computes


def start_with_a_whitened_layer(folder: str) -> list[int]:
    """Train from another random state on each rank, and write the weights of its first step."""

    def command() -> int:
        starts: list[Any] = []

        def started(trainer: pl.Trainer, model: Any, *_: Any) -> None:
            if not starts:
                starts.append({name: tensor.tolist() for name, tensor in weights(model).items()})

        torch.manual_seed(this_rank())
        callbacks = [NoSignalHandlers(), Whitening(), LambdaCallback(on_train_batch_start=started)]
        fitted(classifier(**WHITENED), shapes_data(), *callbacks, **TWO, max_epochs=1)
        Path(folder, f"{this_rank()}.json").write_text(json.dumps(starts[0]))
        return 0

    return two_ranks(command, folder)


WHITENED: dict[str, Any] = {"net": "whitened", "net_options": {"widths": [8, 12]}}


def test_ranks_start_with_the_whitened_layer_of_the_first_one(forking: Callable[..., Any], tmp_path: Path) -> None:
    codes = forking(start_with_a_whitened_layer, folder=str(tmp_path))
    assert codes == [0, 0], (tmp_path / "rank-0.txt").read_text()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    expected = classifier(**WHITENED).net
    expected.initialise(shapes_data().plain_images(5000))
    torch.testing.assert_close(torch.tensor(first["net.whiten.weight"]), expected.whiten.weight)
