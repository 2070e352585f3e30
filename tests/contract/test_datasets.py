"""Data sets: failed downloads, and folders and tables of own images."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .command_line import (
    NO_SHAPES,
    OWN_IMAGES,
    SMALL,
    assert_refused,
    config_of,
    draw_folder,
    rows_of,
    run_command,
)

# ---- downloads


ARCHIVES = {"cifar10": "cifar-10", "cifar100": "cifar-100-python.tar.gz", "fashion_mnist": "train-images-idx3-ubyte.gz"}


@pytest.mark.parametrize(("dataset", "archive"), ARCHIVES.items())
def test_without_network_the_error_names_each_sources_reason_and_where_to_put_the_archive(
    dataset: str, archive: str
) -> None:
    answer = run_command(*SMALL, "--dataset", dataset, *NO_SHAPES)
    line = answer.error_lines[-1]
    assert answer.code == 1
    assert "Traceback" not in answer.err
    for part in (archive, "refused", "data", "md5", "--data.url", "--recipe quickstart", "no download"):
        assert part in line, part
    hosts = re.findall(r"[\w-]+(?:\.[\w-]+)+: \S", line)
    assert len({host.split(":")[0] for host in hosts}) >= 2, line
    assert not Path("lightning_logs").exists()


# ---- folders


def test_a_table_lists_images_keeps_groups_on_one_side_and_is_stored_in_the_run() -> None:
    draw_folder(Path("own/images"), {"cat": 10, "dog": 20}, size=18)
    names = [f"cat/{number}.png" for number in range(10)] + [f"dog/{number}.png" for number in range(20)]
    rows = [f"images/{name};{name[:3]};{name[:5]}" for name in names]  # dogs 1 and 10 to 19 share a group
    Path("own/labels.csv").write_text("\n".join(["file;class;animal", *rows]))
    words = [*SMALL, *OWN_IMAGES, "--data-dir", "own/labels.csv", "--data.val_size", "0.25", "--data.split.group"]
    answer = run_command(*words, "animal", "--epochs", "1")
    assert answer.code == 0, answer.err
    run_dir = Path("lightning_logs/small-1")
    labels = [row["label"] for row in rows_of(run_dir / "predictions.csv")]
    assert sorted(labels) == ["cat"] * 2 + ["dog"] * 4
    assert config_of(run_dir)["data"]["split"]["group"] == "animal"
    assert_refused(run_command(*words, "animals"), 2, "animals", "Did you mean animal?")
