"""The review over HTTP: the images, and decisions about them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cifar_lit.errors import Failure
from cifar_lit.extras.label.journal import ACTIONS, Decision, Journal
from cifar_lit.extras.label.queue import Queue
from cifar_lit.extras.web import read_body

PAGE = Path(__file__).parent / "page"
MAX_BODY_BYTES = 10_000


class Review:
    """What the page of a review asks for.

    Args:
        write: writes the table of labels and returns its number of rows.
        about: values for the page: `run`, the `command` that trains with the table, and `open`: whether classes may be
            added.
    """

    def __init__(self, queue: Queue, journal: Journal, write: Callable[[], int], about: dict[str, object]) -> None:
        self.queue, self.journal, self.write, self.about = queue, journal, write, about
        self._turn = asyncio.Lock()  # decisions are stored in the order of their arrival
        self.routes = [
            Route("/images", self._list),
            Route("/image/{item:int}", self._show),
            Route("/decide", self._store, methods=["POST"]),
            Route("/write", self._store, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        made = self.journal.decisions
        images = []
        for image, key in zip(self.queue.summaries, self.queue.keys, strict=True):
            images.append({**image._asdict(), **_state(made.get(key))})
        classes = {"classes": self.journal.classes, "known": len(self.queue.train.classes)}
        return JSONResponse({**self.about, **classes, "images": images})

    async def _show(self, request: Request) -> Response:
        item = self._checked(request.path_params["item"])
        return JSONResponse(await asyncio.to_thread(self.queue.details, item))

    async def _store(self, request: Request) -> Response:
        try:
            body = json.loads(await read_body(request, MAX_BODY_BYTES, "reload the page"))
        except (ValueError, RecursionError):
            raise HTTPException(400, "the decision is not valid JSON: reload the page") from None
        async with self._turn:
            try:
                if request.url.path.endswith("/write"):
                    return JSONResponse({"rows": await asyncio.to_thread(self.write)})
                return JSONResponse(await asyncio.to_thread(self._decide, body))
            except OSError as error:
                fault = f"the decision was not saved ({error.strerror})"
                raise HTTPException(507, f"{fault}: free some space, or start the review again") from None
            except Failure as error:
                raise HTTPException(507, str(error)) from None

    def _checked(self, item: object) -> int:
        """Return the place of an image in the queue; raise HTTPException if there is no such image."""
        last = len(self.queue.keys) - 1
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= last:
            raise HTTPException(404, f"there is no image {str(item)[:20]}: the last one is {last}")
        return item

    def _decide(self, body: object) -> dict[str, object]:
        """Store a decision, `{"item", "action", "label"}` or `{"action": "undo"}`; return the image's new state."""
        queue, journal = self.queue, self.journal
        if not isinstance(body, dict):
            body = {}
        action = body.get("action")
        if action == "undo":
            undone = journal.undo()
            if undone is None:
                raise HTTPException(409, "there is no decision to undo")
            state = {"item": None, "name": Path(undone.image).name, **_state(journal.decisions.get(undone.image))}
            if undone.image in queue.keys:
                state["item"] = queue.keys.index(undone.image)
            return state
        if action not in ACTIONS:
            raise HTTPException(422, f"{str(action)[:40]!r} is no decision: use {', '.join(ACTIONS)} or undo")
        item = self._checked(body.get("item"))
        label = None
        if action == "keep":  # an image without a label gets the predicted class
            label = queue.labels[item] or queue.summaries[item].predicted
        if action == "relabel":
            label = body.get("label")
            if label not in journal.classes:
                self._add_class(label)
        decision = Decision(queue.keys[item], action, label, date.today().isoformat(), queue.labels[item] is None)
        journal.decide(decision)
        return {"item": item, **_state(decision)}

    def _add_class(self, label: object) -> None:
        if not self.about["open"]:
            raise HTTPException(422, "the classes of this data set are fixed: choose one of them, or drop the image")
        try:
            self.journal.add_class(label)
        except ValueError:
            rule = "use up to 300 visible characters, and none of = + - @ at the start"
            raise HTTPException(422, f"a class cannot be called {str(label)[:80]!r}: {rule}") from None


def _state(decision: Decision | None) -> dict[str, object]:
    if decision is None:
        return {}
    return {"action": decision.action, "now": decision.label}
