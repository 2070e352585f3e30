"""The package works without what Windows and macOS lack, and with their encodings and file names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from contract.command_line import RECIPE, environment, run_process
from PIL import Image

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
lines += [f"{command} --help" for command in OWN]
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
    program = "from cifar_lit.base.text import *; accept_any_encoding(); say('2 × 3 岩\\udc80'); note('·')"
    answer = run_process([sys.executable, "-c", program], Path.cwd(), PYTHONIOENCODING="ascii")
    assert (answer.out, answer.err) == ("2 \\xd7 3 \\u5ca9\\udc80\n", "\\xb7\n")
