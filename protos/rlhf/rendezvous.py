"""The environment variable by which a launcher tells the ranks of one service where to meet.

Its value is either the path of a file that only processes of this user can open, or `tcp://HOST:PORT`, where a torch
store listens on that host's interface alone. Without it, ranks meet as torchrun's other backends arrange.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "RLHF_RENDEZVOUS"
TCP = "tcp://"


class LocalRendezvous:
    """Rendezvous for ranks on this host: a memfd of this process, which its children open through /proc.

    No port is open and no name has to be cleaned up; only processes of the same user can open it, and it ends with this
    process.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rlhf-rendezvous")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Frees the memory; running ranks cannot meet any more."""
        os.close(self._descriptor)


def rank_environment(rank: int, ranks: int, rendezvous: str) -> dict[str, str]:
    """The environment variables, by torchrun's names, of one rank of a service whose ranks are all on this host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        VARIABLE: rendezvous,
    }


def is_on_one_host(environment: Mapping[str, str]) -> bool:
    """Whether all ranks of the service are on this host, by the environment of one of them."""
    ranks = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", ranks) == ranks
