import re
import warnings
from typing import Any

import pytest
from torch import nn

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import NETS, build_net


def made(options: dict[str, Any], width: float = 1.0) -> nn.Module:
    return build_net("whitened", channels=3, image_size=32, num_classes=5, width=width, options=options)


def test_no_options_are_all_defaults() -> None:
    defaults = {
        "widths": [64, 256, 256], "depth": 2, "residual": False, "patch": 2, "stride": 1, "activation": "gelu",
        "whiten_bias": True, "head_pool": "max", "norm_momentum": 0.4, "logit_scale": None,
    }  # fmt: skip
    assert set(defaults) == set(NETS["whitened"].options)
    assert repr(made({})) == repr(made(defaults)) == repr(build_net("whitened", channels=3, image_size=32, num_classes=5))
    assert made({}).logit_scale == made(defaults).logit_scale == 1 / 256


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"widhts": [8]}, "model.net_options of whitened has no 'widhts'. Did you mean widths? It has widths, depth, residual"),
        ({"widths": []}, "widths must be a list of whole numbers above 0, one a group, not []"),
        ({"widths": 64}, "widths must be a list of whole numbers above 0, one a group, not 64"),
        ({"widths": [64, 0]}, "widths must be a list of whole numbers above 0, one a group, not [64, 0]"),
        ({"widths": [64, "128"]}, "widths must be a list"),
        ({"depth": 0}, "depth must be a whole number above 0, or a list of 3, one a group, not 0"),
        ({"depth": [2, 2]}, "depth must be a whole number above 0, or a list of 3, one a group, not [2, 2]"),
        ({"depth": True}, "depth must be a whole number above 0"),
        ({"residual": "yes"}, "residual must be true or false, not 'yes'"),
        ({"residual": True, "depth": 1}, "residual goes around the second convolution and those after: set depth above 1"),
        ({"patch": 0}, "patch must be a whole number of pixels above 0, not 0"),
        ({"patch": 2.5}, "patch must be a whole number of pixels above 0, not 2.5"),
        ({"stride": -1}, "stride must be a whole number of pixels above 0, not -1"),
        ({"stride": 3}, "stride 3 would skip pixels: it can be 2 (patch) at most"),
        ({"activation": "glu"}, "activation must be one of gelu, silu, relu, not 'glu'. Did you mean gelu?"),
        ({"head_pool": "mean"}, "head_pool must be one of max, avg, not 'mean'"),
        ({"norm_momentum": 0}, "norm_momentum must be above 0 and at most 1, not 0"),
        ({"norm_momentum": "fast"}, "norm_momentum must be above 0 and at most 1, not 'fast'"),
        ({"logit_scale": 0.0}, "logit_scale must be a number above 0, or null, not 0.0"),
        ({"logit_scale": float("nan")}, "logit_scale must be a number above 0, or null, not nan"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)) as refused:
        made(options)
    assert str(refused.value).startswith("model.net_options")
    assert "\n" not in str(refused.value)


def test_building_a_narrow_net_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made({}, width=0.001)
