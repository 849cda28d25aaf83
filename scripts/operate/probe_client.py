"""Requests of the self-test, over plain aiohttp: what a client sees, nothing of ours in between."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp


class CheckFailed(Exception):
    """What was expected and what came."""


class CheckSkipped(Exception):
    """Why the check does not apply to this server."""


def expect(condition: object, message: str) -> None:
    """Raises CheckFailed unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


# What an operator may have limited, as the server says it; from so much on the checks have enough.
LIMITS = (
    (re.compile(r"maximum context length is (\d+) tokens"), 2048),
    (re.compile(r"is limited to (\d+) by this server \(--max-"), 3),
)


def check_ok(status: int, answer: Any) -> None:
    """Raises CheckSkipped for a request above a limit of this server, CheckFailed for any other refusal."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        message = str(error.get("message"))
        if status == 429 and error.get("code") == "queue_full":
            raise CheckSkipped(f"above a limit of this server: {message}")
        if status != 400:
            raise CheckFailed(f"status {status}: {answer}")
        for pattern, enough in LIMITS:
            if (found := pattern.search(message)) and int(found[1]) < enough:
                raise CheckSkipped(f"above a limit of this server: {message}")
    expect(status == 200, f"status {status}: {answer}")


@dataclass
class Client:
    url: str
    session: aiohttp.ClientSession
    model: str
    timeout_s: float = 60.0  # of one request

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self.request("GET", path)

    async def request(
        self, method: str, path: str, body: Any = None, data: bytes | None = None
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if data is not None else None
        async with (
            asyncio.timeout(self.timeout_s),
            self.session.request(
                method, self.url + path, json=body, data=data, headers=headers
            ) as response,
        ):
            return response.status, await response.read()

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        status, answer = await self.request("POST", path, {"model": self.model, **body})
        try:
            return status, json.loads(answer)
        except ValueError:
            raise CheckFailed(f"{path} answered {status} without JSON: {answer[:80]!r}") from None

    async def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A completion; as long as max_tokens says, and greedy, unless said otherwise."""
        fields = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, **body}
        return await self.good("/v1/completions", prompt=prompt, **fields)

    async def chat(self, content: str, **body: Any) -> dict[str, Any]:
        """Raises CheckSkipped for a model without a chat template."""
        messages = [{"role": "user", "content": content}]
        fields = {"messages": messages, "temperature": 0, "max_tokens": 16, **body}
        status, answer = await self.post("/v1/chat/completions", **fields)
        if status == 400 and "template" in str(answer.get("error", {}).get("message")):
            raise CheckSkipped("the model has no chat template")
        check_ok(status, answer)
        return answer

    async def good(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer = await self.post(path, **body)
        check_ok(status, answer)
        return answer

    async def events(self, path: str, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream. Raises CheckFailed if it is none, or ends without [DONE]."""
        fields = {"model": self.model, "stream": True, **body}
        done = False
        async with (
            asyncio.timeout(self.timeout_s),
            self.session.post(self.url + path, json=fields) as response,
        ):
            kind = response.headers.get("Content-Type", "")
            if response.status != 200:
                check_ok(response.status, decoded(await response.text()))
            expect(kind.startswith("text/event-stream"), f"Content-Type is {kind!r}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    yield json.loads(line[6:])
        expect(done, "the stream ended without [DONE]")


def decoded(text: str) -> Any:
    """As JSON; the beginning of what is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text[:200]
