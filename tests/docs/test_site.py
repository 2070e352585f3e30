"""The documentation site: its table of contents is complete, and the parts that it generates can be generated."""

import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from contract.command_line import ROOT
from doc_pages import DOCS

sys.path.append(str(DOCS / "reference"))

import generated

PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md") if "_build" not in page.parts)
COMMENTS = [comment for page in PAGES for comment in generated.COMMENT.finditer((DOCS / page).read_text())]


def contents() -> list[str]:
    return [page for pages in generated.sections((DOCS / "index.md").read_text()).values() for page in pages]


@pytest.mark.parametrize("page", PAGES)
def test_the_index_lists_every_page_once(page: str) -> None:
    assert contents().count(page) == (page != "index.md"), f"add {page} to a section of docs/index.md"


def test_the_index_lists_only_pages_that_exist() -> None:
    assert [page for page in contents() if not (DOCS / page).is_file()] == []


@pytest.mark.parametrize("comment", COMMENTS, ids=lambda comment: comment[0][5:-4])
def test_generated_text_has_no_gaps(comment: re.Match[str]) -> None:
    lines = generated.filled_in(comment[0]).splitlines()
    assert len(lines) > 2
    if comment[1] in ("settings", "program", "fields", "schema"):
        undescribed = [line for line in lines[2:] if line.endswith(" |  |")]
        assert undescribed == [], "describe it in the docstring"
    if comment[1] == "api":
        _, path, *_ = comment[2].split()
        assert inspect.getdoc(import_module(path) if "automodule" in comment[2] else generated.imported(path))


def test_settings_are_those_of_the_signature() -> None:
    text = generated.settings("cifar_lit.ImageData", "data")
    assert "| `--data.crop` | `int` | `0` | " in text
    assert "| `--data.root` | `str \\| None` | `null` | " in text


def test_defaults_of_the_trainer_are_ours() -> None:
    text = generated.settings("lightning.pytorch.Trainer", "trainer")
    assert "| `--trainer.max_epochs` | `int \\| None` | `10` | Stop training once" in text


def test_help_of_a_command_leaves_out_the_data_settings() -> None:
    text = generated.command("preview")
    assert "--out FILE.png" in text and "--data.crop" not in text


def test_a_schema_is_listed_with_its_nested_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schema").mkdir()
    score = {"type": ["object", "null"], "properties": {"loss": {"type": "number", "description": "Mean."}}}
    val = {"$ref": "#/$defs/score", "description": "Scores."}
    text = json.dumps({"properties": {"val": val}, "$defs": {"score": score}})
    (tmp_path / "schema/some.json").write_text(text)
    monkeypatch.setattr(generated, "DOCS", tmp_path)
    assert generated.schema("some.json").splitlines()[2:] == [
        "| `val` | object or null | Scores. |",
        "| `val.loss` | number | Mean. |",
    ]


def test_the_site_is_built_by_ci() -> None:
    assert ".ci/docs" in (ROOT / ".ci/run").read_text()
