"""`compile` acts on CUDA devices only, in training steps only."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import classifier, fitted, same, shapes_data, weights

from cifar_lit.base.errors import UsageError
from cifar_lit.features.compile import Compile


def test_on_a_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("the net is compiled"))
    plain, other = classifier(), classifier()
    fitted(plain, shapes_data())
    fitted(other, shapes_data(), Compile())
    assert same(weights(plain), weights(other))


def test_on_a_cuda_device_the_net_of_the_fit_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def compiled(call: Any, **settings: Any) -> Any:
        calls.append(settings)
        return lambda images: call(images) + 1

    monkeypatch.setattr(torch, "compile", compiled)
    net, feature = torch.nn.Identity(), Compile()
    model: Any = SimpleNamespace(net=net, device=torch.device("cuda"))
    feature.on_fit_start(None, model)  # type: ignore[arg-type]
    assert (calls, net(1)) == ([{"mode": "reduce-overhead", "dynamic": False}], 2)
    feature.on_fit_end(None, model)  # type: ignore[arg-type]
    assert net(1) == 1


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="reduce-overhead"):
        Compile("fast")
