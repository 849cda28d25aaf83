"""Request bodies with Content-Encoding: what is taken, and that a small body cannot become a large cost."""

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import http_parser

from server import inflate, receive
from server.errors import ApiError
from server.inflate import MAX_OUT, Inflater
from tests.server.conftest import Site, running_site

TEXT = "/v1/completions"
BODY = b'{"prompt": "x", "max_tokens": 1}'
JSON = {"Content-Type": "application/json"}
LIMIT = 2**20


def raw_deflate(data: bytes) -> bytes:
    """Without zlib's header, as some clients send it."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def bomb(size: int) -> bytes:
    return gzip.compress(b" " * size)


def coded(coding: str) -> dict[str, str]:
    return {**JSON, "Content-Encoding": coding}


class Handled:
    """Counts what is inflated by the server, and by aiohttp's parser."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[int] = []
        self.num_inflaters = 0
        handled = self

        class Counting(Inflater):
            def __init__(self, coding: str) -> None:
                handled.num_inflaters += 1
                super().__init__(coding)

            def pieces(self, data: bytes) -> Any:
                for piece in super().pieces(data):
                    handled.pieces.append(len(piece))
                    yield piece

        def refuse(*args: Any) -> None:
            raise AssertionError("aiohttp inflates")

        monkeypatch.setattr(receive, "Inflater", Counting)
        monkeypatch.setattr(http_parser.DeflateBuffer, "feed_data", refuse)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZip", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
)
async def test_what_is_taken(site: Site, coding: str, data: bytes) -> None:
    status, answer = await site.post(TEXT, data=data, headers=coded(coding))
    assert (status, len(answer.get("choices", []))) == (200, 1), answer

    async def bytewise() -> AsyncIterator[bytes]:
        for i in range(len(data)):
            yield data[i : i + 1]

    status, _ = await site.post(TEXT, data=bytewise(), headers=coded(coding))
    assert status == 200


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (BODY, "incorrect header check"),
        (gzip.compress(BODY)[:-1], "it is cut off"),
        (gzip.compress(BODY)[:-8], "it is cut off"),
        (gzip.compress(BODY)[:5], "it is cut off"),
        (gzip.compress(BODY)[:-8] + b"\0" * 8, "incorrect data check"),
        (gzip.compress(BODY) + b"\n", "there are bytes behind its end"),
        (gzip.compress(BODY) * 2, "there are bytes behind its end"),
        (zlib.compress(BODY), "incorrect header check"),
    ],
)
async def test_what_is_not_as_encoded_is_the_clients_mistake(
    site: Site, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await site.post(TEXT, data=data, headers=coded("gzip"))
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_json", None)
    assert error["message"] == f"The body is not gzip, as Content-Encoding says: {reason}."
    status, _ = await site.post(TEXT, data=gzip.compress(BODY), headers=coded("gzip"))
    assert status == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_deflate_that_is_none(site: Site) -> None:
    for data in (BODY, zlib.compress(BODY)[:-4], raw_deflate(BODY)[:-1], raw_deflate(BODY) + b"a"):
        status, answer = await site.post(TEXT, data=data, headers=coded("deflate"))
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
        assert "not deflate, as Content-Encoding says" in answer["error"]["message"]
    status, answer = await site.post(TEXT, data=b"", headers=coded("deflate"))
    assert (status, answer["error"]["code"]) == (400, "empty_body")


@pytest.mark.parametrize(
    "coding", ["br", "zstd", "compress", "gzip, gzip", "identity, gzip", "x'\"y"]
)
async def test_other_codings_are_refused_by_name(site: Site, coding: str) -> None:
    status, headers, answer = await site.post_full(TEXT, data=BODY, headers=coded(coding))
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert answer["error"]["message"] == (
        f"Content-Encoding must be one of identity, gzip, deflate, got {coding!r}"
    )
    assert headers["Accept-Encoding"] == "identity, gzip, deflate"


async def test_of_two_headers_neither_is_left_out(site: Site) -> None:
    headers = [*JSON.items(), ("Content-Encoding", "gzip"), ("Content-Encoding", "identity")]
    status, answer = await site.post(TEXT, data=gzip.compress(BODY), headers=headers)
    assert status == 415
    assert "'gzip, identity'" in answer["error"]["message"]


async def test_a_bomb_is_inflated_to_the_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = Handled(monkeypatch)
    async with running_site(max_body_size=LIMIT) as site:
        status, answer = await site.post(TEXT, data=bomb(64 * LIMIT), headers=coded("gzip"))
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert "--max-body-size" in answer["error"]["message"]
        assert LIMIT < sum(handled.pieces) <= LIMIT + MAX_OUT
        assert max(handled.pieces) <= MAX_OUT
        handled.pieces.clear()
        data = b'{"prompt": "x"' + b" " * (LIMIT - 15) + b"}"
        status, _ = await site.post(TEXT, data=gzip.compress(data), headers=coded("gzip"))
        assert (status, sum(handled.pieces)) == (200, LIMIT), "the limit itself is not too much"


async def test_what_is_received_is_limited_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty blocks without end: nothing comes out of them."""
    handled = Handled(monkeypatch)
    packer = zlib.compressobj()

    async def blocks() -> AsyncIterator[bytes]:
        yield packer.compress(b"") + packer.flush(zlib.Z_SYNC_FLUSH)
        for _ in range(100):
            yield b"\0\0\0\xff\xff" * 4000

    async with running_site(max_body_size=LIMIT) as site:
        status, answer = await site.post(TEXT, data=blocks(), headers=coded("deflate"))
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert sum(handled.pieces) == 0


async def test_others_have_their_turn_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes while a body of 16 MiB is inflated is answered before that is done."""
    handled = Handled(monkeypatch)
    async with running_site(max_body_size=2**24) as site:
        data = bomb(2**24)
        slow = asyncio.create_task(site.post(TEXT, data=data, headers=coded("gzip")))
        while not handled.pieces and not slow.done():
            await asyncio.sleep(0)
        assert (await site.get("/live"))[0] == 200
        assert sum(handled.pieces) < 2**24
        assert (await slow)[1]["error"]["code"] == "empty_body"
        assert sum(handled.pieces) == 2**24


async def test_few_bodies_are_inflated_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take as much memory as --max-body-size."""
    under_way, most = 0, 0

    class Watched(Inflater):
        def pieces(self, data: bytes) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            yield from super().pieces(data)
            under_way -= 1

    monkeypatch.setattr(receive, "Inflater", Watched)
    async with running_site(max_body_size=2**20) as site:
        body = gzip.compress(b'{"prompt": "x"' + b" " * 2**19 + b"}")
        answers = await asyncio.gather(
            *(site.post(TEXT, data=body, headers=coded("gzip")) for _ in range(8))
        )
    assert [status for status, _ in answers] == [200] * 8
    assert (under_way, most) == (0, 2)


async def test_a_body_that_is_not_read_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = Handled(monkeypatch)
    data = bomb(64 * LIMIT)
    async with running_site(api_key=["secret"], max_body_size=LIMIT) as site:
        for path, coding, status in (
            (TEXT, "gzip", 401),
            (TEXT, "br", 401),  # the key comes first
            ("/nowhere", "gzip", 401),
            ("/live", "gzip", 405),
        ):
            found, _ = await site.post(path, data=data, headers=coded(coding))
            assert found == status, path
        key = {"Authorization": "Bearer secret"}
        for path, coding, status in (
            ("/nowhere", "gzip", 404),
            ("/v1/embeddings", "zstd", 501),
            ("/v1/models", "gzip", 405),
            (TEXT, "zstd", 415),
        ):
            found, _ = await site.post(path, data=data, headers={**coded(coding), **key})
            assert found == status, path
        async with site.session.get(site.url + "/live", data=data, headers=coded("br")) as response:
            assert response.status == 200
        assert (handled.num_inflaters, handled.pieces) == (0, [])
        headers = {**coded("gzip"), **key}
        status, _ = await site.post(TEXT, data=gzip.compress(BODY), headers=headers)
        assert (status, handled.pieces) == (200, [len(BODY)]), "the connection goes on"


async def test_an_operator_may_send_them_too() -> None:
    async with running_site(admin_key="root") as site:
        headers = {**coded("gzip"), "Authorization": "Bearer root"}
        data = gzip.compress(b'{"nonsense": 1}')
        status, answer = await site.post("/admin/drain", data=data, headers=headers)
        assert (status, answer["error"]["code"]) == (400, "unknown_field")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_pieces_are_what_was_compressed(monkeypatch: pytest.MonkeyPatch, coding: str) -> None:
    """For data of all kinds, cut anywhere, with pieces as small as they can be."""
    pack = gzip.compress if coding == "gzip" else zlib.compress
    rng = random.Random(3)
    for most_in, most_out in ((1, 1), (7, 3), (16, 100), (inflate.MAX_IN, inflate.MAX_OUT)):
        monkeypatch.setattr(inflate, "MAX_IN", most_in)
        monkeypatch.setattr(inflate, "MAX_OUT", most_out)
        for data in (b"", b"a", b"a" * 5000, rng.randbytes(3000), json.dumps([1] * 700).encode()):
            packed = pack(data)
            for size in (1, 100, len(packed)):
                inflater = Inflater(coding)
                pieces = [
                    piece
                    for start in range(0, len(packed), size)
                    for piece in inflater.pieces(packed[start : start + size])
                ]
                inflater.finish()
                assert b"".join(pieces) == data
                assert max(map(len, pieces)) <= most_out
                with pytest.raises(ApiError, match="behind its end"):
                    list(inflater.pieces(b"a"))
