"""Fixtures for every room; with this file here, tests import `browser` by its name."""

from browser import browser, open_page

__all__ = ["browser", "open_page"]
