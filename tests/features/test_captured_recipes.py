"""The recipes with captured steps: a training by replays, recorded on the CPU, is the same to the bit as without.

It passes every image size of the recipe, a smaller last batch, and the end of the whitening bias.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import recorded_graphs
import torch
from small_runs import features, fitted, same, weights
from torch import Tensor

from cifar_lit.cli.flags import recipe_names, recipe_path
from cifar_lit.data.datamodule import ImageData
from cifar_lit.features.capture import GraphedSteps
from cifar_lit.models import fast_gradients
from cifar_lit.runs.config_file import plain_values
from cifar_lit.training.classifier import ImageClassifier

SETTINGS: dict[str, Any] = {name: plain_values(recipe_path(name)) for name in recipe_names()}
# The other captured recipes differ from these in widths, lengths and data sets only.
DIFFERENT = ["fast94", "fast97", "resnet18_30", pytest.param("wrn28_10", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _plain_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a GPU."""
    monkeypatch.setattr(fast_gradients, "convolve", torch.conv2d)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Yield the list of compiled graphs. The backend runs a graph eagerly; a graph break is an error."""
    compiled: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count, fullgraph=True))
    torch.compiler.reset()
    yield compiled
    torch.compiler.reset()


def trained(name: str, compiled: bool) -> dict[str, Tensor]:
    """Train a narrow net of a recipe on small images; return its weights."""
    settings = {**SETTINGS[name], "capture": {"compile": compiled}}
    model, epochs = {**settings["model"], "num_classes": 10}, 1
    if model["net"] in ("whitened", "wide_resnet"):
        model["width"] = 0.125
    if model["net"] == "whitened":
        settings["whitening"], epochs = {"bias_epochs": 1.5}, 4  # the bias ends within an epoch
    images = {"dataset": "shapes", "image_size": 32 if "resolutions" in settings else 16, "count": 20}
    data = ImageData(**{**settings["data"], **images, "val_size": 0, "batch_size": 8})
    torch.manual_seed(0)
    net = ImageClassifier(**model)
    fitted(net, data, *features(settings), max_epochs=epochs, precision="bf16-mixed")
    return weights(net)


@pytest.mark.parametrize("name", DIFFERENT)
def test_replays_of_a_recipes_steps_train_like_the_steps_themselves(
    name: str, fake_graphs: recorded_graphs.Module, graphs: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(GraphedSteps, "_step", GraphedSteps._run)
        expected = trained(name, compiled=True)
    shapes = len(graphs)
    assert shapes >= 2 * (1 + len(SETTINGS[name].get("resolutions", {}).get("sides", {})))  # two sizes of batch
    assert same(trained(name, compiled=True), expected)
    assert len(graphs) == shapes == fake_graphs.captures  # a second net, as in `bench recipe`, compiles nothing
    assert same(trained(name, compiled=False), expected)
    assert (len(graphs), fake_graphs.captures) == (shapes, 2 * shapes)
