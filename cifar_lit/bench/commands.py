"""`cifar-lit bench NAME`: the measurements, each a module of this folder that is imported when it is asked for.

A module has `WHAT` (what is measured), `add_arguments(parser)` and `run(settings)`; one that takes names or passes
flags on has `main(words)` in their place.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from cifar_lit.errors import UsageError, nearest

BENCHES = {
    "step": "what the Trainer adds to a recipe's steps: ours against a bare loop that does the same work",
    "input": "our batches against torchvision transforms in a DataLoader with 0 and with 2 workers",
    "devices": "the CPU against each GPU over batch sizes and widths: time an epoch, images/s, speed-up",
    "scaling": "one recipe and global batch on 1, 2, … devices: time, speed-up, accuracy",
    "cold": "from the start of the process to the tested net, and what that time is made of",
    "hand": "a recipe's whole training by a bare loop: its time and accuracy, to be compared with `recipe`",
    "tutorial": "a tutorial's recipe against its hand-written loop, by steps or by whole epochs with validation",
    "serve": "a run's service under load: requests/s, p50 and p99 with 1 and 32 at a time, and its answers to bad inputs",
    "recipe": "seeds of recipes: accuracy with its interval, warm and cold time, memory; plots",
    "export": "a run's net as ONNX, int8 ONNX and torch-export: accuracy, agreement, size and time beside PyTorch",
    "novelty": "ways to tell images that are unlike those of a training: AUROC, false alarms and misses of each",
    "classify": "images/s of `classify` on a folder, and its peak memory, against decoding alone",
    "checkpoint": "what checksum and sync of a checkpoint take, against an epoch",
    "table": "the results in JSON files as Markdown",
    "hostile": "files that want to run code or to take memory: what each gave",
    "profile": "where the time of a recipe's step goes: kernels against idle, or the CPU's operators",
}


def bench(words: list[str]) -> None:
    """Runs the measurement that is named first in `words`; raises UsageError for what is none, or cannot be measured."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: cifar-lit bench NAME [flags]\n")
        for name, what in BENCHES.items():
            print(f"  {name:<10} {what}")
        print("\nEach prints a table; --json FILE writes its figures too. `cifar-lit bench NAME --help` lists its flags.")
        return
    name, rest = words[0], words[1:]
    if name not in BENCHES:
        raise UsageError(f"no measurement is called {name!r}.{nearest(name, BENCHES)} There are {', '.join(BENCHES)}.")
    from cifar_lit.cli.quiet import quieten

    if name == "classify":
        from cifar_lit.cli.classify import share_cores

        share_cores()  # as the command itself does
    quieten()
    module = import_module(f"cifar_lit.bench.{name}")
    if hasattr(module, "main"):
        module.main(rest)
    else:
        _run(name, module, rest)


def _run(name: str, module: Any, words: list[str]) -> None:
    import torch
    from jsonargparse import ArgumentParser

    from cifar_lit.bench.report import make_room
    from cifar_lit.cli.errors import parsed

    parser = ArgumentParser(prog=f"cifar-lit bench {name}", description=module.WHAT, exit_on_error=False, allow_abbrev=False)
    module.add_arguments(parser)
    parser.add_argument("--threads", type=int | None, default=None, help="of torch; as many as it takes if not given")
    parser.add_argument("--json", type=str | None, default=None, help="write the figures to this file too")
    settings = parsed(parser, words)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.json:
        make_room(Path(settings.json))  # rather now than when all is measured
    module.run(settings)
