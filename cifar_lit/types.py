"""Names of types that many modules use."""

from __future__ import annotations

from typing import Any, TypeAlias

Settings: TypeAlias = dict[str, Any]  # values by name, as YAML and JSON hold them: settings, options, results
State: TypeAlias = dict[str, Any]  # the state of an object in a checkpoint: tensors and plain values by name
