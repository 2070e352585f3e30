"""Settings of a training as plain values, and which of them may change when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cifar_lit.errors import UsageError
from cifar_lit.plugins import part_name

# Settings of devices, loading, logging and places. They do not change what is computed, except for rounding.
MAY_CHANGE = {
    "ckpt_path", "weights_only", "logs", "logger", "checkpoint_every", "rank_timeout", "threads",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.precision",
    "trainer.plugins", "trainer.sync_batchnorm", "trainer.benchmark", "trainer.deterministic",
    "trainer.logger", "trainer.log_every_n_steps", "trainer.profiler", "trainer.default_root_dir",
    "trainer.detect_anomaly", "trainer.enable_progress_bar", "trainer.enable_model_summary",
    "trainer.num_sanity_val_steps",
    "trainer.max_time", "model.patience", "model.channels_last", "model.compile", "model.capture",
    "data.root", "data.url", "data.cache_dir", "data.placement", "data.workers", "data.eval_batch_size",
}  # fmt: skip
# May be raised if nothing depends on the length of the training. A later `max_steps` would not be exact: Lightning
# counts the epoch in which a training reaches it as complete.
END = "trainer.max_epochs"


def plain_settings(group: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name as values of JSON. A class, function or object becomes its name."""
    named = {f"{group}.{name}": value for name, value in settings.items()}
    plain: dict[str, Any] = json.loads(json.dumps(named, default=part_name, skipkeys=True))
    return plain


def saved_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the state of a checkpoint; raise UsageError if it has none."""
    try:
        settings = json.loads(state["settings"])
    except (KeyError, TypeError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        fault = "the checkpoint does not hold the settings that it was trained with, because its version is older"
        raise UsageError(f"{fault}: it cannot be resumed. Start a new run")
    return settings


def changed_settings(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `given` that differ from those of a run; raise UsageError if one must not change."""
    changed = {name: given[name] for name in saved if name in given and not _are_equal(saved[name], given[name])}
    for name, value in changed.items():
        if name in MAY_CHANGE:
            continue
        fault = f"{name} was {json.dumps(saved[name])[:200]} in this run, not {json.dumps(value)[:200]}"
        remedy = "leave it out to resume the run, or start a new one"
        if name == END and _is_later(saved[name], value):
            cause = _depends_on_length(saved)
            if not cause:
                continue
            remedy = f"{cause} depends on the length, so leave it out, or train a new run from these weights"
        raise UsageError(f"{fault}: {remedy}")
    return changed


def _are_equal(old: Any, new: Any) -> bool:
    """Return whether two values are equal. One number stands for a list of it, as in `data.mean`."""
    return old == new or (isinstance(old, list) and old == [new] * len(old))


def _is_later(old: Any, new: Any) -> bool:
    return isinstance(old, int) and isinstance(new, int) and 0 < old < new


def _depends_on_length(settings: Mapping[str, Any]) -> str | None:
    """Return the first setting whose effect depends on the number of epochs, None if there is none."""
    if settings.get("model.schedule", "constant") != "constant":
        return f"model.schedule {settings['model.schedule']}"
    patience = settings.get("model.patience")
    if isinstance(patience, float) and 0 < patience < 1:
        return f"model.patience {patience:g}"
    shares = ("data.skip_easy", "data.resolutions")
    return next((name for name in shares if settings.get(name)), None)
