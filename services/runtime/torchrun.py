"""The rendezvous backend `rlhf` of torchrun: `torchrun --rdzv-backend rlhf --nproc-per-node 2 -m services actor ...`.

torch's own backends open a store that listens on every interface, and `c10d`, which `--standalone` uses too, unpickles
all data that clients write there. This backend opens no port for ranks on one host. For ranks on several hosts, one
store listens on the host of `--rdzv-endpoint` alone; its data is not unpickled, but TCPStore has no authentication, so
the network of that host has to be trusted.

torchrun loads `handler` by the entry point group `torchrun.handlers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from rlhf.rendezvous import TCP, VARIABLE, LocalRendezvous
from services.runtime.stores import connected_store, listening_store

BACKEND = "rlhf"
TIMEOUT_S = 600.0
"""Most seconds that hosts wait for each other."""


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns `create`, the function that makes the backend. Entry point for torchrun's registry."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Returns the rendezvous handler for torchrun's command line: `OneHost`, or `SeveralHosts` if --nnodes is above
    1.

    Raises:
        ValueError: `--rdzv-endpoint HOST:PORT` or `--rdzv-conf rank=N`, which several hosts need, is missing or
            wrong, or --nnodes is a range.
    """
    if parameters.max_nodes == 1:
        return OneHost(parameters.run_id)
    rank = parameters.get_as_int("rank")
    if rank is None or not 0 <= rank < parameters.max_nodes or parameters.min_nodes != parameters.max_nodes:
        raise ValueError(
            f"--rdzv-backend {BACKEND} over several hosts needs their number, --nnodes N, and on each host its own: "
            f"--rdzv-conf rank=0 on the first (given: --nnodes {parameters.min_nodes}:{parameters.max_nodes}, "
            f"rank={rank})"
        )
    host, _, port = parameters.endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"--rdzv-backend {BACKEND} over several hosts needs --rdzv-endpoint HOST:PORT, an address of the first "
            f"host and a free port there (given: {parameters.endpoint!r})"
        )
    return SeveralHosts(parameters.run_id, host, int(port), rank, parameters.max_nodes)


class _Backend(RendezvousHandler):
    """Base class of both rendezvous handlers, neither of which replaces ranks while a service runs."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class OneHost(_Backend):
    """Rendezvous of ranks that are all on this host. Their store is an in-memory file of the torchrun process (see
    `rlhf.rendezvous`)."""

    _local: LocalRendezvous | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Creates a new store, for each start or restart of the ranks, and passes its path to them in the
        environment. Returns what torchrun's own process needs: a store in its memory, and that it is the only
        agent."""
        if self._local is not None:
            self._local.close()
        self._local = LocalRendezvous()
        os.environ[VARIABLE] = self._local.path
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))


class SeveralHosts(_Backend):
    """Rendezvous of ranks on several hosts, in a TCPStore of the first host's torchrun.

    Args:
        run_id: torchrun's id of the job.
        host: Address of the first host, the only one that the store listens on.
        port: Port of the store.
        rank: Number of this host, from 0.
        hosts: Number of hosts.
    """

    def __init__(self, run_id: str, host: str, port: int, rank: int, hosts: int) -> None:
        super().__init__(run_id)
        self._host, self._port, self._rank, self._hosts = host.strip("[]"), port, rank, hosts
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the store (on the first host) or connects to it, and passes its address to the ranks in the
        environment. Returns the store, this host's number and the number of hosts for torchrun's own process.

        Raises:
            RendezvousClosedError: The ranks were started before; the other hosts would not take part in a restart.
        """
        if self._store is not None:
            raise RendezvousClosedError(f"--rdzv-backend {BACKEND} over several hosts cannot restart ranks")
        # Another host waits up to TIMEOUT_S for the start of the first one's store.
        open_store = listening_store if self._rank == 0 else connected_store
        self._store = open_store(self._host, self._port, TIMEOUT_S)
        host = f"[{self._host}]" if ":" in self._host else self._host
        os.environ[VARIABLE] = f"{TCP}{host}:{self._port}"
        store = PrefixStore("torchrun", self._store)
        return RendezvousInfo(store, self._rank, self._hosts, RendezvousStoreInfo(self._host, self._port))
