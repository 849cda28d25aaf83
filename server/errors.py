"""The one error type of the HTTP surface, and the body it becomes.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

import orjson

TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "server_error",
    504: "server_error",
}

RETRY_QUEUE_S = 1  # `Retry-After` where a queue was too long
# Official clients retry 408, 429 and 5xx by themselves; these do not get better by retrying.
NO_RETRY_CODES = frozenset({"engine_dead", "not_implemented", "request_timeout", "aborted"})


class ApiError(Exception):
    """An answer other than 200: `status`, a machine-readable `code`, and for whom it is written.

    `param` is the path of the offending field, such as `messages[2].content[0].type`.
    `retry_after` (whole seconds) becomes the `Retry-After` header.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.extra_headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        headers = dict(self.extra_headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.code in NO_RETRY_CODES:
            headers["x-should-retry"] = "false"
        return headers

    def body(self, request_id: str) -> bytes:
        """The JSON body. Messages of 5xx end with the request id, to be found in the log."""
        message = self.message
        if self.status >= 500:
            message = f"{message} Request id: {request_id}"
        return orjson.dumps(
            {
                "error": {
                    "message": message,
                    "type": TYPE_OF_STATUS.get(self.status, "invalid_request_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def invalid_type(path: str, expected: str, value: object) -> ApiError:
    return ApiError(400, "invalid_type", f"{path} must be {expected}, got {describe(value)}", path)


def invalid_value(path: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, path)


def unsupported(path: str, message: str) -> ApiError:
    return ApiError(400, "unsupported_value", message, path)


def missing(path: str, message: str = "") -> ApiError:
    return ApiError(400, "missing_field", message or f"{path} is required", path)


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", "The server met an unexpected error with this request.")


def describe(value: object) -> str:
    """A JSON value as people call it, for messages about wrong types."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) <= 40 else "a string"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, float) and abs(value) >= 2**63:
        return "a number that exceeds 64 bits"  # digits would be those of the nearest float
    return f"{value}"
