"""The review over HTTP: the page, the images, and decisions. Every address begins with a random token."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cifar_lit.errors import Failure, nearest
from cifar_lit.extras.label.journal import ACTIONS, Decision, Journal
from cifar_lit.extras.label.queue import Queue
from cifar_lit.extras.serve.bodies import Limits, RequestError
from cifar_lit.extras.serve.service import Service

FOLDER = Path(__file__).parent.parent
FILES = {
    "": ("label/page/review.html", "text/html"),
    "review.js": ("label/page/review.js", "text/javascript"),
    "review.css": ("label/page/review.css", "text/css"),
    "page.css": ("serve/page/page.css", "text/css"),
}
# The browser keeps its connection while a reviewer looks at an image.
LIMITS = Limits(body=4096, body_seconds=600.0)


class ReviewApp(Service):
    """The service of a review, for this machine only.

    Args:
        queue: the images.
        journal: the decisions.
        write: writes the table of labels and returns its number of rows.
        about: values for the page: `run`, the `command` that trains with the table, and `open`: whether classes may be
            added.
    """

    def __init__(self, queue: Queue, journal: Journal, write: Callable[[], int], about: dict[str, Any]) -> None:
        super().__init__(names=None)
        self.queue, self.journal, self.write, self.about = queue, journal, write, about
        self.token = secrets.token_urlsafe(16)
        self._turn = asyncio.Lock()  # decisions are stored in the order of their arrival

    async def answer(self, request: Request) -> Response:
        """Return a file of the page, the list of images, an image, or the result of a decision."""
        token, _, name = request.scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            raise RequestError(403, "the token is missing or wrong: open the address that the console shows")
        method = "POST" if name in ("decide", "write") else "GET"
        if request.method != method:
            raise RequestError(405, f"this address does not take {request.method[:20]}: use {method}")
        if name in FILES:
            file, kind = FILES[name]
            return Response((FOLDER / file).read_bytes(), media_type=kind)
        if match := re.fullmatch("image/([0-9]{1,9})", name):
            return JSONResponse(await asyncio.to_thread(self.queue.details, self._item(int(match[1]))))
        if name == "images":
            made = self.journal.decisions
            pairs = zip(self.queue.summaries, self.queue.keys, strict=True)
            images = [{**image, **_state(made.get(key))} for image, key in pairs]
            classes = {"classes": self.journal.classes, "known": len(self.queue.train.classes)}
            return JSONResponse({**self.about, **classes, "images": images})
        if method == "GET":
            raise RequestError(404, "there is nothing at this address: open the address that the console shows")
        try:
            body = await request.json() if name == "decide" else None
        except (ValueError, RecursionError):
            raise RequestError(400, "the decision is not valid JSON: reload the page") from None
        async with self._turn:
            try:
                if name == "decide":
                    return JSONResponse(await asyncio.to_thread(self._decide, body))
                return JSONResponse({"rows": await asyncio.to_thread(self.write)})
            except OSError as error:
                fault = f"the decision was not saved ({error.strerror})"
                raise RequestError(507, f"{fault}: free some space, or start the review again") from None
            except Failure as error:
                raise RequestError(507, str(error)) from None

    def _item(self, item: Any) -> int:
        count = len(self.queue.keys)
        if type(item) is not int or not 0 <= item < count:
            raise RequestError(404, f"there is no image {str(item)[:20]}: the last one is {count - 1}")
        return item

    def _decide(self, body: Any) -> dict[str, Any]:
        """Store a decision, `{"item", "action", "label"}` or `{"action": "undo"}`; return the image's new state.

        With `"create": true`, the label may be a new class.
        """
        queue, action = self.queue, body.get("action") if isinstance(body, dict) else None
        if action == "undo":
            undone = self.journal.undo()
            if undone is None:
                raise RequestError(409, "there is no decision to undo")
            item = queue.keys.index(undone.image) if undone.image in queue.keys else None
            return {"item": item, "name": Path(undone.image).name, **_state(self.journal.decisions.get(undone.image))}
        if action not in ACTIONS:
            raise RequestError(422, f"{str(action)[:40]!r} is no decision: use {', '.join(ACTIONS)} or undo")
        item = self._item(body.get("item"))
        # An image without a label gets the predicted class.
        kept = queue.labels[item] or queue.summaries[item]["predicted"]
        label = {"keep": kept, "relabel": body.get("label")}.get(action)
        if action == "relabel" and label not in self.journal.classes:
            name = str(label)[:80]
            if body.get("create") is not True:
                raise RequestError(422, f"no class is called {name!r}.{nearest(name, self.journal.classes)}")
            self._add_class(label, name)
        new = queue.labels[item] is None
        decision = Decision(queue.keys[item], action, label, date.today().isoformat(), new)
        self.journal.decide(decision)
        return {"item": item, **_state(decision)}

    def _add_class(self, label: Any, name: str) -> None:
        if not self.about["open"]:
            raise RequestError(422, "the classes of this data set are fixed: choose one of them, or drop the image")
        if similar := [known for known in self.journal.classes if known.casefold() == name.casefold()]:
            raise RequestError(422, f"there is a class {similar[0]!r}, which differs only in capitals: choose it")
        try:
            self.journal.add_class(label)
        except ValueError:
            rule = "use up to 300 visible characters, and none of = + - @ at the start"
            raise RequestError(422, f"a class cannot be called {name!r}: {rule}") from None


def _state(decision: Decision | None) -> dict[str, Any]:
    return {"action": decision.action, "now": decision.label} if decision else {}
