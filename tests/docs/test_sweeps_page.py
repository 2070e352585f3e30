"""docs/sweeps.md: its example runs."""

from pathlib import Path

import pytest
from doc_pages import Page


@pytest.mark.slow
def test_the_example_is_a_sweep_whose_best_recipe_can_be_trained() -> None:
    page = Page("sweeps.md")
    answer, _ = page.follow(page.section("An example"))
    assert "Best of 2 trials" in answer.out
    assert Path("lightning_logs/shapes/best.yaml").is_file()
