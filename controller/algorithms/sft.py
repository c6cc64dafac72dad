"""Supervised fine-tuning, the first step of RLHF (Ouyang et al. 2022, arXiv 2203.02155, section 3.5): the policy learns
to answer prompts as demonstrations do."""

from __future__ import annotations

import math

import numpy as np

from controller.algorithm import SCHEDULE, algorithm
from controller.dataflow import FutureBatch
from controller.run import Evaluation, Run


@algorithm(services=("actor",), columns=("response",), reads=SCHEDULE)
def sft(run: Run) -> None:
    """Actor; rows with prompt and response, of which only the responses are learned."""
    actor = run.actor()

    def evaluate(heldout: FutureBatch) -> Evaluation:
        """Mean negative log-likelihood of the held-out response tokens, in nats, and its exponential."""
        batch = heldout | actor.tokenize(heldout)
        batch |= actor.log_likelihood(batch)
        loss = -float(np.mean(run.fetch(batch, "log_probs")["log_probs"].values, dtype=np.float64))
        return {"loss": loss, "perplexity": math.exp(loss)}, [batch]

    for step in run.steps(evaluate):
        batch = step.prompts | actor.tokenize(step.prompts)
        step.finish(batch, actor.update_supervised(batch))
