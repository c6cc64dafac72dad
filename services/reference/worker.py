"""The reference: log-probabilities under weights that never change."""

from __future__ import annotations

from rlhf.config import ReferenceTable
from rlhf.errors import InvalidRequest
from rlhf.v1 import reference_pb2
from services.engines.heads import PolicyHead
from services.model_worker import ModelWorker, per_token
from services.models import load_causal_lm
from services.ranks import Ranks
from services.worker import CallContext, Result, Rows, register


class ReferenceWorker(ModelWorker):
    """The frozen policy."""

    role = "reference"

    def __init__(self, table: ReferenceTable, ranks: Ranks) -> None:
        super().__init__(table, ranks, load_causal_lm, None)

    @register("3D_PROTO")
    def compute_ref_log_prob(
        self, rows: Rows, request: reference_pb2.ComputeRefLogProbRequest, call: CallContext
    ) -> Result:
        if request.temperature <= 0:
            raise InvalidRequest(f"temperature must be above 0 (given: {request.temperature})")
        head = PolicyHead(request.temperature)
        sequences = self.sequences(rows)
        computed = self.forward(sequences, head, call)
        log_probs = per_token(computed, lambda output: output.log_probs_BR, sequences[1].lengths)
        return Result({"ref_log_probs": log_probs})
