"""The fuzzed reader of request bodies."""

from __future__ import annotations

from hypothesis import strategies as st
from security.fuzz_files import PICTURES, pictures
from security.fuzzing import Reader, refused_or_read
from security.mutations import damaged

from cifar_lit.extras.serve.images import Limits, parse_body

PART = b"\r\n--xx\r\nContent-Disposition: form-data; "
FORM = (
    PART[2:]
    + b'name="image"; filename="cat.png"\r\nContent-Type: image/png\r\n\r\n%b' % PICTURES[0]
    + PART
    + b'name="note"\r\n\r\nhello'
    + PART
    + b"filename*=UTF-8''%e2%82%ac.gif\r\n\r\nGIF89a\r\n--xx--\r\n"
)
FORM_TYPE = "multipart/form-data; boundary=xx"
TYPE_WORDS = (
    "multipart/form-data", "; boundary=", "; boundary*=", "; boundary*0=xx", "; boundary*1*=utf-8''x", "xx", '"', "''",
    ";", "image/png", "application/json", "; charset=bogus", "application/octet-stream", "\xff", "%", "\r\n", "*", ",",
)  # fmt: skip
content_types = st.sampled_from([FORM_TYPE, "image/png", ""]) | st.lists(
    st.sampled_from(TYPE_WORDS) | st.text(st.characters(max_codepoint=255), max_size=4), max_size=6
).map("".join)
DISPOSITIONS = (
    b"filename*0=", b"filename*0*=", b"filename*=bogus''x", b"filename*=''%ff", b'filename="', b"=?utf-8?q?=ff?=", b";",
    b"\r\n ", b"\0",
)  # fmt: skip


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    """The form with pieces of header syntax in random places."""
    form = FORM
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, 120) | st.integers(0, len(form)))
        form = form[:index] + draw(st.sampled_from(DISPOSITIONS) | st.binary(max_size=4)) + form[index:]
    return form


bodies = damaged(FORM) | forms() | pictures


def read_body(request: tuple[str, bytes]) -> None:
    parsed = refused_or_read(lambda: parse_body(*request, Limits()))
    if parsed is not None:
        assert all(name.isprintable() and len(name) < 200 and data for name, data in parsed.files), parsed


READERS = {
    "the body of a request": Reader(
        st.tuples(content_types, bodies), read_body, found=[(FORM_TYPE, FORM.replace(b"UTF-8''", b"\0TF-8''"))]
    ),
}
