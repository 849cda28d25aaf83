"""Token buckets and allowances by a clock that the test turns; the words of the key file."""

from pathlib import Path

import pytest

from engine.api.config import ConfigError
from server.access import Access
from server.config import ServerConfig
from server.errors import ApiError
from server.rate_limits import Allowance, KeyLimits, TokenBucket, duration, parse_limits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refusal(allowance: Allowance, num_completions: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        allowance.check(num_completions)
    return caught.value


def test_a_bucket_fills_steadily_and_no_further(clock: Clock) -> None:
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert bucket.level == 0
    assert bucket.seconds_until(1) == pytest.approx(1.0)
    clock.now += 2.5
    assert bucket.level == pytest.approx(2.5)
    clock.now += 1e6
    assert bucket.level == 60
    bucket.take(180)
    assert bucket.level == -120
    assert bucket.seconds_until(1) == pytest.approx(121)


def test_requests_a_minute(clock: Clock) -> None:
    allowance = Allowance(KeyLimits(requests_per_minute=3), clock)
    for _ in range(3):
        allowance.check(1)
        allowance.begin(1)
        allowance.end(1, 100)
    error = refusal(allowance)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limit_exceeded", 20)
    assert error.headers["Retry-After"] == "20"
    clock.now += 19.5
    assert refusal(allowance).retry_after == 1
    clock.now += 0.5
    allowance.check(1)


def test_over_time_no_key_gets_more_than_its_tokens(clock: Clock) -> None:
    """Whatever a request uses, and however soon it is asked for again."""
    allowance = Allowance(KeyLimits(tokens_per_minute=600), clock)
    used, began = 0, clock.now
    while clock.now < began + 3600:
        if used:
            clock.now += int(refusal(allowance).headers["Retry-After"])
        allowance.check(1)  # what Retry-After says is enough
        allowance.begin(1)
        clock.now += 0.25
        allowance.end(1, 1500)
        used += 1500
    minutes = (clock.now - began) / 60
    assert 600 * minutes - 1500 <= used <= 600 * (minutes + 1) + 1500


def test_what_is_refused_costs_nothing(clock: Clock) -> None:
    allowance = Allowance(KeyLimits(requests_per_minute=1, live_requests=2), clock)
    allowance.begin(2)
    before = allowance.headers()
    for _ in range(5):
        assert refusal(allowance).retry_after == 1
    assert allowance.headers() == before
    assert allowance.num_live == 2


def test_completions_at_once(clock: Clock) -> None:
    allowance = Allowance(KeyLimits(live_requests=4), clock)
    assert refusal(allowance, 5).status == 400
    allowance.begin(3)
    assert refusal(allowance, 2).code == "rate_limit_exceeded"
    allowance.check(1)
    allowance.end(3, 10)
    allowance.check(4)
    assert allowance.headers() == {}


def test_headers_tell_what_is_left(clock: Clock) -> None:
    allowance = Allowance(KeyLimits(requests_per_minute=120, tokens_per_minute=60), clock)
    allowance.begin(1)
    allowance.end(1, 90)
    assert allowance.headers() == {
        "x-ratelimit-limit-requests": "120",
        "x-ratelimit-remaining-requests": "119",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.5, "500ms"), (1, "1s"), (16.2, "17s"), (360, "6m0s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def read(tmp_path: Path, text: str, **settings: str) -> Access:
    file = tmp_path / "keys"
    file.write_text(text)
    return Access.from_config(ServerConfig(api_key_file=str(file), **settings))


def test_lines_of_the_key_file(tmp_path: Path) -> None:
    access = read(
        tmp_path,
        "# team\nsecret-1\nsecret-2 name=bob requests-per-minute=7 live-requests=0\n#secret-3\n",
        key_limits="requests-per-minute=60, live-requests=8",
    )
    assert [(key.name, key.limits) for key in access.user_keys] == [
        ("", KeyLimits(60, 0, 8)),
        ("bob", KeyLimits(7, 0, 0)),
    ]
    assert access.check("/v1/models", {"x-api-key": "secret-2"}) == access.user_keys[1]
    assert "secret" not in repr(access)
    assert access.user_keys[1].digest.hex() not in repr(access)


def test_the_file_says_more_of_a_key_than_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k tokens-per-minute=5\n")
    access = Access.from_config(ServerConfig(api_key=["k", "k2"], api_key_file=str(file)))
    assert [key.limits.tokens_per_minute for key in access.user_keys] == [5, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("se cret=", "line 1: a key has no spaces"),
        ("ok\nk secret", "line 2: a key has no spaces"),
        ("k secret=5", "line 1: a key has no spaces"),
        ("k requests-per-minute=x", "requests-per-minute must be a whole number up to"),
        ("k requests-per-minute=-1", "got '-1'"),
        ("k requests-per-minute=\N{SUPERSCRIPT TWO}", "must be a whole number"),
        ("k tokens-per-minute=99999999999", "must be a whole number"),
        ("k name=", "a name has letters"),
        ("secret\nsecret", "line 2: this key is in a line above"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-file") as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "cret=" not in str(caught.value)


def test_limits_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="'rpm=5' is no limit; they are requests-per-minute, "):
        parse_limits(["rpm=5"], KeyLimits(), "--key-limits")
    with pytest.raises(ConfigError, match="--key-limits needs keys"):
        Access.from_config(ServerConfig(key_limits="live-requests=1"))
