"""Choice of the poller by which gRPC waits for messages in a process."""

from __future__ import annotations

import importlib
import os

_VARIABLE = "GRPC_EXPERIMENTS"


def serve_from_one_thread() -> None:
    """Selects the poller that needs one thread between the sockets of this process's server and its event loop.

    gRPC 1.80 gave Python its EventEngine, whose threads pass a message on three times before Python gets it. The poller
    of earlier versions is still in 1.85. It needs a Python thread that waits, as an event loop's does: so the server
    uses it, and channels, some of which the data plane polls from no thread, keep the EventEngine.

    Call it before gRPC is imported, which reads the environment then. A value that the user has set there stays.
    """
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = "-event_engine_listener"
    importlib.import_module("grpc")
    # Child processes choose for themselves.
    del os.environ[_VARIABLE]
