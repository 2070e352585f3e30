"""`cifar-lit review`: the images it shows, decisions over HTTP, the table it writes, and the training that takes it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from contract.command_line import SMALL, Answer, assert_refused, config_of, draw_folder, rows_of, run_command
from inference.small_nets import write_net

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.settings import Split

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")
from starlette.testclient import TestClient

from cifar_lit.extras.web import Server
from cifar_lit.inference.logits import FEATURES, OUT_OF_FOLD
from cifar_lit.inference.model_file import ModelCard, load_model_file, save_weights
from cifar_lit.runs.label_errors import (
    list_training_labels,
    listed_images,
    missing_list,
    rank_labels,
    write_list,
)

CLASSES = ["cat", "dog", "owl"]
Visit = Callable[[TestClient], object]


@pytest.fixture(autouse=True)
def in_working_folder(working_folder: Path) -> None:
    """Run each test in its own working folder."""


@pytest.fixture
def review(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Return review(visit, *words): run the command, and in place of its server `visit(client)`."""

    def run(visit: Visit, *words: object, code: int = 0) -> Answer:
        def serve(server: Server, sockets: object) -> None:
            root = server.config.app.routes[0].path  # type: ignore[union-attr]
            visit(TestClient(server.config.app, f"http://localhost{root}/", raise_server_exceptions=False))  # type: ignore[arg-type]

        monkeypatch.setattr(Server, "run", serve)
        answer = run_command("review", *words, "--port", "0")
        assert answer.code == code, answer.err
        return answer

    return run


def write_run(folder: str, **data: object) -> Path:
    """Write a run with random weights on images of 16 × 16 pixels and three classes."""
    run = write_net(Path(folder), "lenet", side=16, classes=CLASSES)
    settings = {"dataset": "folder", "images": {"image_size": 16}, "loading": {"cache_dir": "cache"}, **data}
    (run / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    return run


def decisions(*made: tuple[object, str, str | None]) -> Visit:
    """Return a visit that decides about images, by the names in the list of the page."""

    def visit(client: TestClient) -> None:
        names = [image["name"] for image in client.get("images").json()["images"]]
        for name, action, label in made:
            body = {"item": names.index(str(name)), "action": action, "label": label}
            assert client.post("decide", json=body).status_code == 200

    return visit


def exported(run: Path, *words: object) -> list[dict[str, str]]:
    answer = run_command("review", run, "--export", *words)
    assert answer.code == 0, answer.err
    return rows_of(run / "labels-reviewed.csv")


def reviewed(run: Path, **changes: object) -> ImageData:
    """Return the data of a training with the reviewed labels."""
    return ImageData(**{**config_of(run)["data"], "root": str(run / "labels-reviewed.csv"), **changes})


@pytest.mark.parametrize("layout", ["parts", "classes", "table", "no test"])
def test_a_training_takes_the_table_with_the_split_of_the_run(layout: str, review: Callable[..., Answer]) -> None:
    parts = {"parts": ("train/", "val/", "test/"), "no test": ("train/", "val/")}.get(layout, ("",))
    draw_folder(Path("animals"), {f"{part}{name}": 8 for part in parts for name in CLASSES})
    for number, file in enumerate(sorted(Path("animals").rglob("*.png"))):
        file.rename(file.with_stem(f"{number}"))  # no name twice
    before = sorted(path.read_bytes() for path in Path("animals").rglob("*.png"))
    root, data = "animals", {}
    if layout == "table":
        lines = [f"{path.relative_to('animals')},{path.parent.name}" for path in Path("animals").rglob("*.png")]
        cells = [f"{line},{number},{number % 2}" for number, line in enumerate(lines)]
        Path("animals/labels.csv").write_text("\n".join(["filename,breed,herd,camera", *cells]))
        root = "animals/labels.csv"
        data = {"images": {"image_size": 16, "groups": "breed"}, "split": {"group": "herd"}}
    run = write_run("runs/folder-1", root=root, val_size=6, **data)
    plain = ImageData(**config_of(run)["data"])
    names, (train, val) = plain.train_images.names, plain.split
    changed, kept, dropped, skipped = (Path("animals", names[row]).absolute() for row in train[[0, 1, 2, 3]])
    changed_val = Path("animals", names[val[0]]).absolute()
    review(
        decisions(
            (changed.name, "relabel", "owl"), (kept.name, "keep", None), (dropped.name, "drop", None),
            (skipped.name, "skip", None), (changed_val.name, "drop", None), (changed_val.name, "relabel", "owl"),
        ), run,
    )  # fmt: skip
    rows = {row["path"]: row for row in rows_of(run / "labels-reviewed.csv")}
    count = len({*names, *(plain.test_images.names or ())})
    assert len(rows) == count - 1 and str(dropped) not in rows
    assert [rows[str(path)]["reviewed"] == "" for path in (changed, kept, skipped)] == [False, False, True]
    assert (rows[str(changed)]["label"], rows[str(changed)]["original_label"]) == ("owl", changed.parent.name)
    assert rows[str(kept)]["label"] == kept.parent.name
    if layout == "table":
        assert all(row["camera"] == str(int(row["herd"]) % 2) for row in rows.values())
        assert {row["breed"] for row in rows.values()} == {*CLASSES}

    again = reviewed(run)
    shown = again.train_images.names
    assert shown is not None
    for part, rows_before, rows_after in zip(("train", "val"), plain.split, again.split, strict=True):
        paths = {str(Path("animals", names[row]).absolute()) for row in rows_before} - {str(dropped)}
        assert {shown[row] for row in rows_after} == paths, part
    tests = {str(Path("animals", name).absolute()) for name in plain.test_images.names or ()}
    assert {*(again.test_images.names or ())} == tests
    labels = dict(zip(shown, again.train_images.labels.tolist(), strict=True))
    assert labels[str(changed)] == labels[str(changed_val)] == 2
    assert sorted(path.read_bytes() for path in Path("animals").rglob("*.png")) == before


def test_several_labels_are_switched_and_a_training_takes_them(review: Callable[..., Answer]) -> None:
    draw_folder(Path("animals"), {"": 12})
    texts = ["cat|dog", "", "owl", "dog"] * 3
    lines = [f"{number}.png,{text},{'test' if number > 8 else 'train'}" for number, text in enumerate(texts)]
    Path("animals/labels.csv").write_text("\n".join(["path,label,split", *lines]))
    run = write_run("runs/small-1", root="animals/labels.csv", val_size=2)
    card = load_model_file(run)
    save_weights(run / "model.safetensors", card.net.state_dict(), replace(card.card, thresholds=[0.0, 1.0, 0.0]))
    data = ImageData(**config_of(run)["data"])
    rows = torch.arange(len(data.train_images))
    values = torch.full((len(rows), 3), 0.5)
    place = data.train_images.names.index("0.png")
    values[place] = torch.tensor([0.1, 0.9, 0.8])  # cat is surplus, owl is missing
    np.save(run / OUT_OF_FOLD, values.numpy())
    np.save(run / FEATURES, torch.randn(len(rows), 4).numpy())
    list_training_labels(run, data.train_images, data.parts.part_names())

    def visit(client: TestClient) -> None:
        answer = client.get("images").json()
        assert answer["several"] and answer["suspects"] == 1 and len(answer["images"]) == len(rows)
        shown = answer["images"][0]
        assert (shown["name"], shown["label"], shown["predicted"]) == ("0.png", "cat|dog", "cat|owl")
        assert {label for _, label in client.get("image/0").json()["nearest"]} <= {"cat|dog", "", "owl", "dog"}
        refused = client.post("decide", json={"item": 0, "action": "relabel", "label": "dog|\t"})
        assert refused.status_code == 422
        body = {"item": 0, "action": "relabel", "label": "dog|owl|hen"}
        assert client.post("decide", json=body).json() == {"action": "relabel", "now": "dog|owl|hen"}
        assert client.get("images").json()["classes"] == ["cat", "dog", "owl", "hen"]

    answer = review(visit, run)
    assert answer.lines[-1].endswith('labels-reviewed.csv --data.separator "|"')
    again = reviewed(run).train_images
    assert again.classes == ("cat", "dog", "hen", "owl")
    own = {Path(name).name: again.label_text(row) for row, name in enumerate(again.names)}
    assert own["0.png"] == "dog|hen|owl" and own["1.png"] == "" and own["4.png"] == "cat|dog"


def test_unknown_labels_stay_unknown_until_their_image_is_reviewed(review: Callable[..., Answer]) -> None:
    draw_folder(Path("animals"), {"": 12})
    lines = [f"{number}.png,{number % 2},{['', -1, 0, 1][number % 4]},1" for number in range(12)]
    Path("animals/labels.csv").write_text("\n".join(["path,cat,dog,owl", *lines]))
    run = write_run("runs/small-1", root="animals/labels.csv", val_size=2)
    card = load_model_file(run)
    save_weights(run / "model.safetensors", card.net.state_dict(), replace(card.card, thresholds=[0.5] * 3))
    review(decisions(("0.png", "relabel", "owl")), run)
    again = reviewed(run)
    found = {
        Path(name).stem: row for name, row in zip(again.train_images.names, again.train_images.labels, strict=True)
    }
    assert found.pop("0").tolist() == [0, 0, 1]
    assert len(found) > 6
    for name, row in found.items():
        assert row.tolist() == [int(name) % 2, [-1, -1, 0, 1][int(name) % 4], 1], name


def test_several_labels_of_drawn_images_are_not_reviewed() -> None:
    run = write_run(
        "runs/small-1", dataset="shapes", images={"figures": 2, "count": 30, "image_size": 16, "num_classes": 3}
    )
    card = ModelCard("lenet", 1.0, [3, 16, 16], ["circle", "square", "triangle"], [0.5] * 3, [0.25] * 3)
    save_weights(run / "model.safetensors", load_model_file(run).net.state_dict(), card)
    line = "review corrects several labels of your own pictures, and shapes has none"
    assert_refused(run_command("review", run, "--export"), 2, line)


def test_a_class_with_a_vertical_bar_stays_one_class(review: Callable[..., Answer]) -> None:
    draw_folder(Path("animals"), {"cat|dog": 8, "owl": 8, "cat": 8})
    run = write_net(Path("runs/small-1"), "lenet", side=16, classes=["cat", "cat|dog", "owl"])
    settings = {"dataset": "folder", "root": "animals", "images": {"image_size": 16}, "loading": {"cache_dir": "cache"}}
    (run / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    answer = review(lambda client: None, run)
    assert answer.lines[-1].endswith('labels-reviewed.csv --data.separator ""')
    assert reviewed(run, images={"image_size": 16, "separator": ""}).classes == ("cat", "cat|dog", "owl")
    exported(run)


def test_a_cross_validation_keeps_the_test_images_of_its_data_set_apart() -> None:
    for part in ("train", "test"):
        draw_folder(Path("animals", part), {"cat": 4, "dog": 4, "owl": 4})
    sides = [row["split"] for row in exported(write_run("runs/small-1", root="animals", split={"folds": 2}))]
    assert (sides.count("train"), sides.count("test")) == (12, 12)


def test_a_cross_validation_is_reviewed_by_its_out_of_fold_predictions(review: Callable[..., Answer]) -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    lines = [f"{name}/{number}.png,{name},{number // 2}" for name in CLASSES for number in range(6)]
    Path("animals/labels.csv").write_text("\n".join(["path,label,herd", *lines]))
    run = write_run("runs/small-1", root="animals/labels.csv", split={"group": "herd", "folds": 2})
    folds = Path("runs/small-folds-1")
    folds.mkdir()
    (folds / "folds.json").write_text(json.dumps({"folds": ["elsewhere/small-1", "elsewhere/small-2"]}))
    probabilities = np.full((18, 3), 0.05, np.float32)
    probabilities[range(18), np.arange(18) // 6] = 0.9
    probabilities[7] = [0.95, 0.02, 0.03]  # the label is dog
    np.save(folds / "probabilities.npy", probabilities)
    data = ImageData(**config_of(run)["data"])
    ranking = rank_labels(data.train_images.labels, torch.tensor(probabilities))
    write_list(folds, listed_images(data.train_images, torch.arange(18), ranking, ["test"] * 18))

    def visit(client: TestClient) -> None:
        answer = client.get("images").json()
        images = answer["images"]
        assert answer["suspects"] == 1
        assert [images[0][key] for key in ("name", "label", "predicted")] == ["1.png", "dog", "cat"]
        assert len(images) == 5 and (folds / "labels-reviewed.csv").exists()  # written at the start
        assert client.post("decide", json={"item": 0, "action": "relabel", "label": "cat"}).status_code == 200

    answer = review(visit, folds, "--limit", "5")
    assert answer.lines[-1] == (
        f"train with them: cifar-lit train --config {run}/config.yaml --data-dir {folds}/labels-reviewed.csv "
        "--data.split.folds 0"
    )
    rows = rows_of(folds / "labels-reviewed.csv")
    assert len(rows) == 18 and "split" not in rows[0]
    assert [row["herd"] for row in rows[:7]] == ["0", "0", "1", "1", "2", "2", "0"]
    with contextlib.chdir(folds):
        exported(Path(), "--data-dir", Path("../../animals/labels.csv"))
    data = reviewed(run, root=str(folds / "labels-reviewed.csv"), split=Split(folds=2, group="herd"))
    assert data.train_images.labels.bincount().tolist() == [7, 5, 6]


def test_a_finetuned_run_is_reviewed_with_what_its_training_has_computed(
    review: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    run = write_run("runs/finetune-1", root="animals")
    images = ImageData(**config_of(run)["data"]).train_images
    probabilities = torch.eye(3)[images.labels] * 0.85 + 0.05
    suspect, twin = (images.labels == 1).nonzero()[2, 0], (images.labels == 0).nonzero()[0, 0]
    probabilities[suspect] = torch.tensor([0.7, 0.2, 0.1])
    features = torch.randn(len(images), 8, generator=torch.Generator().manual_seed(0)).half()
    features[suspect] = features[twin]
    np.save(run / OUT_OF_FOLD, probabilities.numpy())
    np.save(run / FEATURES, features.numpy())
    list_training_labels(run, images, ["train"] * len(images))
    before = (run / "label_errors.csv").read_bytes()
    draw_folder(Path("animals"), {"ant": 9})  # moves all rows; a class that the net does not know

    def visit(client: TestClient) -> None:
        first, second = client.get("images").json()["images"][:2]
        assert (first["name"], first["label"], first["predicted"]) == (Path(images.names[suspect]).name, "dog", "cat")
        assert first["probability"] == pytest.approx(0.7) and second["probability"] == pytest.approx(0.9)
        shown = client.get("image/0").json()
        assert shown["top"][1] == ["dog", pytest.approx(0.2)] and shown["nearest"][0][1] == "cat"

    monkeypatch.delattr("cifar_lit.extras.label.queue.logits_and_embeddings")
    answer = review(visit, run)
    assert (
        "finetune-1 does not know ant, whose images are not used here. To learn: cifar-lit train --config" in answer.err
    )
    assert (run / "label_errors.csv").read_bytes() == before
    assert [row["label"] for row in rows_of(run / "labels-reviewed.csv")].count("ant") == 9


def test_images_of_a_pool_or_a_table_are_labelled_and_trained_on(review: Callable[..., Answer]) -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    draw_folder(Path("pool"), {"new": 3})
    shutil.copy("pool/new/0.png", "pool/a\nb.png")
    Path("pool/new/1.png").write_bytes(b"damaged")
    Path("next.csv").write_text("path,label\npool/new/2.png,\npool/gone.png,cat\npool/new/0.png,dog\n")
    run = write_run("runs/folder-1", root="animals", val_size=0)
    first, last = (str(Path(f"pool/new/{number}.png").absolute()) for number in (0, 2))

    def listed(client: TestClient) -> None:
        assert [image["name"] for image in client.get("images").json()["images"]] == ["2.png", "0.png"]

    review(listed, run, "--pool", "next.csv")
    answer = review(decisions(("0.png", "relabel", "=great heron"), ("2.png", "drop", None)), run, "--pool", "pool")
    assert "left out 2 images: " in answer.err
    answer = run_command("review", run, "--pool", "gone", "--port", "0")
    assert answer.code == 2 and "there are no readable images in gone" in answer.error_lines[-1]
    row = exported(run)[-1]
    assert {**row, "reviewed": ""} == {
        "path": first, "label": "'=great heron", "original_label": "", "reviewed": "", "split": "train"
    }  # fmt: skip
    data = reviewed(run)
    assert first in (data.train_images.names or ()) and last not in (data.train_images.names or ())
    assert list(data.classes) == ["=great heron", "cat", "dog", "owl"]


def test_labels_of_a_built_in_set_are_reviewed_twice(run_dir: Path, review: Callable[..., Answer]) -> None:
    run = Path(shutil.copytree(run_dir, "runs/small-1"))
    plain = ImageData(**config_of(run)["data"])
    first, second = (int(row) for row in plain.split[0][:2])
    answer = review(decisions((first, "relabel", "star"), (second, "drop", None)), run, "--limit", "0")
    assert answer.error_lines[-1] == missing_list(run)  # in the words of the report
    assert_refused(run_command("review", run, "--pool", "pool"), 2, "--pool adds files to your own images")
    assert len(rows_of(run / "labels-reviewed.csv")) == 199
    again = run_command("train", *SMALL, "--epochs", "1", "--data.labels", run / "labels-reviewed.csv")
    assert again.code == 0, again.err
    data = ImageData(**config_of(Path("lightning_logs/small-1"))["data"])
    assert [len(rows) for rows in data.split] == [159, 40]
    assert torch.equal(data.train_images.images[data.split[1]], plain.train_images.images[plain.split[1]])
    rows = exported(Path("lightning_logs/small-1"))
    assert {row["image"] for row in rows} == {*map(str, range(200))} - {str(second)}
    changed = next(row for row in rows if row["image"] == str(first))
    assert (changed["label"], changed["original_label"], changed["reviewed"] == "") == ("star", "star", False)


def test_decisions_are_taken_over_by_a_run_that_started_from_the_weights_of_the_reviewed_one(
    review: Callable[..., Answer],
) -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    first, second = (write_run(f"runs/folder-{number}", root="animals") for number in (1, 2))
    config = yaml.safe_load((second / "config.yaml").read_text())
    (second / "config.yaml").write_text(yaml.safe_dump({**config, "finetune": {"weights": str(first)}}))

    def visit(client: TestClient) -> None:
        for item, action in ((0, "drop"), (1, "keep")):
            client.post("decide", json={"item": item, "action": action})

    review(visit, first)
    gone, kept = (json.loads(line)["image"] for line in (first / "review.jsonl").read_text().splitlines())
    Path(kept).unlink()
    answer = run_command("review", second, "--export")
    assert answer.error_lines[-1] == f"1 decision taken over from {first}/review.jsonl"
    assert gone not in [row["path"] for row in exported(second)] and len(rows_of(second / "labels-reviewed.csv")) == 16
    assert len((second / "review.jsonl").read_text().splitlines()) == 1


def test_photos_added_later_join_the_table_and_move_no_image_to_another_side() -> None:
    draw_folder(Path("animals"), {"cat": 20, "dog": 20, "owl": 20})
    run = write_run("runs/folder-1", root="animals", val_size=12)
    before = {row["path"]: row["split"] for row in exported(run)}
    draw_folder(Path("animals/cat"), {"new": 9})
    data = ImageData(**config_of(run)["data"])
    new_val = {str(Path("animals", (data.train_images.names or ())[row]).absolute()) for row in data.split[1]}
    assert any(before.get(name, "val") != "val" for name in new_val)  # a new training on the folder draws anew
    answer = run_command("review", run, "--export")
    assert answer.error_lines[-1] == f"9 images added to {run}/labels-reviewed.csv, which keeps its split"
    rows = {row["path"]: row for row in rows_of(run / "labels-reviewed.csv")}
    assert len(rows) == 69 and {name: rows[name]["split"] for name in before} == before
    assert not run_command("review", run, "--export").err


def test_decisions_about_images_that_were_moved_are_counted(review: Callable[..., Answer]) -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    run = write_run("runs/folder-1", root="animals")
    names: list[str] = []

    def visit(client: TestClient) -> None:
        names.append(client.get("images").json()["images"][0]["name"])
        client.post("decide", json={"item": 0, "action": "drop"})

    assert "effect" not in review(visit, run).err
    Path("animals").rename("pets")
    answer = run_command("review", run, "--export", "--data-dir", "pets")
    assert answer.code == 0 and "1 decision without effect: this data set has no " in answer.error_lines[0]


# ---- wrong inputs


def test_decisions_that_are_not_valid_and_requests_without_the_token_are_refused(
    run_dir: Path, review: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(run_dir, "runs/small-1"))

    def visit(client: TestClient) -> None:
        good = {"item": 0, "action": "drop"}
        for path in ("/", "/images", "/wrong-token/images"):
            assert client.get(f"http://localhost{path}").status_code == 404
        assert client.get("").status_code == 200
        assert client.post("decide", json=good, headers={"Host": "evil.example"}).status_code == 400
        for name in ("a\u202eb", ""):
            answer = client.post("decide", json={"item": 0, "action": "relabel", "label": name})
            assert (answer.status_code, "a class cannot be called" in answer.json()["error"]) == (422, True)
        assert (run / "review.jsonl").read_text() == ""
        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            answer = client.post("decide", json=good)
        assert (answer.status_code, "not saved (No space left" in answer.json()["error"]) == (507, True)
        assert (run / "review.jsonl").read_text() == "" and "action" not in client.get("images").json()["images"][0]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    review(visit, run)


def test_invalid_inputs_get_one_line(run_dir: Path) -> None:
    run = Path(shutil.copytree(run_dir, "own-1"))
    Path("bare-1").mkdir()
    shutil.copy(run / "model.safetensors", "bare-1")
    assert_refused(run_command("review", "bare-1"), 2, "bare-1 has no config.yaml that names the data: name")
    (run / "review.jsonl").write_text("{}\n")
    assert_refused(run_command("review", "own-1"), 1, "review.jsonl, line 1 is not a decision")
    (run / "folds.json").write_text('{"folds": ["../../elsewhere-1"]}')
    assert_refused(run_command("review", "own-1"), 2, "elsewhere-1: name the folder of a finished run")
