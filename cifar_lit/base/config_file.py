"""Read configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cifar_lit.base.errors import UsageError


def plain_values(file: Path) -> Any:
    """Return the values in a configuration file; empty for an empty file. Raise UsageError for invalid YAML."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = ""
        if mark:
            place = f" at line {mark.line + 1}, column {mark.column + 1}"
        raise UsageError(f"{file} is not valid YAML{place}: check its indentation and brackets") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text: save it as UTF-8") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{file} must hold settings by name (trainer:, model:, data:), not just text or a list")
    return values
