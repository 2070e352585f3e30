"""List and read objects of a bucket with obstore, verified, and explain errors in one line."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import boto3
import obstore
from botocore.exceptions import BotoCoreError
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import from_url

from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.text import is_file_name, is_name

READABLE = ("s3", "gs", "az", "https", "http")
WRITABLE = ("s3", "gs", "az")
# obstore waits 0.1, 0.2, 0.4 … s after lost connections, 408, 429 and 5xx. The user's endpoint may be http.
CLIENT: Any = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "10m", "allow_http": True}
RETRY: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}
ATTEMPTS = 4  # for an object that arrives truncated or damaged
PAUSE = 1.0  # seconds before the second attempt, twice as many before the third, and so on
SPARE_BYTES = 256 << 20  # left free on the disk
SHA256 = "cifarlitsha256"  # attribute of the files of a run; Azure takes letters and digits
# Errors of S3, and the servers of roles, which obstore asks if there are no credentials.
REFUSED = r"AccessDenied|Expired|InvalidAccessKey|InvalidToken|Signature|redential|169\.254\.169|metadata\.google"


class Object(NamedTuple):
    """An object: path below the URL, size in bytes, and ETag, which changes with the content."""

    path: str
    size: int
    etag: str


def check_url(url: str, schemes: tuple[str, ...] = READABLE) -> None:
    """Raise UsageError unless a URL names object storage, without credentials: URLs are written to config.yaml."""
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if parts.scheme not in schemes or not parts.netloc:
        raise UsageError(f"{place} is no object storage: use one of {', '.join(schemes)}, as in s3://bucket/prefix")
    if "@" in parts.netloc or parts.query or parts.fragment:
        fault = f"the URL of {place} has a user, a query or a fragment"
        raise UsageError(f"{fault}: leave that out, and put credentials into the environment, see docs/buckets.md")


def failure(error: Exception, place: str) -> Failure:
    """Return the Failure for an error of obstore, without users and queries of URLs, which may hold secrets."""
    text = re.sub(r"\?\S*|(?<=//)\S*@", "", first_line(error))
    reason = "".join(re.findall(r"<Code>(\w+)", str(error))[:1]) or text[:300]
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or re.search(REFUSED, reason):
        return Failure(f"{place}: access is refused ({reason}): renew the credentials, see docs/buckets.md")
    if isinstance(error, FileNotFoundError) or reason == "NoSuchBucket":
        return Failure(f"{place} does not exist, or was deleted after it was listed: check the URL, then start again")
    if isinstance(error, PreconditionError):
        return Failure(f"{place} has changed since it was listed: start again to use the new version")
    return Failure(f"{place} cannot be read or written ({reason}): check network, URL and names of objects")


@contextmanager
def explained_errors(place: str) -> Iterator[None]:
    """Raise errors of obstore as Failure, see `failure`."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        raise failure(error, place) from None


def check_path(path: str, url: str) -> bool:
    """Return True. Raise Failure if the path of an object cannot be that of a file below a folder on this system."""
    for name in path.split("/"):
        is_valid = 0 < len(os.fsencode(name)) <= 255 and (name.isprintable() or is_name(name)) and "\\" not in name
        if not is_valid or name in (".", "..") or (os.name == "nt" and not is_file_name(name)):
            raise Failure(f"{url}: the object {path[:200]!r} cannot be a file here: rename or remove it")
    return True


def check_space(folder: Path, needed: int, url: str) -> None:
    """Raise Failure if the disk of a folder has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        fault = f"{url} needs {needed / 1e9:,.1f} GB, but the disk of {folder} has {free / 1e9:,.1f} GB free"
        remedy = "free some space, choose another folder with --data.cache_dir or --logs"
        raise Failure(f"{fault}: {remedy}, or do not copy images: --data.stream true")


def _object(meta: Mapping[str, Any]) -> Object:
    """Return an object by what a store says of it. Stores quote ETags or not; without one, the time stands for it."""
    etag = meta["e_tag"] or meta["last_modified"].isoformat()
    return Object(meta["path"], meta["size"], etag.removeprefix("W/").strip('"'))


def _profile(url: str) -> dict[str, Any]:
    """Return the option with the credentials of a profile in ~/.aws, which only boto3 reads. The environment wins."""
    if not url.startswith("s3:") or {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & os.environ.keys():
        return {}
    session = boto3.Session()
    if not session.available_profiles:  # the role of a machine or container, which obstore asks itself
        return {}
    return {"credential_provider": Boto3CredentialProvider(session)}


class Reader:
    """List the objects below a URL, and read them from several threads. Raise UsageError for an invalid URL."""

    def __init__(self, url: str, schemes: tuple[str, ...] = READABLE) -> None:
        check_url(url, schemes)
        self.url = url
        try:
            self.store = from_url(url, client_options=CLIENT, retry_config=RETRY, **_profile(url))
        except (BaseError, BotoCoreError, ValueError) as error:
            raise failure(error, url) from None
        self._etags_are_md5 = True  # if they have 32 digits; not in buckets with other encryption
        self._unexpected: set[str] = set()  # checksums that differ from what the store claims

    def pages(self) -> Iterator[list[Object]]:
        """Yield all objects, some at a time. Raise Failure if one cannot be a local file."""
        with explained_errors(self.url):
            for page in obstore.list(self.store, chunk_size=1000):
                yield [item for item in map(self._below, page) if check_path(item.path, self.url)]

    def _below(self, meta: Mapping[str, Any]) -> Object:
        """Return a listed object with its path below the URL. For web servers, obstore gives the path on the server."""
        item = _object(meta)
        if not self.url.startswith("http"):
            return item
        return item._replace(path=item.path.removeprefix(unquote(urlsplit(self.url).path).strip("/") + "/"))

    def read(self, item: Object, target: Path) -> None:
        """Write the content of an object to `target`. Raise Failure if it has changed or cannot be read."""
        place, fault = f"{self.url}/{item.path}", ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            fault = self._read_once(item, target, place)
            if not fault:
                return
        raise Failure(f"{place} arrives damaged ({fault}), {ATTEMPTS} times: upload it again, or try later")

    def _read_once(self, item: Object, target: Path, place: str) -> str:
        """Write an object to `target`. Return what is wrong with the bytes that arrived, '' if nothing is."""
        options: Any = {}
        if not self.url.startswith("http"):  # a web server's ETag may be weak, and then never matches
            options["if_match"] = f'"{item.etag}"'
        with explained_errors(place):
            result = obstore.get(self.store, item.path, options=options)
            if _object(result.meta)[1:] != item[1:]:
                raise PreconditionError
        claimed = str(result.attributes.get(SHA256, ""))
        digest = hashlib.new("sha256" if claimed else "md5", usedforsecurity=False)
        if not claimed and self._etags_are_md5 and re.fullmatch("[0-9a-f]{32}", item.etag):
            claimed = item.etag
        with target.open("wb", buffering=0) as file:
            try:
                for block in result.stream(min_chunk_size=1 << 20):
                    digest.update(block)
                    file.write(block)
            except BaseError as error:
                return first_line(error)[:200]
            os.fsync(file.fileno())
        if claimed in ("", digest.hexdigest()):
            return ""
        if claimed == item.etag and digest.hexdigest() in self._unexpected:  # the same again: it is no checksum
            self._etags_are_md5 = False
            return ""
        self._unexpected.add(digest.hexdigest())
        return "its checksum differs"
