"""Settings of generation."""

from __future__ import annotations

from pydantic import Field, model_validator

from settings.engines import LOWEST_TEMPERATURE
from settings.generation import RESPONSE_TOKENS
from settings.strict import Positive, Strict


class RolloutTable(Strict):
    """Settings of the generation of responses."""

    samples_per_prompt: Positive = 1
    """Number of responses to each prompt."""
    max_response_tokens: Positive = RESPONSE_TOKENS
    """Maximum length of a response, in tokens."""
    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE)
    """Sampling temperature: divides the logits in sampling, and in the computation of log-probabilities."""
    top_k: int = Field(default=0, ge=0)
    """Samples from the k most probable tokens. 0: from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples from the smallest set of tokens whose probabilities sum to at least top_p. With top_k or top_p, KL
    estimates are biased: they average over the truncated distribution, and not over the policy's."""
    stop: tuple[str, ...] = ()
    """Stop strings: texts that end a response beside the EOS token, for example `["\\n\\n"]`. The token that
    completes one stays in the response's ids; its text ends before the stop string."""

    segments: Positive = 1
    """Number of calls that generate a response, in as many steps one after another, each with the weights of its time.
    Each but the last adds an equal share of max_response_tokens. At most run.ahead + 1; see docs/timing.md."""

    chunks: Positive = 1
    """Number of calls that generate the rows of a step, one chunk of rows after another: rewards and forward passes of
    a chunk start while the next is generated. At most data.prompts_per_step, since the responses to a prompt stay
    together; see docs/timing.md."""

    @property
    def truncates(self) -> bool:
        """Whether top_k or top_p truncate the distribution that tokens are sampled from."""
        return bool(self.top_k) or self.top_p < 1

    @model_validator(mode="after")
    def _check(self) -> RolloutTable:
        if not all(self.stop):
            raise ValueError(f"stop: a text is empty in {list(self.stop)}")
        return self
