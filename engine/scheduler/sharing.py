"""What a long prompt leaves of a step's budget to a short one that came later.

A prompt of 100,000 tokens is prefilled in many steps and could use up the budget of all of them: a new
chat of ten tokens would wait until it is done, for seconds or minutes. So unfinished prefills leave the
next in the queue what it needs, if that is little and it can start now. It then starts and samples in
the same step, which delays the long prompt by at most a quarter; prompts of similar length still run
one after the other, in order, which is the soonest for most of them.

    step          1     2     3     4                 step          1     2     3     4
    without   |LLLLL|LLLLL|LLLLL|Ls   |           with          |LLLLL|LLLLs|LLLLs|LLL  |
"""

from engine.kv.manager import KVCacheManager
from engine.request import Request
from engine.scheduler.admission import Admission

SHORT_SHARE = 4  # a prompt is short if it needs at most one of so many parts of the budget


def kept_for(request: Request, kv: KVCacheManager, admission: Admission, budget: int) -> int:
    """Tokens of `budget` to keep for `request`, the next in the queue; 0 if it is long or must wait."""
    if request.num_uncommitted:
        return 0
    cached = kv.find_prefix(request)
    want = len(request.token_ids) - len(cached) * kv.block_size
    if want > budget // SHORT_SHARE:
        return 0
    num_shared = sum(kv.pool.refs(block) > 0 for block in cached)
    return want if admission.check(request, num_shared).fits else 0
