"""Follow a page of docs/ as a reader does: write the files of its fenced blocks, and run its commands.

An HTML comment in the line before a block says what it is:

- `<!-- file: NAME -->`: the file NAME, to be written into the working folder;
- `<!-- run -->`: commands, whose trainings get the flags of the page's `<!-- settings: … -->` behind their own;
- `<!-- run: FLAGS -->`: the same with these flags in their place;
- `<!-- python -->`: statements, which see the names of those before them;
- `<!-- trained -->`: statements that use a trained run; test_using_page.py runs them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contract.command_line import ROOT, environment, run_command

DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SCRIPTS = {"scripts/train.py": "train", "scripts/test.py": "test", "scripts/classify.py": "classify"}
TRAINING = ("fit", "train")
STAYS_OPEN = "tensorboard"  # not run, because it does not end
FEWER = {'"count": 20_000': '"count": 400', "max_epochs=4": 'max_epochs=1, accelerator="cpu"'}  # in statements


class Block(NamedTuple):
    """A fenced block. `kind` and `value` come from the comment before it, such as ("file", "my_nets.py")."""

    language: str
    text: str
    kind: str
    value: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a text."""
    found = []
    for match in BLOCK.finditer(text):
        kind, _, value = (match["note"] or "").partition(":")
        found.append(Block(match["language"], match["text"], kind.strip(), value.strip()))
    return found


def sections(page: Path) -> Iterator[tuple[str, str]]:
    """Yield heading and text of each section of a page."""
    for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        yield heading, text


def follow(page: Path, text: str) -> None:
    """Write the files, and run statements and commands in order. Each command must succeed."""
    settings = re.search(r"<!-- settings: (.*) -->", page.read_text())
    names: dict[str, object] = {}
    for block in blocks(text):
        if block.kind == "file":
            Path(block.value).write_text(block.text)
        elif block.kind == "python":
            statements = block.text
            for words, fewer in FEWER.items():
                statements = statements.replace(words, fewer)
            exec(compile(statements, page.name, "exec"), names)
        elif block.kind == "run":
            flags = block.value or (settings[1] if settings else "")
            for words in command_lines(block.text):
                if Path(words[1]).is_file():  # a program of the page
                    subprocess.run([sys.executable, *words[1:]], env=environment(Path.cwd()), check=True)
                else:
                    run(words, shlex.split(flags))


def run(words: list[str], settings: list[str]) -> None:
    """Run a command of a page; a training gets the settings."""
    command, arguments = _command(words)
    if command in TRAINING:
        arguments = [*arguments, *settings]
    answer = run_command(command, *arguments)
    assert answer.code == 0, f"{shlex.join(words)}\n{answer.err}"


def command_lines(text: str) -> list[list[str]]:
    """Return the words of each command, without comments; a backslash continues a line."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words and words[0] != STAYS_OPEN]


def _command(words: list[str]) -> tuple[str, list[str]]:
    """Return the sub-command and the arguments of `python scripts/train.py …` or `cifar-lit …`."""
    if words[0] == "python" and words[1] in SCRIPTS:
        return SCRIPTS[words[1]], words[2:]
    assert words[0] == "cifar-lit", words
    return words[1], words[2:]
