"""The live view: with reports from a script, and with the three real processes on a tiny model."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.api.inspection import StepsReport, TimelineReport
from engine.api.messages import Subject
from tests.engine_cpu.tiny_models import make_tiny
from tests.page.browser import Page
from tests.page.test_chat import ask, open_page, shows
from tests.server.conftest import Site, eventually, live_server, running_site
from tests.server.test_debug import kv_report, request_report, requests_report, step_report

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBLEM = "#live-problem:not([hidden])"
WHY = "waits for KV blocks: needs 7, 2 are free"
# How many different colours a canvas shows
COLORS = (
    "(id => { const c = document.getElementById(id); const d = c.getContext('2d')"
    ".getImageData(0, 0, c.width, c.height).data; const seen = new Set(); for (let i = 0; "
    "i < d.length; i += 4) if (d[i + 3] === 255) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); "
    "return seen.size })"
)


def tell(site: Site) -> None:
    """One request runs, two wait."""
    runs = [("reserved", 1), ("used", 30), ("shared", 8), ("cached", 21), ("free", 40)]
    waiting: dict[str, Any] = {
        "state": "waiting",
        "phase": "queued",
        "arrival_ns": time.monotonic_ns(),
    }
    site.backend.reports = {
        Subject.KV: kv_report(runs),
        Subject.REQUESTS: requests_report(
            request_report(1, row=3, blocks=38, prompt_tokens=500, output_tokens=77),
            request_report(2, reason=WHY, **waiting),
            request_report(3, reason="1 request is before it in the queue", **waiting),
        ),
        Subject.STEPS: StepsReport(
            steps=[
                step_report(i, decode_tokens=i % 5, prefill_tokens=i, waiting=2) for i in range(60)
            ]
        ),
        Subject.TIMELINE: TimelineReport(
            timelines=[(2, [(5 * 10**9, "arrived"), (6 * 10**9, WHY)])]
        ),
    }


async def test_requests_blocks_and_steps_are_shown(tab: Page) -> None:
    async with running_site() as site:
        tell(site)
        await open_page(tab, site.url)
        await tab.click("#to-live")
        await shows(tab, "#counts", "1 running, 2 waiting")
        rows = await tab.run("[...document.querySelectorAll('#requests tr')].map(r => r.innerText)")
        assert [row.split()[0] for row in rows] == ["1", "2", "3"]
        assert "running, decode" in rows[0]
        assert "500" in rows[0]
        assert WHY in rows[1]
        await shows(tab, "#kv-totals", "38 of 99 used")
        assert "21 cached" in await tab.run("document.querySelector('#map').ariaLabel")
        assert await tab.run(f"{COLORS}('map')") == 4, "free, cached, used, shared"
        assert await tab.run(f"{COLORS}('steps')") >= 3
        assert "Requests that wait 2" in await tab.run("document.querySelector('#steps').ariaLabel")
        await tab.until("document.querySelector('#rates').ariaLabel?.includes('/s')")
        await tab.focus("#requests tr:nth-child(2) button")
        site.backend.reports[Subject.REQUESTS] = requests_report(request_report(2))
        await shows(tab, "#counts", "1 running, 0 waiting")
        assert await tab.run("document.activeElement.textContent") == "2", "the row is still there"
        await tab.press("Enter")
        await shows(tab, "#timeline li", WHY)
        assert "+1.000 s" in await tab.text("#timeline li:last-child")
        await tab.press("Escape")
        await tab.until("!document.querySelector('#timeline').open")
    assert tab.console == []


async def test_nothing_is_asked_while_nobody_looks(tab: Page) -> None:
    async with running_site() as site:
        tell(site)
        await open_page(tab, site.url)
        assert site.backend.inspects == []
        await tab.click("#to-live")
        await eventually(lambda: len(site.backend.inspects) >= 6)
        await tab.click("#to-chat")
        await asyncio.sleep(0.3)
        asked = len(site.backend.inspects)
        await asyncio.sleep(1.3)
        assert len(site.backend.inspects) == asked


async def test_an_engine_of_operators_says_whose_key_it_wants(tab: Page) -> None:
    async with running_site(api_key=["user"], admin_key="boss") as site:
        tell(site)
        await tab.open(site.url + "/#live")
        await shows(tab, PROBLEM, "API key")
        await tab.run("sessionStorage.setItem('key', 'user')")
        await shows(tab, PROBLEM, "--admin-key")
        await tab.run("sessionStorage.setItem('key', 'boss')")
        await shows(tab, "#counts", "1 running, 2 waiting")
        await tab.until(f"!document.querySelector({PROBLEM!r})")


async def test_three_real_processes(tab: Page, tmp_path: Path) -> None:
    """An answer in the chat, a request that waits for it and says why, and a stop that frees both."""
    model = tmp_path / "model"
    make_tiny("llama", model, max_position_embeddings=8192)
    for name in ("config.json", "generation_config.json"):  # texts go on until they are stopped
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**settings, "eos_token_id": None}))
    flags = (
        "--dtype", "float32", "--cpu-threads", "1", "--max-model-len", "8192", "--num-blocks", "600",
        "--block-size", "16", "--max-num-seqs", "1", "--served-model-name", "tiny",
    )  # fmt: skip
    with live_server(str(model), *flags) as server:
        await open_page(tab, server.url)
        assert await tab.text("#model") == "tiny"
        for name, value in (("seed", "5"), ("max_tokens", "8000")):
            await tab.focus(f"[name={name}]")
            await tab.type(value)
        await ask(tab, "Hi")
        await tab.until("document.querySelector('.assistant .text')?.innerText.length > 20")
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            other = asyncio.create_task(session.post(server.url + "/v1/completions", json=body))
            await tab.click("#to-live")
            await shows(
                tab, "#requests tr.waiting", "waits for a seat: 1 requests are running, 1 may"
            )
            running = json.loads(server.get("/debug/requests")[1])["requests"][0]
            assert (running["state"], running["row"] > 0, running["blocks"] > 0) == (
                "running", True, True,
            )  # fmt: skip
            await tab.click("#to-chat")
            await tab.click("#stop")
            await shows(tab, ".assistant .stats", "stopped")
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        await eventually(lambda: idle_gauges(server.get("/metrics")[1].decode()) == {0.0})
        await eventually(lambda: json.loads(server.get("/debug/kv")[1])["usage"] == 0)
        steps = json.loads(server.get("/debug/steps?last=1000")[1])["steps"]
        assert any(step["waiting"] == 1 for step in steps)
        assert sum(step["prefill_tokens"] for step in steps) > 0
        told = json.loads(server.get(f"/debug/requests/{running['id']}/timeline")[1])
        texts = [event["text"] for event in told["timelines"][0]["events"]]
        assert texts[0].startswith("arrived")
        assert texts[-1].startswith("finished (abort)")
    assert tab.console == []


def idle_gauges(text: str) -> set[float]:
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return {float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)}
