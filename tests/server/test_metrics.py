"""/metrics: the names that dashboards read, and numbers that add up."""

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.api.messages import (
    Deltas,
    EngineState,
    EngineStats,
    FinishReason,
    Phase,
    RequestError,
)
from server.metrics import Histogram
from server.status_line import describe
from tests.server.conftest import Site, eventually
from tests.server.fake_backend import Script

DASHBOARD_NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_swapped",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:cpu_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "srv:http_requests_total",
    "srv:queue_limit",
    "srv:free_blocks",
    "srv:process_resident_memory_bytes",
    "srv:engine_step_seconds_bucket",
    "srv:engine_last_step_age_seconds",
    "srv:gpu_memory_used_bytes",
    "srv:nan_events_total",
    "srv:failed_steps_total",
    "srv:late_messages_total",
]


async def samples(site: Site) -> dict[str, float]:
    """Sum of each metric's samples over its labels, by sample name."""
    async with site.session.get(site.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def test_every_dashboard_name_exists(site: Site) -> None:
    await site.post("/v1/completions", {"prompt": "x"})
    found = await samples(site)
    assert [name for name in DASHBOARD_NAMES if name not in found] == []


async def test_counts_of_requests(site: Site) -> None:
    site.backend.script = lambda g: Script(["a", "b", "c"], tokens_per_piece=2, prompt_tokens=9)
    await site.post("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 7})
    await site.post("/v1/completions", {"prompt": "x", "temperature": 9})
    found = await samples(site)
    assert found["vllm:request_success_total"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 2 * 4, "a gap for each later token"
    assert found["vllm:request_generation_tokens_sum"] == 12
    assert found["vllm:request_prompt_tokens_sum"] == 18
    assert found["vllm:request_params_n_sum"] == 2
    assert found["vllm:request_params_max_tokens_sum"] == 7
    assert found["vllm:request_queue_time_seconds_sum"] == pytest.approx(2 * 0.0015)
    assert await site.metric('srv:rejected_requests_total{code="invalid_value"') == 1
    assert await site.metric('vllm:request_success_total{engine="0",finished_reason="stop"') == 2


async def test_a_start_told_with_the_first_token_was_when_the_queue_ended(site: Site) -> None:
    """An engine may tell of both at the end of the step that computes the prompt."""
    site.backend.script = lambda g: Script(hold="queued")
    headers = {"X-Request-Metrics": "1"}
    body = {"prompt": "x", "n": 2}
    answer = asyncio.create_task(site.post("/v1/completions", body, headers=headers))
    await eventually(lambda: len(site.backend.generates) == 1)
    await asyncio.sleep(0.3)
    first = site.backend.generates[0].req_id
    site.backend.send(
        "replies",
        Deltas(
            req_ids=[first, first + 1],
            texts=["a", "b"],
            counts=[1, 1],
            finished=[(0, FinishReason.LENGTH, None), (1, FinishReason.LENGTH, None)],
            started=[(first, 0, 100_000), (first + 1, 0, 200_000)],
        ),
    )
    times = (await answer)[1]["metrics"]
    found = await samples(site)
    assert found["vllm:request_prefill_time_seconds_sum"] > 0.2 + 0.1 - 0.01
    assert found["vllm:request_inference_time_seconds_sum"] > 0.2 + 0.1 - 0.01
    assert times["tokens_per_second"] < 2 / (0.2 - 0.01)


async def test_the_start_is_told_even_if_nobody_asks_for_anything(site: Site) -> None:
    """A restart shows as a change of it; counters that are still 0 show none."""
    started = (await samples(site))["srv:start_time_seconds"]
    assert 0 <= time.time() - started < 3600
    assert (await samples(site))["srv:start_time_seconds"] == started


async def test_names_that_appear_with_their_first_event(site: Site) -> None:
    """Labels of errors, aborts and phases of the start are not known before."""
    site.service.client.metrics.startup_seconds["loading weights"] = 1.5
    await site.post("/v1/completions", {"prompt": 3})
    site.backend.script = lambda g: Script(finish=FinishReason.ABORT)
    await site.post("/v1/completions", {"prompt": "x"})
    found = await samples(site)
    assert found["srv:startup_seconds"] == 1.5
    assert found["srv:aborted_requests_total"] == 1
    assert found["srv:rejected_requests_total"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 0, "aborted ones are not in it"
    assert found["vllm:request_queue_time_seconds_count"] == 1, "but in phases they completed"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("hold", ["prefill", "decode"])
async def test_every_choice_that_started_is_counted_once_at_its_end(
    site: Site, hold: str, n: int
) -> None:
    """Also one that is given up on its way for a fault of its form, and its siblings."""
    site.backend.script = lambda g: Script(hold=hold)
    answer = asyncio.create_task(site.post("/v1/completions", {"prompt": "x", "n": n}))
    client = site.service.client
    await eventually(lambda: [c.phase for c in client._choices.values()] == [hold] * n)
    first = site.backend.generates[0].req_id
    fault = RequestError(req_id=first, n=1, status=400, code="invalid_schema", message="too large")
    site.backend.send("replies", fault)
    assert (await answer)[0] == 400
    found = await samples(site)
    assert found["vllm:request_queue_time_seconds_count"] == n
    assert found["vllm:request_success_total"] == n
    assert await site.metric('vllm:request_success_total{engine="0",finished_reason="error"') == n
    assert await site.metric(f'srv:aborted_requests_total{{phase="{hold}"') == n
    assert await site.metric('srv:rejected_requests_total{code="invalid_schema"') == 1


async def test_types_and_labels(site: Site) -> None:
    """What dashboards select by: the kind of each metric, its model and its engine."""
    async with site.session.get(site.url + "/metrics") as response:
        text = await response.text()
    kinds: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        kinds.setdefault(family.type, set()).add(family.name)
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "tiny", sample.name
                assert sample.labels["engine"] == "0", sample.name
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= kinds["gauge"]
    assert {"vllm:prompt_tokens", "vllm:request_success"} <= kinds["counter"]
    assert {"vllm:iteration_tokens_total", "vllm:time_to_first_token_seconds"} <= kinds["histogram"]


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("vllm:time_to_first_token_seconds", 0.001, 2560.0),
        ("vllm:time_per_output_token_seconds", 0.001, 80.0),
        ("vllm:inter_token_latency_seconds", 0.001, 80.0),
        ("vllm:e2e_request_latency_seconds", 0.3, 1920.0),
        ("vllm:request_queue_time_seconds", 0.3, 1920.0),
    ],
)
async def test_buckets(site: Site, name: str, first: float, last: float) -> None:
    async with site.session.get(site.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    (family,) = [family for family in families if family.name == name]
    bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert (bounds[0], bounds[-2], bounds[-1]) == (first, last, float("inf"))
    assert bounds == sorted(bounds)


async def test_the_state_of_the_engine(site: Site) -> None:
    status = site.service.client.status
    assert (await samples(site))["srv:engine_last_step_age_seconds"] == 0
    site.backend.send(
        "state",
        EngineState(
            epoch=0, phase=Phase.SERVING, progress=1.0, detail="", loop_count=3,
            step_in_flight_ms=0.0, rss_bytes=11, gpu_memory_bytes=12,
        ),
    )  # fmt: skip
    site.backend.stats(steps=1, nan_events=2, failed_steps=3)
    await eventually(lambda: status.stats is not None and status.gpu_memory_bytes == 12)
    found = await samples(site)
    assert found["srv:gpu_memory_used_bytes"] == 12
    assert found["srv:nan_events_total"] == 2
    assert found["srv:failed_steps_total"] == 3
    assert found["srv:engine_last_step_age_seconds"] > 0


async def test_engine_statistics(site: Site) -> None:
    site.backend.stats(steps=1)
    site.backend.stats(
        num_running=3,
        num_waiting=2,
        num_free_blocks=25,
        steps=3,
        step_seconds=0.02,
        prompt_tokens=40,
        generation_tokens=20,
        prefix_query_tokens=40,
        prefix_hit_tokens=16,
        preemptions=1,
        num_host_blocks=8,
        num_used_host_blocks=2,
        num_swapped=1,
    )
    status = site.service.client.status
    await eventually(lambda: status.stats is not None and status.stats.num_running == 3)
    found = await samples(site)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.75
    assert found["vllm:prompt_tokens_total"] == 40
    assert found["vllm:generation_tokens_total"] == 20
    assert found["vllm:prefix_cache_hits_total"] == 16
    assert found["vllm:num_preemptions_total"] == 1
    assert found["vllm:num_requests_swapped"] == 1
    assert found["vllm:cpu_cache_usage_perc"] == 0.25
    assert found["vllm:iteration_tokens_total_sum"] == 60
    assert found["vllm:iteration_tokens_total_count"] == 2
    site.backend.stats(num_free_blocks=100, steps=3)
    await eventually(lambda: status.stats is not None and status.stats.num_running == 0)
    found = await samples(site)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:cpu_cache_usage_perc"] == 0


def test_status_line_has_rates_of_the_interval() -> None:
    zero = dict.fromkeys(EngineStats.__struct_fields__, 0)
    before = EngineStats(**{**zero, "num_blocks": 10, "num_free_blocks": 10, "prompt_tokens": 5})
    now = EngineStats(
        **{
            **zero,
            "num_blocks": 10,
            "num_free_blocks": 8,
            "prompt_tokens": 105,
            "generation_tokens": 20,
            "num_running": 3,
            "prefix_query_tokens": 100,
            "prefix_hit_tokens": 40,
            "preemptions": 2,
        }
    )
    line = describe(before, now, seconds=10.0)
    assert line.startswith(
        "prompt 10.0 tok/s, generation 2.0 tok/s, running 3, waiting 0, KV 20.0%, prefix hits 40%"
    )
    assert "preempted 2" in line


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 5.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.total == 14.0
