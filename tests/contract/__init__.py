"""Promises to users, tested through the command line; only a few tests import from the package."""
