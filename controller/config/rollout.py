"""Settings of generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from settings.engines import LOWEST_TEMPERATURE, REPETITION_PENALTIES
from settings.generation import RESPONSE_TOKENS
from settings.strict import Fraction, Positive, Seconds, Strict

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class EnvironmentTable(Strict):
    """Environment that answers the policy between the turns of a response; see docs/multi_turn.md."""

    factory: str = ""
    """Makes the environment of an episode, as module:object. Its keyword arguments are prompt, ground_truth and
    metadata of the row, and `options`. Runs in the controller's process. Default: none; responses have one turn."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the factory."""
    turns: Positive = 4
    """Maximum number of turns of an episode."""
    turn_tokens: int = Field(default=0, ge=0)
    """Maximum number of tokens that the policy adds in a turn; required with an environment.
    rollout.max_response_tokens limits all turns together with what the environment adds: an episode ends where that
    leaves no room for a further turn."""
    timeout_s: Seconds = 60.0
    """Timeout of a call of the environment, in seconds, after which its episode has failed."""
    concurrency: Positive = 64
    """Maximum number of calls of environments at a time."""


class EvaluationTable(Strict):
    """Sampling of the responses to held-out prompts; see docs/algorithms.md#evaluation."""

    samples: Positive = 1
    """Number of responses to each prompt. Metrics are means over all of them; with more than one, pass@k is measured
    too."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature. 0: takes the most probable token."""
    top_k: int = Field(default=0, ge=0)
    """Samples from the k most probable tokens. 0: from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples from the smallest set of tokens whose probabilities sum to at least top_p."""
    min_p: Fraction = 0.0
    """Samples from the tokens that are at least min_p times as probable as the most probable one. 0: from all."""
    repetition_penalty: float = Field(default=1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    """Divides the logits of tokens that the prompt or the response contains where they are positive, and multiplies
    them where they are negative; also with temperature 0. 1: none. For evaluations alone: see docs/rollout.md."""
    solved_at: float = 1.0
    """Lowest score of a response that solves its prompt, for pass@k."""

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0

    def with_values(self, values: Mapping[str, Any]) -> EvaluationTable:
        """Returns the table with other values of some keys, by name. Raises pydantic.ValidationError where they are
        invalid."""
        return EvaluationTable.model_validate({**self.model_dump(), **values}) if values else self

    @model_validator(mode="after")
    def _check(self) -> EvaluationTable:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature: 0, or at least {LOWEST_TEMPERATURE:g} (given: {self.temperature:g})"
            )
        if self.is_greedy and (self.samples > 1 or self.top_k or self.top_p < 1 or self.min_p):
            raise ValueError(
                "temperature: 0 takes the most probable token; samples, top_k, top_p and min_p need one above 0"
            )
        return self


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
    """Samples from the smallest set of tokens whose probabilities sum to at least top_p. With top_k, top_p or min_p,
    KL estimates are biased: they average over the truncated distribution, and not over the policy's."""
    min_p: Fraction = 0.0
    """Samples from the tokens that are at least min_p times as probable as the most probable one. 0: from all."""
    stop: tuple[str, ...] = ()
    """Stop strings: texts that end a response beside the EOS token, for example `["\\n\\n"]`. The token that
    completes one stays in the response's ids; its text ends before the stop string."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Ids of further tokens that end a response as the EOS token does, also in evaluations. They stay in the response;
    the text of special tokens is left out of its text."""

    segments: Positive = 1
    """Number of calls that generate a response, in as many steps one after another, each with the weights of its time.
    Each but the last adds an equal share of max_response_tokens. At most run.ahead + 1; see docs/timing.md."""

    chunks: Positive = 1
    """Number of calls that generate the rows of a step, one chunk of rows after another: rewards and forward passes of
    a chunk start while the next is generated. At most data.prompts_per_step, since the responses to a prompt stay
    together; see docs/timing.md."""

    environment: EnvironmentTable = EnvironmentTable()
    """Environment that answers between turns."""

    evaluation: EvaluationTable = EvaluationTable()
    """Sampling of the responses to held-out prompts."""

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p truncate the distribution that tokens are sampled from."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0

    @model_validator(mode="after")
    def _check(self) -> RolloutTable:
        if not all(self.stop):
            raise ValueError(f"stop: a text is empty in {list(self.stop)}")
        return self
