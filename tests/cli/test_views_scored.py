"""Test-time views from the command line: beside the plain score, and only where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Typed, config_of, metrics_of, refused, typed


def test_a_training_without_views_says_nothing_of_them(training: tuple[Path, Typed]) -> None:
    run, answer = training
    assert "tta" not in metrics_of(run)["test"]
    assert "views" not in answer.out
    assert config_of(run)["model"]["tta"] == "none"


@pytest.mark.parametrize("views", ["mirror", "full"])
def test_a_checkpoint_is_tested_with_views_beside_its_plain_score(here: Path, run: Path, views: str) -> None:
    answer = typed("test", "--ckpt_path", run / "checkpoints/best.ckpt", "--model.tta", views)
    assert answer.code == 0, answer.err
    (found,) = (metrics_of(path) for path in (here / "lightning_logs").iterdir())
    seen = found["test"].pop("tta")
    assert found["test"] == metrics_of(run)["test"]
    assert list(seen) == ["views", "accuracy", "loss"]
    assert seen["views"] == views
    assert seen["loss"] != found["test"]["loss"]
    assert 0 <= seen["accuracy"] <= 1
    with_views = f"with {views} test-time views accuracy {seen['accuracy']:.4f} · loss {seen['loss']:.4f}"
    plain = f"test accuracy {found['test']['accuracy']:.4f} · loss {found['test']['loss']:.4f} · 40 images"
    lines = answer.out.splitlines()
    assert lines.index(with_views) < lines.index(plain)


def test_a_training_with_views_keeps_them_out_of_its_validation_and_curves(here: Path, run: Path) -> None:
    answer = typed("--recipe", "small.yaml", "--model.tta", "mirror")
    assert answer.code == 0, answer.err
    found, plain = metrics_of(here / "lightning_logs" / "small-1"), metrics_of(run)
    assert found["test"].pop("tta")["views"] == "mirror"
    assert (found["val"], found["test"]) == (plain["val"], plain["test"])
    assert config_of(here / "lightning_logs" / "small-1")["model"]["tta"] == "mirror"


def test_views_that_are_none_are_refused() -> None:
    answer = typed("--recipe", "small.yaml", "--model.tta", "mirrored")
    refused(answer, "cifar-lit: model.tta must be one of none, mirror, full, not 'mirrored'. Did you mean mirror?", 2)
