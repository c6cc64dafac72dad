"""GRPO over episodes of several turns: a tool answers each response, and the policy goes on from the whole text so
far. `rlhf-controller --algo turns` runs it where this package is installed.

Each turn is a row of its own: its prompt is the whole text before it, its response what the policy has added. So no row
has tokens that the policy did not sample, no loss mask is needed, and log-probabilities are those of the tokens that
were generated, however the text is tokenized in the next turn. All turns of an episode get its advantage.
"""

from collections.abc import Callable

import numpy as np
from pydantic import Field

from controller.advantage import Advantage, sequence_scores
from controller.advantage.groups import group_metrics, standardized
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import POLICY, algorithm
from controller.training.columns import texts_of
from controller.training.roles import Actor
from controller.training.run import Run
from rlhf.plugins import load_object
from settings.strict import Strict

Tool = Callable[[str, str, str, str], str | None]
"""Maps (prompt, response, ground truth, metadata) to the text that follows the response; None ends the episode."""


class TurnsOptions(Strict):
    tool: str = f"{__name__}:try_again"
    """The tool, as module:function. It runs in the controller's process."""
    turns: int = Field(default=2, ge=1)
    """Maximum number of turns of an episode."""


@algorithm(
    services=("actor", "reward"),
    options=TurnsOptions,
    compares_groups=True,
    quickstart="groups",
    reads=POLICY,
)
def turns(run: Run, options: TurnsOptions) -> None:
    actor, reward, tool = run.actor(), run.reward(), load_object(options.tool, Callable)  # type: ignore[type-abstract]
    for step in run.steps():
        batch, episode = play(actor, step.prompts | step.groups, tool, options.turns)
        last = last_rows(episode)
        scored = reward.score(batch.take(last))
        scores, group = run.fetch(scored, "rewards", "group").values()
        batch |= actor.compute_log_prob(batch)
        batch |= step.compute(episode_advantage, scores, group, episode)
        step.finish(batch | FutureBatch.of(episode=episode), actor.update_actor(batch), scored)


def play(actor: Actor, rows: FutureBatch, tool: Tool, most: int) -> tuple[FutureBatch, np.ndarray]:
    """Generates the turns of an episode for each row. Returns a row for each turn, first the first turns of all
    episodes, and the number of each row's episode [turns] int64."""
    given, episode = list(rows.columns), np.arange(rows.rows)
    made, numbers = [], []
    for turn in range(most):
        made.append(rows | actor.generate_sequences(rows, return_text=True))
        numbers.append(episode)
        if turn + 1 == most:
            break
        names = ("prompt", "response", "ground_truth", "metadata")
        texts = list(zip(*(texts_of(made[-1], name) for name in names), strict=True))
        answers = [tool(*row) for row in texts]
        going = np.flatnonzero([answer is not None for answer in answers])
        if not len(going):
            break
        prompts = [f"{texts[row][0]}{texts[row][1]}{answers[row]}" for row in going]
        rows = rows.take(going).select(given) | FutureBatch.of(prompt=prompts)
        episode = episode[going]
    return FutureBatch.concat(made), np.concatenate(numbers)


def last_rows(episode: np.ndarray) -> np.ndarray:
    """Returns the index of the last row of each episode [episodes] int64, in the order of their numbers."""
    _, from_the_end = np.unique(episode[::-1], return_index=True)
    return len(episode) - 1 - from_the_end


def episode_advantage(scores: np.ndarray, group: np.ndarray, episode: np.ndarray) -> Advantage:
    """Computes one advantage per turn: the score of its episode, standardized within the group of the prompt."""
    per_episode = sequence_scores(scores)
    mean = float(per_episode.mean())
    metrics = {
        "score/mean": mean,
        "reward/mean": mean,
        "episode/turns": len(episode) / len(per_episode),
        **group_metrics(per_episode, group),
    }
    return Advantage(standardized(per_episode, group)[episode], metrics)


def try_again(prompt: str, response: str, ground_truth: str, metadata: str) -> str | None:
    """Asks the last question again where the response to it is wrong."""
    return None if response.strip() == ground_truth else f";{prompt.rpartition(';')[2]}"
