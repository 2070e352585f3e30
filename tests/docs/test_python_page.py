"""docs/python.md: run the examples of the features under a plain Trainer."""

import re

from doc_pages import Page

from cifar_lit.features import FEATURES, feature_class

PAGE = Page("python.md")


def test_every_feature_has_an_example_that_trains() -> None:
    examples = PAGE.section("Features")
    text = "\n".join(block.text for block in examples)
    assert [name for name in FEATURES if not re.search(rf"\b{feature_class(name).__name__}\(", text)] == []
    PAGE.follow(examples)
