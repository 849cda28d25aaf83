"""Process matters that Sluice's processes share: how an engine is started, dying with the parent, memory."""

import ctypes
import os
import signal

import msgspec

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class LaunchConfig(msgspec.Struct):
    """Contents of the --config file of an engine process."""

    engine: dict[str, object]
    run_dir: str
    epoch: int
    parent_pid: int


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the process `parent_pid`, which started it, ends.

    Call it first thing in a child: a parent killed with SIGKILL cannot tell its children, and an
    orphan would keep the GPU's memory. The kernel watches the parent's *thread* that did the fork,
    so parents start children from a thread that lives as long as they do (their main thread).
    `parent_pid` 0 means: started by hand, watch nobody. Raises OSError if the kernel refuses.
    """
    if parent_pid == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != parent_pid:  # the parent ended before prctl, so no signal will come
        os.kill(os.getpid(), signal.SIGKILL)


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
