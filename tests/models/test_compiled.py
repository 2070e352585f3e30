"""Nets under torch.compile: one graph per batch shape, shared by equal nets, with results equal to eager mode.

The backend only counts graphs and runs them eagerly, because compiling kernels takes minutes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.training.classifier import ImageClassifier

Graphs = list[list[tuple[int, ...]]]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Yield the shapes of the images and filters of each compiled graph. A graph break is an error."""
    compiled: Graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append([tuple(value.shape) for value in inputs if isinstance(value, Tensor) and value.ndim == 4])
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count, fullgraph=True))
    torch.compiler.reset()
    yield compiled
    torch.compiler.reset()


def make_model(compiled: bool) -> ImageClassifier:
    torch.manual_seed(0)
    options = {"widths": [8, 12], "depth": 2, "residual": True}
    model = ImageClassifier("whitened", [3, 16, 16], 5, net_options=options)
    model.net.is_prepared = True  # as by the feature whitening
    if compiled:
        model.net.compile(dynamic=False)
    return model


def gradients(model: ImageClassifier, size: int, count: int, precision: str) -> list[Tensor]:
    """Return the logits of random images and the gradients of the parameters."""
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(count, 3, size, size, generator=generator).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        logits = model(images)
    model.zero_grad()
    F.cross_entropy(logits.float(), torch.arange(count) % 5).backward()
    return [logits.detach(), *(p.grad.clone() for p in model.net.parameters() if p.grad is not None)]


def assert_equal(model: ImageClassifier, eager: ImageClassifier, *arguments: Any) -> None:
    for result, expected in zip(gradients(model, *arguments), gradients(eager, *arguments), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_batch_shape_is_compiled_once_and_shared_with_an_equal_net(precision: str, graphs: Graphs) -> None:
    shapes = [(16, 6), (16, 4), (16, 5), (12, 6)]
    for _ in range(2):
        model, eager = make_model(True), make_model(False)
        for size, count in shapes:
            assert_equal(model, eager, size, count, precision)
    assert len(graphs) == len(shapes)
    assert all((count, 3, size, size) in inputs for inputs, (size, count) in zip(graphs, shapes, strict=True))


def test_freezing_the_whitening_bias_compiles_one_more_graph(graphs: Graphs) -> None:
    model, eager = make_model(True), make_model(False)
    for final in (False, True, True):
        model.net.bias_is_final = eager.net.bias_is_final = final
        assert_equal(model, eager, 16, 6, "32-true")
    assert len(graphs) == 2
