"""A reward model that is sharded over two ranks, as a service and through the controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from controller.config.config import Config
from controller.role_groups.dataflow import FutureBatch
from integration.conftest import Task
from integration.harness import Processes, free_ports, write_config
from integration.test_reward import TIMEOUT_S, TOLERANCE, reward_group, rewards, score_alone
from rlhf.errors import RewardFailed
from settings.reward import RewardTable

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


ENGINES: dict[str, dict[str, Any]] = {"fsdp": {}, "zero, stage 3": {"engine": "zero", "zero": {"stage": 3}}}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param != "fsdp":
        pytest.importorskip("deepspeed")
    return request.param


@pytest.fixture(scope="module")
def sharded(
    engine: str, config: Config, task: Task, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Config]:
    table = RewardTable.model_validate(
        {"role": "reward", "address": f"127.0.0.1:{free_ports(1)[0]}", "ranks": 2, "kind": "model", "sharded": True,
         "model": task.own_scorer, "dtype": "float32", **ENGINES[engine]}
    )  # fmt: skip
    alone = config.model_copy(update={"services": {"reward": table}})
    directory, processes = tmp_path_factory.mktemp("sharded"), Processes()
    try:
        up = processes.serve(write_config(alone, directory / "sharded.toml"), directory / "logs")
        yield alone
        up.terminate()
        assert up.wait(TIMEOUT_S) == 0
    finally:
        processes.kill()


def texts(*responses: str) -> FutureBatch:
    prompts = [f"{i}+1=" for i in range(len(responses))]
    return FutureBatch.of(prompt=prompts, response=list(responses), ground_truth=["1"] * len(responses))


@pytest.mark.parametrize("count", [7, 1])
def test_two_ranks_score_together_as_one_forward_pass_does(
    sharded: Config, task: Task, engine: str, count: int
) -> None:
    """Of one row, the second rank takes part without any."""
    tokenizer = AutoTokenizer.from_pretrained(task.own_scorer)
    model = AutoModelForSequenceClassification.from_pretrained(task.own_scorer).eval()
    batch = texts(*(str(10**i) for i in range(count)))
    read = batch.result(["prompt", "response"], TIMEOUT_S)
    pairs = zip(read["prompt"].texts, read["response"].texts, strict=True)  # type: ignore[union-attr]
    expected = [score_alone(model, tokenizer(prompt + response)["input_ids"]) for prompt, response in pairs]
    with reward_group(sharded) as group:
        assert group.description.engine == f"model, sharded by {engine}"
        found = rewards(group.compute_reward(batch))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_row_that_cannot_be_read_is_an_error_of_this_row_and_no_rank_waits_for_another(
    sharded: Config,
) -> None:
    with reward_group(sharded) as group:
        with pytest.raises(RewardFailed, match="row has 204 tokens; the reward model reads from 1 to 64"):
            rewards(group.compute_reward(texts("1", "2", "3", "4" * 200)))
        assert len(rewards(group.compute_reward(texts("1", "2")))) == 2
