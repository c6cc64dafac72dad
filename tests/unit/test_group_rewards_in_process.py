"""Groups on ranks that serve in this process, and on a server that speaks the proto alone: they come whole and in
order, and what keeps one from being scored is the error of its rows."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.test_data_rewards import STEP, rewards
from unit.test_requests import SharedProcess

from client.session import Session
from controller.config.config import Config
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.roles import RewardGroup
from controller.training.rewards import Failures, Reward
from integration import broken_rewards
from nccl_transfer.refs.batch import lengths_of
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.shards import Endpoint
from rlhf.errors import ConfigError, RewardFailed
from rlhf.v1 import reward_pb2, worker_pb2
from services.reward.worker import RewardWorker
from services.runtime.server import RankServer
from settings.reward import RewardTable

TIMEOUT_S = 60.0
RANKS = 3
NUMBERS = [5, 3, 5, 3, 9, 5]
"""The prompt of each row."""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service finds the functions."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def config_of(table: RewardTable) -> Config:
    data = {"train": Path("train.jsonl"), "heldout": Path("heldout.jsonl"), "prompts_per_step": 128}
    return Config.model_validate({"data": data, "services": {"reward": table.model_dump(exclude_unset=True)}})


def connected(table: RewardTable, use: Callable[[RewardGroup], Any]) -> Any:
    """Returns the result of `use` for the role group of a running reward."""
    cluster = Cluster(config_of(table), Session(timeout_s=TIMEOUT_S))
    try:
        cluster.connect()
        group = cluster.group("reward")
        assert isinstance(group, RewardGroup)
        return use(group)
    finally:
        cluster.close()


def on_ranks(function: str, use: Callable[[RewardGroup], Any], ranks: int = RANKS) -> Any:
    """Serves a function on several ranks in this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    table = RewardTable(role="reward", address=f"127.0.0.1:{port}", function=function, ranks=ranks)

    async def main() -> Any:
        endpoints: list[Endpoint] = []
        servers: list[RankServer] = []
        runs: list[asyncio.Future[Any]] = []
        for rank in reversed(range(ranks)):
            shared = SharedProcess(rank, ranks, 1, endpoints=endpoints, model_mesh=Mesh(data=ranks))
            servers.append(RankServer(RewardWorker(table, shared)))
            runs.append(asyncio.ensure_future(servers[-1].serve()))
            while len(endpoints) < len(servers):
                assert not runs[-1].done(), runs[-1]
                await asyncio.sleep(0.01)
        try:
            return await asyncio.wait_for(asyncio.to_thread(connected, table, use), TIMEOUT_S)
        finally:
            for server in servers:
                server._stop.set()
            await asyncio.wait_for(asyncio.gather(*runs), TIMEOUT_S)

    return asyncio.run(main())


def batch_of(responses: list[str], **columns: Any) -> FutureBatch:
    columns = {"prompt_number": np.array(NUMBERS), **columns}
    prompts = [f"prompt {number}" for number in columns["prompt_number"]]
    return FutureBatch.of(prompt=prompts, response=responses, **columns)


def reward_of(group: RewardGroup, policy: str = "stop") -> Reward:
    return Reward("reward", {"reward": group}, {"all": {"reward": 1.0}}, Failures(policy, 1), lambda _: STEP)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_groups_come_whole_and_in_order_to_any_number_of_ranks(ranks: int) -> None:
    def score(group: RewardGroup) -> list[float]:
        assert group.scores_groups
        return rewards(reward_of(group).score(batch_of(["a", "b", "c", "d", "e", "f"])))

    found = on_ranks("group_functions:place", score, ranks)
    assert found == [300, 200, 301, 201, 100, 302]


def test_rows_without_a_prompt_number_are_groups_of_one() -> None:
    def score(group: RewardGroup) -> list[float]:
        return rewards(reward_of(group).score_for_eval(batch_of(["a"] * 6).drop("prompt_number")))

    assert on_ranks("group_functions:place", score) == [100] * 6


def test_the_groups_of_an_algorithm_go_before_those_of_the_prompts() -> None:
    def score(group: RewardGroup) -> list[float]:
        batch = batch_of(["a"] * 6, prompt_number=np.zeros(6, np.int64), group=np.array([0, 0, 1, 1, 1, 1]))
        return rewards(reward_of(group).score(batch))

    assert on_ranks("group_functions:place", score) == [200, 201, 400, 401, 402, 403]


def test_a_function_of_rows_gets_no_groups() -> None:
    def score(group: RewardGroup) -> list[float]:
        assert not group.scores_groups
        return rewards(reward_of(group).score(batch_of(list("abcdef"), ground_truth=list("axcxex"))))

    assert on_ranks("exact_match", score) == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("policy", ["stop", "retry"])
def test_a_group_that_cannot_be_scored_is_the_error_of_its_rows(policy: str) -> None:
    def score(group: RewardGroup) -> str:
        with pytest.raises(RewardFailed) as raised:
            rewards(reward_of(group, policy).score(batch_of(["a", "b", "c", "raise", "e", "f"])))
        return str(raised.value)

    found = on_ranks("group_functions:obey", score)
    assert "2 of 6 rows could not be scored; row 1: group_functions:obey raised ValueError" in found


def test_a_group_that_cannot_be_scored_is_dropped() -> None:
    def score(group: RewardGroup) -> list[float]:
        return rewards(reward_of(group, "drop_group").score(batch_of(["a", "b", "cc", "raise", "ddd", "e"])))

    assert on_ranks("group_functions:obey", score) == [1, 2, 3, 1]


class Noting(broken_rewards.OfGroups):
    """A server of somebody else's that notes the rows of its requests."""

    description = worker_pb2.DescribeResponse(role="reward", scores_groups=True)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[tuple[int, str]]] = []

    def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        return self.description

    def ComputeReward(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
        self.seen.append([(row.group, row.response) for row in request.text_rows])
        return super().ComputeReward(request, context)


@contextlib.contextmanager
def foreign(reward: broken_rewards.Good) -> Iterator[RewardTable]:
    with broken_rewards.served(reward) as address:
        yield RewardTable(role="reward", address=address, external=True)


def test_a_server_that_describes_only_that_it_scores_groups_gets_them_numbered() -> None:
    reward = Noting()
    batch = batch_of(["a", "bb", "cc", "d", "eee", "ffff"])
    with foreign(reward) as table:
        found = connected(table, lambda group: rewards(reward_of(group).score(batch)))
        lone = connected(table, lambda group: rewards(reward_of(group).score(batch.drop("prompt_number"))))
    assert reward.seen[0] == [(5, "a"), (5, "cc"), (5, "ffff"), (3, "bb"), (3, "d"), (9, "eee")]
    assert found == [1.25, 3, 2.5, 1.5, 4, 5]
    assert [number for number, _ in reward.seen[1]] == [2**63 + i for i in range(6)]
    assert lone == [2, 3, 3, 2, 4, 5]


def test_groups_of_token_ids_are_refused() -> None:
    reward = Noting()
    reward.description = worker_pb2.DescribeResponse(
        role="reward",
        scores_groups=True,
        ranks=[worker_pb2.RankInfo()],
        input_form=worker_pb2.INPUT_FORM_TENSOR,
    )
    with (
        foreign(reward) as table,
        pytest.raises(ConfigError, match="only a reward that reads text can score"),
    ):
        connected(table, lambda group: group)


@pytest.mark.parametrize("policy", ["stop", "retry", "drop_group"])
def test_another_number_of_token_scores_than_of_tokens_is_the_error_of_the_row(policy: str) -> None:
    lengths = np.array([1, 2, 3, 1, 1, 1])
    batch = batch_of(["a", "b c", "d e", "f", "g", "h"], response_ids=Jagged(np.zeros(9, np.int64), lengths))

    def score(group: RewardGroup) -> Any:
        return lengths_of(reward_of(group, policy).score(batch).result(["rewards"])["rewards"]).tolist()

    with foreign(broken_rewards.OfTokens()) as table:
        if policy == "drop_group":
            assert connected(table, score) == [2, 1, 1]  # without the other responses to its prompt
            return
        with pytest.raises(
            RewardFailed,
            match="1 of 6 rows could not be scored; row 2: 2 token scores for a response of 3 tokens",
        ):
            connected(table, score)


def test_rows_of_text_have_the_number_of_tokens_that_were_sampled() -> None:
    class Counting(broken_rewards.Good):
        def ComputeReward(self, request: Any, context: Any) -> reward_pb2.ComputeRewardResponse:
            seen.extend(
                row.response_tokens if row.HasField("response_tokens") else None for row in request.text_rows
            )
            return super().ComputeReward(request, context)

    def column(*lengths: int) -> Jagged:
        return Jagged(np.zeros(sum(lengths), np.float32), np.array(lengths))

    seen: list[int | None] = []
    ids, sampled = column(3, 1, 2, 1, 1, 5), column(2, 1, 1, 1, 1, 4)
    with foreign(Counting()) as table:
        for columns in (
            {},
            {"response_ids": ids},
            {"response_ids": ids, "response_mask": ids, "rollout_log_probs": sampled},
        ):
            batch = batch_of(list("abcdef"), **columns)
            connected(table, lambda group, batch=batch: rewards(reward_of(group).score(batch)))
    assert seen == [*[None] * 6, 3, 1, 2, 1, 1, 5, 2, 1, 1, 1, 1, 4]
