"""Shapes the rewards of a step as `[algorithm]` says, for all algorithms that learn from rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

from controller.advantage.columns import mean, sequence_scores
from controller.advantage.shaping import ScoreMoments, shape_scores
from controller.training.run import MOMENTS, Run
from controller.training.step import Step
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest


def shaped(run: Run, step: Step, columns: dict[str, Any]) -> dict[str, Any]:
    """Returns columns that `Run.fetch` has returned, with column "rewards" shaped by `algorithm.reward_normalization`
    and `algorithm.reward_clip`. A column "baselines", scores of other responses to the same prompts, is shaped by the
    same numbers. Metrics of the step are the mean of the rewards before, score/mean, and the share that was clipped,
    score/clipped.

    With normalization "running", updates the moments that the run keeps. So it must be called once in a step, by a
    function whose columns are `future_columns`.

    Raises:
        InvalidRequest: A reward is not finite, or rewards per token are to be normalized.
    """
    table, rewards = run.config.algorithm, columns["rewards"]
    if not table.shapes_rewards:
        return columns
    moments = None
    try:
        step.given_metrics = {"score/mean": mean(sequence_scores(rewards))}
        if table.reward_normalization != "none":
            moments = run.kept.get(MOMENTS, ScoreMoments())
            moments.add(rewards)
    except ValueError as error:
        raise InvalidRequest(f"rewards of step {step.number}: {error}") from error
    if table.reward_clip:
        normalized, (low, high) = shape_scores(rewards, moments), table.reward_clip
        values = normalized.values if isinstance(normalized, Jagged) else normalized
        step.given_metrics["score/clipped"] = mean(((values < low) | (values > high)).astype(np.float64))
    names = columns.keys() & {"rewards", "baselines"}
    return {**columns, **{name: shape_scores(columns[name], moments, table.reward_clip) for name in names}}
