"""Follow a page of docs/ as a reader does: write the files of its fenced blocks, and run its commands.

An HTML comment in the line before a block says what it is:

- `<!-- file: NAME -->`: the file NAME, to be written into the working folder;
- `<!-- run -->`: commands, whose trainings get the flags of the page's `<!-- settings: … -->` behind their own;
- `<!-- run: FLAGS -->`: the same with these flags in their place;
- `<!-- python -->`: statements, which see the names of those before them on the page;
- `<!-- patch -->`: a change of the package.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contract.command_line import ROOT, Answer, run_command

from cifar_lit import plugins

DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SCRIPTS = {"scripts/train.py": "train", "scripts/test.py": "test", "scripts/classify.py": "classify"}
TRAINING = ("fit", "train")
STAYS_OPEN = "tensorboard"  # not run, because it does not end


class Block(NamedTuple):
    """A fenced block. `kind` and `value` come from the comment before it, such as ("file", "my_nets.py")."""

    language: str
    text: str
    kind: str
    value: str


class Page:
    """A page of docs/."""

    def __init__(self, name: str) -> None:
        self.text = (DOCS / name).read_text()
        settings = re.search(r"<!-- settings: (.*) -->", self.text)
        self.settings = shlex.split(settings[1]) if settings else []

    def section(self, heading: str) -> list[Block]:
        """Return the blocks between `## heading` and the next heading of that level."""
        match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", self.text, re.MULTILINE | re.DOTALL)
        assert match, f"there is no section {heading!r}"
        return list(_blocks(match[1]))

    def blocks(self) -> list[Block]:
        return list(_blocks(self.text))

    def follow(self, blocks: list[Block]) -> list[Answer]:
        """Write the files, and run statements and commands in order. Each command must succeed."""
        answers: list[Answer] = []
        names: dict[str, object] = {}
        for block in blocks:
            if block.kind == "file":
                Path(block.value).write_text(block.text)
            elif block.kind == "python":
                exec(compile(block.text, "page", "exec"), names)
            elif block.kind == "run":
                answers += [self.run(words, block.value) for words in command_lines(block.text)]
        return answers

    def run(self, words: list[str], flags: str = "") -> Answer:
        """Run a command as in a new process: modules that an earlier command allowed are not allowed."""
        command, rest = _command(words)
        settings = shlex.split(flags) if flags else self.settings
        plugins._allowed.clear()
        answer = run_command(command, *rest, *(settings if command in TRAINING else []))
        assert answer.code == 0, f"{shlex.join(words)}\n{answer.err}"
        return answer


def _blocks(text: str) -> Iterator[Block]:
    for match in BLOCK.finditer(text):
        kind, _, value = (match["note"] or "").partition(":")
        yield Block(match["language"], match["text"], kind.strip(), value.strip())


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
