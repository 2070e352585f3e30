"""Run folders written by hand: settings, figures, curves and predictions as a training leaves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from cifar_lit.runs.predictions import write_predictions

CLASSES = ("cat", "dog")


def made_run(
    path: Path, right: Sequence[bool] | None = None, seed: int = 0, fingerprint: str | None = "f1", **model: Any
) -> Path:
    """A run of the recipe `small`; right: for each test image, whether it is named right; None for a run without test."""
    (path / "checkpoints").mkdir(parents=True)
    settings = {"seed_everything": seed, "trainer": {"max_epochs": 2}, "model": {"net": "lenet", "lr": 0.1, **model}}
    (path / "config.yaml").write_text(yaml.safe_dump({**settings, "recipe": "small", "logs": str(path.parent)}))
    test = None
    if right is not None:
        test = {"accuracy": sum(right) / len(right), "loss": 0.5, "images": len(right)}
        test |= {"fingerprint": fingerprint} if fingerprint else {}
        labels = torch.arange(len(right)) % 2
        named = torch.where(torch.tensor(right), labels, 1 - labels)
        batch = {"indices": torch.arange(len(right)), "labels": labels, "probabilities": torch.eye(2)[named]}
        write_predictions(path / "predictions.csv", CLASSES, [batch])
    metrics = {
        "recipe": "small", "seed": seed, "epochs": 2, "parameters": 1234, "train_seconds": 10.0 + seed,
        "images_per_second": 500.0, "val": {"accuracy": 0.5, "loss": 1.0}, "test": test,
    }  # fmt: skip
    (path / "metrics.json").write_text(json.dumps(metrics))
    (path / "metrics.csv").write_text(
        "epoch,step,lr,train/loss,train/accuracy,val/loss,val/accuracy,test/loss,test/accuracy\n"
        "0,10,0.1,1.5,0.4,1.4,0.45,,\n1,20,0.05,1.0,0.6,1.1,0.5,,\n2,20,,,,,,0.5,0.5\n"
    )
    return path
