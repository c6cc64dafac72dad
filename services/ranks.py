"""The ranks of one service: who they are, and the few small collectives the control plane needs.

torch.distributed is only imported where there is more than one rank or an engine asks for a mesh, so that a
reward service of one rank runs without torch.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from nccl_transfer.batch import Endpoint
from nccl_transfer.mesh import Mesh
from rlhf.errors import OutOfStep, PeerFailed, Refused

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

E = TypeVar("E", bound=BaseException)

RENDEZVOUS_TIMEOUT_S = 120.0

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Above any deadline of a call. gloo ends a collective at the shorter of this and the wait's own timeout, so it
must not be what ends one: the call's deadline is."""


def known_to_all(error: E) -> E:
    """Notes that every rank of the group has heard of an error, so that none waits for another."""
    error.known_to_all = True  # type: ignore[attr-defined]
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, was noted by `known_to_all`."""
    while error is not None:
        if getattr(error, "known_to_all", False):
            return True
        error = error.__cause__
    return False


@dataclass
class Ranks:
    """This rank and its peers.

    Attributes:
        rank: Rank within the service.
        size: Number of ranks.
        epoch: Incarnation of the service: milliseconds of Unix time at which rank 0 started, so that it grows
            at each restart. The same on every rank.
        store: torch.distributed store of the service; None where there is one rank without torch.
        endpoints: Where each rank serves, in rank order; filled in by `exchange`.
        model_mesh: As in `join`.
    """

    rank: int
    size: int
    epoch: int
    store: Store | None = None
    endpoints: list[Endpoint] = field(default_factory=list)
    model_mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """Shape of the training mesh; without model parallelism, all ranks are data ranks."""
        return self.model_mesh or Mesh(data=self.size)

    @property
    def speaks_for_rows(self) -> bool:
        """Whether this rank is the one, of those that have the same rows, that counts in sums over rows."""
        pipeline, tensor, _ = self.mesh.position(self.rank)
        return (pipeline, tensor) == (0, 0)

    @staticmethod
    def join(needs_torch: bool, model_mesh: Mesh | None = None) -> Ranks:
        """Joins the ranks that torchrun started, as its environment names them.

        Args:
            needs_torch: Make a process group also where there is only one rank.
            model_mesh: Training mesh of a model that is spread over several ranks for the same rows.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        epoch = time.time_ns() // 1_000_000
        if size == 1 and not needs_torch:
            return Ranks(rank, size, epoch, model_mesh=model_mesh)
        import torch
        import torch.distributed as dist
        from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        if "MASTER_ADDR" in os.environ:
            base, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
        else:
            base = HashStore()
        store = PrefixStore("rlhf-cluster", base)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend,
            store=PrefixStore("default", base),
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        if rank == 0:
            store.set("epoch", str(epoch))
        return Ranks(rank, size, int(store.get("epoch")), store, model_mesh=model_mesh)

    def exchange(self, own: Endpoint, details: dict[str, Any]) -> list[dict[str, Any]]:
        """Tells every rank where this one serves; returns each rank's details in rank order."""
        if self.size == 1 or self.store is None:
            self.endpoints = [own]
            return [details]
        self.store.set(f"rank/{self.rank}", json.dumps({"endpoint": asdict(own), "details": details}))
        answers = [json.loads(self.store.get(f"rank/{rank}")) for rank in range(self.size)]
        self.endpoints = [Endpoint(**answer["endpoint"]) for answer in answers]
        return [answer["details"] for answer in answers]

    def total(self, values: Sequence[float], deadline: float) -> list[float]:
        """Sums over all ranks, in float64. Every rank calls it, in the same order.

        Args:
            values: This rank's values; the same number on every rank.
            deadline: `time.monotonic()` until which the peers may take.

        Raises:
            OutOfStep: A peer did not come, or died.
        """
        if self.size == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        sums = torch.tensor(values, dtype=torch.float64)
        try:
            work = dist.all_reduce(sums, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise OutOfStep(f"a peer of rank {self.rank} did not join a collective: {error}") from error
        return sums.tolist()

    def agree(
        self, mine: Exception | None, deadline: float, call_id: str = "", session_started_us: int = 0
    ) -> None:
        """Every rank goes on, or none does: raises this rank's error, or PeerFailed where only others failed.

        A controller that died may have left its last call with some ranks only. They meet peers that are at a call
        of the next session, drop theirs, and come again.

        Args:
            call_id: The call that this rank is at.
            session_started_us: When the call's session began, Unix time in microseconds.

        Raises:
            Refused: A peer is at a call of a younger session.
            OutOfStep: A peer did not come, or came with another call of the same session.
        """
        own = [float(r == self.rank) for r in range(self.size)]
        notes = (mine is not None, zlib.crc32(call_id.encode()), session_started_us)
        while True:
            sums = self.total([x * note for note in notes for x in own], deadline)
            failed, calls, sessions = (sums[i * self.size : (i + 1) * self.size] for i in range(3))
            if len(set(calls)) == 1:
                break
            if session_started_us < max(sessions):
                raise known_to_all(Refused(f"call {call_id}: its session was superseded on another rank"))
            if min(sessions) == max(sessions):
                raise OutOfStep(f"rank {self.rank} is at call {call_id}, and not all of its peers are")
        if mine is not None:
            raise known_to_all(mine)
        if any(failed):
            culprits = ", ".join(str(rank) for rank, flag in enumerate(failed) if flag)
            raise known_to_all(PeerFailed(f"rank {self.rank} did not start, because rank {culprits} failed"))

    @contextmanager
    def together(self, deadline: float) -> Iterator[None]:
        """A block without collectives after which every rank goes on, or none does; see `agree`. So a row that
        only one rank has cannot leave the others waiting in a collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised by agree
            error = caught
        self.agree(error, deadline)

    def leave(self) -> None:
        """Ends the process group; ranks that leave together leave cleanly."""
        if self.store is None:
            return
        import torch.distributed as dist

        try:
            work = dist.barrier(async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=5))
            dist.destroy_process_group()
        except RuntimeError as error:
            logging.warning("left without the other ranks: %s", error)
