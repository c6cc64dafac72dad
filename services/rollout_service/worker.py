"""Worker of the rollout role, which generates with weights that it receives from another service."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig

from nccl_transfer.refs.weight_plans import WeightTransfer
from nccl_transfer.refs.wire_weights import slice_to_proto, transfer_from_proto
from rlhf.errors import ConfigError, InvalidRequest, Refused
from rlhf.v1 import actor_pb2, rollout_pb2, worker_pb2
from services.engines.base import HeldTensor
from services.engines.implementation import compute_dtype
from services.generation.generator import SequenceGenerator
from services.models.tokenizers import check_vocabulary
from services.roles.language_worker import LanguageWorker
from services.roles.state_history import check_state_id
from services.rollout.factory import make_rollout
from services.rollout_service.inbox import WeightInbox
from services.rollout_service.versions import Version
from services.rollout_service.wanted import WantedWeights, weight_shards, whole_weights
from services.runtime.ranks import Ranks, known_to_all
from services.runtime.worker import CallContext, CallResult, CallRows, register, require
from services.weights.receive import receive
from settings.rollout import RolloutServiceTable

_DIGITS = 1 << 20
"""Ranks compare their versions by numbers below this, whose squares they can add up exactly in float64."""


class RolloutWorker(LanguageWorker):
    """Worker of a rollout service: generates responses with a rollout engine, whose weights come from the ranks of
    another service.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.

    Raises:
        ConfigError: The model directory cannot be used, or the rollout engine cannot run the model.
    """

    role = "rollout"

    def __init__(self, table: RolloutServiceTable, ranks: Ranks) -> None:
        super().__init__(table, ranks)
        self.table: RolloutServiceTable = table
        try:
            config = AutoConfig.from_pretrained(table.model, local_files_only=True).get_text_config()
            check_vocabulary(self.tokenizer, config.vocab_size, table.model)
            wanted = self._wanted(table, ranks)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        self.longest_row = min([config.max_position_embeddings, *table.row_limits.values()])
        self.rollout = make_rollout(table, None, ranks.mesh, self.torch_device)
        self._generator = SequenceGenerator(self, self.rollout, table.model)
        self._inbox = WeightInbox(self.rollout, wanted, second_buffer=table.second_buffer)

    @property
    def state_id(self) -> str:
        served = self._inbox.versions.served
        return served.state_id if served else ""

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.engine = f"rollout {self.rollout.name}"
        answer.parameters = self._inbox.wanted.whole_numel
        answer.max_tokens = self.longest_row
        answer.limits.append("there is no optimizer state: weights come by LoadWeights, and none are saved")
        answer.limits.extend(self.rollout.limits)
        return answer

    @register("3D_ALL_MICRO_DP")
    def generate_sequences(
        self, rows: CallRows, request: actor_pb2.GenerateSequencesRequest, call: CallContext
    ) -> CallResult:
        """Implements GenerateSequences: generates one response per row with the weights that were committed last."""
        return self._generator.generate_sequences(rows, request, call, lambda: self._check_served(call))

    @register("ONE_TO_ALL", collective=False)
    def describe_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements DescribeWeights: returns the slices that this rank generates with."""
        return CallResult(fields={"slices": [slice_to_proto(each) for each in self._inbox.wanted.slices()]})

    @register("ONE_TO_ALL", collective=False)
    def load_weights(
        self, rows: CallRows, request: rollout_pb2.LoadWeightsRequest, call: CallContext
    ) -> CallResult:
        """Implements LoadWeights: receives this rank's slices of the transfer, which wait for CommitWeights."""
        require(request, "transfer")
        check_state_id(request.state_id)
        transfer = transfer_from_proto(request.transfer)
        version = Version(transfer.id, transfer.policy_version, request.state_id)
        self.rollout.check_awake()
        own = self._own_index(transfer)
        if not transfer.receivers[own].slices:
            self._keep(version)
            return CallResult()
        self._check_slices(transfer, own)
        pieces = receive(transfer, own, self.fetcher, call.deadline, check=call.check)
        return CallResult(fields={"received_bytes": self._inbox.receive(version, pieces)})

    @register("ONE_TO_ALL")
    def commit_weights(
        self, rows: CallRows, request: rollout_pb2.CommitWeightsRequest, call: CallContext
    ) -> CallResult:
        """Implements CommitWeights: generates with the weights of the transfer from now on, if all ranks have them."""
        with self.ranks.together(call.peers_deadline):
            require(request, "transfer")
            self.rollout.check_awake()
            self._inbox.versions.check_commit(request.transfer)
        self.weight_check.before_load()
        self._inbox.commit()
        self._note_version()
        return CallResult()

    @register("ONE_TO_ALL")
    def begin_session(
        self, rows: CallRows, request: worker_pb2.BeginSessionRequest, call: CallContext
    ) -> CallResult:
        """Implements BeginSession: a session begins without weights, unless it keeps those of the one before."""
        with self.ranks.together(call.peers_deadline):
            if request.directories:
                raise InvalidRequest(f"{self.role} saves no weights: it has those of another service")
        self.rollout.wake()
        if not request.keep_weights:
            self._inbox.clear()
            self._note_version()
        return CallResult(fields={"model": str(self.table.model)})

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Offload: moves the weights from a GPU to host memory."""
        self.ranks.agree(None, call.peers_deadline)
        moved_bytes = self.rollout.sleep()
        self._inbox.free_buffer()
        if not self.rollout.keeps_weights:
            self._inbox.clear()
            self._note_version()
        return CallResult(fields={"moved_bytes": moved_bytes})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Onload: moves the weights back to the GPU."""
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.rollout.wake()})

    def held(self) -> Iterator[HeldTensor]:
        return self.rollout.held() if self._inbox.versions.served else iter(())

    def _note_version(self) -> None:
        served = self._inbox.versions.served
        self.policy_version = served.policy_version if served else 0

    def _wanted(self, table: RolloutServiceTable, ranks: Ranks) -> WantedWeights:
        dtype = compute_dtype(table)
        if ranks.mesh.replica_size == 1:
            return whole_weights(table.model, dtype, self.torch_device)
        return weight_shards(table.model, ranks.mesh, ranks.rank, dtype, self.torch_device)

    def _own_index(self, transfer: WeightTransfer) -> int:
        """Returns the index of this rank among the receivers of a transfer; raises InvalidRequest if it is none of
        them."""
        endpoint = self.ranks.endpoints[self.ranks.rank]
        for index, receiver in enumerate(transfer.receivers):
            if (receiver.endpoint.address, receiver.endpoint.epoch) == (endpoint.address, endpoint.epoch):
                return index
        raise InvalidRequest(f"transfer.receivers: {endpoint.address} is none of them")

    def _keep(self, version: Version) -> None:
        """Notes that the rank has the weights of a transfer already, which therefore sends it none. Raises Refused if
        it has others."""
        if not version.state_id or self.state_id != version.state_id:
            raise Refused(
                f"the transfer sends rank {self.ranks.rank} no weights, and it does not have those of policy version "
                f"{version.policy_version}"
            )
        self._inbox.keep(version)

    def _check_slices(self, transfer: WeightTransfer, own: int) -> None:
        """Raises InvalidRequest unless a transfer has exactly the slices that this rank wants."""
        wanted, comes = set(self._inbox.wanted.slices()), set(transfer.receivers[own].slices)
        if wanted != comes:
            odd = min(wanted ^ comes, key=lambda each: each.name)
            raise InvalidRequest(
                f"transfer.receivers[{own}]: not the slices of DescribeWeights; they differ in {odd.name}"
            )

    def _check_served(self, call: CallContext) -> None:
        """Raises Refused on every rank unless all ranks generate with the weights of the same transfer. Collective."""
        served = self._inbox.versions.served
        numbers = _numbers(served) if served else [0, 0, 0]
        sums = self.ranks.total(
            [served is None, *numbers, *(number**2 for number in numbers)], call.peers_deadline
        )
        missing, totals, squares = sums[0], sums[1:4], sums[4:7]
        if missing:
            raise known_to_all(
                Refused(
                    f"{int(missing)} of {self.ranks.size} ranks have no whole weights to generate with: "
                    "sync_weights first"
                )
            )
        # Numbers are all the same where their variance is 0.
        if any(self.ranks.size * int(q) != int(t) ** 2 for t, q in zip(totals, squares, strict=True)):
            raise known_to_all(Refused("ranks have weights of different transfers: sync_weights again"))


def _numbers(version: Version) -> list[int]:
    """Returns three numbers below _DIGITS that are the same for the same version, and for another one practically
    never."""
    digest = hashlib.sha256(
        f"{version.transfer}\n{version.policy_version}\n{version.state_id}".encode()
    ).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4]) % _DIGITS for i in range(3)]
