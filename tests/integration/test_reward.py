"""Rewards of every kind, as services and through the controller: functions, models, and what somebody else serves."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from client.session import Session
from controller import job
from controller.config.config import Config
from controller.role_groups import cluster as controller_cluster
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.roles import ActorGroup, RewardGroup
from controller.tracking.metrics import read_metrics
from integration.conftest import Task
from integration.harness import Cluster, Processes, free_ports, take_rows, under_one_name, wait_for_line
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id
from rlhf.errors import ConfigError, InvalidRequest, RewardFailed
from rlhf.v1 import actor_pb2, reward_pb2, reward_pb2_grpc, worker_pb2, worker_pb2_grpc
from settings.reward import RewardTable

TIMEOUT_S = 30.0
TOLERANCE = 1e-5
SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=5)


@contextlib.contextmanager
def connected(config: Config) -> Iterator[controller_cluster.Cluster]:
    """The controller's own view of the services."""
    cluster = controller_cluster.Cluster(config, Session(timeout_s=TIMEOUT_S))
    try:
        cluster.connect()
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def reward_group(config: Config) -> Iterator[RewardGroup]:
    with connected(config) as cluster:
        group = cluster.group("reward")
        assert isinstance(group, RewardGroup)
        yield group


def text_rows(metadata: Sequence[dict[str, Any]]) -> FutureBatch:
    count = len(metadata)
    return FutureBatch.of(
        prompt=[f"{i}+1=" for i in range(count)],
        response=[str(i + 1) for i in range(count)],
        ground_truth=[str(i + 1) for i in range(count)],
        metadata=[json.dumps(row) for row in metadata],
    )


def rewards(batch: FutureBatch) -> Any:
    column: Any = batch.result(["rewards"], TIMEOUT_S)["rewards"]
    return column.values


def score_alone(model: Any, ids: Sequence[int]) -> float:
    """A plain forward of one sequence."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)])).logits[0, 0].item()


def test_a_function_is_served_without_torch(cluster: Cluster) -> None:
    for name in ("reward", "verdicts"):
        with cluster.service(name) as service:
            (rank,) = service.description.ranks
        maps = Path(f"/proc/{rank.pid}/maps").read_text()
        assert "libpython" in maps or "python" in maps
        assert "libtorch" not in maps


def test_a_users_function_scores_rows_in_order(cluster: Cluster) -> None:
    with reward_group(cluster.select(reward="verdicts")) as group:
        found = rewards(group.compute_reward(text_rows([{"verdict": i / 4} for i in range(9)])))
    assert found.tolist() == [i / 4 for i in range(9)]


def test_a_lone_client_is_answered_without_a_call_header(cluster: Cluster) -> None:
    request = reward_pb2.ComputeRewardRequest(
        text_rows=[reward_pb2.TextRow(prompt="1+1=", response="2a", ground_truth="2")]
    )
    with cluster.service("reward") as service:
        stub = reward_pb2_grpc.RewardServiceStub(service.channel())
        answer = stub.ComputeReward(request, timeout=TIMEOUT_S)
    assert [score.score for score in answer.scores] == [2 / 9 / 2]


def test_scores_of_tokens_come_as_a_jagged_column(cluster: Cluster) -> None:
    with reward_group(cluster.select(reward="verdicts")) as group:
        batch = text_rows([{"verdict": [0.5, -1.0]}, {"verdict": []}, {"verdict": [2.0]}])
        found = rewards(group.compute_reward(batch))
    assert isinstance(found, Jagged)
    assert (found.values.tolist(), found.lengths.tolist()) == ([0.5, -1.0, 2.0], [2, 0, 1])


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"failure": "no ground truth"}, "toy_rewards:by_metadata raised ValueError: no ground truth"),
        ({"verdict": None}, "not a number"),
        ({"verdict": "1.0"}, "text"),
        ({"verdict": [1.0, None]}, "not a number"),
        ({"number": "nan"}, "not finite"),
        ({}, "KeyError"),
    ],
)
def test_a_row_that_fails_is_an_error_that_names_it_and_never_a_zero(
    cluster: Cluster, row: dict[str, Any], cause: str
) -> None:
    with reward_group(cluster.select(reward="verdicts")) as group:
        scored = group.compute_reward(text_rows([{"verdict": 1.0}, row, {"verdict": 1.0}]))
        with pytest.raises(RewardFailed, match="1 of 3 rows could not be scored; row 1") as raised:
            rewards(scored)
    assert cause in str(raised.value)


def test_on_the_wire_only_the_failed_row_carries_an_error(cluster: Cluster) -> None:
    rows = [reward_pb2.TextRow() for _ in range(3)]
    for i, row in enumerate(rows):
        row.metadata.update({"failure": "broken"} if i == 1 else {"verdict": float(i)})
    with cluster.service("verdicts") as service:
        (answer,) = service.call("compute_reward", text_rows=rows)
    kinds = [score.WhichOneof("verdict") for score in answer.scores]
    assert kinds == ["score", "error", "score"]
    assert "broken" in answer.scores[1].error


def test_describe_states_the_range_of_scores_where_it_is_known(cluster: Cluster) -> None:
    with cluster.service("reward") as service:
        bounds = service.description.score_range
    with cluster.service("verdicts") as service:
        assert not service.description.HasField("score_range")
    assert (bounds.lowest, bounds.highest) == (0.0, 1.0)


def test_rows_with_one_score_beside_rows_with_many_are_refused(cluster: Cluster) -> None:
    with reward_group(cluster.select(reward="verdicts")) as group:
        scored = group.compute_reward(text_rows([{"verdict": 1.0}, {"verdict": [1.0]}]))
        with pytest.raises(RewardFailed, match="a score per token"):
            rewards(scored)


def test_a_model_scores_text_with_its_own_tokenizer(cluster: Cluster, task: Task) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(task.own_scorer).eval()
    tokenizer = AutoTokenizer.from_pretrained(task.own_scorer)
    texts = [("1+1=", "2"), ("12+34=", "46 or so"), ("9", ""), ("", "7")]
    expected = [score_alone(model, tokenizer(prompt + response)["input_ids"]) for prompt, response in texts]
    prompts, responses = map(list, zip(*texts, strict=True))
    with reward_group(cluster.select(reward="text_scorer")) as group:
        found = rewards(group.compute_reward(FutureBatch.of(prompt=prompts, response=responses)))
    assert len({round(score, 3) for score in expected}) == len(expected)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_model_scores_the_tokens_it_fetches_from_the_actor(cluster: Cluster, task: Task) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(task.scorer).eval()
    with connected(cluster.select(actor="actor", reward="tensor_scorer")) as services:
        actor, reward = services.group("actor"), services.group("reward")
        assert isinstance(actor, ActorGroup)
        assert isinstance(reward, RewardGroup)
        prompts = FutureBatch.of(prompt=["12+3=", "1", "99+99="] * 3)
        batch = prompts | actor.generate_sequences(prompts, SAMPLING)
        found = rewards(reward.compute_reward(batch))
        fetcher = Fetcher(host_id(), create_readers())
        values = fetcher.fetch(
            batch.result(["prompt_ids", "response_ids"], TIMEOUT_S), time.monotonic() + TIMEOUT_S
        ).values
        ids = [take_rows(values[name]) for name in ("prompt_ids", "response_ids")]  # type: ignore[arg-type]
        expected = [score_alone(model, [*prompt, *response]) for prompt, response in zip(*ids, strict=True)]
        fetcher.close()
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_reward_of_more_ranks_than_rows_scores_them_all(cluster: Cluster) -> None:
    """The rank without rows is sent an empty batch, by reference as by text."""
    with cluster.service("actor") as actor, cluster.service("tensor_scorer") as scorer:
        made = actor.rows("generate_sequences", prompts_of(2), sampling=SAMPLING)
        scorer.introduce(actor)
        empty = made.select(["prompt_ids", "response_ids"]).take(np.arange(0))
        (answer,) = scorer.call("compute_reward", empty)
        assert list(answer.scores) == []
    with cluster.service("verdicts") as verdicts:
        (answer,) = verdicts.call("compute_reward")
        assert list(answer.scores) == []


def prompts_of(count: int) -> Batch:
    return Batch.of(prompt=[f"{i}+1=" for i in range(count)])


def test_tokens_are_refused_by_a_reward_that_reads_text(cluster: Cluster) -> None:
    with cluster.service("actor") as actor, cluster.service("text_scorer") as scorer:
        made = actor.rows("generate_sequences", prompts_of(2), sampling=SAMPLING)
        scorer.introduce(actor)
        with pytest.raises(InvalidRequest, match="reads text: send text_rows"):
            scorer.call("compute_reward", made.select(["prompt_ids", "response_ids"]))


def test_text_is_refused_by_a_reward_that_reads_tokens(cluster: Cluster) -> None:
    with (
        cluster.service("tensor_scorer") as scorer,
        pytest.raises(InvalidRequest, match="reads token ids: send a batch"),
    ):
        scorer.call("compute_reward", text_rows=[reward_pb2.TextRow(response="1")])


def test_token_ids_that_the_model_does_not_have_are_refused_and_the_service_goes_on(cluster: Cluster) -> None:
    lengths = np.array([2, 1])
    good, bad = (Jagged(np.array([3, last, 4]), lengths) for last in (5, 1 << 20))
    with cluster.service("tensor_scorer") as scorer:
        with pytest.raises(InvalidRequest, match="token ids reach from 3 to 1048576; the model has "):
            scorer.call("compute_reward", Batch.of(prompt_ids=good, response_ids=bad))
        (answer,) = scorer.call("compute_reward", Batch.of(prompt_ids=good, response_ids=good))
    assert [score.WhichOneof("verdict") for score in answer.scores] == ["score", "score"]


def test_a_critic_with_another_vocabulary_is_refused_and_both_are_named(cluster: Cluster) -> None:
    with (
        pytest.raises(ConfigError) as raised,
        connected(cluster.select(actor="lone_actor", critic="cut_critic")),
    ):
        pass
    for part in ("services.critic.model", "services.actor", *hashes(cluster, "lone_actor", "cut_critic")):
        assert part in str(raised.value)


def hashes(cluster: Cluster, *names: str) -> list[str]:
    """The beginning of each vocabulary hash, as messages show it."""
    found = []
    for name in names:
        with cluster.service(name) as service:
            found.append(service.description.vocabulary_hash[:12])
    return found


@pytest.mark.parametrize("reward", ["reward", "text_scorer", "tensor_scorer"])
def test_a_reward_that_reads_text_may_have_any_vocabulary_and_others_that_of_the_actor(
    cluster: Cluster, reward: str
) -> None:
    with connected(cluster.select(actor="lone_actor", reward=reward)) as services:
        assert services.group("reward").description.role == "reward"


def test_a_reward_that_reads_tokens_of_another_vocabulary_is_refused(cluster: Cluster) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(ReadsOtherTokens(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        config = cluster.select(actor="lone_actor", reward="tensor_scorer")
        table = config.services["reward"].model_copy(update={"address": f"127.0.0.1:{port}"})
        config = config.model_copy(update={"services": {**config.services, "reward": table}})
        with (
            pytest.raises(ConfigError, match=r"services\.reward\.model: .*services\.actor"),
            connected(config),
        ):
            pass
    finally:
        server.stop(None).wait()


class ReadsOtherTokens(worker_pb2_grpc.WorkerServiceServicer):
    """Says that it is a reward of another vocabulary."""

    def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            role="reward",
            ranks=[worker_pb2.RankInfo()],
            mesh=worker_pb2.MeshShape(pipeline=1, tensor=1, data=1),
            input_form=worker_pb2.INPUT_FORM_TENSOR,
            vocabulary_hash="another",
        )


def test_a_server_of_reward_service_alone_works_in_a_run(cluster: Cluster, tmp_path: Path) -> None:
    """It has no WorkerService: no Describe, no epoch, no Release; and it gives the numbers of ours."""
    (port,) = free_ports(1)
    processes = Processes()
    foreign = processes.start("python", str(Path(__file__).with_name("foreign_reward.py")), str(port))
    try:
        wait_for_line(foreign, "ready\n")
        table = RewardTable(role="reward", address=f"127.0.0.1:{port}")
        found = [_numbers(cluster, reward, tmp_path) for reward in (table, None)]
    finally:
        processes.kill()
        foreign.communicate()
    assert under_one_name(found[0]) == under_one_name(found[1])


def _numbers(cluster: Cluster, reward: RewardTable | None, directory: Path) -> list[dict[str, float]]:
    """The metrics of a short run, with this reward or our own."""
    config = cluster.select(actor="actor", critic="critic", reference="reference", reward="reward")
    tables = config.services | ({"reward": reward} if reward else {})
    run = config.run.model_copy(update={"steps": 1, "directory": directory})
    config = config.model_copy(update={"services": tables, "run": run})
    path = job.run(config, "ppo").directory
    return [
        {key: value for key, value in line.items() if not key.startswith(("time/", "mem/", "rank/"))}
        for line in read_metrics(path)
    ]
