"""Supervised fine-tuning, the first step of RLHF (Ouyang et al. 2022, arXiv 2203.02155, section 3.5): the policy learns
demonstrated responses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from controller.advantage.columns import row_sums
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import SCHEDULE, algorithm
from controller.training.evaluation import Evaluation, Measured
from controller.training.run import Run


@algorithm(services=("actor",), columns=("response",), quickstart="pairs", reads=SCHEDULE)
def sft(run: Run) -> None:
    """Fine-tunes the policy. Needs a service actor, and rows with prompt and response; the loss is taken over
    response tokens only."""
    actor = run.actor()

    def measure(heldout: FutureBatch) -> Measured:
        """Measures each held-out response: its negative log-likelihood, in nats, and its number of tokens."""
        batch = heldout | actor.tokenize(heldout)
        batch |= actor.log_likelihood(batch)
        log_probs = run.fetch(batch, "log_probs")["log_probs"]
        return {"loss": -row_sums(log_probs), "tokens": log_probs.lengths}, [batch]

    for step in run.steps(Evaluation(measure, mean_loss)):
        batch = step.prompts | actor.tokenize(step.prompts)
        step.finish(batch, actor.update_supervised(batch))


def mean_loss(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the metrics loss, the mean negative log-likelihood per held-out response token in nats, and perplexity,
    its exponential, infinite where the loss exceeds 709; from `values` "loss", the sum over each response, and
    "tokens", its length [rows]."""
    loss = float(values["loss"].sum() / values["tokens"].sum())
    # The largest float is between exp(709) and exp(710).
    return {"loss": loss, "perplexity": math.inf if loss > 709 else math.exp(loss)}
