"""Worker of the reference role, which computes log-probabilities with weights that are never trained."""

from __future__ import annotations

from rlhf.v1 import reference_pb2
from services.models.families import load_causal_lm
from services.roles.frozen_worker import FrozenModelWorker
from services.roles.log_probs import ref_log_probs
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, register
from settings.reference import ReferenceTable


class ReferenceWorker(FrozenModelWorker):
    """Worker of the reference, a causal language model that is not trained: computes log-probabilities of responses.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.
    """

    role = "reference"

    def __init__(self, table: ReferenceTable, ranks: Ranks) -> None:
        super().__init__(table, ranks, load_causal_lm)

    @register("3D_PROTO")
    def compute_ref_log_prob(
        self, rows: CallRows, request: reference_pb2.ComputeRefLogProbRequest, call: CallContext
    ) -> CallResult:
        """Implements ComputeRefLogProb: returns column "ref_log_probs" of the response tokens."""
        return ref_log_probs(self, rows, request, call)
