"""The command line. Importing it is light; torch and Lightning come with the command that needs them."""

from cifar_lit.cli.main import main

__all__ = ["main"]
