"""A checksum inside a checkpoint, so that the file verifies wherever it is copied to.

It is the comment that a zip archive may end with: `cifar-lit sha256 ` and the digest of every byte before it, in hex. Lightning,
`torch.load` and `unzip` read such a file as they read any other.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

MARK = b"cifar-lit sha256 "
DIGEST = 64  # hex digits
COMMENT = len(MARK) + DIGEST
START, END, END_SIZE = b"PK\x03\x04", b"PK\x05\x06", 22  # of a zip archive: its first bytes, and its last record
CHUNK = 1 << 20


def seal(file: BinaryIO) -> None:
    """Appends the checksum to a zip archive without a comment; `file` is open for reading and writing."""
    file.seek(-END_SIZE, os.SEEK_END)
    end = file.read(END_SIZE)
    if not (end.startswith(END) and end.endswith(bytes(2))):
        raise RuntimeError("the archive does not end as archives without a comment do")
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", COMMENT) + MARK)
    size = file.tell()
    file.seek(0)
    digest = _digest(file, size)
    file.seek(size)
    file.write(digest)
    file.flush()


def broken_seal(path: Path) -> str | None:
    """Why a file is not as it was written, None when it is; files of before there were checksums pass. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return "the file is empty"
        file.seek(max(0, size - COMMENT))
        tail = file.read()
        file.seek(0)
        if len(tail) == COMMENT and tail.startswith(MARK):
            return None if _digest(file, size - DIGEST) == tail[-DIGEST:] else "its checksum does not match"
        end = tail[-END_SIZE:]
        if file.read(len(START)) == START and not (end.startswith(END) and end.endswith(bytes(2))):
            return "its end is missing"
        return None


def _digest(file: BinaryIO, size: int) -> bytes:
    """The digest, in hex, of the next `size` bytes."""
    found = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(CHUNK, size))):
        found.update(chunk)
        size -= len(chunk)
    return found.hexdigest().encode()
