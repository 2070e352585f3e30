"""The figures and the table of ours against a loop that took turns with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from cifar_lit.bench.interleave import Round
from cifar_lit.bench.report import environment, footer, headline, settings_of, show, shown_spread, spread, write_figures


def comparison(name: str, settings: Namespace, rounds: Sequence[Round], other: str) -> dict[str, Any]:
    """The figures: images/s and ms a step of both, and the ratio of ours over the other, above 1 where ours is faster.

    other: what ours is compared with.
    """
    ours = spread(turn.images / turn.ours for turn in rounds)
    plain = spread(turn.images / turn.plain for turn in rounds)
    ratio = spread(turn.plain / turn.ours for turn in rounds)
    step_ours = spread(1e3 * turn.ours / turn.steps for turn in rounds)
    step_plain = spread(1e3 * turn.plain / turn.steps for turn in rounds)
    return {
        "bench": name,
        "settings": settings_of(settings),
        "environment": environment(),
        **headline(("ours", ours, "images/s"), (other, plain, "images/s"), (f"ours / {other}", ratio, "×")),
        "rounds": len(rounds),
        "ours": {"images_per_second": ours, "ms_per_step": step_ours},
        "plain": {"what": other, "images_per_second": plain, "ms_per_step": step_plain},
        "difference_ms_per_step": round(step_ours["median"] - step_plain["median"], 4),
        "speed_ratio": ratio,
    }


def report(figures: dict[str, Any], json: str | None, turns: str) -> None:
    """Prints the figures as a table, and writes them to a file if one is wanted; `turns`: what a round was of each."""
    settings, ours, plain = figures["settings"], figures["ours"], figures["plain"]
    if json:
        write_figures(Path(json), figures)
    trained = " · ".join(filter(None, (settings.get("recipe"), settings["net"], settings["dataset"])))
    show(
        f"bench {figures['bench']} · {trained} · batch {settings['batch_size']}",
        ("", "images/s", "ms a step"),
        [
            (label, shown_spread(found["images_per_second"]), shown_spread(found["ms_per_step"], ".3f"))
            for label, found in ((f"ours under the Trainer, {settings['precision']}", ours), (plain["what"], plain))
        ],
        f"ours is {shown_spread(figures['speed_ratio'], '.3f')} × as fast · {figures['difference_ms_per_step']:+.3f} ms a step",
        f"medians (quartiles) of {figures['rounds']} rounds of {turns}, in turn",
        footer(figures),
    )
