"""/debug/...: what the engine tells of itself, who may ask, and what happens if it does not answer.

And the page's files: how they are served, and what they may not contain.
"""

import asyncio
import logging
import re
import time
from array import array
from typing import Any

import pytest

from engine.api.inspection import (
    BLOCK_STATES,
    HostReport,
    KvReport,
    RequestReport,
    RequestsReport,
    StepReport,
    StepsReport,
    TimelineReport,
)
from engine.api.messages import Phase, Subject
from server import inspection, page
from tests.server.conftest import Site, eventually, running_site
from tests.server.fake_backend import Script

TEXT = "/v1/completions"
PATHS = ("/debug/kv", "/debug/requests", "/debug/steps", "/debug/requests/7/timeline")
RUNS = [("reserved", 1), ("used", 3), ("shared", 2), ("cached", 4), ("free", 10), ("used", 1)]
SECOND = 10**9


def kv_report(runs: list[tuple[str, int]] = RUNS, host: HostReport | None = None) -> KvReport:
    return KvReport(
        block_size=16,
        enable_prefix_caching=True,
        states=bytes(BLOCK_STATES.index(state) for state, _ in runs),
        lengths=array("i", [length for _, length in runs]).tobytes(),
        host=host,
    )


def request_report(req_id: int, **values: Any) -> RequestReport:
    plain: dict[str, Any] = dict.fromkeys(RequestReport.__struct_fields__, 0)
    words = {"state": "running", "phase": "decode", "reason": ""}
    now = time.monotonic_ns()
    return RequestReport(**{**plain, **words, "req_id": req_id, "arrival_ns": now, **values})


def requests_report(*rows: RequestReport) -> RequestsReport:
    num_running = sum(row.state == "running" for row in rows)
    return RequestsReport(
        now_ns=time.monotonic_ns(),
        num_running=num_running,
        num_waiting=len(rows) - num_running,
        requests=list(rows),
    )


def step_report(step: int, **values: Any) -> StepReport:
    plain: dict[str, Any] = dict.fromkeys(StepReport.__struct_fields__, 0)
    return StepReport(**{**plain, "step": step, "decisions": [], **values})


def answer_all(site: Site) -> None:
    site.backend.reports = {
        Subject.KV: kv_report(),
        Subject.REQUESTS: requests_report(),
        Subject.STEPS: StepsReport(steps=[]),
        Subject.TIMELINE: TimelineReport(timelines=[(7, [(time.monotonic_ns(), "arrived")])]),
    }


async def get(site: Site, path: str, key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with site.session.get(site.url + path, headers=headers) as response:
        return response.status, await response.json()


# --- answers --------------------------------------------------------------------------------------------


async def test_block_map_with_its_totals(site: Site) -> None:
    site.backend.reports[Subject.KV] = kv_report()
    status, body = await site.get("/debug/kv")
    assert status == 200
    assert body["runs"] == [list(run) for run in RUNS]
    assert body["totals"] == {"free": 10, "cached": 4, "used": 4, "shared": 2}
    assert (body["num_blocks"], body["usage"], body["host"]) == (20, 0.3, None)


async def test_host_memory_is_shown_if_there_is_any(site: Site) -> None:
    host = HostReport(num_slots=9, num_used=3, num_saved=5, num_loaded=2, num_swapped=1)
    site.backend.reports[Subject.KV] = kv_report(host=host)
    host_shown = (await site.get("/debug/kv"))[1]["host"]
    assert host_shown == {
        "num_slots": 9, "num_used": 3, "num_saved": 5, "num_loaded": 2, "num_swapped": 1,
    }  # fmt: skip


async def test_requests_have_their_http_ids_and_reasons(site: Site) -> None:
    site.backend.script = lambda g: Script(["a"], hold="decode")
    body = {"prompt": "a secret", "n": 2}
    task = asyncio.create_task(site.post(TEXT, body, headers={"X-Request-Id": "mine"}))
    await eventually(lambda: len(site.backend.generates) == 1)
    await eventually(lambda: all(c.num_tokens for s in site.service.live for c in s.choices))
    first = site.backend.generates[0].req_id
    why = "waits for a seat: 1 requests are running, 1 may"
    past = time.monotonic_ns() - 3 * SECOND
    site.backend.reports[Subject.REQUESTS] = requests_report(
        request_report(first, row=1, blocks=4, prompt_tokens=5, output_tokens=1),
        request_report(first + 1, state="waiting", phase="queued", reason=why, arrival_ns=past),
        request_report(999),
    )
    status, answer = await site.get("/debug/requests?last=50")
    assert status == 200
    assert site.backend.inspects[-1].last == 50
    assert (answer["running"], answer["waiting"], answer["encoding"]) == (2, 1, 0)
    runs, waits, unknown = answer["requests"]
    assert (runs["request_id"], runs["choice"], runs["row"]) == ("mine", 0, 1)
    assert (waits["request_id"], waits["choice"], waits["reason"]) == ("mine", 1, why)
    assert 3 <= waits["age_s"] < 60
    assert unknown["request_id"] is None, "its client has left, and the engine has not heard of it"
    assert "secret" not in str(answer)
    task.cancel()


async def test_requests_that_are_still_being_encoded_are_listed(site: Site) -> None:
    site.backend.reports[Subject.REQUESTS] = requests_report()
    site.backend.script = lambda g: Script(hold="encoding")
    task = asyncio.create_task(site.post(TEXT, {"prompt": "x"}, headers={"X-Request-Id": "new"}))
    await eventually(lambda: len(site.backend.generates) == 1)
    answer = (await site.get("/debug/requests"))[1]
    assert answer["encoding"] == 1
    (row,) = answer["requests"]
    assert (row["request_id"], row["state"], row["phase"]) == ("new", "waiting", "encoding")
    assert "tokens" in row["reason"]
    task.cancel()


async def test_steps_are_told_in_unix_time(site: Site) -> None:
    at = time.monotonic_ns() - 2 * SECOND
    site.backend.reports[Subject.STEPS] = StepsReport(
        steps=[step_report(4, time_ns=at, decode_tokens=3, decisions=[(7, "arrived")])]
    )
    status, body = await site.get("/debug/steps?last=5")
    assert status == 200
    assert site.backend.inspects[-1].last == 5
    (step,) = body["steps"]
    assert (step["step"], step["decode_tokens"]) == (4, 3)
    assert step["decisions"] == [{"id": 7, "text": "arrived"}]
    assert abs(time.time() - step["time"] - 2) < 1


@pytest.mark.parametrize("last", ["0", "-1", "x", "1.5", "1001", "99999999999999999999", "", "²"])
async def test_last_must_be_a_number_in_bounds(site: Site, last: str) -> None:
    answer_all(site)
    for path in ("/debug/steps", "/debug/requests"):
        async with site.session.get(site.url + path, params={"last": last}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "last")
    assert site.backend.inspects == []


async def test_a_timeline_is_found_by_the_id_of_the_http_request(site: Site) -> None:
    headers = {"X-Request-Id": "a/b?c"}
    await site.post(TEXT, {"prompt": "x", "n": 2}, headers=headers)
    first = site.backend.generates[0].req_id
    at = time.monotonic_ns()
    site.backend.reports[Subject.TIMELINE] = TimelineReport(
        timelines=[(first, [(at, "arrived"), (at, "started")]), (first + 1, [])]
    )
    for name in ("a%2Fb%3Fc", str(first)):
        status, body = await site.get(f"/debug/requests/{name}/timeline")
        assert status == 200
        (shown,) = body["timelines"]
        assert (shown["id"], shown["request_id"]) == (first, "a/b?c")
        assert [event["text"] for event in shown["events"]] == ["arrived", "started"]
    assert site.backend.inspects[0].req_ids == [first, first + 1]


@pytest.mark.parametrize("name", ["never", "12345", "9" * 40, "٣"])
async def test_an_unknown_request_is_404_with_advice(site: Site, name: str) -> None:
    site.backend.reports[Subject.TIMELINE] = TimelineReport(timelines=[])
    status, body = await site.get(f"/debug/requests/{name}/timeline")
    assert (status, body["error"]["code"]) == (404, "unknown_request")


# --- time and load --------------------------------------------------------------------------------------


async def test_an_engine_that_does_not_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "LIMIT_S", 0.1)
    status, headers, body = 0, {}, {}
    async with site.session.get(site.url + "/debug/kv") as response:
        status, headers, body = response.status, dict(response.headers), await response.json()
    assert (status, body["error"]["code"], headers["Retry-After"]) == (504, "engine_busy", "1")
    assert body["error"]["type"] == "server_error"
    monkeypatch.undo()
    answer_all(site)
    assert (await site.get("/debug/kv"))[0] == 200, "a late answer is in nobody's way"
    assert site.service.client._calls == {}


async def test_those_who_ask_together_share_an_answer(site: Site) -> None:
    tasks = [asyncio.create_task(site.get("/debug/kv")) for _ in range(20)]
    await eventually(lambda: len(site.backend.inspects) == 1)
    other = asyncio.create_task(site.get("/debug/steps"))
    await asyncio.sleep(0.05)
    assert len(site.backend.inspects) == 1, "one question at a time"
    site.backend.reports[Subject.STEPS] = StepsReport(steps=[])
    site.backend.answer_inspect(site.backend.inspects[0], kv_report())
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 20
    assert (await other)[0] == 200
    assert [i.subject for i in site.backend.inspects] == [Subject.KV, Subject.STEPS]


async def test_states_of_the_server() -> None:
    async with running_site(ready=False) as site:
        answer_all(site)
        site.backend.state(Phase.LOADING, 0.5)
        for path in PATHS:
            status, body = await site.get(path)
            assert (status, body["error"]["code"]) == (503, "not_ready")
        site.backend.ready()
        await eventually(lambda: site.service.client.status.is_loaded)
        site.service.client.status.set_draining()
        for path in PATHS:
            assert (await site.get(path))[0] == 200, "what still runs can be watched"
        site.service.client.status.set_dead("it fell")
        for path in PATHS:
            status, body = await site.get(path)
            assert (status, body["error"]["code"]) == (503, "engine_dead")


async def test_polling_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_site(log_requests="on") as site:
        answer_all(site)
        for path in (*PATHS, "/version"):
            assert (await site.get(path))[0] == 200
        await eventually(lambda: "/version" in caplog.text)
    assert "/debug" not in caplog.text


# --- who may ask ----------------------------------------------------------------------------------------


async def test_keys() -> None:
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({}, {"": 200}),
        ({"api_key": ["user"]}, {"": 401, "wrong": 401, "user": 200}),
        ({"api_key": ["user"], "admin_key": "boss"}, {"": 401, "user": 403, "boss": 200}),
        ({"admin_key": "boss"}, {"": 401, "boss": 200}),
    ]
    for settings, expected in cases:
        async with running_site(**settings) as site:
            answer_all(site)
            for key, wanted in expected.items():
                for path in PATHS:
                    assert (await get(site, path, key))[0] == wanted, (settings, key, path)


# --- the page's files -----------------------------------------------------------------------------------


async def test_the_page_needs_no_key_and_says_what_browsers_may_do() -> None:
    async with running_site(api_key=["user"], admin_key="boss") as site:
        for path, file in page.FILES.items():
            async with site.session.get(site.url + path) as response:
                assert response.status == 200
                assert await response.read() == file.body
                assert response.headers["Content-Type"] == file.content_type
                policy = response.headers["Content-Security-Policy"]
                etag = response.headers["ETag"]
                assert response.headers["Cache-Control"] == "no-cache"
                assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            for known in (etag, f'"old", {etag}', "*"):
                async with site.session.get(
                    site.url + path, headers={"If-None-Match": known}
                ) as response:
                    assert (response.status, await response.read()) == (304, b"")
                    assert response.headers["ETag"] == etag
            async with site.session.get(
                site.url + path, headers={"If-None-Match": '"old"'}
            ) as response:
                assert response.status == 200


async def test_the_page_can_be_left_out() -> None:
    async with running_site(page=False) as site:
        for path in page.FILES:
            status, body = await site.get(path)
            assert (status, body["error"]["code"]) == (404, "unknown_url")


def test_the_page_is_small_and_brings_nothing_from_elsewhere() -> None:
    assert sum(len(file.body) for file in page.FILES.values()) < 40_000
    for path, file in page.FILES.items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text) == [], path
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            "document.write",
        ):
            assert forbidden not in text, path
    html = page.FILES["/"].body.decode()
    assert re.findall(r"(?:src|href)=\"/", html) == [], "a proxy may serve it below any path"
    assert re.findall(r"\son[a-z]+=|style=|<style|<script>", html) == []
    named = set(re.findall(r"(?:src|href)=\"(page/[^\"]+)\"", html))
    assert {"/" + name for name in named} <= set(page.FILES)
