import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import classifier, fitted, same, shapes_data, weights

from cifar_lit.errors import Failure
from cifar_lit.files import PART
from cifar_lit.training.checkpoint import AtomicCheckpointIO, RunCheckpoint, best_checkpoint, last_checkpoint, read_checkpoint

CONTENT = {"state_dict": OrderedDict(weight=torch.arange(5000.0)), "epoch": 3, "hyper_parameters": {"lr": 0.1, "name": "x"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, path)
    return path


def test_what_is_written_is_read_back_and_nothing_lies_beside_it(checkpoint: Path) -> None:
    found = AtomicCheckpointIO().load_checkpoint(checkpoint)
    assert torch.equal(found["state_dict"]["weight"], CONTENT["state_dict"]["weight"])  # type: ignore[index]
    assert (found["epoch"], found["hyper_parameters"]) == (3, {"lr": 0.1, "name": "x"})
    assert [file.name for file in checkpoint.parent.iterdir()] == ["last.ckpt"]


def failing_save(*_: Any) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nmore of it")


def half_a_file(content: Any, file: Any) -> None:
    file.write(b"half of it")
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize(("save", "reason"), [(failing_save, "unexpected pos"), (half_a_file, "No space left on device")])
def test_a_write_that_fails_leaves_the_old_checkpoint_and_no_part(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, save: Any, reason: str
) -> None:
    before = checkpoint.read_bytes()
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(Failure, match=f"cannot write .*last.ckpt: .*{reason}.*Free some space") as failed:
        AtomicCheckpointIO().save_checkpoint(CONTENT, checkpoint)
    assert "\n" not in str(failed.value)
    assert checkpoint.read_bytes() == before
    assert [file.name for file in checkpoint.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk_is_told_in_one_line(checkpoint: Path) -> None:
    before = checkpoint.read_bytes()
    checkpoint.with_name("last.ckpt" + PART).symlink_to("/dev/full")
    with pytest.raises(Failure, match=r"cannot write .*Free some space") as failed:
        AtomicCheckpointIO().save_checkpoint(CONTENT, checkpoint)
    assert "\n" not in str(failed.value)
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.9, 0.999])
def test_a_checkpoint_that_is_cut_short_is_refused(checkpoint: Path, kept: float) -> None:
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(Failure, match="damaged") as failed:
        read_checkpoint(checkpoint)
    assert "\n" not in str(failed.value)


def test_an_empty_file_is_refused(checkpoint: Path) -> None:
    checkpoint.write_bytes(b"")
    with pytest.raises(Failure, match="the file is empty"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("position", [0, 1, 200, -30])
def test_damage_to_the_archives_structure_is_refused(checkpoint: Path, position: int) -> None:
    content = bytearray(checkpoint.read_bytes())
    content[position] ^= 0xFF
    content[position + 1] ^= 0xFF
    checkpoint.write_bytes(bytes(content))
    with pytest.raises(Failure, match="damaged"):
        read_checkpoint(checkpoint)


def test_a_file_of_another_kind_is_called_damaged_and_not_dangerous(tmp_path: Path) -> None:
    for content in (b"hello, world\n" * 50, b"\x89PNG\r\n\x1a\n" + bytes(500)):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(Failure, match="damaged") as failed:
            read_checkpoint(tmp_path / "other")
        assert "execute code" not in str(failed.value)


def test_no_noise_gets_past_the_one_line(tmp_path: Path, checkpoint: Path) -> None:
    noise = random.Random(0)
    content = bytearray(checkpoint.read_bytes()[:4000])
    for number in range(150):
        for _ in range(3):
            content[noise.randrange(len(content))] = noise.randrange(256)
        (tmp_path / "noise").write_bytes(noise.randbytes(300) if number % 2 else bytes(content))
        with pytest.raises(Failure) as failed:
            read_checkpoint(tmp_path / "noise")
        assert "\n" not in str(failed.value)


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_checkpoint_that_would_execute_code_is_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_zip: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "extra": Gadget()}, "bad.ckpt", _use_new_zipfile_serialization=as_zip)
    Path("plain.ckpt").write_bytes(pickle.dumps(Gadget(), protocol=2))
    for name in ("bad.ckpt", "plain.ckpt"):
        with pytest.raises(Failure, match="would execute code"):
            read_checkpoint(Path(name))
    Path("new.ckpt").write_bytes(pickle.dumps(Gadget(), protocol=5))  # an instruction that torch does not read at all
    with pytest.raises(Failure, match="no checkpoint"):
        read_checkpoint(Path("new.ckpt"))
    assert not Path("executed").exists()


def test_a_pickled_module_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "net.pt")
    with pytest.raises(Failure, match="would execute code"):
        read_checkpoint(tmp_path / "net.pt")


@pytest.mark.parametrize("content", [{"weight": torch.zeros(2)}, [1, 2], torch.zeros(3)])
def test_what_holds_no_state_dict_is_no_checkpoint(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "own.pt")
    with pytest.raises(Failure, match="no Lightning checkpoint"):
        read_checkpoint(tmp_path / "own.pt")


def test_a_missing_checkpoint_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"there is no checkpoint .*none\.ckpt"):
        read_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(Failure, match="damaged"):
        read_checkpoint(tmp_path)


def saving(folder: Path) -> list[RunCheckpoint]:
    callbacks = [best_checkpoint(), last_checkpoint()]
    for callback in callbacks:
        callback.dirpath = str(folder)
    return callbacks  # type: ignore[return-value]


def test_the_best_is_of_the_epoch_with_the_highest_accuracy_and_the_last_of_the_last(tmp_path: Path) -> None:
    scores = {}
    model = classifier(net="shapenet", lr=0.3, momentum=0.9)
    after_validation = model.on_validation_epoch_end

    def noted() -> None:
        after_validation()
        assert model.score is not None
        scores[model.current_epoch] = (model.score.accuracy, weights(model))

    model.on_validation_epoch_end = noted  # type: ignore[method-assign]
    best, last = saving(tmp_path)
    fitted(model, shapes_data(), best, last, enable_checkpointing=True, max_epochs=6)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    winner = max(scores, key=lambda epoch: (scores[epoch][0], -epoch))
    assert len({accuracy for accuracy, _ in scores.values()}) > 1
    kept, final = read_checkpoint(tmp_path / "best.ckpt"), read_checkpoint(tmp_path / "last.ckpt")
    assert kept["epoch"] == winner
    assert same(kept["state_dict"], scores[winner][1])
    assert final["epoch"] == 5
    assert read_checkpoint(tmp_path / "previous.ckpt")["epoch"] == 4
    assert same(final["state_dict"], weights(model))
    assert kept["cifar_lit"]["score"]["accuracy"] == scores[winner][0]


def test_a_moved_run_still_knows_its_best_checkpoint(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    fitted(classifier(), shapes_data(), *saving(before), enable_checkpointing=True, max_epochs=1)
    before.rename(after)
    best, last = saving(after)
    fitted(classifier(), shapes_data(), best, last, enable_checkpointing=True, max_epochs=2, resume=after / "last.ckpt")
    assert best.best_model_path == str(after / "best.ckpt")
    assert best.current_score is not None
    assert list(best.best_k_models) == [str(after / "best.ckpt")]
    assert not before.exists()
    assert sorted(file.name for file in after.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
