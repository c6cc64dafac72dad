"""Worker of the rollout role, which generates with weights that it receives from another service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, worker_pb2
from services.engines.base import HeldTensor
from services.engines.implementation import compute_dtype
from services.generation.generator import SequenceGenerator
from services.models.configs import load_config
from services.models.positions import longest_row
from services.models.tokenizers import check_vocabulary
from services.roles.receiving_worker import ReceivingWorker
from services.rollout.base import RolloutSetup
from services.rollout.factory import make_rollout
from services.rollout_service.inbox import WeightInbox
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register
from services.weights.wanted import WantedWeights, weight_shards, whole_weights
from settings.rollout import RolloutServiceTable


class RolloutWorker(ReceivingWorker):
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
            config = load_config(table.model).get_text_config()
            self.vocab_size = config.vocab_size
            check_vocabulary(self.tokenizer, self.vocab_size, table.model)
            self._wanted = self._wanted_by(table, ranks)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        self.longest_row = longest_row(config, *table.row_limits.values())
        self.rollout = make_rollout(table, RolloutSetup(None, ranks.mesh, self.torch_device))
        self._generator = SequenceGenerator(self, self.rollout, table.model)
        self.inbox = WeightInbox(self.rollout, self._wanted, second_buffer=table.second_buffer)
        if table.second_buffer:
            self.beside = frozenset({"describe_weights", "load_weights"})

    def check_awake(self) -> None:
        self.rollout.check_awake()

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.engine = f"rollout {self.table.rollout_engine}"
        answer.parameters = self._wanted.whole_numel
        answer.max_tokens = self.longest_row
        answer.limits.append("there is no optimizer state: weights come by LoadWeights, and none are saved")
        answer.limits.extend(self.rollout.limits)
        answer.lacks_eos = self._generator.lacks_eos
        return answer

    @register("3D_ALL_MICRO_DP")
    def generate_sequences(
        self, rows: CallRows, request: actor_pb2.GenerateSequencesRequest, call: CallContext
    ) -> CallResult:
        """Implements GenerateSequences: generates one response per row with the weights that were committed last."""
        return self._generator.generate_sequences(rows, request, call, lambda: self.check_served(call))

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
            self.forget_weights()
        return CallResult(fields={"model": str(self.table.model)})

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Offload: moves the weights from a GPU to host memory."""
        self.ranks.agree(None, call.peers_deadline)
        moved_bytes = self.rollout.sleep()
        self.inbox.free_buffer()
        if not self.rollout.keeps_weights:
            self.forget_weights()
        return CallResult(fields={"moved_bytes": moved_bytes})

    @register("ONE_TO_ALL")
    def onload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Onload: moves the weights back to the GPU."""
        self.ranks.agree(None, call.peers_deadline)
        return CallResult(fields={"moved_bytes": self.rollout.wake()})

    def held(self) -> Iterator[HeldTensor]:
        return self.rollout.held() if self.inbox.versions.served else iter(())

    def _wanted_by(self, table: RolloutServiceTable, ranks: Ranks) -> WantedWeights:
        dtype = compute_dtype(table)
        if ranks.mesh.replica_size == 1:
            return whole_weights(table.model, dtype, self.torch_device)
        return weight_shards(table.model, ranks.mesh, ranks.rank, dtype, self.torch_device)
