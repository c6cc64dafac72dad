"""How gRPC waits for messages in a process."""

from __future__ import annotations

import importlib
import os

_VARIABLE = "GRPC_EXPERIMENTS"


def serve_from_one_thread() -> None:
    """Leaves one thread between the sockets of this process's server and its event loop.

    gRPC 1.80 gave Python its EventEngine, whose threads hand a message on three times before Python hears of it. The
    poller of the versions before is still in 1.85. It needs a thread of Python that waits, as that of an event loop
    does: so servers of an event loop may have it, and channels, of which the data plane has some that wait for
    nobody, stay as they are.

    Has to come before anything imports gRPC, which reads its environment then; what the user has set there counts.
    """
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = "-event_engine_listener"
    importlib.import_module("grpc")
    # Processes that are started from here choose for themselves.
    del os.environ[_VARIABLE]
