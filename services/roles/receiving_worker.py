"""Base class of the roles whose weights come from another service."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from nccl_transfer.refs.weight_plans import WeightSlice, WeightTransfer
from nccl_transfer.refs.wire_weights import slice_to_proto, transfer_from_proto
from rlhf.errors import DeadlineExceeded, InvalidRequest, Refused, TransferError
from rlhf.v1 import rollout_pb2
from services.roles.language_worker import LanguageWorker
from services.roles.state_history import check_state_id
from services.runtime.ranks import known_to_all
from services.runtime.worker import CallContext, CallResult, CallRows, register, require
from services.weights.receive import Piece, receive
from services.weights.versions import Version, Versions

LATE_S = 1.0
"""Seconds after its deadline at which a load of weights ends that waits for no source."""


class Inbox(ABC):
    """Receives the weights of transfers into the engine of a rank.

    Args:
        second_buffer: Whether weights are received into a second buffer while the engine keeps its own.

    Attributes:
        versions: The version that the engine has, and the one that has arrived.
        lock: Held while `versions` changes, since weights may arrive on another thread than they are committed on.
    """

    def __init__(self, *, second_buffer: bool) -> None:
        self.versions = Versions(second_buffer=second_buffer)
        self.lock = threading.RLock()
        self._is_in_buffer = False

    @abstractmethod
    def slices(self) -> Sequence[WeightSlice]:
        """Returns the slices of the checkpoint's tensors that the rank computes with."""

    @abstractmethod
    def receive(self, version: Version, pieces: Iterable[Piece]) -> int:
        """Writes the pieces of all weights, which then wait for `commit`; returns their bytes.

        Args:
            version: The version of the weights.
            pieces: Pieces of all slices that are wanted, each element once.

        Raises:
            TransferError: Pieces are missing. Whatever the error is: with a second buffer, or before the first piece,
                the engine has the weights from before; otherwise none to compute with.
        """

    @abstractmethod
    def free_buffer(self) -> None:
        """Frees the second buffer until the next transfer, unless weights arrive in it or wait for their commit."""

    @abstractmethod
    def _load_buffer(self) -> None:
        """Loads the weights in the second buffer into the engine. Collective."""

    def keep(self, version: Version) -> None:
        """Notes that the weights that the engine has are also those of another transfer."""
        with self.lock:
            self._is_in_buffer = False
            self.versions.complete(version)

    def commit(self) -> None:
        """Makes the weights that have arrived those that the engine computes with, if any have. Collective."""
        arrived = self.versions.arrived
        if arrived is not None and self._is_in_buffer:
            self.versions.clear()  # no version is served until all tensors are loaded
            self._load_buffer()
            self._is_in_buffer = False
            self.versions.complete(arrived)
        self.versions.commit()

    def _complete(self, version: Version, received: int, *, in_buffer: bool) -> int:
        """Notes that a version has arrived, and returns its bytes, `received`; raises TransferError if these are not
        all. `in_buffer`: whether it is in the second buffer."""
        expected = sum(each.nbytes for each in self.slices())
        if received != expected:
            raise TransferError(f"{received} bytes of weights have arrived, of {expected}")
        with self.lock:
            self._is_in_buffer = in_buffer
            self.versions.complete(version)
        return received

    def clear(self) -> None:
        """Forgets all weights: the engine has none to compute with."""
        with self.lock:
            self.versions.clear()


class ReceivingWorker(LanguageWorker):
    """Worker of a role that computes with weights that it receives from the ranks of another service. Implements
    DescribeWeights, LoadWeights and CommitWeights.

    Attributes:
        inbox: Receives the weights into the engine; a subclass sets it.
    """

    inbox: Inbox

    @property
    def state_id(self) -> str:
        served = self.inbox.versions.served
        return served.state_id if served else ""

    def check_awake(self) -> None:
        """Raises EngineOffloaded where the engine cannot take weights. Default: it can."""

    @register("ONE_TO_ALL", collective=False)
    def describe_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements DescribeWeights: returns the slices that this rank computes with."""
        return CallResult(fields={"slices": [slice_to_proto(each) for each in self.inbox.slices()]})

    @register("ONE_TO_ALL", collective=False)
    def load_weights(
        self, rows: CallRows, request: rollout_pb2.LoadWeightsRequest, call: CallContext
    ) -> CallResult:
        """Implements LoadWeights: receives this rank's slices of the transfer, which wait for CommitWeights."""
        require(request, "transfer")
        check_state_id(request.state_id)
        transfer = transfer_from_proto(request.transfer)
        version = Version(transfer.id, transfer.policy_version, request.state_id)
        self.check_awake()
        own = self._own_index(transfer)
        if not transfer.receivers[own].slices:
            self._keep(version)
            return CallResult()
        self._check_slices(transfer, own)
        with contextlib.closing(
            receive(transfer, own, self.fetcher, call.deadline, check=partial(_go_on, call))
        ) as pieces:
            return CallResult(fields={"received_bytes": self.inbox.receive(version, pieces)})

    @register("ONE_TO_ALL")
    def commit_weights(
        self, rows: CallRows, request: rollout_pb2.CommitWeightsRequest, call: CallContext
    ) -> CallResult:
        """Implements CommitWeights: computes with the weights of the transfer from now on, if all ranks have them."""
        # Locked, so that no other transfer begins to replace the weights that were checked.
        with self.inbox.lock:
            with self.ranks.together(call.peers_deadline):
                require(request, "transfer")
                self.check_awake()
                self.inbox.versions.check_commit(request.transfer)
            self.weight_check.before_load()
            self.inbox.commit()
        self.note_version()
        return CallResult()

    def forget_weights(self) -> None:
        """Refuses to compute until weights are received again."""
        self.inbox.clear()
        self.note_version()

    def note_version(self) -> None:
        """Sets the policy version to that of the weights that are served."""
        served = self.inbox.versions.served
        self.policy_version = served.policy_version if served else 0

    def check_served(self, call: CallContext) -> None:
        """Raises Refused on every rank unless all ranks have weights of the same transfer. Collective."""
        served = self.inbox.versions.served
        numbers = _numbers(served) if served else [-1, -1, -1]
        found = self.ranks.gather(numbers, call.peers_deadline)
        if missing := sum(of_rank[0] < 0 for of_rank in found):
            raise known_to_all(
                Refused(
                    f"{missing} of {self.ranks.size} ranks have no whole weights to compute with: "
                    "sync_weights first"
                )
            )
        if any(of_rank != found[0] for of_rank in found):
            raise known_to_all(Refused("ranks have weights of different transfers: sync_weights again"))

    def _own_index(self, transfer: WeightTransfer) -> int:
        """Returns the index of this rank among the receivers of a transfer; raises InvalidRequest if it is not a
        receiver."""
        endpoint = self.ranks.endpoints[self.ranks.rank]
        for index, receiver in enumerate(transfer.receivers):
            if (receiver.endpoint.address, receiver.endpoint.epoch) == (endpoint.address, endpoint.epoch):
                return index
        raise InvalidRequest(f"transfer.receivers: must contain this rank, {endpoint.address}")

    def _keep(self, version: Version) -> None:
        """Notes that the rank has the weights of a transfer already, which therefore sends it none. Raises Refused if
        it has others."""
        with self.inbox.lock:
            if not version.state_id or self.state_id != version.state_id:
                raise Refused(
                    f"the transfer sends rank {self.ranks.rank} no weights, and it does not have those of policy "
                    f"version {version.policy_version}"
                )
            self.inbox.keep(version)

    def _check_slices(self, transfer: WeightTransfer, own: int) -> None:
        """Raises InvalidRequest unless a transfer has exactly the slices that this rank wants."""
        wanted, comes = set(self.inbox.slices()), set(transfer.receivers[own].slices)
        if wanted != comes:
            odd = min(wanted ^ comes, key=lambda each: each.name)
            raise InvalidRequest(
                f"transfer.receivers[{own}]: not the slices of DescribeWeights; they differ in {odd.name}"
            )


def _go_on(call: CallContext) -> None:
    """Notes that a transfer gets on or waits within its deadline; raises CallCancelled or DeadlineExceeded if it should
    stop. A source that is late is named by the wait for it, a little later than by the deadline itself."""
    call.check_cancelled()
    if time.monotonic() > call.deadline + LATE_S:
        raise DeadlineExceeded(f"call {call.call.call_id} ran past its deadline")
    call.progressed_at = time.monotonic()


def _numbers(version: Version) -> list[int]:
    """Returns three numbers of 32 bits that are the same for the same version, and for another one practically
    never."""
    digest = hashlib.sha256(
        f"{version.transfer}\n{version.policy_version}\n{version.state_id}".encode()
    ).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4]) for i in range(3)]
