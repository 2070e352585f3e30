"""A `python3` for scripts that start many processes: each is a fork of a server with all imports done.

`python forked_python.py SOCKET` is the server. `CLIENT` is the program that a script starts as `python3`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

# Arguments, working folder, environment, stdin, stdout and stderr go to the server, and its answer is the exit code.
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    message = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [message], [0, 1, 2])
    sys.exit(int(server.recv(9) or 1))
"""


def serve(listener: socket.socket) -> None:
    """Fork a process for each client."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes processes that have ended
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            message, descriptors, _, _ = socket.recv_fds(client, 1 << 18, 3)
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
                os.close(descriptor)
            sys.stdout, sys.stderr = (open(target, "w", closefd=False) for target in (1, 2))  # noqa: SIM115
            code = run(*json.loads(message))
            sys.stdout.flush()
            sys.stderr.flush()
            client.send(str(code).encode())
            os._exit(code)
        client.close()


def run(argv: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run `python3 -m MODULE …` or `python3 FILE …` in this process, and return the exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = argv[0]  # for further processes
    place = 2 if argv[1] == "-m" else 1
    sys.argv = argv[place:]
    try:
        if place == 2:
            runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(argv[1]).resolve().parent))
            runpy.run_path(argv[1], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def write_cifar(root: Path, reader: Any, labels: str, per_file: int) -> None:
    """Write random images into the files of a CIFAR, and replace the checksums of torchvision's `reader` by theirs."""
    import hashlib
    import pickle

    import numpy as np

    def write(name: str, content: Any) -> str:
        packed = pickle.dumps(content)
        (folder / name).write_bytes(packed)
        return hashlib.md5(packed).hexdigest()

    folder, random = root / reader.base_folder, np.random.default_rng(0)
    folder.mkdir(parents=True)
    classes = 100 if "100" in reader.base_folder else 10
    for part in ("train_list", "test_list"):
        pixels = (random.integers(256, size=(per_file, 3072), dtype=np.uint8) for _ in getattr(reader, part))
        entries = zip(getattr(reader, part), pixels, strict=True)
        content = {labels: [number % classes for number in range(per_file)]}
        setattr(reader, part, [[name, write(name, {"data": data, **content})] for (name, _), data in entries])
    names = {reader.meta["key"]: [f"class {number}" for number in range(classes)]}
    reader.meta = {**reader.meta, "md5": write(reader.meta["filename"], names)}


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        from cifar_lit.cli.quiet import quieten

        quieten()
        import torch
        from torchvision import datasets

        import cifar_lit.bench.recipe  # noqa: F401
        import cifar_lit.cli.main  # noqa: F401

        torch.set_num_threads(1)  # a fork keeps only one
        for reader, labels in ((datasets.CIFAR10, "labels"), (datasets.CIFAR100, "fine_labels")):
            write_cifar(Path(sys.argv[2]), reader, labels, per_file=20)
        listener.listen()
        serve(listener)
