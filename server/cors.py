"""Cross-origin requests: which web pages may call the server from a browser (the Fetch standard, 3.2).

Off unless origins are given. A browser then asks first (`OPTIONS`, the preflight), without a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from engine.api.config import ConfigError
from server.config import ServerConfig

METHODS = ("GET", "HEAD", "POST")
EXPOSED = ", ".join(
    ["X-Request-Id", "Retry-After", "X-Ignored-Fields", "x-should-retry"]
    + [
        f"x-ratelimit-{x}-{of}"
        for x in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ]
)
MAX_AGE_S = 600  # how long browsers may remember a preflight's answer


@dataclass(frozen=True)
class CorsPolicy:
    origins: frozenset[str]
    methods: tuple[str, ...]
    headers: frozenset[str]  # lower case; "*": any
    allow_credentials: bool

    @classmethod
    def from_config(cls, config: ServerConfig) -> "CorsPolicy | None":
        """None if no origin is allowed. Raises ConfigError for settings that cannot work."""
        origins = read_list("--allowed-origins", config.allowed_origins)
        methods = read_list("--allowed-methods", config.allowed_methods)
        headers = read_list("--allowed-headers", config.allowed_headers)
        if config.allow_credentials and "*" in origins:
            raise ConfigError(
                "--allow-credentials with --allowed-origins *: any web page could then act in the "
                "name of who visits it; name the origins"
            )
        for origin in origins:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise ConfigError(
                    f"--allowed-origins {origin}: an origin is like https://chat.example.org, "
                    "without a slash at the end, or *"
                )
        if not origins:
            return None
        return cls(
            origins=frozenset(origins),
            methods=METHODS if "*" in methods else tuple(m.upper() for m in methods),
            headers=frozenset(h.lower() for h in headers),
            allow_credentials=config.allow_credentials,
        )

    def answer_headers(self, request_headers: Mapping[str, str]) -> dict[str, str]:
        """For every response, errors included."""
        vary = {} if "*" in self.origins else {"Vary": "Origin"}
        origin = request_headers.get("Origin", "")
        if not self.allows(origin):
            return vary
        allowed = {
            **vary,
            "Access-Control-Allow-Origin": "*" if "*" in self.origins else origin,
            "Access-Control-Expose-Headers": EXPOSED,
        }
        if self.allow_credentials:
            allowed["Access-Control-Allow-Credentials"] = "true"
        return allowed

    def preflight_headers(self, request_headers: Mapping[str, str]) -> dict[str, str]:
        """Beyond `answer_headers`. "*" would not cover Authorization: names are repeated instead."""
        if not self.allows(request_headers.get("Origin", "")):
            return {}
        asked = request_headers.get("Access-Control-Request-Headers", "")
        names = [name.strip() for name in asked.split(",") if name.strip()]
        if "*" not in self.headers:
            names = [name for name in names if name.lower() in self.headers]
        answer = {
            "Access-Control-Allow-Methods": ", ".join(self.methods),
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        if names:
            answer["Access-Control-Allow-Headers"] = ", ".join(names)
        return answer

    def allows(self, origin: str) -> bool:
        return bool(origin) and ("*" in self.origins or origin in self.origins)


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return (
        method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers
    )


def read_list(flag: str, values: list[str]) -> list[str]:
    """Words, or JSON lists of them. Raises ConfigError."""
    words: list[str] = []
    for value in values:
        if not value.lstrip().startswith("["):
            words.append(value.strip())
            continue
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f'{flag} {value}: is no JSON list like ["a", "b"]: {error}') from None
        if not all(isinstance(word, str) for word in parsed):
            raise ConfigError(f"{flag} {value}: the list must hold strings")
        words += parsed
    if not all(word and word.isascii() and word.isprintable() for word in words):
        raise ConfigError(f"{flag}: an entry is empty or not plain ASCII")
    return words
