"""Requests that no well-behaved client sends, drawn from an OpenAPI document: valid, mutated, malformed, and broken
below the level of JSON.

Request ``i`` of a seed is always the same, so one that failed can be sent again alone.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

from freetoken.testing.fuzz_seeds import SCHEMAS, SEEDS, TEXTS, VALUES

SHARES = {"valid": 25, "described": 10, "mutated": 40, "malformed": 13, "protocol": 12}
"""Percent of each kind. ``described`` bodies come from the document's schemas alone."""

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")
_DEPTHS = (30, 200, 900, 1020, 3_000, 100_000)
_MARK = "\ue000deep:"
_DEEP = re.compile(r'"\\ue000deep:([\[{])(\d+)"')


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """``data`` is what is written to the socket. With ``cut`` the connection is closed for writing after it, although
    its headers promise more. ``lenient``: no answer is an answer, as the bytes are not HTTP or are cut short.
    ``leaves``: the client goes away when it has ``sent`` the request, or with the ``first`` bytes of the answer."""

    kind: str
    method: str
    target: str
    data: bytes
    cut: bool = False
    lenient: bool = False
    leaves: Literal["", "sent", "first"] = ""


class RequestFuzzer:
    """Draws requests. ``document`` is an OpenAPI document, ``model`` a name that the server knows."""

    def __init__(self, document: Mapping[str, Any], model: str, seed: int) -> None:
        self._document = document
        self._model = model
        self._seed = seed
        operations = [(m.upper(), path) for path, methods in document["paths"].items() for m in methods]
        self._bodiless = [(m, p) for m, p in operations if "requestBody" not in document["paths"][p][m.lower()]]
        self._posts = [p for m, p in operations if "requestBody" in document["paths"][p][m.lower()]]

    def request(self, index: int) -> FuzzRequest:
        """Request number ``index``."""
        rng = random.Random(f"{self._seed}:{index}")
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "protocol":
            return self._protocol(rng)
        if kind == "malformed":
            path = rng.choice(self._posts)
            body = _malform(rng, _dump(self._seed_body(rng, path)))
            return _framed(kind, "POST", path, body, _headers(rng))
        if kind != "mutated" and rng.random() < 0.1:
            return self._without_body(rng, kind)
        path = rng.choice(self._posts)
        body = self._described(rng, path) if kind == "described" else self._seed_body(rng, path)
        if kind == "mutated":
            for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
                body = _mutate(rng, body)
        drawn = _framed(kind, "POST", path, _dump(body), _headers(rng))
        return replace(drawn, leaves=rng.choice(("sent", "first"))) if rng.random() < 0.05 else drawn

    # ------------------------------------------------------------------------------------------------------- bodies

    def _seed_body(self, rng: random.Random, path: str) -> Any:
        seeds = SEEDS.get(path)
        if not seeds:
            return self._described(rng, path)
        body = copy.deepcopy(rng.choice(seeds))
        if not path.startswith("/v1/cache/"):
            body["model"] = self._model
            if "stream" in body:
                body["stream"] = rng.random() < 0.5
        return body

    def _described(self, rng: random.Random, path: str) -> Any:
        operation = self._document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = self._draw(rng, schema, 0)
        if isinstance(body, dict) and path in SEEDS and "model" in body:
            body["model"] = self._model
            for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
                body[name] = rng.randint(1, 4)
        return body

    def _draw(self, rng: random.Random, schema: Any, depth: int) -> Any:
        """A value that ``schema`` allows (but for what JSON schema cannot say)."""
        while isinstance(schema, dict) and "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        if not isinstance(schema, dict) or not schema.keys() - {"title", "description", "default"}:
            return copy.deepcopy(rng.choice([*VALUES, *TEXTS[:8]]))
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._draw(rng, rng.choice(schema[word]), depth)
        kind = schema.get("type", "object")
        if kind == "object":
            return self._draw_object(rng, schema, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            return [self._draw(rng, schema.get("items", {}), depth + 1) for _ in range(least + rng.randrange(3))]
        if kind == "string":
            text = rng.choice(TEXTS) or "x" * schema.get("minLength", 0)
            return text[: schema.get("maxLength", len(text))]
        if kind in ("integer", "number"):
            low: Any = schema.get("minimum", schema.get("exclusiveMinimum", -3))
            high: Any = schema.get("maximum", schema.get("exclusiveMaximum", low + 10))
            high = high - 1 if "exclusiveMaximum" in schema and kind == "integer" else high
            ends = [low, high, min(low + 1, high), (low + high) // 2 if kind == "integer" else (low + high) / 2]
            return rng.choice(ends)
        return rng.random() < 0.5 if kind == "boolean" else None

    def _draw_object(self, rng: random.Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        share = rng.choice((0.05, 0.2, 0.6))
        found = {
            name: self._draw(rng, inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in required or rng.random() < share
        }
        if schema.get("additionalProperties") and depth < 4:
            found[rng.choice(("a", "5", "", "type", "name"))] = self._draw(
                rng, schema["additionalProperties"], depth + 1
            )
        return found

    # ----------------------------------------------------------------------------------------------------- protocol

    def _without_body(self, rng: random.Random, kind: str) -> FuzzRequest:
        method, path = rng.choice(self._bodiless)
        return _framed(kind, method, _fill(rng, path, self._model), b"", _headers(rng))

    def _protocol(self, rng: random.Random) -> FuzzRequest:
        path = rng.choice(self._posts)
        body = _dump(self._seed_body(rng, path))
        headers = _headers(rng)
        choice: Callable[[], FuzzRequest] = rng.choice(
            (
                lambda: _framed("protocol", rng.choice(METHODS), path, body, headers, lenient=True),
                lambda: self._strange_target(rng),
                lambda: _framed("protocol", "POST", path, body, headers | _strange_headers(rng), lenient=True),
                lambda: _framed(
                    "protocol", "POST", path, body[: rng.randrange(len(body))], headers, promised=len(body)
                ),
                lambda: _framed("protocol", "POST", path, body + b"trailing", headers, promised=len(body)),
                lambda: _chunked(rng, path, body, headers),
                lambda: FuzzRequest("protocol", "?", "?", _noise(rng, path, body), True, True),
            )
        )
        return choice()

    def _strange_target(self, rng: random.Random) -> FuzzRequest:
        method, path = rng.choice(self._bodiless)
        strange = ("%ff%fe", "%00", "%2e%2e%2f", "a" * 3000, "😀", "x?limit=%ff", "//x", "?a=%zz&&&=", "%0d%0aX: y")
        target = rng.choice((_fill(rng, path, rng.choice(strange)), path + rng.choice(strange), rng.choice(strange)))
        target = quote(target, safe="/%?&=:{}.~")
        return _framed(
            "protocol", rng.choice((method, method, "POST")), "/" + target.lstrip("/"), b"", {}, lenient=True
        )


def _fill(rng: random.Random, path: str, model: str) -> str:
    name = rng.choice((model, "resp_nowhere", "%20", "x" * 300))
    filled = path.replace("{id}", name)
    if path.endswith("input_items"):
        filled += "?" + rng.choice(
            ("limit=5", "limit=0", "limit=99999999999999999999", "order=up", "after=x", "limit=%C2%B2")
        )
    return filled


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if rng.random() < 0.1:
        headers["anthropic-version"] = "2023-06-01"
        headers["anthropic-beta"] = "interleaved-thinking-2025-05-14,unknown-9"
    if rng.random() < 0.1:
        headers[rng.choice(("x-session-id", "session-id", "x-claude-code-session-id"))] = rng.choice(("s", "é" * 9, ""))
    return headers


def _strange_headers(rng: random.Random) -> dict[str, str]:
    choices: tuple[dict[str, str], ...] = (
        {"Content-Type": "text/plain; charset=utf-16"},
        {"Content-Type": "application/json; charset=nonsense"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": ";;;=\x7f"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "deflate"},
        {"Content-Encoding": "br"},
        {"Content-Encoding": "nonsense"},
        {"Transfer-Encoding": "gzip"},
        {"Authorization": "Bearer " + "k" * 2000},
        {"Authorization": "Bearer"},
        {"x-api-key": "\xff\xfe"},
        {"X-Request-Id": "a\tb" + "c" * 500},
        {"x-session-id": "\udcff" * 3},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://[::1"},
        {"Expect": "100-continue"},
        {"Expect": "nonsense"},
        {"Cookie": "a=" + "b" * 7000},
        {"X-Long": "b" * 20_000},
        {"Connection": "upgrade, close", "Upgrade": "websocket"},
        {"Host": ""},
        {"Range": "bytes=0-0"},
        {"If-Modified-Since": "yesterday"},
        {"Accept": "image/png"},
        {"Content-Length": "-1"},
        {"Content-Length": "99999999999999999999"},
        {"Content-Length": "5, 6"},
    )
    return rng.choice(choices)


# ------------------------------------------------------------------------------------------------------- mutations


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


def _mutate(rng: random.Random, body: Any) -> Any:
    places = _places(body, [])
    if not places or rng.random() < 0.02:
        return copy.deepcopy(rng.choice(VALUES))
    container, key = rng.choice(places)
    old = container[key]
    action = rng.randrange(9)
    if action <= 2:
        container[key] = _hostile(rng)
    elif action == 3:
        del container[key]
    elif action == 4:
        container[key] = [old] if rng.random() < 0.5 else {"type": old}
    elif action == 5 and isinstance(container, list):
        container.extend(copy.deepcopy(old) for _ in range(rng.choice((1, 3, 40))))
    elif action == 6 and isinstance(container, dict):
        container[rng.choice((*TEXTS[:6], "type", "name", "stream", "n", "id", "content"))] = _hostile(rng)
    elif action == 7 and isinstance(old, str):
        container[key] = old + rng.choice(TEXTS)
    elif action == 8:
        other, source = rng.choice(places)
        container[key] = copy.deepcopy(other.get(source) if isinstance(other, dict) else None)
    else:
        container[key] = rng.choice((str(old)[:200], -7, [old, old], None))
    return body


def _hostile(rng: random.Random) -> Any:
    return copy.deepcopy(
        rng.choices(
            (
                rng.choice(VALUES),
                rng.choice(TEXTS),
                rng.choice(SCHEMAS),
                f"{_MARK}{rng.choice('[{')}{rng.choice(_DEPTHS)}",
            ),
            (60, 25, 12, 3),
        )[0]
    )


def _dump(body: Any) -> bytes:
    """As JSON; a text that is a mark becomes that many nested arrays or objects."""

    def nested(match: re.Match[str]) -> str:
        opening, closing = ("[", "]") if match[1] == "[" else ('{"a":', "}")
        return opening * int(match[2]) + "1" + closing * int(match[2])

    return _DEEP.sub(nested, json.dumps(body)).encode()


def _malform(rng: random.Random, body: bytes) -> bytes:
    """JSON that is none, or such that parsers disagree on."""
    place = rng.randrange(len(body))
    choices: tuple[Callable[[], bytes], ...] = (
        lambda: body[:place],
        lambda: body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :],
        lambda: body[:place] + b"\xff\xc0\xaf" + body[place:],
        lambda: body.replace(b'"hi"', b'"\xed\xa0\x80"').replace(b"Be brief", b"\xed\xa0\x80\xfe"),
        lambda: b"\xef\xbb\xbf" + body,
        lambda: body.decode().encode(rng.choice(("utf-16", "utf-32"))),
        lambda: body[:-1] + b', "model": 7, "model": "x"}',
        lambda: (
            body[:-1]
            + b', "max_tokens": '
            + rng.choice((b"NaN", b"-Infinity", b"1e999", b"1E400", b"0x10", b"01"))
            + b"}"
        ),
        lambda: body[:-1] + b', "temperature": ' + b"9" * rng.choice((20, 5000)) + b"}",
        lambda: body[:-1] + b', "x": ' + b"[" * 100_000,
        lambda: body + body,
        lambda: body + b"\x00",
        lambda: body.replace(b'"', b"'"),
        lambda: b"",
        lambda: b"   \n",
        lambda: rng.choice((b"null", b"[]", b'"x"', b"17", b"{", b"{}", b"true", b"\x00", b"NaN", b"// x\n{}")),
        lambda: b"<xml/>",
        lambda: b"model=tiny&prompt=x",
        lambda: body[:-1] + b', "user": "' + b"\\ud800" * 100 + b'"}',
        lambda: bytes(rng.randrange(256) for _ in range(200)),
    )
    return rng.choice(choices)()


def _framed(
    kind: str,
    method: str,
    target: str,
    body: bytes,
    headers: Mapping[str, str],
    promised: int | None = None,
    lenient: bool = False,
) -> FuzzRequest:
    length = len(body) if promised is None else promised
    fields = {"Host": "127.0.0.1", "Connection": "close", "Content-Length": str(length), **headers}
    if not body and method == "GET":
        del fields["Content-Length"]
    head = (
        f"{method} {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    )
    cut = promised is not None and promised > len(body)
    return FuzzRequest(kind, method, target, _latin(head) + body, cut, lenient or promised is not None)


def _latin(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _chunked(rng: random.Random, path: str, body: bytes, headers: Mapping[str, str]) -> FuzzRequest:
    fields = {"Host": "127.0.0.1", "Connection": "close", "Transfer-Encoding": "chunked", **headers}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    size = rng.choice((b"%x" % len(body), b"%x" % (len(body) + 9), b"zz", b"-1", b"ffffffffffffffffff"))
    data = _latin(head) + size + b"\r\n" + body + b"\r\n" + rng.choice((b"0\r\n\r\n", b"0\r\n", b""))
    return FuzzRequest("protocol", "POST", path, data, True, True)


def _noise(rng: random.Random, path: str, body: bytes) -> bytes:
    line = path.encode()
    return rng.choice(
        (
            b"",
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST " + line + b"\r\n\r\n" + body,
            b"POST " + line + b" HTTP/9.9\r\n\r\n",
            b"POST " + line + b" HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
            b"POST " + line + b" HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
            b"POST " + line + b" HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
            b"POST " + line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            b"POST " + line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            bytes(rng.randrange(256) for _ in range(64)),
        )
    )
