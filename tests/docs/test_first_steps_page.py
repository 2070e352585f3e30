"""docs/first-steps.md: its statements run in their order, on fewer images and epochs."""

import pytest
from doc_pages import Page


def test_every_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("first-steps.md")
    for words, fewer in (("count=20_000", "count=400"), ("max_epochs=4", 'max_epochs=1, accelerator="cpu"')):
        assert page.text.count(words) == 1
        page.text = page.text.replace(words, fewer)
    page.follow([block for block in page.blocks() if block.language == "python"])
    shape, labels, losses, *_ = capsys.readouterr().out.splitlines()
    assert f"print(images.shape, images.dtype)  # {shape}\n" in page.text
    assert f"# {labels}\n" in page.text
    before, after = map(float, losses.split())
    assert before == pytest.approx(2.3, abs=0.15)
    assert after < before
