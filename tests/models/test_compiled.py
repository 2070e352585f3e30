"""Nets under torch.compile: one graph for each shape of batch, for a second net the same, and the numbers of the net as it is.

What the compiler sees is counted, and computed as it is: to compile kernels takes minutes, and is torch's to test.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.training.classifier import ImageClassifier

Seen = list[list[tuple[int, ...]]]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """The shapes of the images and filters that each graph takes, in the order of compilation; a break in one is an error."""
    seen: Seen = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.append([tuple(one.shape) for one in inputs if isinstance(one, Tensor) and one.ndim == 4])
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **settings: compile(model, backend=count, fullgraph=True, **settings)
    )
    torch.compiler.reset()
    yield seen
    torch.compiler.reset()


def model_of(compiled: bool) -> ImageClassifier:
    torch.manual_seed(0)
    options = {"widths": [8, 12], "depth": 2, "residual": True}
    return ImageClassifier("whitened", [3, 16, 16], 5, net_options=options, compile=compiled)


def gradients(model: ImageClassifier, size: int, count: int, precision: str) -> list[Tensor]:
    """The logits of some images, and the gradients of the net's parameters."""
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(count, 3, size, size, generator=generator).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        logits = model(images)
    model.zero_grad()
    F.cross_entropy(logits.float(), torch.arange(count) % 5).backward()
    return [
        logits.detach(),
        *(parameter.grad.clone() for parameter in model.net.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_net_is_one_graph_for_each_shape_and_a_second_one_none(precision: str, graphs: Seen) -> None:
    shapes = [(16, 6), (16, 4), (16, 5), (12, 6)]
    for _ in range(2):
        model, plain = model_of(True), model_of(False)
        for size, count in shapes:
            for ours, theirs in zip(*(gradients(each, size, count, precision) for each in (model, plain)), strict=True):
                assert torch.equal(ours, theirs)
    assert len(graphs) == len(shapes)
    assert all((count, 3, size, size) in inputs for inputs, (size, count) in zip(graphs, shapes, strict=True))


def test_the_end_of_the_whitenings_bias_is_one_more_graph(graphs: Seen) -> None:
    model, plain = model_of(True), model_of(False)
    for final in (False, True, True):
        model.net.bias_is_final = plain.net.bias_is_final = final
        for ours, theirs in zip(*(gradients(each, 16, 6, "32-true") for each in (model, plain)), strict=True):
            assert torch.equal(ours, theirs)
    assert len(graphs) == 2
