"""Strategies that share tensors out among GPUs are refused before data are read."""

from pathlib import Path

import pytest
from command_line import typed


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--trainer.strategy", "fsdp"], "fsdp"),
        (["--trainer.strategy=fsdp_cpu_offload"], "fsdp"),
        (["--trainer.strategy", "FSDPStrategy"], "FSDP"),
        (["--trainer.strategy", "deepspeed_stage_3_offload"], "deepspeed"),
        (["--trainer.strategy", "ModelParallelStrategy"], "ModelParallel"),
        (["--config", "class.yaml"], "FSDP"),
    ],
)
def test_what_shares_tensors_out_is_refused_by_any_of_its_names(here: Path, flags: list[str], name: str) -> None:
    (here / "class.yaml").write_text("trainer: {strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}}")
    answer = typed("fit", "--recipe", "small.yaml", "--dataset", "cifar10", "--data-dir", "nowhere", *flags)
    assert answer.code == 2
    assert answer.complaints == [
        f"cifar-lit: --trainer.strategy {name} shares tensors out, which checkpoints and Muon need whole: "
        "use --trainer.strategy ddp"
    ]
    assert not (here / "lightning_logs").exists()
