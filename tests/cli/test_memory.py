"""A training that cannot fit into memory is refused before its images are touched."""

from __future__ import annotations

from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contract.command_line import OWN_IMAGES, SMALL, assert_refused, draw_folder, run_command

from cifar_lit import ImageClassifier, ImageData, hardware
from cifar_lit.cli import memory
from cifar_lit.errors import UsageError

HUGE = ("--recipe", "laptop", "--accelerator", "cpu", "--precision", "32-true", "--batch-size", "40000")


@pytest.fixture
def four_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * 10**9)


@pytest.mark.usefixtures("four_gigabytes")
def test_an_absurd_batch_is_refused_with_one_that_fits_and_without_looking_for_the_images() -> None:
    answer = run_command(*HUGE, "--data-dir", "nowhere")
    assert_refused(answer, 2, "a step of 40,000 images needs at least 47.7 GB of CPU memory", "4.0 GB are free")
    assert answer.err.endswith("use --batch-size 1024\n")
    assert not Path("nowhere").exists() and not Path("lightning_logs").exists()
    assert "could not be downloaded" in run_command(*HUGE[:-1], "1024", "--data-dir", "nowhere").err


@pytest.mark.usefixtures("four_gigabytes")
def test_a_batch_size_that_is_searched_is_not_refused() -> None:
    assert "could not be downloaded" in run_command(*HUGE, "--data-dir", "nowhere", "--auto-batch").err


def test_a_net_that_is_too_large_for_any_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6)
    assert_refused(run_command(*SMALL, "--net", "resnet18"), 2, "choose a smaller --net")


@pytest.mark.usefixtures("four_gigabytes")
def test_a_batch_size_beyond_the_images_counts_only_the_images() -> None:
    assert run_command(*SMALL, "--net", "shapenet", "--batch-size", "100000000").code == 0


def test_own_images_are_checked_with_their_own_size_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_folder(Path("photos"), {"train/a": 20, "train/b": 20, "test/a": 4, "test/b": 4})
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6)
    words = (*SMALL, *OWN_IMAGES, "--data-dir", "photos", "--net", "shapenet", "--data.val_size", "0")
    answer = run_command(*words, "--batch-size", "64")
    assert answer.code == 2 and "a step of 64 images needs at least" in answer.err
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize(
    ("sizes", "precision", "is_refused"),
    [([850_000], "32-true", True), ([10**5, 10**9], "32-true", False), ([850_000], "bf16-true", False)],
)
def test_the_largest_gpu_counts_and_half_the_bytes_of_a_lower_precision(
    sizes: list[int], precision: str, is_refused: bool
) -> None:
    data, model = (
        SimpleNamespace(**{name: setting.default for name, setting in signature(kind).parameters.items()})
        for kind in (ImageData, ImageClassifier)
    )
    data.dataset, data.image_size, data.batch_size, model.net = "shapes", 16, 4, "shapenet"
    trainer = SimpleNamespace(accelerator="gpu", devices=1, num_nodes=1, precision=precision)
    machine = hardware.Machine("", 1, False, gpus=tuple(("", size) for size in sizes))
    with pytest.raises(UsageError, match="GPU memory") if is_refused else nullcontext():
        memory.check_memory(SimpleNamespace(data=data, model=model, trainer=trainer), machine)


@pytest.mark.parametrize(
    ("line", "files", "free"),
    [
        (
            "0::/job",
            {"job/memory.max": "5000", "job/memory.current": "3000", "job/memory.stat": "inactive_file 400"},
            2400,
        ),
        (
            "0::/job",  # the system reclaims all of its file cache before a process runs out of memory
            {
                "job/memory.max": "5000",
                "job/memory.current": "3000",
                "job/memory.stat": "inactive_file 400\nactive_file 300\n",
            },
            2700,
        ),
        ("0::/job/step", {"job/memory.max": "5000", "job/memory.current": "3000", "job/memory.stat": ""}, 2000),
        ("0::/job", {"job/memory.max": "max", "job/memory.current": "3000", "job/memory.stat": ""}, None),
        (
            "4:memory:/",
            {
                "memory/memory.limit_in_bytes": "5000",
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "cache 3\ninactive_file 1000\n",
            },
            5000,
        ),
    ],
)
def test_the_memory_limits_of_containers_and_jobs_count(
    line: str, files: dict[str, str], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        Path("groups", name).parent.mkdir(parents=True, exist_ok=True)
        Path("groups", name).write_text(text)
    read = Path.read_text
    own: dict[Path, Any] = {Path("/proc/self/cgroup"): line, Path("/proc/meminfo"): "MemAvailable: 900 kB\n"}
    monkeypatch.setattr(hardware, "CGROUPS", Path("groups").absolute())
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **more: own.get(path) or read(path, *args, **more))
    assert hardware.free_memory(memory.torch.device("cpu")) == (900 * 1024 if free is None else free)
