"""Files to rows: decoded by other processes where that pays, classified as they come, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cifar_lit.data.decode import decode_chunks, decode_files
from cifar_lit.errors import Failure
from cifar_lit.results.predictions import TOP, Row
from cifar_lit.use.classifier import Classifier
from cifar_lit.use.paths import Found

CHUNK = 64  # files that are decoded and then computed at once; four chunks a processor are held in memory
POOL_FROM = 200  # fewer files are decoded before other processes have started


def classify_files(classifier: Classifier, files: Sequence[Found], top: int = TOP) -> Iterator[tuple[list[Row], Tensor]]:
    """The rows of some files after the other, in order, with the images of those that could be read: uint8 (B, C, H, W).

    A file that cannot be read has the reason as its row's `error`. Only some chunks are in memory at a time, however many
    files there are. Raises Failure when a decoding process is ended from outside.
    """
    work = partial(decode_files, size=classifier.size, channels=classifier.channels)
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    wanted = [[file.path for file in chunk if file.reason is None] for chunk in chunks]
    start = 0
    try:
        for chunk, paths, (pixels, bad) in zip(
            chunks, wanted, decode_chunks(work, wanted, all_cores=len(files) >= POOL_FROM), strict=True
        ):
            shape = (len(paths) - len(bad), *classifier.size, classifier.channels)
            images = torch.from_numpy(np.frombuffer(bytearray(pixels), np.uint8).reshape(shape)).permute(0, 3, 1, 2)
            predictions = iter(classifier.predictions(images, top))
            reasons = iter([bad.get(position) for position in range(len(paths))])
            rows = []
            for index, file in enumerate(chunk, start):
                reason = file.reason or next(reasons)
                if reason is not None:
                    rows.append(Row(index, (), path=file.path, error=reason))
                    continue
                found = next(predictions)
                rows.append(Row(index, found.top, path=file.path, novelty=found.novelty, unlike=found.unlike))
            yield rows, images
            start += len(chunk)
    except BrokenProcessPool as error:
        raise Failure("a decoding process was ended from outside, mostly for want of memory: lower --max-pixels") from error
