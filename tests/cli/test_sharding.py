"""Strategies that share weights out among GPUs are refused with the reason and with what they would bring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import typed

from cifar_lit import hardware as machine
from cifar_lit.cli.sharding import bytes_per_parameter, named, parameter_count, refusal, sharded, shown
from cifar_lit.hardware import Machine
from cifar_lit.models.registry import build_net
from cifar_lit.training.optimizers import build_optimizer

MODEL = {"net": "lenet", "width": 1.0, "net_options": None}
DATA = {"dataset": "cifar10", "channels": None, "num_classes": None, "image_size": None}
S = ("fit", "--recipe", "small.yaml")
START = "cifar-lit: FSDP shares weights, gradients and optimizer states out among GPUs, which this program cannot do, as "


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("fsdp", "FSDP"),
        ("FSDP", "FSDP"),
        ("fsdp_cpu_offload", "FSDP"),
        ("lightning.pytorch.strategies.FSDPStrategy", "FSDP"),
        ("deepspeed_stage_3_offload", "DeepSpeed"),
        ("lightning.pytorch.strategies.DeepSpeedStrategy", "DeepSpeed"),
        ("model_parallel", "ModelParallel"),
        ("ModelParallelStrategy", "ModelParallel"),
        ("auto", None),
        ("ddp", None),
        ("ddp_find_unused_parameters_false", None),
        ("lightning.pytorch.strategies.DDPStrategy", None),
        ("single_device", None),
    ],
)
def test_what_shares_weights_out_is_known_by_any_of_its_names(strategy: str, name: str | None) -> None:
    assert sharded(strategy) == name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
def test_the_bytes_are_those_that_an_optimizer_keeps_after_a_step(optimizer: str, precision: str, dtype: torch.dtype) -> None:
    net = build_net("lenet", channels=3, image_size=16, num_classes=4).to(dtype)
    made = build_optimizer(net, optimizer, 0.1, momentum=0.9)
    net(torch.zeros(2, 3, 16, 16, dtype=dtype)).sum().backward()
    made.step()
    parameters = list(net.parameters())
    states = [tensor for state in made.state.values() for tensor in state.values() if tensor.ndim]
    taken = sum(tensor.nbytes for tensor in [*parameters, *(p.grad for p in parameters if p.grad is not None), *states])
    assert taken == bytes_per_parameter(optimizer, precision) * sum(p.numel() for p in parameters)


def test_plain_gradient_descent_keeps_nothing() -> None:
    assert bytes_per_parameter("sgd", momentum=0.0) == 8


def test_parameters_are_counted_without_data() -> None:
    expected = sum(p.numel() for p in build_net("lenet", channels=3, image_size=32, num_classes=10).parameters())
    assert parameter_count(MODEL, DATA) == expected
    grey = sum(p.numel() for p in build_net("lenet", channels=1, image_size=28, num_classes=10).parameters())
    assert parameter_count(MODEL, {**DATA, "dataset": "fashion_mnist"}) == grey
    assert parameter_count({**MODEL, "net": "inception_v3"}, {**DATA, "dataset": "folder"}) > 2e7


@pytest.mark.parametrize(
    "flags",
    [
        ["--trainer.strategy", "fsdp"],
        ["--trainer.strategy=fsdp_cpu_offload"],
        ["--trainer.strategy", "FSDPStrategy"],
        ["--trainer.strategy", "lightning.pytorch.strategies.FSDPStrategy", "--trainer.strategy.cpu_offload", "true"],
        ["--config", "plain.yaml"],
        ["--config", "class.yaml"],
    ],
)
def test_fsdp_is_refused_before_data_are_read(here: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "plain.yaml").write_text("trainer: {strategy: fsdp}")
    (here / "class.yaml").write_text("trainer: {strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}}")
    monkeypatch.setattr(machine, "detect_machine", lambda: Machine("a CPU", 4, False))
    answer = typed(*S, "--dataset", "cifar10", "--data-dir", "nowhere", *flags)
    assert answer.code == 2
    taken = shown(12 * sum(p.numel() for p in build_net("lenet", channels=3, image_size=32, num_classes=10).parameters()))
    assert answer.complaints == [
        f"{START}its checkpoints hold whole weights; it would not pay: for lenet under sgd they take {taken} (12 bytes a "
        "parameter), and it pays where that is more than half of a GPU's memory, and this machine has no GPU, a CPU with 4 "
        "threads: use --trainer.strategy ddp"
    ]
    assert not (here / "lightning_logs").exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--model.optimizer", "muon"], "Muon makes whole filters orthogonal"),
        (["--model.ema_decay", "0.99"], "the average of the weights is of whole ones"),
    ],
)
def test_the_reason_is_that_of_the_recipe(flags: list[str], reason: str) -> None:
    answer = typed(*S, "--trainer.strategy", "fsdp", *flags)
    assert answer.err.startswith(START + reason)
    assert answer.code == 2


def test_where_it_would_pay_it_is_said_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Machine("a CPU", 4, False, gpus=(("T4", 16 * 10**9), ("old", 6 * 10**9)))
    monkeypatch.setattr(machine, "detect_machine", lambda: small)
    answer = typed(*S, "--net", "regnet_y_128gf", "--model.optimizer", "adamw", "--trainer.strategy", "fsdp", "--precision", "32")
    assert answer.complaints == [
        f"{START}its checkpoints hold whole weights; it would pay here, as for regnet_y_128gf under adamw they take 10.2 GB "
        "(16 bytes a parameter), more than half of a GPU's 6.0 GB: choose a smaller --net, or halve that with --precision "
        "bf16-true; a smaller --batch-size leaves them more room"
    ]


def test_what_is_halved_already_is_not_advised_to_be() -> None:
    small = Machine("a CPU", 4, False, gpus=(("old", 6 * 10**9),))
    said = refusal("FSDP", "a net under sgd", 4 * 10**9, 6, small, "bf16-true", "it must")
    assert "it would pay here" in said and "bf16-true" not in said


def test_on_a_gpu_that_is_large_enough_it_would_not_pay() -> None:
    large = Machine("a CPU", 4, False, gpus=(("H200", 140 * 10**9),))
    said = refusal("FSDP", "resnet18 under sgd", 134_000_000, 12, large, "32-true", "it must")
    assert said.endswith("134 MB (12 bytes a parameter), and it pays where that is more than half of a GPU's memory: "
                         "use --trainer.strategy ddp")  # fmt: skip


def test_devices_names_where_sharding_would_pay_for_a_net() -> None:
    answer = typed("devices", "--net", "lenet", "--accelerator", "cpu")
    count = sum(p.numel() for p in build_net("lenet", channels=3, image_size=32, num_classes=10).parameters())
    assert named(count) in answer.out
    assert f"{shown(12 * count)} under sgd with momentum and muon (12 bytes a\nparameter)" in answer.out
    assert f"{shown(16 * count)} under adamw (16)" in answer.out
    assert f"less than about {shown(24 * count)} and {shown(32 * count)}" in answer.out
