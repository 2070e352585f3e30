"""The package works without what Windows and macOS lack, and with their encodings and file names."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import RECIPE, environment, run_process
from PIL import Image

from cifar_lit import files
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import display_path

# Runs command lines without the modules and functions that Windows lacks and that torch does not need on Linux.
PROGRAM = """
import mmap, os, signal, socket, sys, time
import psutil  # has code of its own for Windows
sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios")))
gone = {
    os: "sysconf fork killpg setsid getuid geteuid sched_getaffinity posix_fadvise set_blocking O_NOFOLLOW O_DIRECTORY "
    "O_NONBLOCK getloadavg fchmod fchown chown statvfs nice",
    signal: "SIGKILL SIGHUP SIGUSR1 SIGPROF SIGALRM setitimer ITIMER_PROF pthread_sigmask SIG_BLOCK SIG_SETMASK",
    time: "clock_gettime CLOCK_BOOTTIME",
    mmap: "MADV_WILLNEED",
    socket: "AF_UNIX",
}
for module, names in gone.items():
    for name in names.split():
        delattr(module, name)
from cifar_lit.cli import main
from cifar_lit.cli.main import OWN
run, image = "lightning_logs/small-1", "picture.png"
lines = ["--help", "recipes", "devices", "train --recipe small.yaml", f"report {run}"]
lines += ["train --recipe small.yaml --seed 4", f"compare {run} lightning_logs/small-2", f"classify {run} {image}"]
lines += [f"{command} --help" for command in OWN] + ["bench recipe --help", "bench devices --help"]
codes = {}
for line in lines:
    try:
        codes[line] = main(line.split())
    except SystemExit as end:
        codes[line] = end.code
print("failed:", [line for line, code in codes.items() if code])
"""


@pytest.fixture(autouse=True)
def in_working_folder(working_folder: Path) -> None:
    Path("small.yaml").write_text(RECIPE.replace("—", "-"), encoding="utf-8")


@pytest.mark.slow
def test_commands_work_without_unix_and_on_consoles_with_an_old_code_page() -> None:
    Image.new("RGB", (16, 16)).save("picture.png")
    old = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(Path.cwd(), **old), capture_output=True)
    out = done.stdout.decode("ascii")
    assert out.splitlines()[-1] == "failed: []", done.stderr.decode("ascii")
    assert re.search(r"test accuracy \d\.\d{4} \\xb7 loss \d\.\d{4} \\xb7 40 images", out)


def test_messages_escape_what_a_console_cannot_show() -> None:
    program = "from cifar_lit.text import *; accept_any_encoding(); say('2 × 3 岩\\udc80'); note('·')"
    answer = run_process([sys.executable, "-c", program], Path.cwd(), PYTHONIOENCODING="ascii")
    assert (answer.out, answer.err) == ("2 \\xd7 3 \\u5ca9\\udc80\n", "\\xb7\n")


# ---- files


def test_files_are_synced_through_a_writable_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to sync a file that is open for reading."""

    def fsync(descriptor: int) -> None:
        if not Path(f"/proc/self/fd/{descriptor}").is_dir():
            os.write(descriptor, b"")  # fails without the right to write

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(Path("a.txt"), "one\ntwo\n")
    assert Path("a.txt").read_bytes() == b"one\ntwo\n"


def test_text_files_have_the_same_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `newline`, Windows would write a carriage return too."""
    write, newlines = Path.write_text, []

    def write_and_record(path: Path, text: str, **settings: Any) -> int:
        newlines.append(settings.get("newline"))
        return write(path, text, **settings)

    monkeypatch.setattr(Path, "write_text", write_and_record)
    write_text(Path("a.txt"), "é\n")
    assert Path("a.txt").read_bytes() == "é\n".encode() and newlines == ["\n"]


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_on_windows_a_file_that_a_virus_scanner_reads_is_replaced_a_moment_later(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    replace = Path.replace
    calls: list[Path] = []

    def busy(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) < 4:
            raise PermissionError(errno.EACCES, "in use")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files, "REPLACE_SECONDS", seconds)
    with nullcontext() if seconds else pytest.raises(PermissionError):
        write_text(Path("a.txt"), "one")
    assert (len(calls), Path("a.txt").exists()) == ((4, True) if seconds else (1, False))
    assert not list(Path().glob("a.txt?*"))  # no partial file


def test_paths_are_printed_with_slashes() -> None:
    assert display_path(Path("lightning_logs", "small-1").absolute()) == "lightning_logs/small-1"
