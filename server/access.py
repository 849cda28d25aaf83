"""Who may call what: API keys, the admin key, and the paths that need none.

Every path is closed unless it is listed here, so a new route cannot be left open by mistake.
"""

import hmac
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from engine.api.config import ConfigError
from server.config import ServerConfig
from server.errors import ApiError
from server.page import PAGE_PATHS
from server.rate_limits import LIMIT_NAMES, KeyLimits, parse_limits

OPEN_PATHS = frozenset({"/live", "/health", "/ping", "/ready", "/version", *PAGE_PATHS})
METRICS_PATH = "/metrics"
ADMIN_PATHS = frozenset({"/server_info", "/start_profile", "/stop_profile"})
ADMIN_PREFIXES = ("/admin/", "/debug/")
KEY_HEADERS = ("api-key", "x-api-key")  # besides Authorization: Bearer KEY


@dataclass(frozen=True)
class UserKey:
    """A key, as its SHA-256 digest, and who has it."""

    digest: bytes = field(repr=False)
    limits: KeyLimits
    name: str = ""  # for the log


@dataclass(frozen=True)
class Access:
    """The keys, as SHA-256 digests: equal in length, so that comparing them takes constant time."""

    user_keys: tuple[UserKey, ...] = ()
    admin_key: bytes | None = None
    protect_metrics: bool = False

    @classmethod
    def from_config(cls, config: ServerConfig) -> "Access":
        """Raises ConfigError for a key that no header can carry, or a key file that cannot be read."""
        limits = parse_limits(
            config.key_limits.replace(",", " ").split(), KeyLimits(), "--key-limits"
        )
        given = [digest(check_key("--api-key", key)) for key in config.api_key]
        keys = {key: UserKey(key, limits) for key in given}
        if config.api_key_file:  # says more of a key than the other ways
            keys |= read_key_file(Path(config.api_key_file), limits)
        admin = digest(check_key("--admin-key", config.admin_key)) if config.admin_key else None
        if admin is not None and admin in keys:
            raise ConfigError("--admin-key is also an --api-key: give operators a key of their own")
        if config.protect_metrics and not keys and admin is None:
            raise ConfigError("--protect-metrics needs a key: give --api-key or --admin-key")
        if config.key_limits and not keys:
            raise ConfigError("--key-limits needs keys: give --api-key or --api-key-file")
        return cls(tuple(keys.values()), admin, config.protect_metrics)

    def is_admin_path(self, path: str) -> bool:
        return path in ADMIN_PATHS or path.startswith(ADMIN_PREFIXES)

    def is_open(self, path: str) -> bool:
        """Does `path` need no key?"""
        return path in OPEN_PATHS or (path == METRICS_PATH and not self.protect_metrics)

    def check(self, path: str, headers: Mapping[str, str]) -> UserKey | None:
        """The user's key, if that is what opens `path`.

        Raises ApiError 401 without a valid key, and 403 for a user's key on an admin path.
        """
        path = path.rstrip("/") or "/"
        if self.is_open(path):
            return None
        needs_admin = self.admin_key is not None and self.is_admin_path(path)
        if not needs_admin and not self.user_keys and not self._guards_metrics(path):
            return None
        given = [digest(key) for key in keys_of(headers)]
        if self.admin_key is not None and matches(given, [self.admin_key]):
            return None
        places = matches(given, [key.digest for key in self.user_keys])
        if not places:
            raise unauthorized(has_key=bool(given))
        if needs_admin:
            raise ApiError(403, "forbidden", f"{path} needs the admin key, not a user's.")
        return self.user_keys[places[0]]

    def _guards_metrics(self, path: str) -> bool:
        return path == METRICS_PATH and self.protect_metrics


def keys_of(headers: Mapping[str, str]) -> list[str]:
    """All keys that a request brings. The scheme `Bearer` may have any case (RFC 7235, 2.1)."""
    keys = [headers[name].strip() for name in KEY_HEADERS if name in headers]
    scheme, _, credentials = headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        keys.append(credentials.strip())
    return [key for key in keys if key]


def digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def matches(given: Iterable[bytes], known: Iterable[bytes]) -> list[int]:
    """Places in `known` of what is given.

    Compares all pairs, whatever the result, so that the time taken says nothing of a wrong key.
    """
    known = list(known)
    return [i for a in given for i, b in enumerate(known) if hmac.compare_digest(a, b)]


def unauthorized(has_key: bool) -> ApiError:
    problem = "The API key is not valid." if has_key else "An API key is required."
    return ApiError(
        401,
        "invalid_api_key",
        f"{problem} Send it as the header Authorization: Bearer KEY.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def check_key(where: str, key: str) -> str:
    """Raises ConfigError, without the key, unless a header can carry it."""
    key = key.strip()
    if not key:
        raise ConfigError(f"{where}: the key is empty")
    if not all(c in string.ascii_letters + string.digits + string.punctuation for c in key):
        raise ConfigError(f"{where}: a key has letters, digits and punctuation of ASCII, no spaces")
    return key


def read_key_file(file: Path, default: KeyLimits) -> dict[bytes, UserKey]:
    """One key a line, by digest: `KEY [name=NAME] [LIMIT=NUMBER ...]`.

    Empty lines and those that begin with # do not count. Raises ConfigError with the line, without
    the key.
    """
    where = f"--api-key-file {file}"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{where}: cannot be read: {reason}") from None
    keys: dict[bytes, UserKey] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.strip().startswith("#"):
            key = read_key_line(line.split(), default, f"{where}, line {number}")
            if key.digest in keys:
                raise ConfigError(f"{where}, line {number}: this key is in a line above; keep one")
            keys[key.digest] = key
    if not keys:
        raise ConfigError(f"{where}: has no key, and would leave the server open; write one a line")
    return keys


def read_key_line(words: list[str], default: KeyLimits, where: str) -> UserKey:
    key = digest(check_key(where, words[0]))
    name, limits = "", []
    for word in words[1:]:
        what, _, value = word.partition("=")
        if what not in ("name", *LIMIT_NAMES):  # perhaps a part of a key: not to be shown
            raise ConfigError(
                f"{where}: a key has no spaces; after it may come name=NAME and limits, which are "
                + ", ".join(f"{limit}=N" for limit in LIMIT_NAMES)
            )
        if what == "name":
            if not value.isascii() or not value.isprintable() or not value:
                raise ConfigError(f"{where}: a name has letters, digits and punctuation of ASCII")
            name = value
        else:
            limits.append(word)
    return UserKey(key, parse_limits(limits, default, where), name)
