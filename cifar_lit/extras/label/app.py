"""The review over HTTP: the images, and decisions about them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cifar_lit.extras.label.journal import Decision, Journal
from cifar_lit.extras.label.queue import Queue
from cifar_lit.extras.label.table import is_cell

PAGE = Path(__file__).parent / "page"


class Review:
    """What the page of a review asks for.

    Args:
        write: writes the table of labels and returns its number of rows.
        about: values for the page: `run`, the `command` that trains with the table, `open`: whether classes may be
            added, and `several`: whether an image has several labels.
    """

    def __init__(self, queue: Queue, journal: Journal, write: Callable[[], int], about: dict[str, object]) -> None:
        self.queue, self.journal, self.write, self.about = queue, journal, write, about
        self.routes = [
            Route("/images", self._list),
            Route("/image/{item:int}", self._show),
            Route("/decide", self._decide, methods=["POST"]),
            Route("/write", self._write, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        images = []
        for image, key in zip(self.queue.summaries, self.queue.keys, strict=True):
            images.append({**image._asdict(), **_state(self.journal.decisions.get(key))})
        classes = {"classes": self.journal.classes, "known": len(self.queue.train.classes)}
        counts = {"suspects": self.queue.suspects, "count": len(self.queue.train_rows)}
        return JSONResponse({**self.about, **classes, **counts, "images": images})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self.queue.details(request.path_params["item"]))

    async def _write(self, request: Request) -> Response:
        return JSONResponse({"rows": self.write()})

    async def _decide(self, request: Request) -> Response:
        """Store a decision, `{"item", "action", "label"}`; return the image's new state."""
        body = await request.json()
        item, action, label = body["item"], body["action"], None
        if action == "keep":  # an image without a label gets the predicted class
            label = self.queue.labels[item]
            if label is None:
                label = self.queue.summaries[item].predicted
        if action == "relabel":
            label = self._checked(body["label"])
        made = Decision(self.queue.keys[item], action, label, date.today().isoformat(), self.queue.labels[item] is None)
        try:
            self.journal.decide(made)
        except OSError as error:
            raise HTTPException(507, f"the decision was not saved ({error.strerror}): free some space") from None
        return JSONResponse(_state(made))

    def _checked(self, label: str) -> str:
        """Return the name of a class, or of several with `|` between them. Some may be new."""
        if self.about["several"] and not label:
            return label
        for name in label.split("|"):
            if name not in self.journal.classes and not is_cell(name):
                raise HTTPException(422, f"a class cannot be called {name!r}: use visible characters")
        return label


def _state(made: Decision | None) -> dict[str, object]:
    if made is None:
        return {}
    return {"action": made.action, "now": made.label}
