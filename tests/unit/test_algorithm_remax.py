"""ReMax asks for as many greedy responses as there are prompts, however many samples each has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.algorithms.remax import remax
from controller.config.algorithm import AlgorithmTable
from controller.role_groups.dataflow import FutureBatch
from nccl_transfer.refs.batch import LocalColumn


class Asked(Exception):
    """The reward was asked, which is as far as this test goes."""


class Stub:
    """Run, actor, reference and reward; responses are the prompts with a mark."""

    def __init__(self, samples: int) -> None:
        self.config = SimpleNamespace(
            rollout=SimpleNamespace(samples_per_prompt=samples), algorithm=AlgorithmTable()
        )
        prompts = FutureBatch.of(prompt=["a", "b", "c"]).repeat(samples)
        self._step = SimpleNamespace(prompts=prompts)
        self.asked: dict[str, FutureBatch] = {}

    def actor(self) -> Stub:
        return self

    reference = reward = actor

    def keep(self, name: str, state: Any) -> Any:
        return state

    def steps(self) -> list[Any]:
        return [self._step]

    def generate_sequences(self, prompts: FutureBatch, *, greedy: bool = False) -> FutureBatch:
        return FutureBatch.of(
            response=[f"{text}{'!' if greedy else '?'}" for text in texts(prompts, "prompt")]
        )

    def compute_log_prob(self, batch: FutureBatch) -> FutureBatch:
        return FutureBatch(batch.rows, {})

    compute_ref_log_prob = compute_log_prob

    def score(self, batch: FutureBatch, **others: FutureBatch) -> FutureBatch:
        self.asked = {"rewards": batch, **others}
        raise Asked


def texts(batch: FutureBatch, name: str) -> list[str]:
    column = batch.result([name])[name]
    assert isinstance(column, LocalColumn)
    return column.texts


@pytest.mark.parametrize("samples", [1, 3])
def test_each_prompt_is_answered_greedily_once(samples: int) -> None:
    run: Any = Stub(samples)
    with pytest.raises(Asked):
        remax(run)
    assert texts(run.asked["baselines"], "prompt") == ["a", "b", "c"]
    assert texts(run.asked["baselines"], "response") == ["a!", "b!", "c!"]
    assert run.asked["rewards"].rows == 3 * samples
