"""GRPO whose reward has a bonus for new responses: an algorithm that calls role `novelty`."""

from pydantic import Field

from controller.advantage import sequence_scores
from controller.advantage.groups import group_advantage
from controller.training.algorithm import POLICY, REWARD, algorithm
from controller.training.run import Run
from rlhf_example.novelty.group import NoveltyGroup
from settings.strict import Strict


class CuriousOptions(Strict):
    """Options of curious."""

    bonus: float = Field(default=0.1, ge=0)
    """Weight of the novelty, from 0 to 1, of a response beside its reward."""


@algorithm(
    services=("actor", "novelty", "reward"),
    options=CuriousOptions,
    compares_groups=True,
    quickstart="groups",
    reads=(*POLICY, *REWARD),
)
def curious(run: Run, options: CuriousOptions) -> None:
    actor, reward, novelty = run.actor(), run.reward(), run.group("novelty", NoveltyGroup)
    for step in run.steps():
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= novelty.compute_novelty(batch) | actor.compute_log_prob(batch)
        batch = reward.score(batch)
        columns = run.fetch(batch, "rewards", "novelty", "group")
        scores = sequence_scores(columns["rewards"]) + options.bonus * columns["novelty"]
        batch |= step.compute(group_advantage, scores, run.lengths(batch), columns["group"])
        step.finish(batch, actor.update_actor(batch))
