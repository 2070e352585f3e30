"""What the probes' answers mean: rows of a table, and a line for each thing that is not as it should be. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cifar_lit.cli.check.processes import Answer, Said

RIGHT, WRONG, SILENT, FAILED = "right", "wrong", "no answer", "failed"
# what a process says whose peer has gone or is late, in contrast to what is wrong with itself
_IN_VAIN = ("closed by peer", "reset by peer", "Broken pipe", "recvValue failed", "imed out", "imeout", "remote process exited")


class Row(NamedTuple):
    """A line of the table. seconds: None where the try did not come to its end."""

    what: str
    tried: str
    result: str
    seconds: float | None
    figure: str


class Verdict(NamedTuple):
    """About one device or one group. complaints: what is wrong, in words; none if all is right."""

    rows: list[Row]
    complaints: list[str]


def device_verdict(name: str, answer: Answer, limit: float) -> Verdict:
    """About a device, such as "GPU 0", from what its probe said."""
    rows = _rows(name, answer.said, _ending(answer.said, answer.code))
    stage = _stage(answer.said)
    complaints = []
    if wrong := _wrong(answer.said):
        complaints.append(f"{name} computes wrong numbers: {wrong}")
    if error := _error(answer.said):
        complaints.append(f"{name} fails in {stage}: {error}")
    elif not _is_done(answer.said):
        if answer.code is None:
            complaints.append(f"{name} gave no answer in {limit:g} s ({stage})")
        else:
            said = f": {answer.error}" if answer.error else ""
            complaints.append(f"the process of {name} {_how(answer.code)} in {stage}{said}")
    return Verdict(rows, complaints)


def group_verdict(size: int, backend: str, said: Sequence[Said], codes: Mapping[int, int | None], limit: float) -> Verdict:
    """About a group of processes, from what all of them said.

    codes: by rank, how a process ended, None for one that fell silent and was ended, or never was heard of. The ranks that
    Lightning starts are not in it unless all fell silent: their parent, rank 0, is the one that knows, and is killed then.
    """
    by_rank = {rank: [one for one in said if one.get("rank") == rank] for rank in range(size)}
    name = f"{_many(size)} over {backend}"
    first = by_rank[0]
    rows = _rows(name, first, _ending(first, codes.get(0)))
    wrong = [f"process {rank}: {text}" for rank, heard in by_rank.items() if (text := _wrong(heard))]
    if wrong:
        names = {one["tried"] for one in said if one.get("wrong")}
        rows = [row._replace(result=WRONG) if row.tried in names else row for row in rows]
        return Verdict(rows, [f"{_many(size)} exchange wrong numbers over {backend}: {wrong[0]}"])
    errors = {rank: text for rank, heard in by_rank.items() if (text := _error(heard))}
    own = {rank: text for rank, text in errors.items() if not any(sign in text for sign in _IN_VAIN)}
    silent = [rank for rank, heard in by_rank.items() if rank not in errors and not _is_done(heard)]
    reach = "does not come up" if size == 1 else "cannot reach each other"
    if own:
        rank, text = next(iter(own.items()))
        return Verdict(rows, [f"{_many(size)} {reach} over {backend}: process {rank} in {_stage(by_rank[rank])}: {text}"])
    if silent:
        return Verdict(rows, [_about_silent(silent, by_rank, size, backend, codes, limit)])
    if errors:
        return Verdict(rows, [f"{_many(size)} {reach} over {backend}: {next(iter(errors.values()))}"])
    return Verdict(rows, [])


def _about_silent(
    silent: Sequence[int],
    by_rank: Mapping[int, Sequence[Said]],
    size: int,
    backend: str,
    codes: Mapping[int, int | None],
    limit: float,
) -> str:
    """Names those that were behind the others when all came to a stop; the others were waiting for them."""
    crashed = [rank for rank in silent if codes.get(rank) not in (None, 0, -signal.SIGKILL)]
    least = min(len(by_rank[rank]) for rank in silent)
    behind = crashed or [rank for rank in silent if len(by_rank[rank]) == least]
    if len(behind) > 1 and behind[0] == 0 and 0 in codes and codes[0] is not None:
        behind = behind[1:]  # rank 0 was killed as another was gone
    stage = _stage(by_rank[behind[0]])
    if not crashed and len(behind) == size > 1 and codes.get(0) is None:
        return f"{_many(size)} cannot reach each other over {backend}: no answer in {limit:g} s ({stage})"
    who = f"process {', '.join(map(str, behind))} of {size}"
    if crashed:
        return f"{who} {_how(codes[crashed[0]])} over {backend}, in {stage}"
    if all(rank in codes and codes[rank] is None for rank in behind):
        return f"{who} gave no answer in {limit:g} s over {backend} ({stage})"
    return f"{who} ended without a word over {backend}, in {stage}"


def _rows(name: str, said: Iterable[Said], ending: str) -> list[Row]:
    rows, open_try = [], None
    for one in said:
        if "tried" in one:
            rows.append(Row(name, one["tried"], WRONG if one["wrong"] else RIGHT, one["seconds"], one["figure"]))
            open_try = None
        elif "tries" in one:
            open_try = one["tries"]
    if ending != RIGHT:
        rows.append(Row(name, open_try or "", ending, None, ""))
    return rows


def _ending(said: Iterable[Said], code: int | None) -> str:
    said = list(said)
    return RIGHT if _is_done(said) else FAILED if _error(said) or code is not None else SILENT


def _is_done(said: Iterable[Said]) -> bool:
    return any("done" in one for one in said)


def _error(said: Iterable[Said]) -> str:
    return next((str(one["error"]) for one in said if "error" in one), "")


def _wrong(said: Iterable[Said]) -> str:
    return "; ".join(f"{one['tried']}: {one['wrong']}" for one in said if one.get("wrong"))


def _stage(said: Sequence[Said]) -> str:
    """What was being tried at the end."""
    return next((str(one["tries"]) for one in reversed(said) if "tries" in one), "starting")


def _how(code: int | None) -> str:
    """How a process ended that did not say so itself."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"crashed with {signal.Signals(-code).name}"
    except ValueError:
        return f"crashed with signal {-code}"


def _many(size: int) -> str:
    words = {1: "one process", 2: "two processes"}
    return words.get(size, f"{size} processes")
