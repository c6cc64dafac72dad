"""Worker of the values role, which computes values with weights that it receives from a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from rlhf.v1 import critic_pb2, worker_pb2
from services.engines.sharded import ShardedEngine
from services.models.families import load_value_model
from services.roles.model_worker import ModelWorker
from services.roles.receiving_worker import ReceivingWorker
from services.roles.values import response_values
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register
from services.values.inbox import EngineInbox
from settings.values import ValuesTable


class ValuesWorker(ReceivingWorker, ModelWorker):
    """Worker of a values service: computes values with a training engine that is not trained, whose weights come from
    the ranks of a critic.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.

    Raises:
        ConfigError: The model directory cannot be used, or the engine cannot take weights of another service.
    """

    role = "values"

    def __init__(self, table: ValuesTable, ranks: Ranks) -> None:
        super().__init__(table, ranks, load_value_model, None)
        if not isinstance(self.engine, ShardedEngine):
            raise ConfigError(f"engine: {table.engine} cannot take weights of another service")
        self.inbox = EngineInbox(self.engine)

    def check_awake(self) -> None:
        self.engine.check_onloaded()

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = super().describe()
        answer.limits.append("there is no optimizer state: weights come by LoadWeights")
        return answer

    @register("3D_PROTO")
    def compute_values(
        self, rows: CallRows, request: critic_pb2.ComputeValuesRequest, call: CallContext
    ) -> CallResult:
        """Implements ComputeValues: returns column "values", with the weights that were committed last."""
        self.check_served(call)
        return response_values(self, rows, call)

    @register("ONE_TO_ALL")
    def begin_session(
        self, rows: CallRows, request: worker_pb2.BeginSessionRequest, call: CallContext
    ) -> CallResult:
        """Implements BeginSession: a session begins without weights, unless it keeps those of the one before."""
        begun = super().begin_session(rows, request, call)
        if not request.keep_weights:
            self.forget_weights()
        return begun

    def load(self, directory: Path) -> None:
        """Loads a checkpoint, as the base class does; the service computes again after the next transfer."""
        super().load(directory)
        self.forget_weights()

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        """Implements Offload: moves the weights from a GPU to host memory."""
        moved = super().offload(rows, request, call)
        self.inbox.free_buffer()
        return moved
