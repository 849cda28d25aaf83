"""How much the holder of a key may ask for: requests and tokens a minute, and completions at once.

Requests and tokens come out of token buckets (Turner 1986, "New directions in communications"): a bucket
holds what a minute brings, so that a pause is made up for, and fills steadily. What a request will use is
known when it has ended. So it starts if there is anything left, and pays afterwards: a key may fall into
debt, and then waits until it is paid. Over time no key gets more than its limit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from engine.api.config import ConfigError
from server.errors import ApiError, invalid_value

Clock = Callable[[], float]  # seconds, never back

MOST = 10**9
RETRY_LIVE_S = 1  # nobody knows when a completion ends


@dataclass(frozen=True)
class KeyLimits:
    """0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # prompts and completions together
    live_requests: int = 0  # completions: prompts times n


LIMIT_NAMES = tuple(field.name.replace("_", "-") for field in fields(KeyLimits))


def parse_limits(words: list[str], default: KeyLimits, where: str) -> KeyLimits:
    """`default`, changed by words such as `requests-per-minute=60`. Raises ConfigError."""
    values: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in LIMIT_NAMES:
            raise ConfigError(
                f"{where}: {word!r:.80} is no limit; they are {', '.join(LIMIT_NAMES)}"
            )
        if not (value.isascii() and value.isdigit() and len(value) <= 10 and int(value) <= MOST):
            raise ConfigError(
                f"{where}: {name} must be a whole number up to {MOST}, 0 for no limit; got {value!r:.80}"
            )
        values[name.replace("-", "_")] = int(value)
    return KeyLimits(**{**vars(default), **values})


class TokenBucket:
    """`per_minute` at most, full at first."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What is left; negative: debt."""
        now = self._clock()
        filled = self._level + (now - self._at) * self.per_minute / 60
        self._level, self._at = min(filled, float(self.per_minute)), now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """0 if it is there."""
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class Allowance:
    """What one key has left. Ask `check`; if that does not raise, `begin`, and `end` once."""

    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.most_live = limits.live_requests
        self.num_live = 0
        self._buckets: dict[str, TokenBucket] = {}
        if limits.requests_per_minute:
            self._buckets["requests"] = TokenBucket(limits.requests_per_minute, clock)
        if limits.tokens_per_minute:
            self._buckets["tokens"] = TokenBucket(limits.tokens_per_minute, clock)

    def check(self, num_completions: int) -> None:
        """Raises ApiError: 429 if waiting helps, 400 if it does not."""
        if self.most_live and num_completions > self.most_live:
            raise invalid_value(
                "n",
                f"This request asks for {num_completions} completions (prompts times n), but this key "
                f"may have at most {self.most_live} at once.",
            )
        if self.most_live and self.num_live + num_completions > self.most_live:
            raise exceeded(
                f"{self.num_live} completions of this key are running or waiting, and it may have at "
                f"most {self.most_live} at once.",
                RETRY_LIVE_S,
            )
        for what, bucket in self._buckets.items():
            wait_s = bucket.seconds_until(1)
            if wait_s > 0:
                retry_s = max(1, math.ceil(wait_s))
                raise exceeded(
                    f"This key has used its {bucket.per_minute} {what} a minute; there are more in "
                    f"{retry_s} s.",
                    retry_s,
                )

    def begin(self, num_completions: int) -> None:
        self.num_live += num_completions
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)

    def end(self, num_completions: int, num_tokens: int) -> None:
        """`num_tokens`: of prompts and completions, also of a request that was cut short."""
        self.num_live -= num_completions
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(num_tokens)

    def headers(self) -> dict[str, str]:
        """What is left, by the names that OpenAI's servers use. Empty without limits a minute."""
        headers: dict[str, str] = {}
        for what, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{what}"] = duration(bucket.seconds_until(bucket.per_minute))
        return headers


def exceeded(message: str, retry_after: int) -> ApiError:
    return ApiError(429, "rate_limit_exceeded", message, retry_after=retry_after)


def duration(seconds: float) -> str:
    """As OpenAI's servers write it: `0s`, `120ms`, `17s`, `6m0s`. Rounded up."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
