"""How many files the server may have open, each connection being one.

Users and systemd units start with a low soft limit (mostly 1024) for the sake of programs that use
select(), and a high hard one for those that do not, as we do. At the limit new connections are closed
without an answer, before any of our code sees them.
"""

import logging
import resource

from engine.api.config import ConfigError
from server.settings_check import CANNOT_WORK

logger = logging.getLogger(__name__)

NEEDED_FILES = 40  # what a server with a few connections has open
LEAST_FILES = 4096  # fewer are worth a warning
ENOUGH_FILES = 65536  # where the hard limit is higher still


def raise_file_limit() -> None:
    """Raise the soft limit as far as is of use and allowed; processes started later inherit it.

    Raises ConfigError if that is not enough to start with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = allowed_files()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < NEEDED_FILES:
        raise ConfigError(
            f"{wanted} open files are allowed, and the server needs {NEEDED_FILES} to begin with; raise the hard "
            "limit: ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile= of docker",
            CANNOT_WORK,
        )
    if wanted < LEAST_FILES:
        logger.warning(
            "%d open files are allowed, so about as many connections; more get no answer. Raise the "
            "hard limit: LimitNOFILE= of a systemd unit, --ulimit nofile= of docker",
            wanted,
        )


def allowed_files() -> int:
    """What `raise_file_limit` makes the limit at least."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
