"""One request inside the engine: what it asks for, what it holds, how far it has come."""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from engine.api.hashing import NAME_BYTES
from engine.api.messages import AddRequest
from engine.api.sampling import SamplingParams


class RequestStatus(IntEnum):
    """WAITING -> RUNNING <-> PREEMPTED -> FINISHED; a request may finish from any state."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Only the scheduler and the KV manager write to it.

    Three counts describe its progress, and all rules follow from them:

        0 ........ num_computed ........ len(token_ids) .. + num_uncommitted ..... max_total_tokens
        | KV is written or launched | known, KV missing | sampled, value unknown |

    A token counts as computed when the step that computes it is launched. The KV of the last sampled
    token is written by the step that consumes it, so that of the very last token never is.
    """

    req_id: int
    params: SamplingParams
    priority: int  # lower runs earlier
    arrival_ns: int
    sequence: int  # order of arrival at this engine, breaks ties
    cache_salt: str
    token_ids: "array[int]"  # int32; prompt, then output as far as it is committed
    num_prompt_tokens: int
    max_total_tokens: int  # prompt and output: ends with LENGTH when reached
    eos_token_ids: frozenset[int]  # empty with ignore_eos
    stop_token_ids: frozenset[int]  # end-of-sequence tokens included
    block_names: list[bytes]  # content addresses of the leading full blocks, as far as computed

    status: RequestStatus = RequestStatus.WAITING
    row: int = 0  # place in the device tables while running
    block_ids: list[int] = field(default_factory=list)  # the block table; grows at its end only
    num_computed: int = 0
    num_uncommitted: int = 0  # samples launched whose values are not known yet
    num_prefill_tokens: int = 0  # tokens known at the last (re)start: what prefill must compute
    num_named_blocks: int = 0  # leading blocks of the table that are named, or whose name is taken
    num_shared_blocks: int = 0  # cached blocks others were using at the last (re)start
    likely_kv_tokens: int = 0  # its expected end, for admission; drawn anew once outgrown
    num_preemptions: int = 0
    num_prompt_counted: int = 0  # prompt tokens in the statistics already
    has_started: bool = False
    num_scored: int = 1  # prompt tokens whose log-probabilities are launched; the first has none

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV this request will ever hold: all but the last one generated."""
        return max(self.num_prompt_tokens, self.max_total_tokens - 1)

    @property
    def is_scored(self) -> bool:
        """All prompt log-probabilities that it wants are launched, or it wants none."""
        return self.params.prompt_logprobs is None or self.num_scored >= self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the prefix cache.

        The token before one whose probability is wanted has to be computed: the last one known to
        sample, and in a prompt to be scored all that are not behind a scored one yet.
        """
        return (len(self.token_ids) if self.is_scored else self.num_scored) - 1

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prefill_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


def make_request(
    msg: AddRequest,
    sequence: int,
    max_model_len: int,
    block_size: int,
    eos_token_ids: frozenset[int],
) -> Request:
    """The waiting request that `msg` describes. `max_tokens` counts tokens of before a restart, too."""
    token_ids = array("i")
    token_ids.frombytes(msg.token_ids)
    params = msg.params
    num_prompt_tokens = len(token_ids) - msg.num_prior_output
    max_total_tokens = max_model_len
    if params.max_tokens is not None:
        max_total_tokens = min(max_model_len, num_prompt_tokens + params.max_tokens)
    eos = frozenset() if params.ignore_eos else eos_token_ids
    num_names = min(len(msg.block_names) // NAME_BYTES, len(token_ids) // block_size)
    return Request(
        req_id=msg.req_id,
        params=params,
        priority=msg.priority,
        arrival_ns=msg.arrival_ns,
        sequence=sequence,
        cache_salt=msg.cache_salt,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        max_total_tokens=max_total_tokens,
        eos_token_ids=eos,
        stop_token_ids=eos.union(params.stop_token_ids),
        block_names=[
            msg.block_names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in range(num_names)
        ],
    )
