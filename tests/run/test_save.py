"""`cifar_lit.save`: the net of a plain Trainer becomes a run that the commands accept."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from contract.command_line import run_command

from cifar_lit import ImageClassifier, ImageData, load, save
from cifar_lit.base.errors import UsageError

URL = {"url": "https://me:secret@example.org/"}


def test_a_net_of_a_plain_trainer_is_saved_once_and_used_as_a_run(working_folder: Path) -> None:
    data = ImageData("shapes", images={"count": 300, "image_size": 16}, val_size=30, loading=URL)
    model = ImageClassifier("lenet", lr=0.01)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(model, data)
    trainer.validate(model, data, verbose=False)
    save(model, data, "validated")
    assert not Path("validated/metrics.json").exists()  # the scores of other images
    trainer.test(model, data, verbose=False)
    save(model, data, "mine")
    (scores,) = trainer.test(model, data, verbose=False)
    assert json.loads(Path("mine/metrics.json").read_text())["test"]["accuracy"] == pytest.approx(
        scores["test/accuracy"]
    )
    images = data.test_images.images[:5].permute(0, 3, 1, 2)
    normalised = data.preprocessing.normalise(data.test_images.images[:5])
    torch.testing.assert_close(load("mine")(images), model.eval()(normalised).detach())
    assert "secret" not in Path("mine/config.yaml").read_text()
    for command in ("report mine", "export mine --to torch-export", "compare mine mine"):
        assert run_command(*command.split()).code == 0, command
    with pytest.raises(UsageError, match="mine has a model"):
        save(model, data, "mine")
