"""What operators see and do: load, settings, drain, abort, profiles, limits, deep health, the log."""

import asyncio
import json
import logging
from typing import Any

import pytest

from engine.api.config import ConfigError, EngineConfig
from engine.api.messages import ControlAction, Deltas, FinishReason, Phase
from server import deep_check
from server.config import ServerConfig
from server.deep_check import DeepCheck
from server.request_log import trace_of
from server.settings_check import check_settings
from server.stream import FINISH_NAMES
from tests.server.conftest import Site, eventually, read_events, running_site
from tests.server.fake_backend import LIMITS, Script

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "x"}
USER = [{"role": "user", "content": "Hi"}]
ADMIN = {"Authorization": "Bearer admin"}


def running_managed(**settings: Any) -> Any:
    return running_site(admin_key="admin", **settings)


# --- load and settings --------------------------------------------------------------------------------


async def test_load(site: Site) -> None:
    site.backend.script = lambda g: Script(hold="queued" if "q" in g.prompt.text else "decode")
    tasks = [asyncio.create_task(site.post(TEXT, {"prompt": p})) for p in ("q", "q", "r")]
    site.backend.stats(num_running=1, num_waiting=2, num_free_blocks=25)
    client = site.service.client
    await eventually(lambda: client.num_live == 3 and client.num_queued == 2)
    await eventually(lambda: client.status.stats is not None)
    status, load = await site.get("/load")
    assert status == 200
    assert load == {
        "status": "ok",
        "running": 1,
        "waiting": 2,
        "kv_cache_usage": 0.75,
        "free_blocks": 25,
        "num_blocks": 100,
        "max_num_seqs": LIMITS.max_num_seqs,
        "max_model_len": LIMITS.max_model_len,
        "max_queued_requests": 2048,
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_load_while_loading() -> None:
    async with running_site(ready=False) as site:
        status, load = await site.get("/load")
        assert (status, load["status"], load["max_num_seqs"]) == (200, "loading", None)


async def test_server_info() -> None:
    async with (
        running_managed(max_n=3, api_key=["user"]) as site,
        site.session.get(site.url + "/server_info", headers=ADMIN) as answer,
    ):
        info = await answer.json()
    assert info["server"]["max_n"] == 3
    assert info["engine"]["admission"] == "peak"
    assert info["limits"]["num_blocks"] == LIMITS.num_blocks
    assert (info["server"]["api_key"], info["server"]["admin_key"]) == ("set", "set")
    assert info["system_fingerprint"].startswith("fp_")


async def test_system_fingerprint_is_stable() -> None:
    prints = []
    for _ in range(2):
        async with running_site() as site:
            prints += [
                (await site.post(TEXT, BODY))[1]["system_fingerprint"],
                (await site.post(CHAT, {"messages": USER}))[1]["system_fingerprint"],
            ]
    assert len(set(prints)) == 1
    async with running_site(served_model_name=["other"]) as site:
        assert (await site.post(TEXT, BODY))[1]["system_fingerprint"] != prints[0]


# --- drain and abort ----------------------------------------------------------------------------------


async def test_drain_without_stopping() -> None:
    async with running_managed() as site:
        site.backend.script = lambda g: Script(["a", "b"], paced=True)
        running = asyncio.create_task(site.post(TEXT, BODY))
        await eventually(lambda: site.service.client.num_live == 1)
        status, answer = await site.post("/admin/drain", {}, headers=ADMIN)
        assert (status, answer) == (200, {"status": "draining", "running": 1})
        status, headers, answer = await site.post_full(TEXT, BODY)
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert int(headers["Retry-After"]) >= 1
        assert (await site.get("/ready"))[1]["status"] == "draining"
        assert (await site.get("/health"))[0] == 200
        await eventually(lambda: site.backend.generates)
        site.backend.go_on()
        assert (await running)[0] == 200, "what runs may finish"
        site.backend.script = lambda g: Script()
        assert (await site.get("/load"))[1]["status"] == "draining"
        status, answer = await site.post("/admin/drain", {"drain": False}, headers=ADMIN)
        assert (status, answer["status"]) == (200, "ok")
        assert (await site.post(TEXT, BODY))[0] == 200
        async with site.session.post(site.url + "/admin/drain", headers=ADMIN) as response:
            assert (await response.json())["status"] == "draining", "no body is needed"


async def test_drain_cannot_take_back_a_shutdown() -> None:
    async with running_managed() as site:
        site.service.client.status.set_draining()
        status, answer = await site.post("/admin/drain", {"drain": False}, headers=ADMIN)
        assert (status, answer["status"]) == (200, "draining")
        assert (await site.post(TEXT, BODY))[0] == 503


async def test_abort_by_id() -> None:
    async with running_managed() as site:
        site.backend.script = lambda g: Script(hold="decode")
        tasks = {
            name: [
                asyncio.create_task(site.post(TEXT, {**BODY, "request_id": name, "n": 2}))
                for _ in range(count)
            ]
            for name, count in (("twice", 2), ("other", 1))
        }
        await eventually(lambda: site.service.client.num_live == 6)
        status, answer = await site.post("/admin/abort", {"request_id": "twice"}, headers=ADMIN)
        assert (status, answer) == (200, {"aborted": 2})
        for task in tasks["twice"]:
            status, answer = await task
            assert (status, answer["error"]["code"]) == (500, "aborted")
        await eventually(lambda: len(site.backend.aborted) == 4)
        assert site.service.client.num_live == 2
        _, answer = await site.post("/admin/abort", {"request_id": "twice"}, headers=ADMIN)
        assert answer == {"aborted": 0}, "once more is no error"
        _, answer = await site.post("/admin/abort", {"all": True}, headers=ADMIN)
        assert answer == {"aborted": 1}
        assert (await tasks["other"][0])[0] == 500
        assert site.service.live == {}


async def test_abort_of_a_stream_is_an_event() -> None:
    async with running_managed() as site:
        site.backend.script = lambda g: Script(["a"], hold="decode")
        async with site.session.post(site.url + TEXT, json={**BODY, "stream": True}) as response:
            await response.content.readline()
            await site.post("/admin/abort", {"all": True}, headers=ADMIN)
            rest = (await response.read()).decode()
        assert '"code":"aborted"' in rest
        assert "[DONE]" not in rest


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/admin/abort", {}, "missing_field"),
        ("/admin/abort", {"all": False}, "missing_field"),
        ("/admin/abort", {"request_id": 3}, "invalid_type"),
        ("/admin/abort", {"requestid": "x"}, "unknown_field"),
        ("/admin/drain", {"drain": "no"}, "invalid_type"),
        ("/admin/drain", {"enabled": False}, "unknown_field"),
        ("/admin/drain", [], "invalid_json"),
    ],
)
async def test_bad_admin_bodies(path: str, body: Any, code: str) -> None:
    async with running_managed() as site:
        status, answer = await site.post(path, body, headers=ADMIN)
        assert (status, answer["error"]["code"]) == (400, code)
        assert site.service.client.status.takes_requests


@pytest.mark.parametrize(
    ("path", "action"),
    [
        ("/admin/reset_prefix_cache", ControlAction.RESET_PREFIX_CACHE),
        ("/start_profile", ControlAction.START_PROFILE),
        ("/stop_profile", ControlAction.STOP_PROFILE),
    ],
)
async def test_wishes_reach_the_engine(path: str, action: ControlAction) -> None:
    async with running_managed() as site:
        status, answer = await site.post(path, {}, headers=ADMIN)
        assert (status, answer) == (200, {"status": "ok", "detail": "done"})
        assert [control.action for control in site.backend.controls] == [action]
        site.backend.control_answer = (False, "give --profile-dir")
        status, answer = await site.post(path, {}, headers=ADMIN)
        assert (status, answer["error"]["message"]) == (400, "give --profile-dir")
        site.service.client.status.set_paused(True)
        site.backend.control_answer = (True, "done")
        assert (await site.post(path, {}, headers=ADMIN))[0] == 200, "a drained engine obeys"
        site.service.client.status.set_draining()
        assert (await site.post(path, {}, headers=ADMIN))[0] == 503


async def test_wishes_wait_for_nobody_while_loading() -> None:
    async with running_site(ready=False, admin_key="admin") as site:
        status, answer = await site.post("/start_profile", {}, headers=ADMIN)
        assert (status, answer["error"]["code"]) == (503, "not_ready")


# --- deep health --------------------------------------------------------------------------------------


async def test_deep_health_takes_one_token(site: Site) -> None:
    assert await site.get("/health") == (200, {"status": "ok"})
    assert site.backend.generates == []
    assert await site.get("/health?deep=1") == (200, {"status": "ok"})
    (generate,) = site.backend.generates
    assert (generate.params.max_tokens, generate.params.temperature) == (1, 0.0)
    assert generate.priority == -(2**31), "before everything that waits"
    assert (await site.get("/health?deep=0"))[0] == 200
    assert len(site.backend.generates) == 1


async def test_deep_checks_that_overlap_share_a_token(site: Site) -> None:
    verdicts = await asyncio.gather(*(site.service.deep_check.verdict() for _ in range(5)))
    assert all(verdict.is_ok for verdict in verdicts)
    assert len(site.backend.generates) == 1


async def test_deep_health_of_an_engine_that_gives_no_token(site: Site) -> None:
    site.service.deep_check = DeepCheck(site.service.client, limit_s=0.1)
    site.backend.script = lambda g: Script(hold="prefill")
    status, body = await site.get("/health?deep=1")
    assert (status, body["status"]) == (503, "stalled")
    assert "one token" in body["reason"]
    assert site.service.client.num_live == 0
    site.service.deep_check = DeepCheck(site.service.client)
    site.backend.script = lambda g: Script(finish=FinishReason.ERROR)
    status, body = await site.get("/health?deep=1")
    assert (status, body["status"]) == (503, "failing")
    assert FinishReason.ERROR not in FINISH_NAMES


async def test_deep_health_of_a_full_engine(site: Site) -> None:
    """All seats are taken, but tokens flow: that is no failure."""
    site.service.deep_check = DeepCheck(site.service.client, limit_s=0.4)
    site.backend.script = lambda g: Script(hold="queued")
    asking = asyncio.create_task(site.get("/health?deep=1"))
    await eventually(lambda: site.service.client.num_live == 1)
    site.backend.stats(steps=5, generation_tokens=5)
    assert (await asking)[0] == 200
    assert (await site.get("/health?deep=1"))[0] == 503, "no token more has come"
    assert deep_check.LIMIT_S == 10.0


async def test_health_watches_the_step_loop(site: Site) -> None:
    status = site.service.client.status
    site.backend.state(Phase.SERVING, 1.0, loop_count=7)
    await eventually(lambda: status.loop_count == 7)
    status.loop_moved_at -= 11  # heartbeats came, the loop did not turn
    code, body = await site.get("/health")
    assert (code, body["status"]) == (503, "stalled")
    assert "step loop" in body["reason"]
    status.step_in_flight = True
    assert (await site.get("/health"))[0] == 200, "a step may take longer"
    status.loop_moved_at -= 60
    assert (await site.get("/health"))[0] == 503
    site.backend.state(Phase.SERVING, 1.0, loop_count=8)
    await eventually(lambda: status.loop_count == 8)
    assert (await site.get("/health"))[0] == 200


# --- limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"n": 3}, "n"),
        (TEXT, {"stop": ["a", "b"]}, "stop"),
        (TEXT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"n": 3}, "n"),
        (CHAT, {"stop": ["a", "b"]}, "stop"),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"stop": ["a", "b"], "n": 3}, "stop"),
    ],
)
async def test_limits_of_the_operator(path: str, fields: dict[str, Any], param: str) -> None:
    async with running_site(max_n=2, max_stop=1, max_logprobs=2) as site:
        prompt = BODY if path == TEXT else {"messages": USER}
        status, answer = await site.post(path, {**prompt, **fields})
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "invalid_value", param)
        flag = {"n": "--max-n", "stop": "--max-stop"}.get(param, "--max-logprobs")
        assert flag in error["message"]


async def test_limits_allow_what_they_name() -> None:
    async with running_site(max_n=2, max_stop=1, max_logprobs=2) as site:
        body = {**BODY, "n": 2, "stop": "long", "logprobs": 2}
        assert (await site.post(TEXT, body))[0] == 200
        assert (await site.post(TEXT, {**BODY, "logprobs": True, "stop": None}))[0] == 200


@pytest.mark.parametrize("value", [21, {}, {"a": 1}, "x", [1, 2, 3]])
async def test_limits_are_for_fields_that_the_endpoint_knows(site: Site, value: Any) -> None:
    """Nobody has looked at the type of an ignored one."""
    body = {**BODY, "top_logprobs": value}
    status, headers, _ = await site.post_full(TEXT, body)
    assert (status, headers["X-Ignored-Fields"]) == (200, "top_logprobs")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_n": 0},
        {"max_n": 129},
        {"max_stop": -1},
        {"max_stop": 17},
        {"max_logprobs": 21},
        {"request_timeout": -1.0},
        {"queue_timeout": float("nan")},
    ],
)
def test_limits_that_cannot_work(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        check_settings(ServerConfig(**settings), EngineConfig())


async def test_strict_fields() -> None:
    async with running_site(strict_fields=True) as site:
        for path, body in (
            (TEXT, BODY),
            (CHAT, {"messages": USER}),
            ("/tokenize", BODY),
            ("/detokenize", {"tokens": [1]}),
        ):
            status, answer = await site.post(path, {**body, "frobnicate": 1})
            error = answer["error"]
            assert (status, error["param"]) == (400, "frobnicate"), path
            assert (error["code"], "--strict-fields" in error["message"]) == ("unknown_field", True)
            status, headers, _ = await site.post_full(path, body)
            assert status == 200
            assert "X-Ignored-Fields" not in headers
        assert (await site.post(TEXT, {**BODY, "user": "me", "store": True}))[0] == 200


@pytest.mark.parametrize("clamp", [False, True])
async def test_clamp_max_tokens_is_passed_on(clamp: bool) -> None:
    async with running_site(clamp_max_tokens=clamp) as site:
        await site.post(TEXT, {**BODY, "max_tokens": 7})
        assert site.backend.generates[0].clamp_max_tokens is clamp


# --- times and the log --------------------------------------------------------------------------------

TIMES = {
    "time_to_first_token", "time_to_first_token_ms", "queue_time_ms", "generation_time_ms",
    "mean_itl_ms", "tokens_per_second",
}  # fmt: skip


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_request_metrics(site: Site, path: str) -> None:
    body = BODY if path == TEXT else {"messages": USER}
    assert "metrics" not in (await site.post(path, body))[1]
    site.backend.script = lambda g: Script(["a", "b", "c"], paced=True)
    headers = {"X-Request-Metrics": "1"}
    asking = asyncio.create_task(site.post(path, body, headers=headers))
    choices = site.service.client._choices
    await eventually(lambda: any(choice.first_token_ns for choice in choices.values()))
    for _ in "bc":
        await asyncio.sleep(0.01)
        site.backend.go_on()
    times = (await asking)[1]["metrics"]
    assert set(times) == TIMES
    assert times["time_to_first_token_ms"] == pytest.approx(
        1000 * times["time_to_first_token"], 0.01
    )
    assert times["queue_time_ms"] == pytest.approx(1.5)
    assert times["generation_time_ms"] >= 15
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 2, rel=0.01)
    assert times["tokens_per_second"] > 0


async def test_request_metrics_of_one_token_and_of_streams() -> None:
    async with running_site(enable_request_metrics=True) as site:
        site.backend.script = lambda g: Script(["a"])
        times = (await site.post(TEXT, BODY))[1]["metrics"]
        assert times["mean_itl_ms"] is None, "one token has no gap"
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        async with site.session.post(site.url + TEXT, json=body) as response:
            events = await read_events(response)
        last = json.loads(events[-2])
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 1
        assert set(last["metrics"]) == TIMES
        assert ["metrics" in json.loads(event) for event in events[:-2]] == [False] * (
            len(events) - 2
        )


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def log_line(caplog: pytest.LogCaptureFixture, request_id: str) -> str:
    lines = [
        r.getMessage() for r in caplog.records if f"request id={request_id} " in r.getMessage()
    ]
    assert len(lines) == 1
    return lines[0]


async def test_request_log_tells_sizes_times_and_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_site(log_requests="on") as site:
        site.backend.script = lambda g: Script(cached_tokens=4)
        body = {"prompt": "secret\ntext", "n": 2}
        headers = {"X-Request-Id": "one", "traceparent": TRACE}
        await site.post(TEXT, body, headers=headers)
        await site.post(TEXT, {"prompt": 3}, headers={"X-Request-Id": "two"})
        await site.get("/load")
        await eventually(lambda: "id=two" in caplog.text)
    line = log_line(caplog, "one")
    for part in (
        "POST /v1/completions status=200 prompt_tokens=5 completion_tokens=6 cached_tokens=4",
        "choices=2", "finish_reason=stop", "queue_ms=1.5", "ttft_ms=", "itl_ms=", "seconds=0.",
        "trace_id=4bf92f3577b34da6a3ce929d0e0e4736 parent_id=00f067aa0ba902b7",
    ):  # fmt: skip
        assert part in line
    assert "status=400 error=invalid_type" in log_line(caplog, "two")
    assert "secret" not in caplog.text
    assert "/load" not in caplog.text


async def test_request_log_of_streams_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_managed(log_requests="on") as site:
        site.backend.script = lambda g: Script(["a"], hold="decode")
        headers = {"X-Request-Id": "s"}
        body = {**BODY, "stream": True}
        async with site.session.post(site.url + TEXT, json=body, headers=headers) as response:
            await response.content.readline()
            await site.post("/admin/abort", {"all": True}, headers=ADMIN)
            await response.read()
        await eventually(lambda: "id=s " in caplog.text)
    line = log_line(caplog, "s")
    assert "status=200" in line
    assert "finish_reason=none" in line
    assert "stream_error=aborted" in line


async def test_prompts_are_logged_only_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_site(log_requests="prompts") as site:
        for name, path, body in (
            ("text", TEXT, {"prompt": "two\nlines"}),
            ("chat", CHAT, {"messages": USER}),
            ("ids", TEXT, {"prompt": [1, 2, 3]}),
            ("long", TEXT, {"prompt": "y" * 10_000}),
        ):
            await site.post(path, body, headers={"X-Request-Id": name})
        await eventually(lambda: "id=long" in caplog.text)
    assert 'prompts=["two\\nlines"]' in log_line(caplog, "text")
    assert '"content":"Hi"' in log_line(caplog, "chat")
    assert 'prompts=["3 token ids"]' in log_line(caplog, "ids")
    assert len(log_line(caplog, "long")) < 3000
    assert "(10004 characters)" in log_line(caplog, "long")


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (TRACE, True),
        ("01" + TRACE[2:] + "-more", True),
        (TRACE + "-more", False),
        (TRACE.upper(), False),
        ("ff" + TRACE[2:], False),
        ("00-" + "0" * 32 + TRACE[35:], False),
        (TRACE[:36] + "0" * 16 + "-01", False),
        ("", False),
        (TRACE[:-1], False),
        (TRACE + "\n", True),
    ],
)
def test_traceparent(header: str, is_valid: bool) -> None:
    assert (trace_of(header) is not None) is is_valid


# --- paths --------------------------------------------------------------------------------------------


async def test_methods_and_slashes(site: Site) -> None:
    for path in (
        "/live",
        "/health",
        "/ping",
        "/ready",
        "/version",
        "/metrics",
        "/load",
        "/v1/models",
    ):
        for spelling in (path, path + "/"):
            async with site.session.head(site.url + spelling) as answer:
                assert answer.status == 200
                assert await answer.read() == b""
                assert answer.headers["X-Request-Id"]
        async with site.session.post(site.url + path, json={}) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
            assert (await answer.json())["error"]["code"] == "method_not_allowed"
    for path in ("/v1/embeddings", "/v1/responses", "/v1/messages"):
        status, headers, answer = await site.post_full(path + "/", {})
        assert (status, answer["error"]["type"]) == (501, "not_implemented_error")
        assert headers["x-should-retry"] == "false"
    async with site.session.head(site.url + "/v1/models/none") as answer:
        assert answer.status == 404


async def test_done_after_error() -> None:
    for wanted in (False, True):
        async with running_managed(done_after_error=wanted) as site:
            site.backend.script = lambda g: Script(["a"], hold="decode")
            body = {**BODY, "stream": True}
            async with site.session.post(site.url + TEXT, json=body) as response:
                await response.content.readline()
                await site.post("/admin/abort", {"all": True}, headers=ADMIN)
                rest = (await response.read()).decode()
            assert rest.endswith("data: [DONE]\n\n") is wanted
            assert '"code":"aborted"' in rest


async def test_two_live_requests_of_one_id_are_independent(site: Site) -> None:
    """Cancelling one leaves the other, whatever names they were given."""
    site.backend.script = lambda g: Script(["a", "b"], hold="decode")
    body = {**BODY, "request_id": "same", "stream": True, "n": 2}
    headers = {"X-Request-Id": "same"}
    first = await site.session.post(site.url + TEXT, json=body, headers=headers)
    second = await site.session.post(site.url + TEXT, json=body, headers=headers)
    assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"] == "same"
    one, two = (g.req_id for g in site.backend.generates)
    first.close()
    await eventually(lambda: site.backend.aborted == {one, one + 1})
    assert site.service.client.num_live == 2
    ends = Deltas(
        req_ids=[two, two + 1],
        texts=["!", "!"],
        counts=[1, 1],
        finished=[(0, FinishReason.STOP, None), (1, FinishReason.STOP, None)],
    )
    site.backend.send("replies", ends)
    events = await read_events(second)
    assert events[-1] == "[DONE]"
    ids = {json.loads(event)["id"] for event in events[:-1]}
    assert len(ids) == 1
    assert ids != {"same"}, "the id is for headers and log only"
