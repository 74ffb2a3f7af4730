"""This machine's cores, shared by every queue on it: never more runs at once than it bears.

A core is a name in the kernel's table of abstract sockets: one table for all users, shells and settings of a machine, and a
name is free again when its process ends, however it ends. It bounds how much runs at once; it pins nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from pathlib import Path

POOL_ENV = "MOLT_CORES"
"""Environment variable that names another pool of cores than the machine's, for queues that shall not wait for others."""


def take_cores(count: int) -> ExitStack | None:
    """Hold ``count`` of the cores that this process may use (at most all), None where too few are free."""
    own = sorted(os.sched_getaffinity(0))
    held = ExitStack()
    taken = 0
    for number in own:
        core = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        try:
            core.bind(f"\0{_pool()}/{number}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            core.close()
            continue
        taken += 1
        if taken == min(count, len(own)):
            return held
    held.close()
    return None


def taken_by_others(than: int) -> int:
    """How many of the cores are held, but by the process ``than``. Looking disturbs nobody."""
    wanted = {f"@{_pool()}/{number}" for number in os.sched_getaffinity(0)}
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    held = {f"socket:[{row[6]}]" for row in rows if row[7:] and row[7] in wanted}
    return len(held - _files_of(than))


def _files_of(process: int) -> set[str]:
    """What the file descriptors of a process lead to; nothing where it is gone, or another user's."""
    found = set()
    try:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            found.add(os.readlink(descriptor))
    except (FileNotFoundError, PermissionError):
        pass  # it ends just now: what it held is free
    return found


def _pool() -> str:
    return os.environ.get(POOL_ENV, "molt-cores")
