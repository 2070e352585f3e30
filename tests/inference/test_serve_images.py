"""Requests taken apart: what is in a form or in JSON, to the byte."""

from __future__ import annotations

import base64
import json

import pytest
from serving import form, picture

from cifar_lit.inference.serve.images import Images, Limits, RequestError, parse_body

LIMITS = Limits(images=3)


def asked(body: bytes, kind: str) -> Images:
    return parse_body(kind, body, LIMITS)


def test_files_of_a_form_are_taken_to_the_byte_and_other_fields_are_left_out() -> None:
    odd = picture() + b"\r\n--x-\r\n\r\n--\n--x-y"  # what looks like the form's own lines but is none
    body, headers = form(("a.jpg", odd), ("b.bmp", b"BM\r\n"))
    note = b'--x-y\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
    found = asked(b"a preamble\r\n" + note + body, headers["Content-Type"])
    assert found == Images([("image 1 (a.jpg)", odd), ("image 2 (b.bmp)", b"BM\r\n")], many=True)


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('form-data; name="i"; filename="katze \\"1\\".jpg"', 'katze "1".jpg'),
        ("form-data; name=i; filename*=UTF-8''gr%C3%BCn.jpg", "grün.jpg"),
        ('form-data; name="i"; filename=""', "without a name"),
        ('form-data; name="i"; filename="' + "x" * 500 + '"', "x" * 80),
        ('form-data; name="i"; filename="a\x1b[31m.jpg"', "a?[31m.jpg"),
    ],
)
def test_names_in_a_form_are_read_and_shown_short_and_printable(disposition: str, name: str) -> None:
    body = f"--b\r\ncontent-disposition: {disposition}\r\n\r\n".encode() + picture() + b"\r\n--b--"
    assert asked(body, 'multipart/form-data; boundary="b"').files == [(f"image 1 ({name})", picture())]


def test_base64_may_be_folded_and_may_be_a_data_url() -> None:
    text = base64.encodebytes(picture()).decode()
    assert "\n" in text.strip()
    for one in (text, "data:image/jpeg;base64," + text):
        assert asked(json.dumps({"image": one}).encode(), "application/json; charset=utf-8").files == [("the image", picture())]


@pytest.mark.parametrize("kind", ["image/jpeg", "IMAGE/PNG; q=1", "application/octet-stream", ""])
def test_a_body_of_an_images_type_is_the_image(kind: str) -> None:
    assert asked(picture(), kind) == Images([("the image", picture())], many=False)


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data; boundary=b", b"--b\r\n\r\n", 400),
        ("multipart/form-data; boundary=b", b"--b\r\nno headers\r\n--b--", 400),
        ("multipart/form-data; boundary=", b"--\r\n\r\n\r\n----", 400),
        ("multipart/form-data; boundary=b", form(*[("a", picture())] * 4)[0].replace(b"--x-y", b"--b"), 413),
        ("application/json", json.dumps({"images": [base64.b64encode(picture()).decode()] * 4}).encode(), 413),
        ("application/json", b'{"image": "", "images": []}', 422),
        ("application/json", b"\xff\xfe", 400),
        ("application/json", b"[]", 422),
        ("application/json", b'{"image": null}', 422),
        ("application/json", '{"image": "é"}'.encode(), 422),
        ("video/mp4", picture(), 415),
        ("image/svg+xml", b"<svg/>", 415),
        ("image/webp", b"RIFF1234WAVE", 415),
    ],
)
def test_what_is_no_request_for_images_is_refused(kind: str, body: bytes, status: int) -> None:
    with pytest.raises(RequestError) as refused:
        asked(body, kind)
    assert refused.value.status == status
    assert "\n" not in refused.value.text
