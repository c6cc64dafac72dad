"""ComputeRefLogProb, for whichever worker has the frozen policy."""

from __future__ import annotations

import math

from rlhf.errors import InvalidRequest
from rlhf.v1 import reference_pb2
from services.compute.heads import PolicyHead
from services.roles.model_worker import ModelWorker, per_token
from services.runtime.worker import CallContext, CallResult, CallRows


def ref_log_probs(
    worker: ModelWorker, rows: CallRows, request: reference_pb2.ComputeRefLogProbRequest, call: CallContext
) -> CallResult:
    """Log-probabilities of the response tokens under the weights that the worker's engine computes with."""
    if not 0 < request.temperature < math.inf:
        raise InvalidRequest(f"temperature must be above 0 and finite (given: {request.temperature})")
    sequences = worker.sequences(rows)
    computed = worker.forward(sequences, PolicyHead(request.temperature), call)
    log_probs = per_token(computed, lambda output: output.log_probs_BR, sequences[1].lengths)
    return CallResult({"ref_log_probs": log_probs})
