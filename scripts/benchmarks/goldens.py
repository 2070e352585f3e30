"""Compare the results of short trainings of every recipe between two checkouts, bit for bit.

    python scripts/benchmarks/goldens.py record  OUT.pt [--tree PATH] [--recipes a,b] [--only KINDS]
    python scripts/benchmarks/goldens.py compare OUT.pt [--tree PATH] [--recipes a,b] [--only KINDS]

It checks a rewrite that must not change any result: `record` before, `compare` after, on one machine with one version
of torch. Trainings run on the CPU in float32, on generated images, for three epochs that end in a smaller batch. There
are three kinds:

- single: one process.
- pair: two gloo processes, with the environment variables of torchrun.
- resumed: killed in the middle of an epoch, after a checkpoint within it, then resumed; equal to `single`.

A checkout is accessed only through its command line (`scripts/train.py`) and the files of its run folders. Each
training is a fork of this process, in which the libraries are imported, but not the checkout. It starts in milliseconds
and leaves no state behind.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import io
import json
import math
import multiprocessing
import os
import platform
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file

if sys.platform == "win32":
    raise SystemExit("goldens.py forks its trainings, which Windows cannot do: run it on Linux or macOS")

KINDS = ("single", "pair", "resumed")
SEEDS = (0, 1)
# Slow imports of a training from outside the checkout.
LIBRARIES = (
    *("lightning.pytorch.cli", "torchmetrics", "torchvision", "torch.utils.tensorboard", "tensorboard.plugins.hparams"),
    *(
        "matplotlib.figure",
        "matplotlib.font_manager",
        "matplotlib.backends.backend_agg",
        "jinja2",
        "rich.progress",
        "rich.table",
    ),
)
# 185 images are 6 batches of 32; the last one has 25, or 7 where some images are held out. The test set has 37.
SHORT = (
    *("--dataset", "shapes", "--data.count", "185", "--batch-size", "32", "--epochs", "3", "--precision", "32-true"),
    *("--accelerator", "cpu", "--trainer.log_every_n_steps", "3"),
)
# Total: 18 steps (126 with lenet). Before it: last checkpoint at step 8, last row of the curves at step 6.
KILLED_AT = 9
# Narrow nets, learning rates for batches of 32, and whitening frozen after the first epoch.
OPTION = "--model.optimizer_options."
WHITENED = ("--model.net_options.widths=[16,32,32]", f"{OPTION}bias_lr", "1.7", f"{OPTION}head_lr", "21")
FAST = (*WHITENED, "--whitening.bias_epochs", "1")
# Further flags of each recipe. A name with a plus is a variant of the recipe before the plus.
FLAGS: dict[str, tuple[str, ...]] = {
    "fashion_cnn": ("--data.image_size", "28", "--data.channels", "1"),
    "fast94": FAST,
    "cpu91": WHITENED,
    "lenet": ("--batch-size", "4"),
    "quickstart": ("--data.val_size", "19"),
    "quickstart+ema": ("--data.val_size", "19", "--weight_average.decay", "0.9", "--trainer.gradient_clip_val", "0.5"),
    "resnet18": ("--data.image_size", "8", "--data.count", "50", "--batch-size", "8", "--lr", "0.01"),
}
SAMPLE = 16_384  # stored elements of a tensor, evenly spaced; the checksum covers all
LEAST = 1e-3  # a larger difference is not rounding
KILLER = '''"""A callback that kills its process after the step given by an environment variable."""

import os
import signal

from lightning.pytorch.callbacks import Callback


class KillAt(Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step >= int(os.environ.get("KILL_AT", "1000000")):
            os.kill(os.getpid(), signal.SIGKILL)
'''


class Broken(Exception):
    """A training that failed. The text is the end of its output."""


def train(tree: Path, folder: Path, words: Sequence[str], variables: dict[str, str], processes: int = 1) -> list[int]:
    """Run the training command `words` of a checkout; return the exit codes (-N for a process killed by signal N).

    Args:
        folder: working folder of the processes, which write `log.txt` there.
        variables: further environment variables.
    """
    variables = dict(variables)
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "goldens"}
        variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    children = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _become(tree, folder, words, {**variables, **own})
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _become(tree: Path, folder: Path, words: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """Turn this forked process into `python TREE/scripts/train.py WORDS`."""
    code = 70
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        os.environ.update(variables)
        sys.path[1:1] = [str(folder)]
        sys.argv = [str(tree / "scripts" / "train.py"), *words]
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def outcome(tree: Path, key: str) -> dict[str, Any]:
    """Train the case `kind/recipe/seed`; return the result of `_read`, or `failed` with the reason."""
    kind, name, seed = key.split("/")
    with tempfile.TemporaryDirectory(prefix="goldens-") as place:
        folder = Path(place)
        (folder / "kill_at.py").write_text(KILLER)
        environment = {"XDG_CACHE_HOME": place, "PYTHONPATH": f"{tree}{os.pathsep}{place}"}
        words = ["--recipe", name.partition("+")[0], *SHORT, *FLAGS.get(name, ()), "--seed", seed, "--logs", place]
        try:
            if kind == "resumed":
                killed = [*words, "--checkpoint-every", "2", "--trainer.callbacks+=kill_at.KillAt"]
                if (codes := train(tree, folder, killed, {**environment, "KILL_AT": str(KILLED_AT)})) != [
                    -signal.SIGKILL
                ]:
                    raise Broken(f"exit {codes} in place of a kill")
                (run,) = (path.parent for path in folder.glob("*/checkpoints"))
                words = ["--resume", str(run), "--trust"]
            if any(codes := train(tree, folder, words, environment, 2 if kind == "pair" else 1)):
                raise Broken(f"exit {codes}")
            (run,) = (path.parent for path in folder.glob("*/metrics.json"))
            return _read(run)
        except (Broken, OSError, KeyError, ValueError) as error:  # files may be missing from the run folder
            return {"failed": f"{error!r}: {(folder / 'log.txt').read_text()[-300:].strip()}"}


def _saved(tree: Path, key: str) -> bytes:
    """Return the outcome of a case as bytes. Tensors sent between processes would use shared memory."""
    buffer = io.BytesIO()
    torch.save(outcome(tree, key), buffer)
    return buffer.getvalue()


def _read(run: Path) -> dict[str, Any]:
    """Return checksums and samples of a run's tensors, the values of its scores, and the rows of its curves."""
    tensors = {f"model/{name}": tensor for name, tensor in load_file(run / "model.safetensors").items()}
    last = torch.load(run / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    tensors |= {
        f"last/{name}": tensor for name, tensor in last["state_dict"].items() if isinstance(tensor, torch.Tensor)
    }
    metrics = json.loads((run / "metrics.json").read_text())
    with (run / "metrics.csv").open(newline="") as file:
        rows = [{column: float(text) for column, text in row.items() if text} for row in csv.DictReader(file)]
    return {
        "sha256": {name: _checksum(tensor) for name, tensor in tensors.items()},
        "tensors": {
            name: tensor.flatten()[:: max(1, tensor.numel() // SAMPLE)].clone() for name, tensor in tensors.items()
        },
        "scores": {
            f"{part}/{name}": value for part in ("val", "test") for name, value in _figures(metrics[part] or {})
        },
        "curves": {f"{number}/{column}": value for number, row in enumerate(rows) for column, value in row.items()},
    }


def _checksum(tensor: torch.Tensor) -> str:
    """Return the sha256 of a tensor's dtype, shape and elements, independent of its memory layout."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} "
    return hashlib.sha256(head.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _figures(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a nested part of metrics.json with their names."""
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", figure) for inner, figure in _figures(value))
        elif isinstance(value, int | float):
            yield name, value


def verdict(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return `identical`, `equal up to …` with the largest absolute differences, or `different: …`."""
    for when, case in (("before", old), ("now", new)):
        if "failed" in case:
            return f"different: failed {when}, {case['failed']}"
    parts = ("sha256", "scores", "curves")
    if all(sorted(map(repr, old[part].items())) == sorted(map(repr, new[part].items())) for part in parts):
        return "identical"
    alone = sorted({f"{part} {name}" for part in parts for name in old[part].keys() ^ new[part].keys()})
    gaps = {
        part: max((_gap(old[part][name], new[part][name]) for name in old[part].keys() & new[part].keys()), default=0.0)
        for part in ("tensors", "scores", "curves")
    }
    text = ", ".join(f"{gap:.2g} ({part})" for part, gap in gaps.items())
    if alone:
        return f"different: by {text}; {len(alone)} in one only, such as {', '.join(alone[:3])}"
    return f"equal up to {text}" if all(gap <= LEAST for gap in gaps.values()) else f"different: by {text}"


def _gap(one: torch.Tensor | float, other: torch.Tensor | float) -> float:
    """Return the largest absolute difference; infinity if shapes differ. Equal non-finite values do not differ."""
    first, second = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    if first.shape != second.shape:
        return math.inf
    same = (first == second) | (first.isnan() & second.isnan())
    return torch.where(same, 0.0, (first - second).abs()).nan_to_num(nan=math.inf).max().item()


def machine() -> dict[str, str]:
    """Return what the bits of a result depend on besides the checkout."""
    return {"host": platform.node(), "cpu": torch.backends.cpu.get_cpu_capability(), "torch": str(torch.__version__)}


def main() -> int:
    """Record or compare; return exit code 1 if a training failed or anything differs."""
    own = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--tree", type=Path, default=own, help="checkout; default: the one of this script")
    parser.add_argument("--recipes", help="comma-separated recipes; default: all")
    parser.add_argument("--only", default=",".join(KINDS), help="comma-separated kinds")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent trainings, each on one thread")
    settings = parser.parse_args()
    tree = settings.tree.resolve()
    recipes = {path.stem for path in (tree / "cifar_lit" / "recipes").glob("*.yaml")}
    names = settings.recipes.split(",") if settings.recipes else sorted(recipes | FLAGS.keys())

    torch.set_num_threads(1)
    sys.path[0] = str(tree)  # instead of this script's folder
    for library in LIBRARIES:
        importlib.import_module(library)
    started = time.monotonic()
    old = torch.load(settings.file, weights_only=True) if settings.action == "compare" else None
    if old and old["machine"] != machine():
        print(f"recorded with {old['machine']}, compared with {machine()}: rounding may differ")
    keys = [f"{kind}/{name}/{seed}" for name in names for seed in SEEDS for kind in settings.only.split(",")]
    cases: dict[str, Any] = {}
    verdicts: list[str] = []
    with ProcessPoolExecutor(settings.jobs, multiprocessing.get_context("fork")) as pool:
        for key, saved in zip(keys, pool.map(partial(_saved, tree), keys), strict=True):
            cases[key] = torch.load(io.BytesIO(saved), weights_only=True)
            if old:
                text = verdict(old["cases"].get(key, {"failed": "not recorded"}), cases[key])
            else:
                text = f"failed: {cases[key]['failed']}" if "failed" in cases[key] else "recorded"
            verdicts.append(text)
            print(f"{key:28} {text}", flush=True)
            kind, _, rest = key.partition("/")
            if kind == "resumed" and (single := cases.get(f"single/{rest}")):
                verdicts.append(verdict(single, cases[key]))
                print(f"{'  beside single':28} {verdicts[-1]}", flush=True)
    if not old:
        torch.save({"machine": machine(), "cases": cases}, settings.file)
    good = [text for text in verdicts if text in ("identical", "recorded")]
    close = [text for text in verdicts if text.startswith("equal")]
    kinds = f"{len(good)} {'identical' if old else 'recorded'}, {len(close)} equal up to rounding"
    print(f"{kinds}, {len(verdicts) - len(good) - len(close)} different or failed · {time.monotonic() - started:.0f} s")
    return int(len(good) < len(verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
