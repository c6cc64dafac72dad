"""Values of response tokens, for the roles with a value model."""

from __future__ import annotations

from services.compute.heads import value_head
from services.roles.columns import sequence_columns
from services.roles.micro_batching import per_token
from services.roles.model_worker import ModelWorker
from services.runtime.worker import CallContext, CallResult, CallRows


def response_values(worker: ModelWorker, rows: CallRows, call: CallContext) -> CallResult:
    """Returns column "values", the value of the state in which each response token was chosen, jagged float32.
    Collective."""
    sequences = sequence_columns(rows)
    computed = worker.forward(sequences, value_head, call)
    return CallResult({"values": per_token(computed, lambda values_BR: values_BR, sequences.lengths)})
