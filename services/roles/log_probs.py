"""Computes log-probabilities of response tokens, for the actor and the reference."""

from __future__ import annotations

import math

from rlhf.errors import InvalidRequest
from rlhf.v1 import reference_pb2
from services.compute.heads import PolicyHead
from services.roles.columns import sequence_columns
from services.roles.micro_batching import per_token
from services.roles.model_worker import ModelWorker
from services.runtime.worker import CallContext, CallResult, CallRows
from settings.engines import LOWEST_TEMPERATURE


def policy_head(temperature: float, *, entropy_gradient: bool = False) -> PolicyHead:
    """Returns the head that computes log-probabilities and entropies of response tokens.

    Args:
        temperature: Divisor of the logits, from the request.
        entropy_gradient: Whether gradients flow through the entropy.

    Raises:
        InvalidRequest: The temperature is below LOWEST_TEMPERATURE or not finite.
    """
    if not LOWEST_TEMPERATURE <= temperature < math.inf:
        raise InvalidRequest(
            f"temperature must be finite and at least {LOWEST_TEMPERATURE:g} (given: {temperature})"
        )
    return PolicyHead(temperature, entropy_gradient=entropy_gradient)


def ref_log_probs(
    worker: ModelWorker, rows: CallRows, request: reference_pb2.ComputeRefLogProbRequest, call: CallContext
) -> CallResult:
    """Implements ComputeRefLogProb: returns column "ref_log_probs", the log-probabilities of the response tokens
    under the current weights of the worker's engine, in nats. Collective."""
    head = policy_head(request.temperature)
    sequences = sequence_columns(rows)
    computed = worker.forward(sequences, head, call)
    log_probs = per_token(computed, lambda output: output.log_probs_BR, sequences.lengths)
    return CallResult({"ref_log_probs": log_probs})
