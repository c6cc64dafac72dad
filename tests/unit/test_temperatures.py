"""Temperatures that no float32 logits can be divided by are refused."""

from __future__ import annotations

import pytest

from rlhf.errors import InvalidRequest
from services.roles.log_probs import policy_head
from services.rollout.base import SamplingOptions


@pytest.mark.parametrize("temperature", [-1.0, 0.0, 5e-324, 1e-7, float("inf"), float("nan")])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidRequest, match="at least 1e-06"):
        policy_head(temperature)
    with pytest.raises(ValueError, match="at least 1e-06"):
        SamplingOptions(max_new_tokens=1, temperature=temperature)


def test_a_low_temperature_is_allowed() -> None:
    policy_head(1e-6)
    SamplingOptions(max_new_tokens=1, temperature=1e-6)
