"""`cifar-lit review` in its own process and in a browser: decisions, keys, refused requests, kill -9."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from browser import Open
from contract.command_line import draw_folder
from extras.serving import Service, running
from inference.small_nets import write_net

from cifar_lit.cli import main

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")


class Review(NamedTuple):
    """A running review of a run."""

    run: Path
    service: Service
    token: str

    @property
    def url(self) -> str:
        return f"{self.service.url}/{self.token}/"

    @property
    def images(self) -> list[dict[str, Any]]:
        return list(self.service.ask("GET", f"/{self.token}/images").json["images"])

    def post(self, name: str, body: object = None, **headers: str) -> Any:
        data = body if isinstance(body, str) else json.dumps(body)
        return self.service.ask("POST", f"/{self.token}/{name}", data, headers)

    @property
    def table(self) -> dict[str, dict[str, str]]:
        with (self.run / "labels-reviewed.csv").open() as file:
            return {row["image"]: row for row in csv.DictReader(file)}


@contextmanager
def reviewing(run: Path, *flags: object) -> Iterator[Review]:
    with running(run, *flags, command="review") as service:
        yield Review(run, service, service.lines[-1].partition("http://")[2].split("/")[1])


@pytest.fixture(scope="module")
def review(fitted_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Review]:
    """Return a running review of 400 shapes, shared by the tests of this file."""
    run = Path(shutil.copytree(fitted_run, tmp_path_factory.mktemp("review") / "run-1"))
    with reviewing(run, "--limit", 30) as opened:
        yield opened


def test_requests_without_the_token_from_other_sites_and_invalid_decisions_are_refused(review: Review) -> None:
    ask, good = review.service.ask, {"item": 0, "action": "drop"}
    before = (review.run / "review.jsonl").read_bytes()
    for path in ("/", "/images", "/wrong-token/images", f"/{review.token[:-1]}/decide", f"/{review.token}x/"):
        answer = ask("GET", path)
        assert (answer.status, "the address that the console shows" in answer.error) == (404, True), path
    assert ask("POST", "/wrong-token/decide", json.dumps(good)).status == 404
    for headers, status in (({"Origin": "http://evil.example"}, 403), ({"Host": "evil.example"}, 400)):
        assert review.post("decide", good, **headers).status == status
    for body, status, text in (
        ({"item": 0, "action": "relabel", "label": "sqare"}, 422, "classes of this data set are fixed"),
        ({"item": 0, "action": "relabel", "label": ["a"]}, 422, "classes of this data set are fixed"),
        ({"item": 30, "action": "keep"}, 404, "there is no image 30: the last one is 29"),
        ({"item": -1, "action": "keep"}, 404, "there is no image -1"),
        ({"item": True, "action": "keep"}, 404, "there is no image True"),
        ({"item": "\ud800", "action": "keep"}, 404, "there is no image \\ud800"),
        ({"item": 0, "action": "burn"}, 422, "'burn' is no decision: use keep, relabel, drop, skip or undo"),
        ([], 422, "'None' is no decision"),
        ("{", 400, "the decision is not valid JSON"),
        ("[" * 5000, 400, "the decision is not valid JSON"),
        ("x" * 2_000_000, 413, "the body is larger than"),
    ):
        answer = review.post("decide", body)
        assert (answer.status, text in answer.error) == (status, True), answer.error
    for method, name, status in (("POST", "images", 405), ("GET", "decide", 405), ("GET", "nowhere", 404),
                                 ("GET", "image/30", 404), ("GET", "../serve/http.py", 404)):  # fmt: skip
        assert ask(method, f"/{review.token}/{name}").status == status, name
    assert (review.run / "review.jsonl").read_bytes() == before
    page = ask("GET", f"/{review.token}/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "access-control-allow-origin" not in page.headers


def test_labels_are_reviewed_with_keys_and_buttons(review: Review, open_page: Open) -> None:
    opened = open_page(review.url)
    page = opened.page
    page.wait_for_selector("[aria-busy=false] #review:not([hidden])")
    images = review.images
    assert len(images) == 30
    first = images[0]
    assert page.inner_text("#question") == f"Is this “{first['label']}”?"
    assert page.locator("#nearest img").count() == 5
    assert page.evaluate("document.getElementById('picture').classList.contains('pixels')")  # 16 pixels, enlarged
    assert (opened.unloaded, opened.nameless, opened.low_contrasts) == ([], [], [])

    def after(count: int) -> None:
        page.locator("[aria-busy=false] #progress", has_text=f"{count} of 30 reviewed").wait_for()

    page.keyboard.press("p" if first["label"] != first["predicted"] else "k")
    after(1)
    page.get_by_role("button", name="Drop").click()
    after(2)
    page.focus("#filter")  # keys are decisions there too, although "s" and "d" begin the names of classes
    page.keyboard.press("s")
    after(3)
    assert page.input_value("#filter") == ""
    page.keyboard.press("w")
    page.locator("#written", has_text="399 rows are written").wait_for()
    page.keyboard.press("3")
    after(4)
    page.keyboard.press("/")
    page.keyboard.type("sta")
    assert page.locator("#classes button").all_inner_texts() == ["star Enter"]
    page.keyboard.press("Enter")
    after(5)
    page.keyboard.press("u")
    after(4)
    assert page.inner_text("#question") == f"Is this “{images[4]['label']}”?"
    page.keyboard.press("Control+z")
    after(3)
    page.keyboard.press("k")
    after(4)
    states = [(image["action"], image["now"]) for image in review.images[:4]]
    same = first["label"] == first["predicted"]
    assert states[0] == ("keep" if same else "relabel", first["predicted"])
    assert states[1:] == [("drop", None), ("skip", None), ("keep", images[3]["label"])]
    assert "action" not in review.images[4]

    page.get_by_role("button", name="Write the table").click()
    page.locator("#written", has_text="399 rows are written").wait_for()
    assert "--data.labels" in page.inner_text("#command")
    assert images[1]["name"] not in review.table
    assert [url for url in opened.requests if not url.startswith((review.url, "data:"))] == []
    assert opened.errors == []


@pytest.mark.parametrize(("width", "height", "scheme"), [(390, 844, "dark"), (1280, 800, "light")])
def test_the_page_fits_its_window_and_shows_where_the_focus_is(
    review: Review, open_page: Open, width: int, height: int, scheme: str
) -> None:
    opened = open_page(review.url, width=width, height=height, scheme=scheme)
    opened.page.wait_for_selector("[aria-busy=false] #review:not([hidden])")
    assert (opened.overflow, opened.low_contrasts) == (0, [])
    bottom = "document.getElementById('nearest').getBoundingClientRect().bottom"
    assert opened.page.evaluate(bottom) <= height  # the most similar images are visible without scrolling
    for name in ("filter", "write", "keep"):
        opened.page.keyboard.press("Tab")
        assert opened.page.evaluate("document.activeElement.id") == name
    assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.slow
def test_classes_called_by_digits_have_their_own_keys_and_long_names_fit(tmp_path: Path, open_page: Open) -> None:
    classes = ["0", "1", "10", "2", *("W" * 150 + letter for letter in "abcdefgh")]
    draw_folder(tmp_path / "set", dict.fromkeys(classes, 2))
    run = write_net(tmp_path / "run-1", "lenet", side=16, classes=classes)
    settings = {"dataset": "folder", "root": str(tmp_path / "set"), "image_size": 16, "val_size": 0}
    settings["cache_dir"] = str(tmp_path / "cache")
    (run / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    with reviewing(run, "--trust") as review:
        opened = open_page(review.url, width=390)
        opened.page.wait_for_selector("[aria-busy=false] #review:not([hidden])")
        assert opened.overflow == 0
        for count, digit in enumerate("20", 1):
            opened.page.keyboard.press(digit)
            opened.page.locator("[aria-busy=false] #progress", has_text=f"{count} of 12 reviewed").wait_for()
        opened.page.keyboard.press("5")  # not a class
        assert [image.get("now") for image in review.images[:3]] == ["2", "0", None]
        opened.page.keyboard.press("/")
        opened.page.keyboard.type(" Great  heron")
        opened.page.keyboard.press("Enter")
        opened.page.locator("[aria-busy=false] #progress", has_text="3 of 12 reviewed").wait_for()
        opened.page.locator("#classes button", has_text="Great heron").click()  # listed from now on, without a search
        opened.page.locator("[aria-busy=false] #progress", has_text="4 of 12 reviewed").wait_for()
        assert [image.get("now") for image in review.images[2:4]] == ["Great heron"] * 2
        opened.page.reload()
        opened.page.locator("#classes button", has_text="Great heron").wait_for()
        assert opened.page.locator("#filter option", has_text="Great heron").count() == 0  # no image has this label yet
        assert opened.errors == []
        answer = review.post("decide", {"item": 5, "action": "relabel", "label": "=1+1"})
        assert answer.status == 422 and "cannot be called '=1+1'" in answer.error
        assert "action" not in review.images[5]


@pytest.mark.slow
def test_a_killed_review_loses_no_decision(
    fitted_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(fitted_run, tmp_path / "run-1"))
    with reviewing(run, "--limit", 0) as review:
        images = review.images
        assert len(images) == 400
        assert review.post("decide", {"action": "undo"}).error == "there is no decision to undo"
        for item in range(0, 60, 2):
            assert review.post("decide", {"item": item, "action": "drop"}).status == 200
            assert review.post("decide", {"item": item + 1, "action": "relabel", "label": "star"}).status == 200
        assert review.post("decide", {"action": "undo"}).json == {"item": 59, "name": images[59]["name"]}
        review.service.process.kill()
        review.service.process.wait()
        assert not (run / "labels-reviewed.csv").exists()
    assert main(["review", str(run), "--export"]) == 0
    assert "59 decisions · 370 rows in " in capsys.readouterr().out
    table = review.table
    for item in range(60):
        row = table.get(images[item]["name"])
        if item % 2 == 0:
            assert row is None
        else:
            assert row is not None and row["label"] == ("star" if item < 59 else images[item]["label"])
            assert row["original_label"] == images[item]["label"]
