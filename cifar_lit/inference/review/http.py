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
from cifar_lit.inference.review.journal import ACTIONS, Decision, Journal
from cifar_lit.inference.review.queue import Queue
from cifar_lit.inference.serve.bodies import Limits, RequestError
from cifar_lit.inference.serve.service import Service

FOLDERS = (Path(__file__).parent / "page", Path(__file__).parent.parent / "serve" / "page")
PAGES = {"": "review.html", "review.js": "review.js", "review.css": "review.css", "page.css": "page.css"}
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# A reviewer may look at an image for a long time, while the browser keeps its connection.
LIMITS = Limits(body=4096, body_seconds=600.0)


class ReviewApp(Service):
    """The service of a review, for this machine only.

    Args:
        queue: the images.
        journal: the decisions.
        write: writes the table of labels and returns its number of rows.
        about: texts of the page: `run` and `command`, which trains with the table.
    """

    def __init__(self, queue: Queue, journal: Journal, write: Callable[[], int], about: dict[str, str]) -> None:
        super().__init__(names=None)
        self.queue, self.journal, self.write, self.about = queue, journal, write, about
        self.token = secrets.token_urlsafe(16)
        self._items = {key: item for item, key in enumerate(queue.keys)}
        self._turn = asyncio.Lock()  # decisions are stored in the order of their arrival

    async def answer(self, request: Request) -> Response:
        """Return a file of the page, the list of images, an image, or the result of a decision."""
        token, _, name = request.scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            raise RequestError(403, "the token is missing or wrong: open the address that the console shows")
        method = "POST" if name in ("decide", "write") else "GET"
        if request.method != method:
            raise RequestError(405, f"{name[:40] or 'the page'} does not take {request.method[:20]}: use {method}")
        if name in PAGES:
            file = next(folder / PAGES[name] for folder in FOLDERS if (folder / PAGES[name]).is_file())
            return Response(file.read_bytes(), media_type=KINDS[file.suffix])
        if name == "images":
            return JSONResponse(self._list())
        if match := re.fullmatch("image/([0-9]{1,9})", name):
            return JSONResponse(await asyncio.to_thread(self.queue.details, self._item(int(match[1]))))
        if method == "GET":
            raise RequestError(404, "there is nothing at this address: open the address that the console shows")
        try:
            body = await request.json() if name == "decide" else None
        except ValueError:
            raise RequestError(400, "the decision is not valid JSON: reload the page") from None
        async with self._turn:
            try:
                return JSONResponse(await asyncio.to_thread(self._decide, body) if name == "decide" else self._write())
            except OSError as error:
                text = f"this was not saved ({error.strerror or error}): free some space, then repeat it"
                raise RequestError(507, text) from None

    def _write(self) -> dict[str, int]:
        try:
            return {"rows": self.write()}
        except Failure as error:
            raise RequestError(507, str(error)) from None

    def _list(self) -> dict[str, Any]:
        decisions = self.journal.decisions
        images = []
        for item, key in enumerate(self.queue.keys):
            decision = decisions.get(key)
            made = {"action": decision.action, "now": decision.label} if decision else {}
            images.append({**self.queue.summary(item), **made})
        return {**self.about, "classes": self.queue.train.classes, "images": images}

    def _item(self, item: Any) -> int:
        if type(item) is not int or not 0 <= item < len(self.queue):
            raise RequestError(404, f"there is no image {str(item)[:20]}: the last one is {len(self.queue) - 1}")
        return item

    def _decide(self, body: Any) -> dict[str, Any]:
        """Store a decision, `{"item", "action", "label"}`, or `{"action": "undo"}`; return the image's new state."""
        action = body.get("action") if isinstance(body, dict) else None
        if action == "undo":
            undone = self.journal.undo()
            if undone is None:
                raise RequestError(409, "there is no decision to undo")
            decision = self.journal.decisions.get(undone.image)
            before = {"action": decision.action, "now": decision.label} if decision else {}
            return {"item": self._items.get(undone.image), "name": Path(undone.image).name, **before}
        if action not in ACTIONS:
            raise RequestError(422, f"{str(action)[:40]!r} is no decision: use {', '.join(ACTIONS)} or undo")
        item = self._item(body.get("item"))
        label, classes = self.queue.labels[item], self.queue.train.classes
        if action == "relabel":
            label = body.get("label")
            if label not in classes:
                name = str(label)[:80]
                raise RequestError(422, f"no class is called {name!r}.{nearest(name, classes)}")
        elif action == "keep":  # an image without a label gets the predicted class
            label = label or self.queue.predicted(item)
        else:
            label = None
        new = self.queue.labels[item] is None
        self.journal.decide(Decision(self.queue.keys[item], action, label, date.today().isoformat(), new))
        return {"item": item, "action": action, "now": label}
