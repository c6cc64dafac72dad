"""A rollout engine that decodes greedily alone."""

from services.rollout.base import SamplingOptions
from services.rollout.hf import HFRollout
from settings.engines import RolloutSpec


class GreedyRollout(HFRollout):
    name = "greedy"

    def _check_sampling(self, sampling: SamplingOptions) -> None:
        if not sampling.greedy:
            raise ValueError("engine greedy decodes greedily alone")


greedy = RolloutSpec(
    implementation="contract.greedy_rollout:GreedyRollout", keys=frozenset({"rollout_tokens"})
)
