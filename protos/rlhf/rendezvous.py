"""The environment variable RLHF_RENDEZVOUS, by which a launcher tells the ranks of one service where to rendezvous.

Its value is the path of a file that only processes of this user can open, or, for ranks on several hosts,
`tcp://HOST:PORT`, where a torch store of torchrun listens on that host's interface alone, or `rank0://HOST:PORT`, where
rank 0 opens such a store. If it is not set, the ranks use the rendezvous of torchrun's own backends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "RLHF_RENDEZVOUS"
TCP = "tcp://"
RANK_0 = "rank0://"


class LocalRendezvous:
    """Rendezvous file for ranks on this host: a memfd of this process, which its child processes open through /proc.

    It opens no port and leaves no file behind. Only processes of the same user can open it, and it ends with this
    process.

    Attributes:
        path: Path of the file, the value of RLHF_RENDEZVOUS.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rlhf-rendezvous")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Closes the file. Ranks that start later cannot rendezvous."""
        os.close(self._descriptor)


def rank_environment(
    rank: int, ranks: int, rendezvous: str, here: range | None = None, host: int = 0
) -> dict[str, str]:
    """Returns the environment variables of one rank of a service, named as by torchrun.

    Args:
        rank: Rank of the process.
        ranks: Number of ranks of the service.
        rendezvous: Value of RLHF_RENDEZVOUS.
        here: Ranks on this host. Default: all.
        host: Number of this host among those of the service, from 0, the host of rank 0.
    """
    here = here or range(ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(here.index(rank)),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(host),
        VARIABLE: rendezvous,
    }


def is_on_one_host(environment: Mapping[str, str]) -> bool:
    """Returns whether all ranks of a service are on one host, given the environment variables of one of them; True
    where LOCAL_WORLD_SIZE is not set."""
    ranks = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", ranks) == ranks
