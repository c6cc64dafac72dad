"""Parity of the rollout engine and the training engine: differences of their log-probabilities under the same weights.
The actor's ranks compare them and return only the figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controller.role_groups.dataflow import CallRecord
from rlhf.errors import RlhfError
from rlhf.v1 import actor_pb2


def parities(records: Iterable[CallRecord]) -> list[actor_pb2.RolloutParity]:
    """Returns the parity figures in the responses to compute_log_prob, one per rank that compared
    log-probabilities."""
    answers = [answer for record in records for answer in record.responses]
    compared = [answer for answer in answers if isinstance(answer, actor_pb2.ComputeLogProbResponse)]
    return [answer.parity for answer in compared if answer.parity.tokens]


def largest(found: Iterable[actor_pb2.RolloutParity]) -> float:
    """Returns the largest absolute difference of a token's two log-probabilities, in nats; NaN where any is NaN."""
    differences = [parity.max_abs for parity in found]
    return max(differences, key=lambda x: (x != x, x))


def parity_metrics(records: Iterable[CallRecord]) -> dict[str, float]:
    """Computes the parity metrics of a step, in nats; empty where no log-probabilities were compared.

    Returns:
        `rollout/parity_max_abs` and `rollout/parity_mean_abs`, the largest and mean |difference| of a token's two
        log-probabilities, and `rollout/kl`, the k3 estimate of KL(rollout || training) per token.
    """
    found = parities(records)
    if not found:
        return {}
    tokens = sum(parity.tokens for parity in found)
    return {
        "rollout/parity_max_abs": largest(found),
        "rollout/parity_mean_abs": sum(parity.sum_abs for parity in found) / tokens,
        "rollout/kl": sum(parity.sum_kl for parity in found) / tokens,
    }


@dataclass(frozen=True)
class DriftCheck:
    """Callable that raises an error for a call of compute_log_prob in which the two engines differ too much.

    Attributes:
        step: Number of the step, for messages.
        limit: Largest absolute difference allowed, in nats.
    """

    step: int
    limit: float

    def __call__(self, record: CallRecord) -> CallRecord:
        """Returns the record of the call unchanged.

        Raises:
            RlhfError: A difference is above `limit` or NaN, or no rank compared log-probabilities.
        """
        found = parities([record])
        if not found:
            raise RlhfError(
                f"step {self.step}: {record.service} does not say how far the log-probabilities of rollout and "
                "training are apart, so algorithm.max_log_prob_drift cannot be kept"
            )
        drift = largest(found)
        if not drift <= self.limit:
            raise RlhfError(
                f"step {self.step}: log-probabilities of {record.service}'s rollout and training are up to {drift:.3g} "
                f"apart, more than algorithm.max_log_prob_drift, {self.limit:g}{_kept(found)}"
            )
        return record


def _kept(found: Iterable[actor_pb2.RolloutParity]) -> str:
    """Returns the first text of a rank on where it has kept its rows that drift; empty where there is none."""
    return next((parity.kept for parity in found if parity.kept), "")
