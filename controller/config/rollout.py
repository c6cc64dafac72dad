"""Settings of generation."""

from __future__ import annotations

from pydantic import Field, model_validator

from settings.strict import Positive, Strict


class RolloutTable(Strict):
    """How responses are generated."""

    samples_per_prompt: Positive = 1
    """Responses to each prompt."""
    max_response_tokens: Positive = 128
    """Most tokens of a response."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits in sampling, and in every log-probability computed from them."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most probable tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this. With top_k or top_p, estimates of KL are biased:
    they average over the truncated distribution, and not over the policy's."""
    stop: tuple[str, ...] = ()
    """Texts that end a response too, as `["\\n\\n"]`. The token that completes one stays; the response's text ends
    before it."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a truncated distribution."""
        return bool(self.top_k) or self.top_p < 1

    @model_validator(mode="after")
    def _check(self) -> RolloutTable:
        if not all(self.stop):
            raise ValueError(f"stop: a text is empty in {list(self.stop)}")
        return self
