"""Content types, bodies, forms, query parameters and headers, as a handler gets to see them."""

from __future__ import annotations

from collections.abc import Iterator

from conformity.rest import BOUNDARY, Case, Part, multipart

PREDICT = "/predictions/probe"
TYPES = (
    None,
    "",
    "application/json",
    "application/json; charset=utf-8",
    "APPLICATION/JSON",
    "application/vnd.api+json",
    "application/jsonlines",
    "text/plain",
    "text/csv; charset=latin-1",
    "application/octet-stream",
    "image/png",
    "garbage",
)
BODIES = {
    "nothing": b"",
    "object": b'{"a": [1, 2.5, null], "b": "\xc3\xa9"}',
    "number": b"3",
    "null": b"null",
    "text": b'"quoted"',
    "not JSON": b'{"a":',
    "NaN": b"[NaN, Infinity]",
    "latin": b"caf\xe9",
    "zero bytes": b"\x00\x01\x02",
    "mark": b"\xef\xbb\xbf{}",
    "two": b'{"a": 1, "a": 2}',
}
URL_ENCODED = {
    "two fields": b"a=1&b=2",
    "a field twice": b"a=1&a=2",
    "an empty value": b"a=",
    "a name alone": b"a",
    "nothing": b"",
    "plus and percent": b"a=one+two%20three%2Bfour",
    "an encoded name": b"a%20b=1",
    "characters": b"a=%C3%A9&b=\xc3\xa9",
    "empty pairs": b"&&a=1&&",
    "semicolons": b"a=1;b=2",
    "two equals signs": b"a=b=c",
    "a broken escape": b"a=%zz",
    "the name body": b"body=x&data=y",
    "JSON": b'{"a": 1}',
}
FORMS = {
    "a text": [Part("data", b"hello")],
    "a file": [Part("data", b"\x89PNG", "p.png", "image/png")],
    "a JSON file": [Part("data", b'{"a": 1}', "d.json", "application/json")],
    "a text file": [Part("data", b"hello", "d.txt", "text/plain")],
    "a file of no type": [Part("data", b"hello", "d.bin")],
    "a typed field": [Part("data", b'{"a": 1}', None, "application/json")],
    "an empty file": [Part("data", b"", "e", "application/octet-stream")],
    "an empty text": [Part("data", b"")],
    "a name twice": [Part("a", b"1"), Part("a", b"2")],
    "a file name twice": [Part("a", b"1", "x"), Part("a", b"2", "y")],
    "several": [Part("b", b"2"), Part("a", b"1", "f"), Part("c", b"3")],
    "no part": [],
    "the name body": [Part("body", b"x")],
    "characters": [Part("data", b"x", "n\u00e9.txt", "text/plain")],
    "names with signs": [Part("input:0", b"1"), Part("a,b", b"2", "x"), Part("c=d", b"3")],
    "line ends": [Part("data", b"a\r\nb\r\n\r\nc")],
}
HEADERS: dict[str, dict[str, str]] = {
    "of the client": {"X-Mixed-Case": "Value", "lower": "b", "UPPER": "c"},
    "a request id": {"x-request-id": "mine"},
    "explain": {"explain": "True"},
    "url_path": {"url_path": "mine"},
    "body": {"body": "mine"},
    "empty": {"X-Empty": ""},
    "cookies": {"Cookie": "a=1; b=2"},
    "latin": {"X-Latin": "caf\u00e9"},
    "accept": {"Accept": "text/html", "Accept-Language": "de"},
    "sequence": {"ts_request_sequence_id": "s1"},
    "close": {"Connection": "close"},
    "spaces": {"X-Spaces": "  inner  space  "},
}
QUERIES = (
    "?model_name=probe&a=1",
    "?model_name=probe&a=1&a=2",
    "?model_name=probe&a=%20x+y",
    "?model_name=probe&a",
    "?model_name=probe&a=",
    "?model_name=none",
    "?model_name=",
    "?a=1",
    "",
    "?model_name=probe&body=query",
)


def body_cases() -> Iterator[Case]:
    """Every content type with every body, forms of both kinds, and headers."""
    for content_type in TYPES:
        for title, body in BODIES.items():
            headers = {} if content_type is None else {"Content-Type": content_type}
            yield Case(f"body: {content_type}, {title}", "POST", PREDICT, headers=headers, body=body)
    for title, body in URL_ENCODED.items():
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        yield Case(f"form: {title}", "POST", PREDICT, headers=headers, body=body)
    for title, parts in FORMS.items():
        body, content_type = multipart(parts)
        yield Case(f"parts: {title}", "POST", PREDICT, headers={"Content-Type": content_type}, body=body)
    yield from _odd_forms()
    for title, headers in HEADERS.items():
        typed = {"Content-Type": "text/plain", **headers}
        yield Case(f"headers: {title}", "POST", PREDICT, headers=typed, body=b"x")
    yield Case("headers: of a GET", "GET", PREDICT)


def query_cases() -> Iterator[Case]:
    """The routes on which query parameters count, with bodies of several kinds beside them."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for query in QUERIES:
        yield Case(f"query: {query}", "POST", f"/invocations{query}", headers=form, body=b"a=form&c=3")
        yield Case(f"query: GET {query}", "GET", f"/invocations{query}")
    named, content_type = multipart([Part("model_name", b"probe"), Part("data", b"x")])
    yield Case(
        "query: named in parts", "POST", "/invocations", headers={"Content-Type": content_type}, body=named
    )
    yield Case("query: named in a form", "POST", "/invocations", headers=form, body=b"model_name=probe&a=1")
    for path in (
        "/models/probe/invoke?a=1",
        "/probe/predict?a=1",
        "/probe/1.0/predict?a=1",
        f"{PREDICT}?a=1",
    ):
        json_type = {"Content-Type": "application/json"}
        yield Case(f"query: {path}", "POST", path, headers=json_type, body=b'{"b": 2}')


def _odd_forms() -> Iterator[Case]:
    plain = b'Content-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    mark = f"--{BOUNDARY}".encode()
    odd = {
        "no boundary": (b"x", "multipart/form-data"),
        "another boundary": (
            mark + b"\r\n" + plain + mark + b"--\r\n",
            "multipart/form-data; boundary=other",
        ),
        "no end": (mark + b"\r\n" + plain, None),
        "cut off": (mark + b'\r\nContent-Disposition: form-data; name="a"', None),
        "no name": (mark + b"\r\nContent-Disposition: form-data\r\n\r\n1\r\n" + mark + b"--\r\n", None),
        "no disposition": (mark + b"\r\nX: y\r\n\r\n1\r\n" + mark + b"--\r\n", None),
        "words around": (b"before\r\n" + mark + b"\r\n" + plain + mark + b"--\r\nafter", None),
        "a quoted boundary": (
            mark + b"\r\n" + plain + mark + b"--\r\n",
            f'multipart/form-data; boundary="{BOUNDARY}"',
        ),
        "mixed": (mark + b"\r\n" + plain + mark + b"--\r\n", f"multipart/mixed; boundary={BOUNDARY}"),
    }
    for title, (body, content_type) in odd.items():
        headers = {"Content-Type": content_type or f"multipart/form-data; boundary={BOUNDARY}"}
        yield Case(f"parts: {title}", "POST", PREDICT, headers=headers, body=body)
