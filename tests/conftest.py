"""Fixtures for every room; with this file here, tests import `browser`, `stress.…` and `security.…` by their names."""

import pytest
from browser import browser, open_page

__all__ = ["browser", "open_page"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress-json", metavar="DIR", help="write what the stress tests count to files there")
