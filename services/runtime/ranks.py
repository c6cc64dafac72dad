"""The ranks of one service, and the few small collectives by which they agree on the course of a call.

torch.distributed is imported only for several ranks, or for a worker that computes with torch, so that a reward
service of one rank runs without torch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.wire_ranks import endpoint_from_proto, endpoint_to_proto
from rlhf.errors import OutOfStep, PeerFailed
from rlhf.rendezvous import RANK_0, TCP, VARIABLE
from rlhf.v1 import common_pb2

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from services.runtime.rounds import Round

E = TypeVar("E", bound=BaseException)

ALONE_S = 5.0
"""Seconds that a rank that failed in the middle of a call waits for its peers to end the call too. They may be in a
collective that needs this rank, and then only its exit frees them."""

RENDEZVOUS_TIMEOUT_S = 120.0
"""Seconds that a rank waits at start for all others."""

KEPT_COLLECTIVES = 100
"""Number of the last collectives of a rank that torch's flight recorder keeps, each with its stack, unless the
environment has TORCH_FR_BUFFER_SIZE. torch's default is 2,000, which take megabytes and fill slowly."""


class FailedAlone(RuntimeError):
    """Raised where this rank failed while its peers wait for it in a collective. The ranks can no longer agree on the
    call's failure, so this rank has to exit."""


def known_to_all(error: E) -> E:
    """Marks an error as one that is raised on every rank, so that this rank need not tell the others of it (see
    `Ranks.agree`); returns the error."""
    error.known_to_all = True  # type: ignore[attr-defined]
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Returns whether an error or one of its causes was marked by `known_to_all`; False for None."""
    while error is not None:
        if getattr(error, "known_to_all", False):
            return True
        error = error.__cause__
    return False


@dataclass
class Ranks:
    """The ranks of this service, as this process sees them.

    Attributes:
        rank: Rank of this process within the service, from 0.
        size: Number of ranks of the service.
        epoch: Incarnation of the service: milliseconds of Unix time at which rank 0 started, so that it grows
            at each restart. The same on every rank.
        store: torch.distributed store of the service; None for a single rank without torch.
        endpoints: Endpoint of each rank, in rank order; empty until `exchange` fills it in.
        model_mesh: Mesh of a model that is sharded by pipeline or tensor parallelism; None if it is not.
        group: Process group of all ranks, used by `Round` alone; None for one rank.
        round: The last round that this rank began; None before the first.
        rounds: Number of rounds that this rank has begun.
    """

    rank: int
    size: int
    epoch: int
    store: Store | None = None
    endpoints: list[Endpoint] = field(default_factory=list)
    model_mesh: Mesh | None = None
    group: ProcessGroup | None = None
    round: Round | None = None
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.store is not None and self.size > 1:
            from services.runtime.rounds import make_group  # imports torch

            self.group = make_group(self.size)

    @property
    def mesh(self) -> Mesh:
        """Training mesh of the service; without model parallelism, a mesh of data-parallel ranks alone."""
        return self.model_mesh or Mesh(data=self.size)

    @property
    def is_row_owner(self) -> bool:
        """Whether this rank adds its rows to sums over all ranks. True on one rank of those that have the same
        rows."""
        pipeline, tensor, _ = self.mesh.position(self.rank)
        return (pipeline, tensor) == (0, 0)

    @staticmethod
    def join(
        needs_torch: bool,
        model_mesh: Mesh | None = None,
        table: str = "{}",
        timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    ) -> Ranks:
        """Joins the other ranks of this service, at the rendezvous that environment variables name
        (`rlhf.rendezvous`), and initializes torch's default process group. Collective.

        Args:
            needs_torch: Whether a single rank also gets a process group. Several ranks always get one.
            model_mesh: Training mesh of a model that is sharded by pipeline or tensor parallelism. Default: none.
            table: The service's table as JSON, which ranks that rlhf-deploy has started on several hosts compare.
            timeout_s: How long these ranks wait for each other, in seconds.

        Returns:
            The ranks, without endpoints; `exchange` fills these in.

        Raises:
            OutOfStep: A rank did not join within RENDEZVOUS_TIMEOUT_S, or `timeout_s` on several hosts.
            ConfigError: Ranks on several hosts do not fit together; see `stores.store_of_hosts`.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        epoch = time.time_ns() // 1_000_000
        if size == 1 and not needs_torch:
            return Ranks(rank, size, epoch, model_mesh=model_mesh)
        import torch
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        from services.runtime.process_groups import COLLECTIVE_TIMEOUT  # imports torch
        from services.runtime.stores import store_of_hosts  # imports torch

        place = os.environ.get(VARIABLE, "")
        if place.startswith(RANK_0):
            base = store_of_hosts(place.removeprefix(RANK_0), rank, size, table, timeout_s)
        else:
            base = _open_store(rank, size)
        store = PrefixStore("rlhf-cluster", base)
        epoch = _meet(store, rank, size, epoch)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT_COLLECTIVES))
        on_gpus = needs_torch and torch.cuda.is_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=PrefixStore("default", base),
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        return Ranks(rank, size, epoch, store, model_mesh=model_mesh)

    def exchange(self, own: Endpoint, details: dict[str, Any]) -> list[dict[str, Any]]:
        """All-gathers the endpoint and the details of every rank, and sets `endpoints`. Collective.

        Args:
            own: Endpoint of this rank.
            details: Further values of this rank, which JSON can represent.

        Returns:
            The details of all ranks, in rank order.

        Raises:
            OutOfStep: A peer did not come within RENDEZVOUS_TIMEOUT_S.
        """
        if self.size == 1 or self.store is None:
            self.endpoints = [own]
            return [details]
        self.store.set(f"rank/{self.rank}", json.dumps({"endpoint": _encode(own), "details": details}))
        _wait_for_all(self.store, "rank", self.rank, self.size)
        answers = [json.loads(self.store.get(f"rank/{rank}")) for rank in range(self.size)]
        self.endpoints = [_decode(answer["endpoint"]) for answer in answers]
        return [answer["details"] for answer in answers]

    def begin_round(self, note: Sequence[float]) -> Round:
        """Begins an all-gather of one note per rank and returns it without waiting; see `Round`. Every rank must
        begin the same rounds in the same order."""
        from services.runtime.rounds import Round  # imports torch

        assert self.group is not None, "there are other ranks"
        self.rounds += 1
        self.round = Round(self.group, note)
        return self.round

    def gather(self, values: Sequence[float], until: float) -> list[list[float]]:
        """Returns the values of each rank, in rank order, in float64. Collective.

        Args:
            values: This rank's values, at most 7; the same number on every rank.
            until: How long to wait for the other ranks, as a time of `time.monotonic()` in seconds.

        Raises:
            PeerFailed: A peer has failed since the last agreement.
            OutOfStep: A peer did not come by `until`, or died.
        """
        if self.size == 1:
            return [list(values)]
        notes = self.begin_round([0, *values]).wait(until)
        self._check_well(notes)
        return [list(note[1 : 1 + len(values)]) for note in notes]

    def total(self, values: Sequence[float], until: float) -> list[float]:
        """Returns the sum over all ranks of each value, in float64. Collective. Arguments and errors as of `gather`."""
        return [sum(of_ranks) for of_ranks in zip(*self.gather(values, until), strict=True)]

    def agree(self, mine: Exception | None, until: float) -> None:
        """Returns if no rank has failed, and raises on every rank if any has. Collective.

        A rank that fails skips what is left of its work and calls this immediately; its peers learn of the failure in
        their own next agreement (`agree`, `together` or `total`).

        Args:
            mine: Error of this rank, which is raised here; None if it has not failed.
            until: How long to wait for the other ranks, as a time of `time.monotonic()` in seconds.

        Raises:
            PeerFailed: This rank has not failed, but another one has.
            OutOfStep: A peer did not come by `until`, or died.
        """
        if self.size == 1:
            if mine is not None:
                raise mine
            return
        notes = self.begin_round([mine is not None]).wait(until)
        if mine is not None:
            raise known_to_all(mine)
        self._check_well(notes)

    def _check_well(self, notes: Sequence[Sequence[float]]) -> None:
        """Raises PeerFailed if the first number of a rank's note is not 0, which says that the rank has failed."""
        failed = [str(rank) for rank, note in enumerate(notes) if note[0]]
        if failed:
            raise known_to_all(
                PeerFailed(f"rank {self.rank} stopped, because rank {', '.join(failed)} failed")
            )

    @contextmanager
    def together(self, until: float) -> Iterator[None]:
        """Context manager of a block without collectives that fails on every rank if it fails on one: after the block
        the ranks `agree`, with that method's errors. So an error in the rows of one rank does not leave the others
        waiting in a collective. FailedAlone and OutOfStep are raised at once, without agreement. Collective.

        Args:
            until: How long to wait for the other ranks, as a time of `time.monotonic()` in seconds.
        """
        error: Exception | None = None
        try:
            yield
        except (FailedAlone, OutOfStep):
            raise
        except Exception as caught:  # noqa: BLE001 - raised by agree
            error = caught
        self.agree(error, until)

    def leave(self) -> None:
        """Destroys the default process group once all ranks have called this. If they do not within 5 s, logs a warning
        and keeps the group. Does nothing where there is no process group, or while a round is under way, since its
        peers may never come."""
        if self.store is None or (self.round is not None and not self.round.is_over):
            return  # a group cannot be ended while a rank waits in it for peers that will not come
        import torch
        import torch.distributed as dist

        try:
            # Not a barrier, which runs on NCCL where there is a GPU, on whatever device is current.
            work = dist.all_reduce(torch.zeros(1), async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=5))
            dist.destroy_process_group()
        except RuntimeError as error:
            logging.warning("left without the other ranks: %s", error)


def _encode(endpoint: Endpoint) -> str:
    return endpoint_to_proto(endpoint).SerializeToString().hex()


def _decode(endpoint: str) -> Endpoint:
    return endpoint_from_proto(common_pb2.Endpoint.FromString(bytes.fromhex(endpoint)))


def _meet(store: Store, rank: int, size: int, epoch: int) -> int:
    """Waits at the store until every rank has joined; returns rank 0's epoch. Done before the process group exists,
    whose own wait is as long as its collectives may take.

    Raises:
        OutOfStep: A rank did not join within RENDEZVOUS_TIMEOUT_S.
    """
    store.set(f"epoch/{rank}", str(epoch))
    _wait_for_all(store, "epoch", rank, size)
    return int(store.get("epoch/0"))


def _wait_for_all(store: Store, key: str, rank: int, size: int) -> None:
    """Waits until every rank has set its own entry, KEY/RANK, in the store.

    Raises:
        OutOfStep: Some rank did not within RENDEZVOUS_TIMEOUT_S; the message names all such ranks.
    """
    try:
        store.wait([f"{key}/{peer}" for peer in range(size)], timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    except RuntimeError:
        missing = [peer for peer in range(size) if not store.check([f"{key}/{peer}"])]
        raise OutOfStep(
            f"rank {rank} waited {RENDEZVOUS_TIMEOUT_S:g} s for its peers; missing: {missing}"
        ) from None


def _open_store(rank: int, size: int) -> Store:
    """Opens the torch.distributed store of a service, at the rendezvous that environment variables name; a store in
    this process's memory if `size` is 1."""
    from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.rendezvous import rendezvous

    from services.runtime.stores import connected_store  # imports torch

    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    place = os.environ.get(VARIABLE, "")
    if size == 1:
        store = HashStore()
    elif place.startswith(TCP):
        host, _, port = place.removeprefix(TCP).rpartition(":")
        store = connected_store(host.strip("[]"), int(port), RENDEZVOUS_TIMEOUT_S)
    elif place:
        store = FileStore(place, size)
    else:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
    store.set_timeout(timeout)
    return store
