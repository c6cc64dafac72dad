"""The files and connections that a rank, a controller or a load test may have open at a time."""

from __future__ import annotations

import resource

MOST_CONNECTIONS = 4096
"""Most connections to a rank. It has one from each rank that reads its rows over grpc or relays them, and from the
controller."""
RESERVED_FILES = 512
"""Open files that connections leave to a rank: models, checkpoints, arenas of other ranks, connections of its own."""


def raise_file_limit() -> None:
    """Raises the soft limit on open files of this process, often 1,024, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Returns how many connections a rank accepts: MOST_CONNECTIONS, or fewer, so that RESERVED_FILES are left, or half
    of the files where there are few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(soft - RESERVED_FILES, soft // 2))
