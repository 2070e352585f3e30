"""`export --to hub` writes a repository that the hub and this program can read, and `hf://` loads one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from contract.command_line import assert_refused, metrics_of, run_command

from cifar_lit import load
from cifar_lit.base.errors import Failure
from cifar_lit.extras.hub import FILES

hub = pytest.importorskip("huggingface_hub", reason="pip install -e '.[hub]'")


@pytest.fixture(autouse=True)
def here(working_folder: Path) -> None:
    """Run each test in its own working folder."""


def test_the_folder_has_the_weights_and_a_card_that_the_hub_can_read(run_dir: Path) -> None:
    answer = run_command("export", run_dir, "--to", "hub", "out", "--license", "cc-by-4.0")
    assert answer.code == 0 and "  hf upload USER/NAME out" in answer.lines, answer.err
    assert {path.name for path in Path("out").iterdir()} == {*FILES}
    assert Path("out/model.safetensors").read_bytes() == (run_dir / "model.safetensors").read_bytes()
    metrics, card = metrics_of(run_dir), hub.ModelCard.load("out/README.md")
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "cc-by-4.0", "cifar-lit", "image-classification"
    )  # fmt: skip
    test = metrics["test"]
    assert f"Of {test['images']} test images, {100 * test['accuracy']:.2f} % are classified correctly (95" in card.text
    assert f"{100 * test['interval'][0]:.2f} to {100 * test['interval'][1]:.2f} %)." in card.text
    for name, accuracy in test["per_class"].items():
        assert f"| {name} | {100 * accuracy:.2f} % |" in card.text
    assert f"| {metrics['train_seconds']:,.1f} s |" in card.text and "The weights: cc-by-4.0." in card.text


def test_text_of_a_run_is_no_html_in_the_card(run_dir: Path) -> None:
    run = Path(shutil.copytree(run_dir, "run-1"))
    (run / "metrics.json").write_text(json.dumps({**metrics_of(run_dir), "recipe": "<img src=x>"}))
    assert run_command("export", run, "--to", "hub", "out", "--license", "<b>").code == 0
    front, _, body = Path("out/README.md").read_text().removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["license"] == "<b>"
    assert "# &lt;img src=x&gt; on shapes" in body and "weights: &lt;b&gt;" in body


def test_an_existing_file_is_kept_and_a_run_without_a_test_has_no_card(run_dir: Path) -> None:
    Path("out").mkdir()
    Path("out/README.md").symlink_to("elsewhere")
    assert_refused(run_command("export", run_dir, "--to", "hub", "out"), 2, "out/README.md exists: name another folder")
    assert [path.name for path in Path("out").iterdir()] == ["README.md"] and not Path("elsewhere").exists()
    run = Path(shutil.copytree(run_dir, "run-1"))
    (run / "metrics.json").write_text(json.dumps({**metrics_of(run_dir), "test": None}))
    assert_refused(run_command("export", run, "--to", "hub", "out-2"), 2, "run-1 has no test results for a model card")


def test_a_model_of_the_hub_is_one_file_of_a_revision_whose_commit_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = Path("cache/0123456789abcdef")
    commit.mkdir(parents=True)
    shutil.copy(run_dir / "model.safetensors", commit)
    requests = []

    def download(repository: str, **settings: object) -> str:
        requests.append({"repository": repository, **settings})
        return str(commit)

    monkeypatch.setattr(hub, "snapshot_download", download)
    for name, revision in (("hf://ada/net", None), ("hf://ada/net@v1.0", "v1.0")):
        assert load(name).classes == load(run_dir).classes
        assert capsys.readouterr().err == f"{name} is hf://ada/net@{commit.name}\n"
        only = {"repository": "ada/net", "revision": revision, "allow_patterns": ["model.safetensors"]}
        assert requests.pop() == only


def test_what_the_hub_refuses_and_a_missing_package_are_explained_in_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hf://", "hf://ada/../net", "hf://ada/net/file", "hf://a b/c"):
        answer = run_command("classify", name, "picture.png")
        assert_refused(answer, 1, f"{name} cannot be loaded (HFValidationError: ", "check the name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert load(run_dir).classes
    text = r"hf:// needs missing packages \(huggingface_hub\): pip install"
    with pytest.raises(Failure, match=text):
        load("hf://ada/net")
