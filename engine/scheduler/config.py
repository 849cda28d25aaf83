"""What limits the scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and switches, resolved (no `auto`)."""

    max_num_seqs: int  # running requests
    max_num_batched_tokens: int  # the token budget of a step
    max_model_len: int  # prompt and output
    block_size: int
    enable_chunked_prefill: bool
    admission: str  # "peak" or "greedy"
    eos_token_ids: tuple[int, ...]
    check_invariants: bool
    num_rows: int  # device rows, the reserved row 0 included

    def __post_init__(self) -> None:
        if self.num_rows <= self.max_num_seqs:
            raise ValueError(
                f"num_rows must be above max_num_seqs ({self.max_num_seqs}) as row 0 is reserved, "
                f"got {self.num_rows}"
            )
        if self.admission not in ("peak", "greedy"):
            raise ValueError(f"admission must be peak or greedy, got {self.admission!r}")
