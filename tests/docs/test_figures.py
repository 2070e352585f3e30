"""Measured figures of the pages and of the recipe headers match their JSON files; a typed one is listed here."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from contract.command_line import ROOT

sys.path.append(str(ROOT / "scripts" / "benchmarks"))

import table

from cifar_lit.errors import UsageError

RESULTS = ROOT / "results"
TABLES = table.read_tables(RESULTS)
INDEXES = [RESULTS / "README.md", RESULTS / "gpu" / "README.md"]
PAGES = [*sorted(ROOT.glob("README*.md")), *INDEXES, *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "cifar_lit" / "recipes").glob("*.yaml"))
UNITS = r"%|×(?! ?\d)|ms\b|s\b|min\b|minutes?\b|seconds?\b|hours?\b|images/s|MB\b|points?\b|times\b|million\b"
UNITS += "|秒|分钟|小时|倍"  # Chinese pages
NUMBER = re.compile(rf"(?<![\w.])\d[\d.,]*(?: … [\d.,]+)? ?(?:{UNITS})|\b(?:tenth|third|fifth|quarter)s?\b")
HEADER_FIELDS = ("Score", "Time", "Hardware", "Date")
# Generated blocks, code and the names of confidence intervals hold no typed figures.
NOT_TYPED = re.compile(
    r"```.*?```|<!-- (results|generated).*?<!-- /\1 -->|<!--.*?-->|`[^`\n]+`"
    r"|95 % (?:confidence |Wilson )?intervals?|95% 置信区间",
    re.DOTALL,
)

AIM = "an aim, not a result"
ARCHIVE = "size of the published archive"
LIMIT = "a limit of the service"
ROUNDED = "rounded; a table has the figure"
RECORD = "published by others"
SETTING = "a setting of the measurement"
EXEMPT: dict[str, dict[str, str]] = {  # page: typed words and the reason
    "README.md": {
        "170 MB": ARCHIVE,
        "about 20 seconds": ROUNDED,
        "2 to 4 minutes": ROUNDED,
        "about 40 seconds": ROUNDED,
        "about 95 %": ROUNDED,
    },
    "README.zh-CN.md": {
        "170 MB": ARCHIVE,
        "大约需要 20 秒": ROUNDED,
        "2 到 4 分钟": ROUNDED,
        "大约需要 40 秒": ROUNDED,
        "约 95%": ROUNDED,
    },
    "docs/first-steps.md": {"170 MB": ARCHIVE},
    "docs/zh/first-steps.md": {"170 MB": ARCHIVE},
    "docs/colab-and-kaggle.md": {"12 hours": LIMIT, "30 hours": LIMIT},
    "docs/zh/colab-and-kaggle.md": {"最多 12 小时": LIMIT, "大约有 30 小时": LIMIT},
    "docs/results.md": {
        "89 % in a quarter": AIM,
        "92 % in half": AIM,
        "93.2 % in one and 93.8 % in": AIM,
        "A share above 100 %": "not a result",
    },
    "docs/cpu-record.md": {"above 77 %": RECORD},
    "docs/method.md": {"220 seconds": "TYPICAL_UNIT of units.py, results/cpu/budget.json"},
    "cifar_lit/recipes/cpu90.yaml": {"20 % of the steps": SETTING},
    "docs/unequal-classes.md": {
        "on 25, 50, 75 and 100 %": "shares of the images, not a result",
    },
    "docs/label-errors.md": {
        "5 % of the labels changed uniformly; 5 % changed": SETTING,
        "20 % of the cats": SETTING,
        "first 5 % of the list": SETTING,
        "5 % of the labels were changed": SETTING,
        "first 5 % of the images. New": SETTING,
        "repair 80 % of the planted errors with the first 5 %": AIM,
    },
    "docs/lab-notebook.md": {
        "89.4 %": "results/cpu/scores.json, of a removed method",
        "89.0 %": "results/cpu/scores.json",
        "about 12 %": "a profile of one step",
        "of 91.5 % without": AIM,
        "took 0.77\ntimes": "352.9 s of results/cpu/recipe-laptop91.json, and an epoch of 46.1 s",
    },
    "cifar_lit/recipes/fast94.yaml": {"aims at 94 %": AIM, "94.01 %": RECORD, "with 10 % held out": SETTING},
    "cifar_lit/recipes/fast95.yaml": {"aims at 95 %": AIM},
    "cifar_lit/recipes/fast96.yaml": {"aims at 96 %": AIM},
    "cifar_lit/recipes/fast100.yaml": {"aims at 75 %": AIM, "75.19 %": RECORD, "3.50 s": RECORD},
    "cifar_lit/recipes/laptop100.yaml": {"with 10 % held out": SETTING},
    "cifar_lit/recipes/fast97.yaml": {
        "aims at 97 %": AIM,
        "public record of 97 %": "a record that does not exist",
        "94, 95 and 96 %": RECORD,
        "continued to 97 %": AIM,
    },
    "cifar_lit/recipes/resnet18.yaml": {"aims at 95 %": AIM, "95.28 %": RECORD},
    "cifar_lit/recipes/resnet18_c100.yaml": {"aims at 76 %": AIM, "77.54 %": RECORD, "75.61 %": RECORD},
    "cifar_lit/recipes/resnet18_30.yaml": {"95.28 %": RECORD},
    "cifar_lit/recipes/resnet18_30_c100.yaml": {"77.54 %": RECORD},
    "cifar_lit/recipes/wrn28_10.yaml": {"aims at 96 %": AIM, "96.00 %": RECORD, "80.75 %": RECORD},
    "cifar_lit/recipes/wrn28_10_c100.yaml": {"aims at 80 %": AIM, "80.75 %": RECORD},
}


def typed_text(page: Path) -> str:
    """Return the text of a page, or the comments of a recipe, without generated figures and code."""
    text = page.read_text()
    if page.suffix != ".yaml":
        return NOT_TYPED.sub("", text)
    comments = [line.partition("# ")[2] for line in text.splitlines() if "# " in line]
    return "\n".join(line for line in comments if "# File: " not in text or not line.startswith(HEADER_FIELDS))


def test_figures_match_their_files() -> None:
    texts = table.updated_pages(ROOT)
    assert {*PAGES, *RECIPES} <= set(texts)
    stale = [str(page.relative_to(ROOT)) for page, text in texts.items() if text != page.read_text()]
    assert stale == [], "run python scripts/benchmarks/table.py --write"


@pytest.mark.parametrize("key", TABLES)
def test_files_have_the_figures_of_each_table(key: str) -> None:
    text = table.table_text(TABLES[key], RESULTS, ROOT)
    assert key == "gpu" or "](results/" in text  # without a file there is no source


def test_a_page_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results: nonesuch -->\n<!-- /results -->\n")
    with pytest.raises(UsageError, match="nonesuch"):
        table.updated_page(page, TABLES, RESULTS)


def test_the_index_of_results_lists_every_file() -> None:
    index = (RESULTS / "README.md").read_text() + (RESULTS / "gpu" / "README.md").read_text()
    files = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.*") if path.name != "README.md"]
    assert [file for file in sorted(files) if f"`{file}`" not in index] == []


def gpu_files(table_of: table.Table) -> list[str]:
    """Return the file of each figure of a GPU in a table."""
    parts = [part for row in table_of.rows for cell in row for part in cell if isinstance(part, table.Figure)]
    return [part.file for part in parts if part.file.startswith("gpu/")]


def test_figures_of_a_gpu_are_unmeasured_until_their_listed_file_exists() -> None:
    headers = re.findall(r"^# File: +results/(gpu/\S+)\.json$", "\n".join(map(Path.read_text, RECIPES)), re.MULTILINE)
    files = {*headers, *(file for one in TABLES.values() for file in gpu_files(one))}
    missing = {file for file in files if not (RESULTS / f"{file}.json").exists()}
    index = (RESULTS / "gpu" / "README.md").read_text()
    assert [file for file in files if f"`{file}.json`" not in index] == []
    assert ("No file exists so far" in index) == (missing == files)
    for one in TABLES.values():
        text = table.table_text(one, RESULTS, ROOT)
        assert text.count(f"| {one.unmeasured} ") == sum(file in missing for file in gpu_files(one))


def test_an_unmeasured_recipe_gets_the_figures_of_its_file(tmp_path: Path) -> None:
    header = "# fast95 — x\n# Score:    91 %\n# Time:     1 s\n# File:     results/gpu/fast95.json\n"
    assert table.updated_header(header, tmp_path).count("not measured yet") == 2
    (tmp_path / "results/gpu").mkdir(parents=True)
    content = (RESULTS / "cpu/recipe-fast94.json").read_text().replace('"fast94"', '"fast95"')
    (tmp_path / "results/gpu/fast95.json").write_text(content)
    assert "# Score:    93.08 ± 0.20 % (n = 3)" in table.updated_header(header, tmp_path)
    further = json.loads(content)
    for number, run in enumerate(further["recipes"]["fast95"]["runs"]):
        run |= {"accelerator": "cuda", "seconds": 1500 + number, "first": False}
    (tmp_path / "results/gpu/more.json").write_text(json.dumps(further))
    both = f"{header}# File:     results/gpu/more.json\n# Times:    1 s\n"
    times = "# Times:    435.7 s on a CPU with bf16; 1,501 s on a GPU"
    assert times in table.updated_header(both, tmp_path).splitlines()
    values = {"fast95: typical training": (112.5, "s"), "fast95: units": (0.51, "×")}
    units = {"bench": "units", "settings": {"precision": "bf16-mixed"}, "environment": further["environment"]}
    units["headline"] = {
        label: {"n": 5, "median": value, "low": 0.1, "high": 9} for label, (value, _) in values.items()
    }
    units["unit"] = {label: unit for label, (_, unit) in values.items()}
    (tmp_path / "results/gpu/units.json").write_text(json.dumps(units))
    comparable = table.updated_header(f"{both}# File:     results/gpu/units.json\n", tmp_path).splitlines()
    assert "# Time:     112.5 s (n = 5); 0.51 × (n = 5) the tutorial's ten epochs" in comparable
    assert "# Times:    112.5 s on a CPU with bf16; 1,501 s on a GPU" in comparable
    gpu = table.table_text(TABLES["gpu"], tmp_path / "results", tmp_path)
    assert "| `fast95` | 95 % with TTA | 93.08 ± 0.20 % (n = 3) |" in gpu and "| `fast96` | 96 % with TTA | not" in gpu


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_figure_is_typed_by_hand(page: Path) -> None:
    text = typed_text(page)
    for words, reason in EXEMPT.get(str(page.relative_to(ROOT)), {}).items():
        assert words in text and reason, words
        text = text.replace(words, "")
    assert [line for line in text.splitlines() if NUMBER.search(line)] == []
