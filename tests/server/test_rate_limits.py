"""Limits of keys over HTTP: 429, headers, what counts, and that others are not touched."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Site, eventually, running_site
from tests.server.fake_backend import Script

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"prompt": "x"}
ALICE = {"Authorization": "Bearer alice-key"}
BOB = {"Authorization": "Bearer bob-key"}
ADMIN = {"Authorization": "Bearer admin-key"}


@asynccontextmanager
async def shared_site(tmp_path: Path, keys: str, **settings: Any) -> AsyncIterator[Site]:
    file = tmp_path / "keys"
    file.write_text(keys)
    async with running_site(api_key_file=str(file), admin_key="admin-key", **settings) as site:
        yield site


async def test_a_key_that_has_used_its_requests_gets_429(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = "alice-key name=alice requests-per-minute=2\nbob-key\n"
    async with shared_site(tmp_path, keys, log_requests="on") as site:
        for left in ("1", "0"):
            status, headers, _ = await site.post_full(TEXT, HELLO, headers=ALICE)
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, left)
            assert headers["x-ratelimit-limit-requests"] == "2"
            assert headers["x-ratelimit-reset-requests"].endswith("s")
            assert "x-ratelimit-limit-tokens" not in headers
        messages = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        status, headers, answer = await site.post_full(CHAT, messages, headers=ALICE)
        assert status == 429
        assert 1 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert answer["error"]["type"] == "rate_limit_error"
        assert answer["error"]["code"] == "rate_limit_exceeded"
        assert len(site.backend.generates) == 2
        for others in (BOB, ADMIN):
            status, headers, _ = await site.post_full(TEXT, HELLO, headers=others)
            assert status == 200
            assert "x-ratelimit-limit-requests" not in headers
        assert (await site.post("/tokenize", HELLO, headers=ALICE))[0] == 200
        rejected = 'srv:rejected_requests_total{code="rate_limit_exceeded"}'
        async with site.session.get(site.url + "/metrics") as response:
            assert f"{rejected} 1.0" in await response.text()
    assert "key=alice" in caplog.text
    assert "alice-key" not in caplog.text


async def test_what_is_refused_for_another_reason_is_no_request(tmp_path: Path) -> None:
    async with shared_site(tmp_path, "alice-key requests-per-minute=1\n") as site:
        for body in ({}, {**HELLO, "n": 0}, {**HELLO, "model": "other"}):
            await site.post(TEXT, body, headers=ALICE)
        assert site.backend.generates == []
        assert (await site.post(TEXT, HELLO, headers=ALICE))[0] == 200
        assert (await site.post(TEXT, HELLO, headers=ALICE))[0] == 429


async def test_tokens_are_paid_when_the_request_has_ended(tmp_path: Path) -> None:
    async with shared_site(
        tmp_path, "alice-key\nbob-key\n", key_limits="tokens-per-minute=6"
    ) as site:
        status, headers, answer = await site.post_full(TEXT, HELLO, headers=ALICE)
        assert (status, answer["usage"]["total_tokens"]) == (200, 8)
        assert headers["x-ratelimit-limit-tokens"] == "6"
        status, headers, answer = await site.post_full(TEXT, HELLO, headers=ALICE)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        # 2 in debt, and 1 to begin with, at 6 a minute
        assert 25 <= int(headers["Retry-After"]) <= 30
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        assert (await site.post(TEXT, HELLO, headers=BOB))[0] == 200


async def test_completions_at_once_are_given_back_when_a_client_leaves(tmp_path: Path) -> None:
    async with shared_site(tmp_path, "alice-key live-requests=4\n") as site:
        site.backend.script = lambda generate: Script(hold="decode", pieces=["a"])
        too_many = {"prompt": ["x"] * 5}
        assert (await site.post(TEXT, too_many, headers=ALICE))[0] == 400
        body = {**HELLO, "n": 4, "best_of": 4, "temperature": 1}
        waiting = asyncio.ensure_future(site.post(TEXT, body, headers=ALICE))
        await eventually(lambda: len(site.backend.generates) == 1)
        status, headers, answer = await site.post_full(TEXT, HELLO, headers=ALICE)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert headers["Retry-After"] == "1"
        waiting.cancel()
        await eventually(lambda: len(site.backend.aborted) == 4)
        site.backend.script = lambda generate: Script()
        assert (await site.post(TEXT, body, headers=ALICE))[0] == 200


@pytest.mark.parametrize(("shown", "root"), [(False, "tiny"), (True, "/srv/models/x")])
async def test_the_path_of_the_model_is_told_only_if_asked_for(shown: bool, root: str) -> None:
    async with running_site(expose_model_path=shown) as site:
        object.__setattr__(site.service.engine_config, "model", "/srv/models/x")
        _, answer = await site.get("/v1/models")
        assert answer["data"][0]["root"] == root
        assert (await site.get("/v1/models/tiny"))[1]["root"] == root
