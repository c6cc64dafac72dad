"""An algorithm of one's own, in the style of RLOO: the baseline of a response lies between the mean and the best of the
other responses to its prompt. `rlhf-controller --algo optimist` runs it where this package is installed, and
`rlhf-controller --algo rlhf_example.algorithms:optimist` where it lies on PYTHONPATH."""

import numpy as np

from controller.advantage import Advantage, sequence_scores
from controller.training.algorithm import algorithm
from controller.training.run import Run
from settings.strict import Strict


class OptimistOptions(Strict):
    optimism: float = 0.5
    """0: the baseline is the mean of the others, as in RLOO; 1: the best of them."""


@algorithm(services=("actor", "reward"), options=OptimistOptions, compares_groups=True, quickstart="groups")
def optimist(run: Run, options: OptimistOptions) -> None:
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch = reward.score(batch)
        rewards, group = run.fetch(batch, "rewards", "group").values()
        batch |= step.compute(compute_advantage, rewards, group, options.optimism)
        step.finish(batch, actor.update_actor(batch))


def compute_advantage(rewards: np.ndarray, group: np.ndarray, optimism: float) -> Advantage:
    scores, above = sequence_scores(rewards), np.zeros(len(group))
    for row, score in enumerate(scores):
        others = np.delete(scores, row)[np.delete(group, row) == group[row]]
        above[row] = score - optimism * others.max() - (1 - optimism) * others.mean()
    return Advantage(above, {"score/mean": float(scores.mean())})
