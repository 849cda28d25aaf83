"""Bodies -> bytes for a socket, as well-behaved clients send them and as others do."""

import gzip
import random
import zlib
from dataclasses import dataclass, field

from scripts.fuzz.bodies import Bodies, Body, wrong_bytes

RIGHT, LEAVE, RESET = "read to the end", "close", "reset"


@dataclass(frozen=True)
class Attempt:
    """One connection: what is written, in which pieces, and how it ends."""

    name: str
    pieces: list[bytes]
    end: str = RIGHT  # LEAVE and RESET go without reading all of the answer
    num_answers: int | None = None  # how many responses must come; None: any number, even none
    bodies: list[Body] = field(default_factory=list)
    half_close: bool = False  # tell the server that no more will come


def post(body: Body, *headers: bytes, length: bytes | None = None, close: bool = True) -> bytes:
    size = str(len(body.data)).encode() if length is None else length
    lines = [
        b"POST %b HTTP/1.1" % body.path.encode(),
        b"Host: fuzz",
        b"Content-Type: application/json",
        b"Content-Length: " + size,
        *([b"Connection: close"] if close else []),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body.data


def cut(data: bytes, rng: random.Random, num: int) -> list[bytes]:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(num))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def chunked(body: Body, chunks: bytes) -> bytes:
    head = post(body, b"Transfer-Encoding: chunked").replace(
        b"Content-Length: %d\r\n" % len(body.data), b""
    )
    return head.removesuffix(body.data) + chunks


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # without the time: attempts depend on their number alone


class Wire:
    def __init__(self, bodies: Bodies, paths: list[str]) -> None:
        self._bodies = bodies
        self._paths = paths

    def draw(self, rng: random.Random) -> Attempt:
        """Half of all are plain requests."""
        if rng.random() < 0.5:
            return self.plain(rng)
        kinds = [
            *(self.split, self.piped, self.half, self.leaving, self.headers, self.chunks),
            *(self.lengths, self.lines, self.noise, self.types, self.packed),
        ]
        return rng.choice(kinds)(rng)

    def plain(self, rng: random.Random) -> Attempt:
        body = self._bodies.draw(rng)
        return Attempt("plain", [post(body)], num_answers=1, bodies=[body])

    def split(self, rng: random.Random) -> Attempt:
        body = self._bodies.draw(rng)
        pieces = cut(post(body), rng, rng.choice([1, 3, 10]))
        return Attempt("split", pieces, num_answers=1, bodies=[body])

    def piped(self, rng: random.Random) -> Attempt:
        """Several requests at once; answers come in order."""
        bodies = [self._bodies.draw(rng) for _ in range(rng.randint(2, 5))]
        data = b"".join(post(body, close=body is bodies[-1]) for body in bodies)
        return Attempt("piped", [data], num_answers=len(bodies), bodies=bodies)

    def half(self, rng: random.Random) -> Attempt:
        body = self._bodies.draw(rng)
        data = post(body)
        end, half_close = rng.choice([(LEAVE, False), (RESET, False), (RIGHT, True)])
        return Attempt("half", [data[: rng.randrange(len(data))]], end, half_close=half_close)

    def leaving(self, rng: random.Random) -> Attempt:
        """A whole request, whose answer is not waited for."""
        body = self._bodies.draw(rng)
        return Attempt("leaving", [post(body)], rng.choice([LEAVE, RESET]))

    def headers(self, rng: random.Random) -> Attempt:
        body = self._bodies.draw(rng)
        size = rng.choice([100, 5000, 8190, 8200, 40_000, 200_000])
        odd = rng.choice(
            [
                (b"X-A: " + b"a" * size,),
                tuple(b"X-%d: a" % i for i in range(size // 40)),
                (b"X-Request-Id: " + bytes([rng.randrange(1, 256)]) * rng.choice([1, 128, 129]),),
                (b"X-Request-Id: a", b"X-Request-Id: b"),
                (b"Authorization: Bearer \xff\xfe",),
                (b"Authorization: " + b"Bearer " * 50,),
                (b"no colon",),
                (b": empty",),
                (b" folded: a\r\n  b",),
                (b"X-A: a\x00b",),
                (b"Expect: 100-continue",),
                (b"Expect: 200-ok",),
                (b"Upgrade: websocket", b"Connection: upgrade"),
                (b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
                (b"Cookie: " + b"a=b; " * 300,),
                (b"Origin: null",),
                (b"X-Request-Metrics: 1",),
                (b"traceparent: 00-zz",),
            ]
        )
        return Attempt("headers", [post(body, *odd)])

    def chunks(self, rng: random.Random) -> Attempt:
        body = self._bodies.draw(rng)
        data, size = body.data, b"%x" % len(body.data)
        whole = size + b"\r\n" + data + b"\r\n0\r\n\r\n"
        odd = rng.choice(
            [
                whole,
                b"".join(b"1\r\n%c\r\n" % byte for byte in data[:2000]) + b"0\r\n\r\n",
                size + b";ext=1\r\n" + data + b"\r\n0\r\nX-Trailer: 1\r\n\r\n",
                b"zz\r\n" + data,
                b"-5\r\n" + data,
                b"ffffffffffffffffff\r\n" + data,
                size + data,
                size + b"\r\n" + data + b"0\r\n\r\n",
                b"0\r\n\r\n",
                whole + b"GARBAGE",
                b"\r\n\r\n",
                b"1" * 5000,
            ]
        )
        return Attempt("chunks", [chunked(body, odd)], half_close=True)

    def lengths(self, rng: random.Random) -> Attempt:
        body = self._bodies.draw(rng)
        size = len(body.data)
        length = rng.choice(
            [
                b"%d" % (size + 10), b"%d" % (size // 2), b"-1", b"abc", b"", b"+5", b"0", b"1e3",
                b"99999999999", b"9" * 30, b"5, 5", b"%d\r\nContent-Length: 3" % size, b"0x10",
                b"%d\r\nTransfer-Encoding: chunked" % size,
            ]
        )  # fmt: skip
        return Attempt("lengths", [post(body, length=length)], half_close=True)

    def lines(self, rng: random.Random) -> Attempt:
        """Request lines: other methods, paths and versions."""
        path = rng.choice(
            [*self._paths, "/", "/nowhere", "*", "http://fuzz/live", "//live", "/live//"]
        )
        path = path.replace("{id}", rng.choice(["tiny", "a/b", "%2e%2e", "%", "%ff%fe", "é"]))
        query = rng.choice(
            ["", "?deep=x", "?last=" + "9" * 50, "?last=-1", "?%zz", "?" + "a" * 9000]
        )
        method = rng.choice(
            [
                "GET",
                "HEAD",
                "PUT",
                "DELETE",
                "OPTIONS",
                "PATCH",
                "TRACE",
                "CONNECT",
                "get",
                "G\x00T",
                "X" * 99,
            ]
        )
        version = rng.choice(
            ["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/9", "", "http/1.1"]
        )
        line = f"{method} {path}{query} {version}\r\nHost: fuzz\r\nConnection: close\r\n\r\n"
        return Attempt(
            "lines", [line.encode("utf-8")], half_close=rng.random() < 0.5 or not version
        )

    def types(self, rng: random.Random) -> Attempt:
        body = self._bodies.draw(rng)
        kind = rng.choice(
            [
                b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x",
                b"application/json; charset=utf-16", b"application/json; charset=nonsense", b";;;", b"",
                b"application/vnd.api+json", b"\xff", b"APPLICATION/JSON",
            ]
        )  # fmt: skip
        encoding = rng.choice(
            [b"", b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"nonsense"]
        )
        data = post(body, *([b"Content-Encoding: " + encoding] if encoding else []))
        return Attempt("types", [data.replace(b"application/json", kind, 1)])

    def packed(self, rng: random.Random) -> Attempt:
        """Compressed as it should be, or damaged, or far more than it looks."""
        body = self._bodies.draw(rng)
        coding, pack = rng.choice([(b"gzip", gzipped), (b"deflate", zlib.compress)])
        header = b"Content-Encoding: " + coding
        if rng.random() < 0.5:
            data = post(Body(body.path, pack(body.data), body.kind), header)
            return Attempt("packed", cut(data, rng, 3), num_answers=1, bodies=[body])
        packed = pack(body.data)
        damage = rng.choice(
            [
                lambda: packed[: rng.randrange(len(packed))],
                lambda: packed + rng.choice([packed, b"\0", b"\n"]),
                lambda: wrong_bytes(packed, rng),
                lambda: pack(packed),
                lambda: pack(b" " * 2**25),
            ]
        )
        damaged = damage()
        return Attempt("packed", [post(Body(body.path, damaged, "bytes"), header)], num_answers=1)

    def noise(self, rng: random.Random) -> Attempt:
        data = rng.choice(
            [
                rng.randbytes(rng.choice([1, 10, 1000])),
                b"\r\n" * 100,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100),
                b"GET /live HTTP/1.1\n\n",
                b"",
            ]
        )
        return Attempt("noise", [data], half_close=True)
