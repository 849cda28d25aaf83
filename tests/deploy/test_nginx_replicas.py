"""Several servers behind nginx with deploy/nginx-replicas.conf: what a restart or a crash may cost."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.deploy.proxy import Replica, needs_nginx, nginx, replicas, session

pytestmark = needs_nginx
TEXT = "/v1/completions"
FAIL_TIMEOUT_S = 2.05  # of deploy/nginx-replicas.list: a second, as nginx counts up to two


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with session() as running:
        yield running


def body_of(num_tokens: int, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "x", "max_tokens": num_tokens, **fields}


def text_of(num_tokens: int) -> str:
    return "".join(f"{i} " for i in range(num_tokens))


async def served_by(client: aiohttp.ClientSession, url: str, **headers: str) -> str:
    """Name of the replica that answers: the last of the models that it lists."""
    async with client.get(url + "/v1/models", headers=headers) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["data"][-1]["id"])


async def num_running(client: aiohttp.ClientSession, replica: Replica) -> int:
    async with client.get(replica.url + "/load") as response:
        answer = await response.json()
    return int(answer["running"]) + int(answer["waiting"])


@dataclass
class Load:
    """Clients that send one short request after another, and what became of them."""

    client: aiohttp.ClientSession
    url: str
    outcomes: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self, num_clients: int) -> None:
        await asyncio.gather(*(self.one_after_another(i) for i in range(num_clients)))

    async def one_after_another(self, number: int) -> None:
        while not self.is_over:
            num_tokens = 1 + number % 4
            stream = number % 2 == 0
            self.outcomes[await self.request(num_tokens, stream)] += 1

    async def request(self, num_tokens: int, stream: bool) -> str:
        """ "ok", or what went wrong."""
        body = body_of(num_tokens, stream=stream)
        try:
            async with self.client.post(self.url + TEXT, json=body) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}: {error}"
        if response.status != 200 or '"error"' in text:
            return f"{response.status} {text[:200]}"
        is_whole = text.endswith("data: [DONE]\n\n") if stream else text_of(num_tokens) in text
        return "ok" if is_whole else "cut short"


async def test_requests_are_spread_by_load(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    with replicas("a", "b", "c") as all_replicas, nginx(tmp_path, all_replicas) as proxy:
        tasks = [asyncio.create_task(Load(client, proxy.url).request(30, True)) for _ in range(6)]
        while sum([await num_running(client, r) for r in all_replicas]) < 6:
            await asyncio.sleep(0.01)
        assert [await num_running(client, r) for r in all_replicas] == [2, 2, 2]
        assert [await task for task in tasks] == ["ok"] * 6


async def test_sessions_stay_with_their_replica(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    names = [f"session-{i}" for i in range(12)]
    with replicas("a", "b", "c") as all_replicas, nginx(tmp_path, all_replicas) as proxy:
        first = {n: await served_by(client, proxy.url, **{"X-Session-Id": n}) for n in names}
        again = {n: await served_by(client, proxy.url, **{"X-Session-Id": n}) for n in names}
        assert first == again
        assert len(set(first.values())) > 1
        gone = next(r for r in all_replicas if r.name == first[names[0]])
        gone.send(signal.SIGKILL)
        gone.wait()
        moved = {n: await served_by(client, proxy.url, **{"X-Session-Id": n}) for n in names}
        assert gone.name not in moved.values()
        stayed = {n for n in names if first[n] != gone.name}
        assert all(moved[n] == first[n] for n in stayed), "only its own sessions move"


async def test_a_drained_replica_loses_nothing(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    with replicas("a", "b") as (a, b), nginx(tmp_path, [a, b]) as proxy:
        load = Load(client, proxy.url)
        running = [asyncio.create_task(load.request(150, i % 2 == 0)) for i in range(4)]
        while [await num_running(client, r) for r in (a, b)] != [2, 2]:
            await asyncio.sleep(0.01)
        a.send(signal.SIGTERM)
        after = [await load.request(1, i % 2 == 0) for i in range(10)]
        assert a.process is not None
        assert a.process.poll() is None, "it was draining all the while"
        assert after == ["ok"] * 10
        assert [await task for task in running] == ["ok"] * 4
        assert a.wait() == 0


async def test_a_killed_replica_takes_its_own_requests_only(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    with replicas("a", "b") as (a, b), nginx(tmp_path, [a, b]) as proxy:
        load = Load(client, proxy.url)
        streams = [asyncio.create_task(load.request(60, True)) for _ in range(2)]
        while [await num_running(client, r) for r in (a, b)] != [1, 1]:
            await asyncio.sleep(0.01)
        whole = [asyncio.create_task(load.request(60, False)) for _ in range(2)]
        while [await num_running(client, r) for r in (a, b)] != [2, 2]:
            await asyncio.sleep(0.01)
        a.send(signal.SIGKILL)
        a.wait()
        after = [await load.request(1, i % 2 == 0) for i in range(10)]
        assert after == ["ok"] * 10
        for outcomes in ([await t for t in streams], [await t for t in whole]):
            assert outcomes.count("ok") == 1, outcomes
        (broken,) = [t.result() for t in whole if t.result() != "ok"]
        assert broken.startswith("502 ")
        assert "was not repeated" in broken
        async with client.get(b.url + "/metrics") as response:
            text = await response.text()
        assert 'srv:http_requests_total{path="/v1/completions",status="200"} 12.0' in text, (
            "2 of its own and the 10 after: what had run on the other was not sent again"
        )


async def test_rolling_restart_under_load(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    with replicas("a", "b", "c") as all_replicas, nginx(tmp_path, all_replicas) as proxy:
        load = Load(client, proxy.url)
        clients = asyncio.create_task(load.run(12))
        try:
            for replica in all_replicas:
                await asyncio.sleep(FAIL_TIMEOUT_S)
                replica.send(signal.SIGTERM)
                assert await asyncio.to_thread(replica.wait) == 0
                replica.launch()
                await asyncio.to_thread(replica.wait_ready)
        finally:
            load.is_over = True
            await clients
        assert set(load.outcomes) == {"ok"}, proxy.log
        assert load.outcomes["ok"] > 50


async def test_all_replicas_draining(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """Sluice's own answer arrives, with the time to come again."""
    with replicas("a", "b") as (a, b), nginx(tmp_path, [a, b]) as proxy:
        load = Load(client, proxy.url)
        running = [asyncio.create_task(load.request(60, True)) for _ in range(2)]
        while [await num_running(client, r) for r in (a, b)] != [1, 1]:
            await asyncio.sleep(0.01)
        for replica in (a, b):
            replica.send(signal.SIGTERM)
        while await asyncio.to_thread(lambda: a.is_ready() or b.is_ready()):
            await asyncio.sleep(0.01)
        for _ in range(3):
            async with client.post(proxy.url + TEXT, json=body_of(1)) as response:
                answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (503, "draining")
            assert response.headers["Retry-After"] == "5"
        assert [await task for task in running] == ["ok", "ok"]
