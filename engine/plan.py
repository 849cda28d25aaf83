"""All that the scheduler and the runner know of each other: a plan goes in, a result comes out.

The scheduler counts tokens as computed when their step is launched; the values of sampled tokens
stay on the device, where the next step's decode rows read them. So plan n+1 can be made before the
result of plan n is known.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from engine.api.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class RowInit:
    """A request enters the batch (first start, or resumption after preemption) on device row `row`."""

    row: int
    params: SamplingParams  # seed is set
    token_ids: Int32Array  # [num_known] prompt and output tokens known so far, for penalties
    num_prompt_tokens: int  # of token_ids; the rest are output
    num_computed: int  # tokens whose KV was found in the prefix cache
    block_ids: list[int]  # the blocks held at this moment, cached prefix first


@dataclass(slots=True)
class PromptSpan:
    """Prompt tokens in a row that a step reports the log-probabilities of.

    Each is predicted at the token before it, which is one of the step's:

        step's tokens      first_token ─► t0  t1  t2  t3
        token_ids          what follows   t1  t2  t3  (t4, of the next chunk)
    """

    first_token: int  # among all tokens of the step
    token_ids: Int32Array  # [n]
    num_top: int  # how many of the best to report with each


@dataclass(slots=True)
class StepPlan:
    """One forward pass. Rows are ordered: decode rows first, then prefill rows.

    A decode row computes one token, the last one sampled on its row, which the host may not know yet.
    A prefill row computes tokens whose ids the host knows (`prompt_tokens`), even if it is only one.
    Row 0 and block 0 are reserved for padding and never appear here. Arrays may belong to other plans,
    too: nobody writes to them.
    """

    step_id: int
    num_decodes: int
    rows: Int32Array  # [B]
    num_tokens: Int32Array  # [B]; 1 for decode rows
    num_computed: Int32Array  # [B] tokens with KV before this step: position of the row's first
    samples: BoolArray  # [B] does the row sample a token (false while a prompt is unfinished)
    prompt_tokens: Int32Array  # ids of all prefill rows, concatenated
    new_rows: list[RowInit] = field(default_factory=list)
    # (row, index in its block table, block ids)
    appended: list[tuple[int, int, list[int]]] = field(default_factory=list)
    freed_rows: list[int] = field(default_factory=list)  # rows given back since the last plan
    req_ids: list[int] = field(default_factory=list)  # [B] for commit and for people
    prompt_spans: list[PromptSpan] = field(default_factory=list)
    # KV blocks to and from host memory (engine/kv/host_tier.py), before anything else of the step:
    # first out, (device block, host slot), then in, (host slot, device block)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    def is_decode(self) -> bool:
        """Only decode rows: every row computes one token and samples."""
        return self.num_decodes == len(self.rows)

    @property
    def query_start(self) -> list[int]:
        """[B + 1] first token of each row, then the end."""
        if self.is_decode:
            return list(range(len(self.rows) + 1))
        return [0, *np.cumsum(self.num_tokens).tolist()]

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(slots=True)
class RowLogprobs:
    """Log-probabilities at one sampled token, before temperature and penalties."""

    sampled: float
    rank: int  # 1 = most likely
    top_ids: Int32Array  # [k] best first
    top_logprobs: npt.NDArray[np.float32]  # [k]


@dataclass(slots=True)
class SpanLogprobs:
    """Log-probabilities of the tokens of one PromptSpan, k = its num_top (or the vocabulary)."""

    logprobs: npt.NDArray[np.float32]  # [n]
    ranks: Int32Array  # [n] 1 = most likely
    top_ids: Int32Array  # [n, k] best first
    top_logprobs: npt.NDArray[np.float32]  # [n, k]
    is_bad: bool = False  # logits held NaN: the numbers mean nothing


class RowEnd(Enum):
    """Why a row with constraints cannot go on."""

    COMPLETE = 0  # nothing may follow the token
    STUCK = 1  # nothing was allowed in the token's place: there is none
    FAILED = 2  # the grammar gave up, e.g. because of its size: the token means nothing


@dataclass(slots=True)
class StepResult:
    """Values of one step, for the rows of the plan with `samples` set, in plan order."""

    token_ids: Int32Array  # [num_sampled]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)  # index into token_ids -> entry
    is_bad: BoolArray | None = None  # [num_sampled] the row's logits held NaN
    prompt_logprobs: list[SpanLogprobs] = field(default_factory=list)  # by plan.prompt_spans
    ends: dict[int, RowEnd] = field(default_factory=dict)  # index into token_ids -> why it ends
    reasons: dict[int, str] = field(default_factory=dict)  # of RowEnd.FAILED, for the client
