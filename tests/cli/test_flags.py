from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cifar_lit.cli.flags import SHORT, Command, arguments, parse, recipe_names, recipe_path
from cifar_lit.cli.launch import apply_launcher
from cifar_lit.errors import UsageError

CONTRACT = {
    "devices": "trainer.devices", "accelerator": "trainer.accelerator", "nodes": "trainer.num_nodes",
    "precision": "trainer.precision", "epochs": "trainer.max_epochs", "dataset": "data.dataset", "data-dir": "data.root",
    "batch-size": "data.batch_size", "net": "model.net", "lr": "model.lr", "seed": "seed_everything",
    "checkpoint-every": "checkpoint_every", "rank-timeout": "rank_timeout",
}  # fmt: skip


def line(*argv: str, base: Path | None = None) -> list[str]:
    return arguments(parse("fit", list(argv)), base, "fit")


def test_the_contracts_short_flags_are_all_there() -> None:
    assert SHORT == CONTRACT


@pytest.mark.parametrize(("short", "long"), CONTRACT.items())
@pytest.mark.parametrize("value", ["3", "0,1", "a b", "-1", "-0.5", "-1e-3", "-inf"])
def test_a_short_flag_is_the_long_one_with_a_space_or_an_equals_sign(short: str, long: str, value: str) -> None:
    expected = ["fit", f"--{long}={value}"]
    for flag in (short, long):
        assert line(f"--{flag}", value) == line(f"--{flag}={value}") == expected


def test_recipe_is_weaker_than_configs_and_these_than_flags_wherever_they_stand(here: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (here / name).write_text("{}")
    pieces = [["--lr", "1"], ["--config", "a.yaml"], ["-c", "b.yaml"], ["--recipe", "small.yaml"], ["--logs", "there"]]
    orders = [order for order in itertools.permutations(pieces) if order.index(pieces[1]) < order.index(pieces[2])]
    (only,) = {tuple(line(*itertools.chain(*order), base=recipe_path("small.yaml"))) for order in orders}
    assert only == (
        *("fit", "--config", "small.yaml", "--logs=lightning_logs", "--config", "a.yaml", "--config", "b.yaml"),
        *("--recipe=small", "--model.lr=1", "--logs=there"),
    )


def test_without_a_base_the_configs_may_name_the_logs(here: Path) -> None:
    assert line("--config=small.yaml") == ["fit", "--config", "small.yaml"]


def test_the_last_of_repeated_flags_counts() -> None:
    for argv in itertools.product(["--lr=1", "--model.lr=1"], ["--lr=3", "--model.lr=3", "--model.lr 3", "--lr 3"]):
        command = parse("fit", " ".join(argv).split())
        assert (command.values("model.lr"), command.value("model.lr")) == (["1", "3"], "3")
    command = parse("fit", ["--recipe", "a", "--logs", "b", "--resume", "c", "--recipe=d", "--logs=e", "--resume=f"])
    assert (command.recipe, command.logs, command.resume, command.value("model.net")) == ("d", "e", "f", None)
    assert parse("fit", ["--resume", "c", "--resume"]).resume == ""


def test_a_flag_can_be_taken_out_with_its_values() -> None:
    command = parse("fit", ["--lr", "1", "--model.lr", "2", "--model.lr_decay", "3", "--model.lr=4", "--data.count", "5"])
    assert command.without("model.lr") == ["--model.lr_decay=3", "--data.count=5"]


@pytest.mark.parametrize(
    ("argv", "resume"),
    [("--lr 1", None), ("--resume --lr 1", ""), ("--resume a-1 --lr 1", "a-1"), ("--resume=a-1 --lr 1", "a-1"),
     ("--ckpt_path a-1 --lr 1", "a-1"), ("--ckpt_path=a-1 --lr 1", "a-1")],
)  # fmt: skip
def test_resume_takes_a_path_or_none(argv: str, resume: str | None) -> None:
    for name in ("fit", "train"):
        command = parse(name, argv.split())
        assert (command.resume, command.flags) == (resume, ["--model.lr=1"])


def test_ckpt_path_of_an_evaluation_names_the_weights_and_resumes_nothing() -> None:
    for name in ("validate", "test", "predict"):
        assert parse(name, ["--ckpt_path", "a.ckpt"]) == Command(name, flags=["--ckpt_path=a.ckpt"])


def test_switches_take_no_value_and_debug_is_left_to_who_reports() -> None:
    command = parse("fit", ["--trust", "--auto-batch", "--debug", "--auto-lr"])
    assert command == Command("fit", trust=True, auto={"batch", "lr"})


def test_an_abbreviation_is_left_to_the_parser_which_refuses_it() -> None:
    for flag in ("--epoch", "--dev", "--batch", "--recip", "--conf", "--log", "--resum", "--auto", "--trus"):
        assert parse("fit", [flag, "3"]) == Command("fit", flags=[f"{flag}=3"])


@pytest.mark.parametrize("flag", [*CONTRACT, "recipe", "config", "logs"])
def test_a_flag_without_its_value_is_refused_with_an_example(flag: str) -> None:
    for argv in ([f"--{flag}"], [f"--{flag}", "--debug"]):
        with pytest.raises(UsageError, match=rf"--{flag} needs a value, as in --{flag} \S+"):
            parse("fit", argv)


@pytest.mark.parametrize("argv", ["extra", "--lr 1 extra", "--lr=1 extra", "--debug extra", "--model.lr=1 3", "--model.lr 1 -3"])
def test_a_word_that_belongs_to_no_flag_is_refused(argv: str) -> None:
    with pytest.raises(UsageError, match=f"'{argv.split()[-1]}' belongs to no flag"):
        parse("fit", argv.split())


def test_help_and_a_printed_configuration_run_nothing() -> None:
    assert all(parse("fit", [flag]).asks_only for flag in ("--help", "-h", "--print_config", "--print_config=skip_default"))
    assert not parse("fit", ["--a"]).asks_only


# ---- recipes


def test_a_packaged_recipe_goes_by_its_name_and_ones_own_by_its_path(here: Path) -> None:
    assert [recipe_path(name).stem for name in recipe_names()] == recipe_names()
    for path in ("small.yaml", str(here / "small.yaml")):
        assert recipe_path(path) == Path(path)
        assert "--recipe=small" in line("--recipe", path)  # the run is named after the file


def test_an_unknown_recipe_is_refused() -> None:
    for name, line in (
        ("quikstart", r"Did you mean quickstart\? There are .*tudui"),
        ("mine.yaml", r"no recipe file mine\.yaml"),
    ):
        with pytest.raises(UsageError, match=line):
            recipe_path(name)


# ---- torchrun

STARTED = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize("argv", ["", "--devices 2", "--devices auto", "--nodes 2", "--devices=-1"])
def test_devices_and_nodes_come_from_torchrun_where_the_flags_agree(argv: str) -> None:
    command = parse("fit", argv.split())
    apply_launcher(command, STARTED)
    assert (command.value("trainer.devices"), command.value("trainer.num_nodes")) == ("2", "2")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--devices 4", r"--devices 4 contradicts torchrun, which started 2 \(--nproc-per-node\): leave --devices out"),
        ("--trainer.devices 0,1,2", "--devices 0,1,2 contradicts torchrun"),
        ("--nodes 1", r"--nodes 1 contradicts torchrun, which started 2 \(--nnodes\)"),
    ],
)
def test_flags_that_contradict_torchrun_are_refused(argv: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        apply_launcher(parse("fit", argv.split()), STARTED)


def test_without_torchrun_the_flags_stay() -> None:
    for missing in STARTED:
        if missing != "WORLD_SIZE":
            command = parse("fit", ["--devices", "3"])
            apply_launcher(command, {name: value for name, value in STARTED.items() if name != missing})
            assert command.flags == ["--trainer.devices=3"]
