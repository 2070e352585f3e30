"""Settings of `ImageData` by name, without their groups."""

from dataclasses import fields
from typing import Any

from cifar_lit.data.settings import Images, Loading


def grouped(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of images and loading in their groups."""
    groups: dict[str, Any] = dict(settings)
    for name, kind in (("images", Images), ("loading", Loading)):
        names = {field.name for field in fields(kind)}
        groups[name] = kind(**{key: groups.pop(key) for key in names & groups.keys()})
    return groups
