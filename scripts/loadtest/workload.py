"""What is sent: lengths, prompts, bodies and arrival times, all decided by one seed."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from scripts.loadtest.dataset import MOST_TOKENS, Row

# Short common words: about one token each in every large vocabulary. The server's usage tells exactly.
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system", "program", "question", "work", "government",
    "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
    "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game",
    "line", "end", "member", "law", "car", "city", "community", "name", "president", "team",
    "minute", "idea", "body", "information", "back", "parent", "face", "others", "level",
    "office", "door", "health", "person", "art", "war", "history", "party", "result", "change",
    "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force",
    "education",
)  # fmt: skip
MOST_SIGMA = 5.0  # of a lognormal distribution, where 0.5 to 2 are usual


@dataclass(frozen=True)
class Lengths:
    """How many tokens: `fixed` a, `uniform` a..b, `normal` mean a deviation b, `lognormal` median a
    with deviation b of the logarithm. Never below 1 nor above `most`."""

    kind: str
    a: float
    b: float = 0.0
    most: float = MOST_TOKENS

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From `512`, `uniform:100:900`, `normal:512:128[:MOST]` or `lognormal:512:0.6[:MOST]`.

        Raises ValueError with advice.
        """
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        wanted = {"fixed": (1,), "uniform": (2,), "normal": (2, 3), "lognormal": (2, 3)}
        if len(values) not in wanted.get(kind, ()) or any(
            not 0 <= v <= MOST_TOKENS for v in values
        ):
            raise ValueError(
                f"{text!r} is no length: write 512, uniform:LOW:HIGH, normal:MEAN:DEVIATION[:MOST] "
                f"or lognormal:MEDIAN:SIGMA[:MOST], with numbers of at most {MOST_TOKENS:,}"
            )
        if min([values[0], *values[2:]]) < 1 or (kind == "uniform" and values[1] < values[0]):
            raise ValueError(f"{text!r}: lengths begin at 1, and LOW is not above HIGH")
        if kind == "lognormal" and values[1] > MOST_SIGMA:
            raise ValueError(
                f"{text!r}: give a SIGMA of at most {MOST_SIGMA:g}, which already makes one length in "
                "fifty more than 20,000 times the median"
            )
        return cls(kind, *values)

    def __str__(self) -> str:
        """As `parse` takes it."""
        if self.kind == "fixed":
            return f"{self.a:g}"
        most = "" if self.most == MOST_TOKENS else f":{self.most:g}"
        return f"{self.kind}:{self.a:g}:{self.b:g}{most}"

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "uniform":
                value = float(rng.randint(round(self.a), round(self.b)))
            case "normal":
                value = rng.gauss(self.a, self.b)
            case "lognormal":
                value = self.a * rng.lognormvariate(0.0, self.b)
            case _:
                value = self.a
        return round(max(1.0, min(value, self.most)))


@dataclass(frozen=True)
class Request:
    body: bytes
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Makes request number `index` of a level and round: the same each time, and no two alike."""

    model: str
    chat: bool
    text: bool  # prompts as text; else as token ids
    input_len: Lengths
    output_len: Lengths
    shared_prefix: float = 0.0  # share of each prompt that is the same in all
    token_ids: tuple[int, int] = (100, 10_000)  # drawn from low <= id < high
    dataset: list[Row] = field(default_factory=list)
    temperature: float = 0.0
    ignore_eos: bool = False
    usage: bool = True  # ask for it
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of the body
    seed: int = 0

    def request(self, round_number: int, level: int, index: int) -> Request:
        rng = random.Random(f"{self.seed} {round_number} {level} {index}")
        num_out = self.output_len.draw(rng)
        body: dict[str, Any] = {"model": self.model, "stream": True}
        if self.dataset:
            # without repeats within a level as far as the file reaches
            row = self.dataset[(index + self._offset(round_number, level)) % len(self.dataset)]
            num_out = row.max_tokens or num_out
            if row.messages is not None:
                body["messages"] = row.messages
            else:
                self._put_prompt(body, row.prompt)
        else:
            self._put_prompt(body, self._prompt(rng))
        body["max_tokens"] = num_out
        body["temperature"] = self.temperature
        if self.temperature > 0:
            body["seed"] = rng.randrange(2**31)
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        body.update(self.extra)
        return Request(json.dumps(body).encode(), num_out)

    def _put_prompt(self, body: dict[str, Any], prompt: Any) -> None:
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt

    def _offset(self, round_number: int, level: int) -> int:
        return random.Random(f"{self.seed} {round_number} {level}").randrange(len(self.dataset))

    def _prompt(self, rng: random.Random) -> str | list[int]:
        num_in = self.input_len.draw(rng)
        num_shared = round(self.shared_prefix * num_in)
        common = random.Random(f"{self.seed} shared")
        if self.text:
            words = common.choices(WORDS, k=num_shared)
            return " ".join(words + rng.choices(WORDS, k=num_in - num_shared))
        ids = range(*self.token_ids)
        return common.choices(ids, k=num_shared) + rng.choices(ids, k=num_in - num_shared)


def poisson_arrivals(
    rate: float, count: int, seed: int, round_number: int, level: int
) -> list[float]:
    """Times in seconds of `count` arrivals of a Poisson process, `rate` a second on average."""
    rng = random.Random(f"arrivals {seed} {round_number} {level}")
    now, times = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times
