"""The reference is that of the program, and the site's table of contents is complete."""

import re
import sys
from importlib.metadata import version

import pytest
from contract.command_line import ROOT
from doc_pages import DOCS

from cifar_lit.features import FEATURES, feature_settings
from cifar_lit.training.optimizers import OPTIMIZERS

sys.path.append(str(DOCS / "reference"))

import generated

PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md") if "_build" not in page.parts)
BLOCKS = [block for page in PAGES for block in generated.BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))]
WRITE = "run python docs/reference/generated.py"
LOCKED = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.lock.txt").read_text(), re.MULTILINE))


def contents() -> list[str]:
    return [page for pages in generated.sections((DOCS / "index.md").read_text()).values() for page in pages]


@pytest.mark.parametrize("page", PAGES)
def test_the_index_lists_every_page_once(page: str) -> None:
    assert contents().count(page) == (page != "index.md"), f"add {page} to a section of docs/index.md"


def test_the_index_lists_only_pages_that_exist() -> None:
    assert [page for page in contents() if not (DOCS / page).is_file()] == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block[2]} {block[3]}".strip())
def test_the_reference_is_current(block: re.Match[str]) -> None:
    packages = ("lightning", "jsonargparse")
    if block[2] in ("command", "settings") and (
        sys.version_info[:2] != (3, 11) or any(version(name) != LOCKED[name] for name in packages)
    ):
        pytest.skip("the texts of another version")
    assert generated.filled_in(block[0]) == block[0], WRITE
    lines = block[0].splitlines()[2:]
    undescribed = [line for line in lines[2:] if line.endswith(" |  |")]
    assert len(lines) > 2
    assert undescribed == [], "describe it in the docstring"


def test_pages_have_a_block_for_each_command_and_class() -> None:
    commands = {block[3] for block in BLOCKS if block[2] == "command"}
    listed = set(re.findall(r"^  ([a-z]+)  ", generated.overview(), re.MULTILINE))
    assert listed - commands == {"fit", "train", "validate", "test", "predict"}


def test_the_site_has_directives_where_the_clone_has_tables() -> None:
    page = (DOCS / "reference/python-api.md").read_text(encoding="utf-8")
    site = generated.filled_in(page, site=True)
    assert "| `predict(images, top, reject, coverage)` | " in page and "| `predict(" not in site
    assert "```{eval-rst}\n.. autoclass:: cifar_lit.ImageData\n   :members: \n```" in site


def test_a_setting_has_one_default() -> None:
    text = generated.optimizers()
    assert re.search(r"`--model.optimizer_options.head_lr` \| `float \\\| None` \|  \| .* Default: lr\. \|", text)
    trainer = generated.settings("lightning.pytorch.Trainer", "trainer").splitlines()[2:]
    defaults = [line for line in trainer if line.split(" | ")[2].strip("| ") and "Default: " in line]
    assert len(trainer) > 30 and defaults == []


def test_every_feature_and_optimizer_has_a_table_of_its_settings() -> None:
    features, optimizers = generated.features(), generated.optimizers()
    assert [name for name in FEATURES if f"### {name}\n" not in features] == []
    settings = [setting for name in FEATURES for setting in feature_settings(name)]
    assert [name for name in settings if f"| `--{name}` |" not in features] == []
    assert "| `--weight_average.decay` | `float` | required |" in features
    assert [name for name in OPTIMIZERS if f"### {name}\n" not in optimizers] == []
