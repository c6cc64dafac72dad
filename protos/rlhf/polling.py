"""Choice of the mechanism by which gRPC waits for messages in a process, its poller."""

from __future__ import annotations

import importlib
import os

_VARIABLE = "GRPC_EXPERIMENTS"


def serve_from_one_thread() -> None:
    """Makes gRPC servers of this process use the poller that passes messages to the event loop from one thread.

    Since gRPC 1.80 Python uses the EventEngine, whose threads pass a message on three times before Python gets it.
    The earlier poller, still present in 1.85, needs a Python thread that waits, such as the event loop's. The server
    has one and uses it; channels, some of which the data plane polls from no thread, keep the EventEngine.

    Imports gRPC, which reads the environment then, so it must be called before any other import of gRPC. The poller
    stays as it is if the user has set GRPC_EXPERIMENTS.
    """
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = "-event_engine_listener"
    importlib.import_module("grpc")
    # Child processes choose for themselves.
    del os.environ[_VARIABLE]
