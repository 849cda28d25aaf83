"""What a server may answer to an attempt."""

import json
from typing import Any

from scripts.fuzz.bodies import Body
from scripts.fuzz.wire import RIGHT, Attempt

NOT_BUILT = {"/v1/embeddings", "/v1/responses", "/v1/messages"}
TOO_LATE = {"queue_timeout"}  # what a `timeout` in a body may lead to
UNREADABLE = (400, 431)
ERROR_MEMBERS = {"message", "type", "param", "code"}
# A body that the description takes may still be refused, but not for its types.
NEVER_FOR_RIGHT = {"invalid_type", "missing_field", "invalid_json", "unknown_field"}


class Answer:
    """One HTTP response, read strictly. Raises ValueError for what no client could read."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"{self.status} {self.body[:300].decode(errors='replace')}"

    @property
    def error_code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


def read_answers(data: bytes, has_bodies: bool = True) -> list[Answer]:
    """All responses of a connection. `has_bodies=False`: those of HEAD.

    Of a request that it cannot read the server does not know the method either; it may say why.
    """
    answers = []
    while data:
        head, found, data = data.partition(b"\r\n\r\n")
        if not found or not head.startswith(b"HTTP/1."):
            raise ValueError(f"no response: {head[:200]!r}")
        line, *lines = head.decode("latin-1").split("\r\n")
        status = int(line.split(" ")[1])
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if status == 100:
            continue
        body = b""
        if status in (204, 304) or (not has_bodies and not (status in UNREADABLE and data)):
            pass
        elif headers.get("transfer-encoding") == "chunked":
            body, data = read_chunks(data)
        elif "content-length" in headers:
            size = int(headers["content-length"])
            if len(data) < size:
                raise ValueError("the body is shorter than its Content-Length")
            body, data = data[:size], data[size:]
        else:  # until the end
            body, data = data, b""
        answers.append(Answer(status, headers, body))
    return answers


def read_chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, found, data = data.partition(b"\r\n")
        if not found:
            raise ValueError("the response ends within its chunks")
        size = int(line, 16)
        chunk, data = data[:size], data[size:]
        if len(chunk) < size or not data.startswith(b"\r\n"):
            raise ValueError("a chunk is cut")
        data = data[2:]
        if size == 0:
            return body, data
        body += chunk


def judge(attempt: Attempt, data: bytes) -> tuple[list[str], list[str]]:
    """Complaints, and what came ("200", "400 invalid_type", ...)."""
    if attempt.end != RIGHT:
        return [], ["left"]
    has_bodies = not attempt.pieces[0].startswith(b"HEAD")
    try:
        answers = read_answers(data, has_bodies)
    except ValueError as error:
        return [str(error)], []
    complaints, seen = [], []
    if attempt.num_answers is not None and len(answers) != attempt.num_answers:
        complaints.append(f"{len(answers)} answers, not {attempt.num_answers}")
    for position, answer in enumerate(answers):
        body = attempt.bodies[position] if position < len(attempt.bodies) else None
        try:
            seen.append(outcome(answer, has_bodies))
            complaints += complain(answer, body, attempt) if has_bodies else []
        except (ValueError, KeyError, TypeError) as error:
            complaints.append(f"{answer.status} with a body that is none: {error!r}")
    return complaints, seen or ["closed"]


def outcome(answer: Answer, has_bodies: bool) -> str:
    if answer.status < 400 or not has_bodies or b'"error"' not in answer.body:
        return str(answer.status)
    return f"{answer.status} {answer.error_code}"


def complain(answer: Answer, body: Body | None, attempt: Attempt) -> list[str]:
    found = []
    if "x-request-id" not in answer.headers:
        found.append("no X-Request-Id")
    is_probe = b"/health" in attempt.pieces[0] or b"/ready" in attempt.pieces[0]
    if answer.status < 400 or (answer.status == 503 and is_probe):
        found += complain_of_success(answer)
        return found
    error = strict_json(answer.body)["error"]
    if set(error) != ERROR_MEMBERS or not error["message"]:
        found.append("the error has other members than it should")
    if answer.status >= 500 and not is_documented(answer.status, error["code"], attempt):
        found.append(f"{answer.status} {error['code']}: {error['message'][:200]}")
    if body is not None and body.kind == "right" and error["code"] in NEVER_FOR_RIGHT:
        found.append(f"refused as described: {error['code']} {error['message'][:200]}")
    return found


def is_documented(status: int, code: str, attempt: Attempt) -> bool:
    written = b"".join(attempt.pieces)
    if status == 501:
        return any(path.encode() in written for path in NOT_BUILT)
    return status == 503 and code in TOO_LATE and b"timeout" in written


def complain_of_success(answer: Answer) -> list[str]:
    kind = answer.headers.get("content-type", "")
    if kind.startswith("application/json"):
        strict_json(answer.body)
    elif kind.startswith("text/event-stream"):
        events = answer.body.decode().split("\n\n")
        if events.pop() != "":
            return ["the stream ends within an event"]
        payloads = [event.removeprefix("data: ") for event in events if event[:1] != ":"]
        parsed = [strict_json(p.encode()) for p in payloads if p != "[DONE]"]
        is_error = bool(parsed) and "error" in parsed[-1]
        if (payloads[-1:] == ["[DONE]"]) == is_error:
            return ["the stream has no end"]
        if is_error and parsed[-1]["error"]["code"] not in ("request_timeout", *TOO_LATE):
            return [f"the stream failed: {parsed[-1]['error']}"]
    return []


def strict_json(data: bytes) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse)
