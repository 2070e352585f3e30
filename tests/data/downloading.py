from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

from local_server import Mirror

from cifar_lit.data.download import fetch

CONTENT = random.Random(0).randbytes(100_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
MirrorMaker = Callable[..., Mirror]


def get(target: Path, *mirrors: Mirror | str, md5: str = MD5) -> Path:
    return fetch("a.gz", [m if isinstance(m, str) else f"{m.url}a.gz" for m in mirrors], md5, target)


def put_part(target: Path, content: bytes) -> Path:
    target.parent.mkdir(parents=True)
    part = target.with_name("a.gz.part")
    part.write_bytes(content)
    return part
