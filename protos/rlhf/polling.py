"""How gRPC waits for messages in a process."""

from __future__ import annotations

import importlib
import os
from typing import Literal

_VARIABLE = "GRPC_EXPERIMENTS"


def poll_from_one_thread(side: Literal["client", "listener"]) -> None:
    """Leaves one thread between the sockets of this process and its event loop.

    gRPC 1.80 gave Python its EventEngine, whose threads hand a message on three times before Python hears of it. The
    poller of the versions before is still in 1.85. It needs a thread of Python that waits, as that of an event loop
    does; channels without one would keep sockets of peers that have gone. So a controller, all of whose channels
    belong to its event loop, chooses it as a client, and a rank, whose data plane has channels of both kinds, for its
    server alone.

    Has to come before anything imports gRPC, which reads its environment then; what the user has set there counts.
    """
    if _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = f"-event_engine_{side}"
    importlib.import_module("grpc")
    # Processes that are started from here choose for themselves.
    del os.environ[_VARIABLE]
