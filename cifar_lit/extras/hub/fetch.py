"""Load `hf://USER/NAME@REVISION`: fetch the model file of a hub repository, which is read like any stranger's file."""

from __future__ import annotations

import re
from pathlib import Path

from cifar_lit.errors import Failure, UsageError, check_packages, first_line
from cifar_lit.runs.run_folder import HUB, MODEL
from cifar_lit.text import note

MAX_BYTES = 8 << 30  # larger than any net of torchvision
_PART = r"\w[\w.-]*"  # begins with no dot, so that a name cannot leave the folder of the hub's cache
_NAME = re.compile(rf"{HUB}({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?", re.ASCII)
_REASONS = {  # by the name of huggingface_hub's error
    "RepositoryNotFoundError": "there is no such repository, or it is private: check the name, or use `hf auth login`",
    "GatedRepoError": "its owner must grant access first: ask on its page, then use `hf auth login`",
    "RevisionNotFoundError": "it has no such revision: check the name after the @",
    "RemoteEntryNotFoundError": f"it has no {MODEL}: name a repository of `cifar-lit export RUN --to hub DIR`",
    "LocalEntryNotFoundError": "the hub cannot be reached, and its cache lacks the file: check the connection",
}


def fetch(name: str) -> Path:
    """Return the path of a repository's model file in the hub's cache. No other file is downloaded.

    Unless the revision is a commit, print the commit. Raise UsageError for an invalid name, Failure without the file.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} names no model: write {HUB}USER/NAME or {HUB}USER/NAME@REVISION")
    check_packages(HUB, ["huggingface_hub"], "hub")
    from huggingface_hub import hf_hub_download

    repository, revision = match[1], match[2] or "main"
    try:
        about = hf_hub_download(repository, MODEL, revision=revision, dry_run=True)
        if not about.file_size or about.file_size > MAX_BYTES:
            raise Failure(f"its {MODEL} is empty or larger than {MAX_BYTES >> 30} GiB")
        path = hf_hub_download(repository, MODEL, revision=about.commit_hash)
    except Exception as error:  # also of its HTTP and transfer libraries
        reason = _REASONS.get(type(error).__name__, first_line(error))
        raise Failure(f"{name} cannot be loaded: {reason}") from None
    if revision != about.commit_hash:
        note(f"{name} is now {HUB}{repository}@{about.commit_hash}")
    return Path(path)
