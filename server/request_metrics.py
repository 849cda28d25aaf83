"""The times that one request took, for its answer (`metrics`) and for its line in the log."""

from server.stream import RequestStream

METRICS = (
    "time_to_first_token",
    "time_to_first_token_ms",
    "queue_time_ms",
    "generation_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
)


def request_metrics(stream: RequestStream) -> dict[str, float | None]:
    """Over all choices of a request; None where nothing happened yet, or once only.

    time_to_first_token (s), time_to_first_token_ms   arrival to the first token of any choice
    queue_time_ms          arrival to the start in the engine, the choice that waited least
    generation_time_ms     first token to last
    mean_itl_ms            mean gap between the tokens of a choice
    tokens_per_second      tokens of all choices, start to last token
    """
    begun = [choice for choice in stream.choices if choice.first_token_ns]
    started = [choice for choice in stream.choices if choice.started_ns]
    num_tokens = sum(choice.num_tokens for choice in begun)
    num_gaps = num_tokens - len(begun)
    gap_ns = sum(choice.last_token_ns - choice.first_token_ns for choice in begun)
    result: dict[str, float | None] = dict.fromkeys(METRICS)
    if started:
        result["queue_time_ms"] = round(min(choice.queue_us for choice in started) * 1e-3, 3)
    if begun:
        first = min(choice.first_token_ns for choice in begun)
        last = max(choice.last_token_ns for choice in begun)
        result["time_to_first_token"] = round((first - stream.arrival_ns) * 1e-9, 6)
        result["time_to_first_token_ms"] = round((first - stream.arrival_ns) * 1e-6, 3)
        result["generation_time_ms"] = round((last - first) * 1e-6, 3)
        busy_ns = last - min(choice.started_ns or first for choice in begun)
        if busy_ns > 0:
            result["tokens_per_second"] = round(num_tokens / (busy_ns * 1e-9), 3)
    if num_gaps > 0:
        result["mean_itl_ms"] = round(gap_ns * 1e-6 / num_gaps, 3)
    return result
