"""The JSON schema of metrics.json matches the files that runs write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract.command_line import metrics_of
from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/metrics.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)


def errors(metrics: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(metrics)]


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}{name}", field
        lists = field.get("additionalProperties") or field
        for inner in (field, lists.get("items") or {}):
            yield from fields(inner, f"{path}{name}.")


def all_fields() -> dict[str, dict[str, Any]]:
    parts = ((f"{name}.", part) for name, part in SCHEMA["$defs"].items())
    return {name: field for path, schema in (("", SCHEMA), *parts) for name, field in fields(schema, path)}


def test_the_schema_is_valid_and_has_a_description_of_each_field_and_a_unit_of_each_number() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for name, field in all_fields().items():
        assert field.get("description", "").endswith("."), name
        kinds = {field["type"]} if isinstance(field.get("type"), str) else {*field.get("type", ())}
        is_number = bool(kinds & {"number", "integer"})
        assert not is_number or name == "seed" or field.get("unit"), name


def test_the_metrics_of_a_run_have_the_fields_of_the_schema(run_dir: Path) -> None:
    metrics = metrics_of(run_dir)
    assert errors(metrics) == []
    # These need more than five classes, `model.tta`, or images with several labels.
    optional = {"top5", "tta", "mean_average_precision", "micro_f1", "hamming_loss", "labels", "at_thresholds"}
    assert metrics.keys() == SCHEMA["properties"].keys()
    for part in ("val", "test"):
        assert SCHEMA["$defs"][part]["properties"].keys() - metrics[part].keys() <= optional
