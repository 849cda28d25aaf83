"""Sampling parameters: one type for HTTP requests, for the wire and for offline use."""

from typing import Literal, get_args

import msgspec

INT64_MAX = 2**63 - 1

# Bounds of numbers, inclusive where not said otherwise; `SamplingParams` checks them, and the HTTP API describes them.
REALS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
}
ABOVE_LOWEST = ("repetition_penalty",)  # the lower bound is not in the range
INTEGERS: dict[str, tuple[int, int]] = {
    "n": (1, 128),
    "top_k": (-1, INT64_MAX),
    "seed": (-(2**63), INT64_MAX),
    "max_tokens": (0, INT64_MAX),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "truncate_prompt_tokens": (-1, INT64_MAX),  # and not 0
}
BIAS = (-100.0, 100.0)
MAX_BIASES = 1024
MAX_STOP = 16
MAX_STOP_IDS = 128
MAX_BAD_WORDS = 128
MAX_TEXT = 256  # characters of a stop string or a bad word

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[str, ...] = get_args(Kind)


class StructuredOutput(msgspec.Struct, array_like=True, frozen=True):
    """What the text of a completion has to look like.

    kind      value
    json      a JSON schema, as JSON text; "{}" allows any JSON object
    regex     a regular expression that the whole text matches
    choice    a JSON list of strings, one of which is the text
    grammar   a context-free grammar in Lark's notation
    """

    kind: Kind
    value: str
    param: str = "structured"  # the request's field that asks for it, for error messages

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParamError(
                self.param, f"kind must be one of {', '.join(KINDS)}, got {self.kind!r:.80}"
            )
        if not isinstance(self.value, str):
            raise ParamError(
                self.param,
                f"the value of kind {self.kind} must be text (json.dumps makes it of a schema or a "
                f"list), got {self.value!r:.80}",
            )
        try:
            self.value.encode()
        except UnicodeEncodeError as error:
            raise ParamError(
                self.param,
                f"{self.param}: the value of kind {self.kind} has a lone surrogate "
                f"({self.value[error.start]!r}) at character {error.start}, which no text can hold; "
                "remove it, or write the whole character",
            ) from None


class SamplingParams(msgspec.Struct, array_like=True, kw_only=True, omit_defaults=False):
    """How to choose the tokens of one completion.

    The names and meanings are those of the HTTP API. `seed=None` draws a fresh one; choice `i` of a
    request with `n > 1` uses a stream derived from (seed, i). Raises `ValueError` on construction,
    naming the field, when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0  # 0 means: only the top token
    top_k: int = -1  # -1 and 0 mean off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # generated tokens only
    frequency_penalty: float = 0.0  # generated tokens only
    repetition_penalty: float = 1.0  # prompt and generated tokens
    seed: int | None = None
    max_tokens: int | None = 16  # None: as many as fit into max_model_len; 0: the prompt only
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # None: off; k: the sampled token's and the k best
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None  # None: any text
    allowed_token_ids: list[int] | None = None  # None: all; a list: only these
    bad_words: list[str] = []  # texts that may not be generated
    bad_word_ids: list[list[int]] = []  # their spellings in tokens; set by tokenizer_proc
    prompt_logprobs: int | None = None  # None: off; k: each prompt token's and the k best there
    truncate_prompt_tokens: int | None = None  # keep the last k; -1: as many as fit; None: refuse

    def __post_init__(self) -> None:
        stop: list[str] | str = self.stop
        if isinstance(stop, str):  # offline users may pass one string
            self.stop = [stop]
        self._check_collections()
        for name, (low, high) in REALS.items():
            check_range(name, getattr(self, name), low, high, is_open=name in ABOVE_LOWEST)
        for name, (least, most) in INTEGERS.items():
            value = getattr(self, name)
            if value is not None and name != "truncate_prompt_tokens":
                check_int(name, value, least, most)
        longest = INT64_MAX if self.max_tokens is None else self.max_tokens
        check_int("min_tokens", self.min_tokens, 0, longest)
        kept = self.truncate_prompt_tokens
        if kept is not None and (kept != -1 or not isinstance(kept, int)):
            besides = ", or -1 for as many as fit"
            check_int("truncate_prompt_tokens", kept, 1, INT64_MAX, besides=besides)
        if len(self.stop) > MAX_STOP:
            raise ParamError("stop", f"stop takes at most {MAX_STOP} strings, got {len(self.stop)}")
        for text in self.stop:
            check_text("stop", text, "each stop string")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ParamError(
                "stop_token_ids",
                f"stop_token_ids takes at most {MAX_STOP_IDS}, got {len(self.stop_token_ids)}",
            )
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids", token_id, 0, INT64_MAX, what="each of stop_token_ids")
        if len(self.logit_bias) > MAX_BIASES:
            raise ParamError(
                "logit_bias",
                f"logit_bias takes at most {MAX_BIASES} entries, got {len(self.logit_bias)}",
            )
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias", token_id, 0, INT64_MAX, what="each token id of logit_bias")
            check_range("logit_bias", bias, *BIAS)
        self._check_constraints()

    def _check_collections(self) -> None:
        """None is the same as an empty one, as elsewhere. One string is no list of strings: its
        characters would be taken one by one."""
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":
                setattr(self, name, [])
            elif value is not None and not isinstance(value, list | tuple):
                raise ParamError(name, f"{name} must be a list, got {value!r:.80}")
        biases: object = self.logit_bias
        if biases is None:
            self.logit_bias = {}
        elif not isinstance(biases, dict):
            raise ParamError(
                "logit_bias",
                f"logit_bias must be a dict of token ids and numbers, got {biases!r:.80}",
            )

    def _check_constraints(self) -> None:
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise ParamError(
                "structured",
                "structured must be a StructuredOutput(kind, value), such as "
                f"StructuredOutput('json', '{{}}'), got {self.structured!r:.80}",
            )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ParamError(
                    "allowed_token_ids",
                    "allowed_token_ids is empty, which allows no token at all; leave it out to "
                    "allow all",
                )
            for token_id in self.allowed_token_ids:
                check_int(
                    "allowed_token_ids", token_id, 0, INT64_MAX, what="each of allowed_token_ids"
                )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ParamError(
                "bad_words",
                f"bad_words takes at most {MAX_BAD_WORDS} strings, got {len(self.bad_words)}",
            )
        for word in self.bad_words:
            check_text("bad_words", word, "each of bad_words")

    @property
    def has_constraints(self) -> bool:
        """Whether some tokens are forbidden, which ones depending on the tokens before."""
        return (
            self.structured is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_word_ids)
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def is_deterministic(self) -> bool:
        """Only the single best token can come out, whatever the seed."""
        return self.is_greedy or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class ParamError(ValueError):
    """A sampling parameter out of range. `param` is the field's name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def check_range(name: str, value: float, low: float, high: float, is_open: bool = False) -> None:
    """Raise ParamError unless `value` is a finite number in [low, high], or in (low, high] if `is_open`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParamError(name, f"{name} must be a number, got {value!r:.80}")
    if not low <= value <= high or (is_open and value == low):  # the first is false for NaN
        bounds = f"above {low} and at most {high}" if is_open else f"between {low} and {high}"
        raise ParamError(name, f"{name} must be {bounds}, got {value!r:.80}")


def check_int(
    name: str, value: int, low: int, high: int, what: str = "", besides: str = ""
) -> None:
    """Raise ParamError unless `value` is an integer in [low, high]. `what` says whose, if not the
    field's own value is meant; `besides`, what else the field takes."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(name, f"{what or name} must be an integer, got {value!r:.80}")
    if not low <= value <= high:
        is_open = high == INT64_MAX and value < low
        bounds = f"at least {low}" if is_open else f"between {low} and {high}"
        raise ParamError(name, f"{what or name} must be {bounds}{besides}, got {value!r:.80}")


def check_text(name: str, text: object, what: str) -> None:
    """Raise ParamError unless `text` is a string of 1 to MAX_TEXT characters that UTF-8 can hold."""
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEXT:
        raise ParamError(name, f"{what} must have 1 to {MAX_TEXT} characters, got {text!r:.80}")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ParamError(name, f"{what} must be text, which holds no lone surrogate: {text!r:.80}")


def choice_seed(seed: int, choice: int) -> int:
    """The 64-bit seed of choice `choice` of a request (splitmix64 step, so streams do not overlap)."""
    if choice == 0:
        return seed & 0xFFFFFFFFFFFFFFFF
    z = (seed + choice * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
