"""Everything that crosses a process boundary (docs/design.md draws the sockets).

    server --ingress--> tokenizer_proc --submit--> engine --tokens--> tokenizer_proc --replies--> server
                                                   engine --state---------------------------------> server

Positional, tagged msgspec structs in MessagePack; no pickle. Messages that exist once per token are
columns (lists of equal length), not rows: for 256 outputs that is 6 us to encode instead of 16.
Token ids travel as little-endian int32 bytes. Times are `time.monotonic_ns()`, which all processes
of one host share. Any message may arrive late, twice or for an unknown id; receivers drop it.
"""

from enum import IntEnum
from typing import Any

import msgspec

from engine.api.inspection import AnyReport
from engine.api.sampling import SamplingParams, StructuredOutput


class Message(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Base of all messages: encoded as [tag, field, ...]."""


# --- prompts ------------------------------------------------------------------------------------


class TextPrompt(Message):
    text: str
    add_special_tokens: bool = True
    suffix: str = ""  # what comes after the completion, for models that can fill in the middle


class TokenPrompt(Message):
    token_ids: bytes  # int32


class ChatPrompt(Message):
    messages: list[dict[str, Any]]  # as in the HTTP body, validated
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    documents: list[dict[str, Any]] = []
    chat_template: str = ""  # in place of the model's own, with which the server trusts the request


Prompt = TextPrompt | TokenPrompt | ChatPrompt


# --- ingress: server -> tokenizer_proc --------------------------------------------------------------


class Generate(Message):
    """Start `n` completions of one prompt, with request ids req_id .. req_id + n - 1."""

    req_id: int
    prompt: Prompt
    params: SamplingParams  # params.n completions; params.max_tokens None: up to the context's end
    arrival_ns: int
    priority: int = 0
    cache_salt: str = ""
    want_prompt_text: bool = False  # for `echo`: return the prompt as text in `Accepted`
    want_token_ids: bool = False  # return ids, too: of the prompt in `Accepted`, then in `Deltas`
    clamp_max_tokens: bool = False  # params.max_tokens is a default: lower it to what fits
    shown_special: list[str] = []  # special tokens that text shows even with skip_special_tokens
    reasoning_mark: str = ""  # a prompt that ends with it opens the reasoning,
    structured_after_mark: StructuredOutput | None = None  # and this is then `params.structured`


class Abort(Message):
    req_ids: list[int]  # or ids of calls


class Tokenize(Message):
    call_id: int
    prompt: Prompt
    return_token_strs: bool = False


class Detokenize(Message):
    call_id: int
    token_ids: bytes  # int32


class ControlAction(IntEnum):
    """What an operator may ask of the engine; done between two steps."""

    RESET_PREFIX_CACHE = 0
    START_PROFILE = 1
    STOP_PROFILE = 2


class Control(Message):
    """Passed on to the engine, which answers with `ControlResult`."""

    call_id: int
    action: ControlAction


class Subject(IntEnum):
    """What the engine can be asked about."""

    KV = 0
    REQUESTS = 1
    STEPS = 2
    TIMELINE = 3


class Inspect(Message):
    """Passed on to the engine, which answers with `Inspection` between two steps."""

    call_id: int
    subject: Subject
    last: int = 0  # at most so many requests or steps
    req_ids: list[int] = []  # whose timelines


Ingress = Generate | Abort | Tokenize | Detokenize | Control | Inspect


# --- submit: tokenizer_proc -> engine -----------------------------------------------------------------


class AbortReason(IntEnum):
    CLIENT = 0
    STOP_STRING = 1
    TIMEOUT = 2


class AddRequest(Message):
    req_id: int
    token_ids: bytes  # int32: the prompt, then `num_prior_output` ids generated before a restart
    block_names: bytes  # 16 bytes for each full block of token_ids; b"" if prefix caching is off
    params: SamplingParams  # max_tokens and seed are set here
    arrival_ns: int
    num_prior_output: int = 0
    priority: int = 0
    cache_salt: str = ""


class AbortRequests(Message):
    req_ids: list[int]
    reason: AbortReason = AbortReason.CLIENT


class TokenPieces(Message):
    """What the tokens stand for. Comes before the first request with a grammar, once."""

    pieces: list[bytes]  # by token id: the true bytes
    special_ids: list[int]  # tokens that are no text


Submit = AddRequest | AbortRequests | Control | TokenPieces | Inspect


# --- tokens: engine -> tokenizer_proc -----------------------------------------------------------------


class FinishReason(IntEnum):
    STOP = 0  # end-of-sequence token, stop token or stop string
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class EngineLimits(Message):
    block_size: int
    num_blocks: int  # usable blocks, the reserved block 0 not counted
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    enable_prefix_caching: bool
    eos_token_ids: list[int]
    dtype: str
    device: str
    max_num_batched_tokens: int = 0


class EngineHello(Message):
    """First message of an engine process; a new `epoch` means a new process."""

    epoch: int
    limits: EngineLimits


class TokenLogprobs(Message):
    """Log-probabilities (natural, after no temperature or penalty) at one generated token."""

    index: int  # into StepOutput.token_ids
    sampled: float
    rank: int  # 1 = most likely
    top_ids: bytes  # int32 [k], best first
    top_logprobs: bytes  # float32 [k]


class PromptLogprobs(Message):
    """Log-probabilities of n prompt tokens in a row, each as the model saw it coming.

    The first token of a prompt is never among them: nothing comes before it.
    """

    req_id: int
    first: int  # place in the prompt of the first of them
    logprobs: bytes  # float32 [n]
    ranks: bytes  # int32 [n]; 1 = most likely
    top_ids: bytes  # int32 [n, k], best first
    top_logprobs: bytes  # float32 [n, k]


class StepOutput(Message):
    """What one engine step produced, in columns over the requests that got tokens or ended.

    `token_ids` is flat: request i owns the next counts[i] entries (0 for a request that ended without
    a token). A stop or EOS token is included as the last id of its request.
    """

    epoch: int
    step_id: int
    req_ids: list[int]
    counts: list[int]
    token_ids: list[int]
    finished: list[tuple[int, FinishReason, int | None]]  # (index into req_ids, reason, stop token)
    logprobs: list[TokenLogprobs] = []
    started: list[tuple[int, int, int]] = []  # (req_id, cached prompt tokens, queue time in us)
    rejected: list[tuple[int, str, str]] = []  # (req_id, code, message): refused or given up
    prompt_logprobs: list[PromptLogprobs] = []  # before all tokens of their requests


Tokens = EngineHello | StepOutput


# --- replies: tokenizer_proc -> server ------------------------------------------------------------------


class TokenizerReady(Message):
    """The tokenizer is loaded and the engine said hello: requests will be served."""

    limits: EngineLimits
    chat_template: str = ""  # from which the server tells how the model writes calls; "": none


class Accepted(Message):
    """The prompt was encoded and sent to the engine. Sent once per Generate."""

    req_id: int
    num_prompt_tokens: int
    prompt_text: str | None = None
    prompt_token_ids: bytes | None = None  # int32, if wanted
    prompt_end: str = ""  # last characters of a chat's text: what its template opened there


class RequestError(Message):
    """Terminal for requests req_id .. req_id + n - 1. `status` is the HTTP status."""

    req_id: int
    n: int
    status: int
    code: str
    message: str
    param: str | None = None


class LogprobEntry(Message):
    token_id: int
    token: str  # text; bytes of an incomplete character as `bytes:\\xNN`
    logprob: float  # finite: -9999 stands for minus infinity, which JSON cannot express
    bytes: bytes  # the token's true bytes; empty for special tokens that render to nothing


class TokenLogprobText(Message):
    """One token of a completion or of a prompt, and the best in its place.

    The texts of all tokens are the text, whatever characters tokens share: one that only begins a
    character has none, and the one that completes it has all of it.
    """

    chosen: LogprobEntry
    top: list[LogprobEntry]  # best first
    rank: int = 0  # of `chosen`, 1 = most likely; 0: a prompt's first token, which has no logprob
    text: str = ""  # what it adds to the text

    def ranked(self, k: int) -> list[tuple[int, LogprobEntry]]:
        """The k best with their ranks, and `chosen`, if it is not one of them."""
        best = list(enumerate(self.top[:k], 1))
        others = [pair for pair in best if pair[1].token_id != self.chosen.token_id]
        if len(others) == len(best):
            return [*best, (self.rank, self.chosen)]
        return [(self.rank if e.token_id == self.chosen.token_id else i, e) for i, e in best]


class Deltas(Message):
    """New text for many requests, in columns over `req_ids`."""

    req_ids: list[int]
    texts: list[str]
    counts: list[int]  # new generated tokens, as billed
    finished: list[tuple[int, FinishReason, str | int | None]]  # (index, reason, stop string or id)
    # (index, entries released with the text)
    logprobs: list[tuple[int, list[TokenLogprobText]]] = []
    started: list[tuple[int, int, int]] = []  # (req_id, cached prompt tokens, queue time in us)
    # (req_id, next prompt tokens); all of a prompt come before its first text or end
    prompt_logprobs: list[tuple[int, list[TokenLogprobText]]] = []
    token_ids: list[tuple[int, bytes]] = []  # (index, int32: the tokens counted), if wanted
    logprob_sums: list[tuple[int, float]] = []  # (index, sum over all tokens), with the end


class TokenizeResult(Message):
    call_id: int
    token_ids: bytes  # int32
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeResult(Message):
    call_id: int
    text: str


class CallError(Message):
    call_id: int
    status: int
    code: str
    message: str
    param: str | None = None


Replies = (
    TokenizerReady
    | Accepted
    | RequestError
    | Deltas
    | TokenizeResult
    | DetokenizeResult
    | CallError
)


# --- state: engine -> server --------------------------------------------------------------------------


class Phase(IntEnum):
    LOADING = 0
    SIZING = 1
    CAPTURING = 2
    SERVING = 3


class EngineState(Message):
    """Heartbeat from the engine's own thread, twice a second, and at every change of phase."""

    epoch: int
    phase: Phase
    progress: float  # 0..1 within the phase
    detail: str
    loop_count: int  # steps and idle polls of the loop so far: stands still when the loop hangs
    step_in_flight_ms: float  # 0 when no step is running
    rss_bytes: int
    gpu_memory_bytes: int = 0  # held by the engine's allocator; 0 without a GPU


class EngineStats(Message):
    """Counters since start and gauges of now; at most ten a second, and at once on becoming idle."""

    epoch: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # free or cached: all that a new request could take
    steps: int
    step_seconds: float
    prompt_tokens: int
    generation_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    aborts: int
    nan_events: int = 0  # steps with logits that are NaN or infinite
    num_host_blocks: int = 0  # of --swap-space
    num_used_host_blocks: int = 0
    num_swapped: int = 0  # of num_waiting: preempted, with their KV kept in host memory
    failed_steps: int = 0  # steps that did not run for lack of memory


class EngineFailed(Message):
    """The engine is about to exit: why, in one line, and with which code (2 or 75: configuration)."""

    epoch: int
    message: str
    exit_code: int


class ControlResult(Message):
    """`message` says what was done, or with `is_done` false why nothing was, and what would help."""

    call_id: int
    is_done: bool
    message: str


class Inspection(Message):
    call_id: int
    report: AnyReport


State = EngineState | EngineStats | EngineFailed | ControlResult | Inspection


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder()


def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for one socket's union of messages, e.g. `decoder(Ingress)`."""
    return msgspec.msgpack.Decoder(union)


class Sockets(msgspec.Struct):
    """Addresses of one server's sockets, in its private run directory (mode 0700)."""

    ingress: str
    submit: str
    tokens: str
    replies: str
    state: str

    @classmethod
    def in_directory(cls, run_dir: str, epoch: int = 0) -> "Sockets":
        def at(name: str) -> str:
            return f"ipc://{run_dir}/{name}"

        return cls(
            ingress=at("ingress"),
            submit=at(f"submit.{epoch}"),
            tokens=at("tokens"),
            replies=at("replies"),
            state=at("state"),
        )
