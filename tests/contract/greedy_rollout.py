"""A rollout engine that decodes greedily alone."""

import numpy as np

from services.rollout.base import SamplingOptions
from services.rollout.hf import HFRollout
from settings.engines import RolloutSpec


class GreedyRollout(HFRollout):
    def _check_request(self, lengths: np.ndarray, sampling: SamplingOptions) -> None:
        super()._check_request(lengths, sampling)
        if not sampling.greedy:
            raise ValueError("engine greedy decodes greedily alone")


greedy = RolloutSpec(
    implementation="contract.greedy_rollout:GreedyRollout", keys=frozenset({"rollout_tokens"})
)
