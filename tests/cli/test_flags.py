from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cifar_lit.cli.flags import (
    SHORT,
    TRAINING,
    Command,
    arguments,
    parse,
    recipe_header,
    recipe_names,
    recipe_path,
    recipe_settings,
)
from cifar_lit.cli.launch import apply_launcher
from cifar_lit.errors import UsageError

VALUES = {
    "devices": "0,1",
    "accelerator": "gpu",
    "precision": "bf16-mixed",
    "dataset": "shapes",
    "data-dir": "a b",
    "net": "lenet",
}


def line(*words: str, name: str = "fit", base: Path | None = None) -> list[str]:
    return arguments(parse(name, list(words)), base, "fit")


@pytest.mark.parametrize(("short", "long"), SHORT.items())
def test_a_short_flag_is_the_long_one_with_a_space_or_an_equals_sign(short: str, long: str) -> None:
    value = VALUES.get(short, "3")
    expected = ["fit", f"--{long}={value}"]
    assert line(f"--{short}", value) == line(f"--{short}={value}") == line(f"--{long}={value}") == expected
    assert line(f"--{long}", value) == ["fit", f"--{long}", value]  # which the parser takes for the same


def test_the_contracts_short_flags_are_all_there() -> None:
    assert {short: SHORT[short] for short in SHORT} == {
        "devices": "trainer.devices",
        "accelerator": "trainer.accelerator",
        "nodes": "trainer.num_nodes",
        "precision": "trainer.precision",
        "epochs": "trainer.max_epochs",
        "dataset": "data.dataset",
        "data-dir": "data.root",
        "batch-size": "data.batch_size",
        "net": "model.net",
        "lr": "model.lr",
        "seed": "seed_everything",
        "checkpoint-every": "checkpoint_every",
        "rank-timeout": "rank_timeout",
    }


@pytest.mark.parametrize("value", ["-1", "-0.5", "1e-3", "-1e-3"])
def test_a_negative_number_is_a_value_and_no_flag(value: str) -> None:
    assert line("--lr", value) == ["fit", f"--model.lr={value}"]
    assert line("--model.lr", value) == ["fit", "--model.lr", value]


def test_recipe_is_weaker_than_configs_and_these_than_flags_wherever_they_stand(here: Path) -> None:
    (here / "a.yaml").write_text("{}")
    (here / "b.yaml").write_text("{}")
    pieces = [["--lr", "1"], ["--config", "a.yaml"], ["--config=b.yaml"], ["--recipe", "small.yaml"]]
    orders = [order for order in itertools.permutations(pieces) if order.index(pieces[1]) < order.index(pieces[2])]
    lines = []
    for order in orders:
        lines.append(line(*itertools.chain(*order), base=recipe_path("small.yaml")))
    assert len(orders) == 12
    assert all(found == lines[0] for found in lines)
    found = lines[0]
    assert [found[i + 1] for i, word in enumerate(found) if word == "--config"] == ["small.yaml", "a.yaml", "b.yaml"]
    assert found.index("--model.lr=1") > found.index("b.yaml")
    assert "--recipe=small" in found


def test_c_is_the_parsers_own_spelling_of_config(here: Path) -> None:
    assert line("-c", "small.yaml") == line("--config", "small.yaml") == ["fit", "--config", "small.yaml"]


def test_the_last_of_two_equal_flags_stands_last() -> None:
    command = parse("fit", ["--lr", "1", "--model.lr=2", "--lr=3"])
    assert command.value("model.lr") == "3"
    assert command.flags[-1] == "--model.lr=3"
    assert command.value("model.net") is None


def test_logs_of_a_flag_beat_every_config_and_those_of_the_weakest_settings_do_not_count(here: Path) -> None:
    (here / "own.yaml").write_text("logs: mine")
    found = line("--logs", "there", "--config", "own.yaml", base=here / "small.yaml")
    assert found.index("--logs=lightning_logs") < found.index("own.yaml") < found.index("--logs=there")
    assert not any(word.startswith("--logs") for word in line("--config", "own.yaml"))


@pytest.mark.parametrize(
    ("words", "resume", "rest"),
    [
        ([], None, []),
        (["--resume"], "", []),
        (["--resume", "--lr", "1"], "", ["--model.lr=1"]),
        (["--resume", "logs/a-1", "--lr", "1"], "logs/a-1", ["--model.lr=1"]),
        (["--resume=logs/a-1"], "logs/a-1", []),
        (["--lr", "1", "--resume"], "", ["--model.lr=1"]),
        (["--ckpt_path", "logs/a-1"], "logs/a-1", []),
        (["--ckpt_path=logs/a-1"], "logs/a-1", []),
    ],
)
def test_resume_takes_a_path_or_none(words: list[str], resume: str | None, rest: list[str]) -> None:
    for name in ("fit", "train"):
        command = parse(name, words)
        assert (command.resume, command.flags) == (resume, rest)


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_ckpt_path_of_an_evaluation_names_the_weights_and_resumes_nothing(name: str) -> None:
    command = parse(name, ["--ckpt_path", "a.ckpt"])
    assert command.resume is None
    assert command.value("ckpt_path") == "a.ckpt"


@pytest.mark.parametrize("flag", ["--epoch", "--dev", "--batch", "--recip", "--conf", "--log", "--resum"])
def test_an_abbreviation_is_no_short_flag(flag: str) -> None:
    command = parse("fit", [flag, "3"])
    assert command.flags == [flag, "3"]  # left to the parser, which refuses it: see test_errors.py
    assert command == Command("fit", flags=[flag, "3"])


@pytest.mark.parametrize("flag", [*SHORT, "recipe", "config", "logs"])
def test_a_flag_without_its_value_is_refused_with_an_example(flag: str) -> None:
    for words in ([f"--{flag}"], [f"--{flag}", "--debug"]):
        with pytest.raises(UsageError, match=rf"--{flag} needs a value, as in --{flag} \S+"):
            parse("fit", words)


@pytest.mark.parametrize(
    "words", [["extra"], ["--lr", "1", "extra"], ["--lr=1", "extra"], ["--debug", "extra"], ["--model.lr=1", "3"]]
)
def test_a_word_that_belongs_to_no_flag_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match=f"'{words[-1]}' belongs to no flag"):
        parse("fit", words)


def test_a_missing_configuration_file_is_refused_before_anything_is_parsed() -> None:
    with pytest.raises(UsageError, match=r"there is no configuration file nowhere\.yaml"):
        parse("fit", ["--config", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["--help"], True),
        (["-h"], True),
        (["--print_config"], True),
        (["--print_config=skip_default"], True),
        (["--lr=1"], False),
    ],
)
def test_help_and_a_printed_configuration_run_nothing(words: list[str], asks: bool) -> None:
    assert parse("fit", words).asks_only is asks


# ---- recipes


def test_a_packaged_recipe_is_found_by_name_and_ones_own_by_path(here: Path) -> None:
    for name in recipe_names():
        assert recipe_path(name).stem == name
        assert recipe_path(name).is_file()
    assert recipe_path("small.yaml") == Path("small.yaml")
    assert recipe_path(str(here / "small.yaml")) == here / "small.yaml"


def test_the_run_is_named_after_the_recipes_file_wherever_it_lies(here: Path) -> None:
    assert "--recipe=small" in line("--recipe", "small.yaml")
    assert "--recipe=small" in line("--recipe", str(here / "small.yaml"))
    assert "--recipe=quickstart" in line("--recipe", "quickstart")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("quikstart", r"no recipe is called 'quikstart'\. Did you mean quickstart\? There are .*tudui"),
        ("recipes/quickstart", "no recipe is called"),
        ("mine.yaml", r"there is no recipe file mine\.yaml"),
    ],
)
def test_an_unknown_recipe_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        recipe_path(name)


@pytest.mark.parametrize("name", recipe_names())
def test_a_packaged_recipe_has_a_comment_on_top_and_settings_by_name(name: str) -> None:
    path = recipe_path(name)
    assert recipe_header(path)[0].startswith(f"{name} — ")
    assert set(recipe_settings(path)) <= {"seed_everything", "trainer", "model", "data"}
    assert "model" in recipe_settings(path)


# ---- torchrun


def torchrun(here: int, everywhere: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": str(here), "WORLD_SIZE": str(everywhere)}


@pytest.mark.parametrize("words", [[], ["--devices", "2"], ["--devices", "auto"], ["--nodes", "2"], ["--devices=-1"]])
def test_devices_and_nodes_come_from_torchrun_where_the_flags_agree(words: list[str]) -> None:
    command = parse("fit", words)
    apply_launcher(command, torchrun(2, 4))
    assert command.value("trainer.devices") == "2"
    assert command.value("trainer.num_nodes") == "2"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--devices", "4"], r"--devices 4 contradicts torchrun, which started 2 \(--nproc-per-node\): leave --devices out"),
        (["--trainer.devices", "0,1,2"], "--devices 0,1,2 contradicts torchrun"),
        (["--nodes", "1"], r"--nodes 1 contradicts torchrun, which started 2 \(--nnodes\)"),
    ],
)
def test_flags_that_contradict_torchrun_are_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        apply_launcher(parse("fit", words), torchrun(2, 4))


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_without_torchrun_the_flags_stay(environment: dict[str, str]) -> None:
    command = parse("fit", ["--devices", "3"])
    apply_launcher(command, environment)
    assert command.flags == ["--trainer.devices=3"]


def test_every_training_command_is_parsed_alike() -> None:
    assert {tuple(parse(name, ["--lr", "1", "--data.count=5"]).flags) for name in TRAINING} == {
        ("--model.lr=1", "--data.count=5")
    }
