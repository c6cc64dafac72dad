"""The reward in Node.js: it takes the place of ours by its address alone, and behaves as a service should."""

from __future__ import annotations

import contextlib
import difflib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller import job
from controller.config.config import Config
from controller.config.data import DataTable
from integration import node_reward
from integration.harness import Cluster, Processes, free_ports, under_one_name, wait_until, write_config
from integration.test_run import numbers
from rlhf.contract import PLAIN_OPTIONS
from rlhf.v1 import reward_pb2, reward_pb2_grpc
from services.reward.functions import find_function
from settings.reward import RewardTable

pytestmark = pytest.mark.timeout(240)

TIMEOUT_S = 30.0
ROLES = ("actor", "critic", "reference")


@contextlib.contextmanager
def stub(address: str) -> Iterator[reward_pb2_grpc.RewardServiceStub]:
    with grpc.insecure_channel(address, PLAIN_OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        yield reward_pb2_grpc.RewardServiceStub(channel)


def ran(cluster: Cluster, config: Config, reward: str) -> tuple[list[dict[str, float]], list[str]]:
    """A run with the reward at an address: the metrics that its seed determines, and the lines of its config, without
    comments."""
    table = config.services["reward"].model_copy(update={"address": reward})
    config = config.model_copy(update={"services": {**config.services, "reward": table}})
    path = job.run(config, "ppo").directory
    lines = (path / "config.toml").read_text().splitlines()
    return under_one_name(numbers(path)), [line for line in lines if not line.startswith("#")]


def within_reach(data: DataTable, directory: Path) -> DataTable:
    """The task with an answer that a model that has hardly learned gives now and then."""
    paths = {}
    for name in ("train", "heldout"):
        paths[name] = directory / f"{name}.jsonl"
        rows = map(json.loads, getattr(data, name).read_text().splitlines())
        paths[name].write_text("".join(json.dumps({**row, "ground_truth": "10"}) + "\n" for row in rows))
    return data.model_copy(update=paths)


def test_a_run_with_the_node_reward_differs_by_one_address_and_in_no_number(
    cluster: Cluster, reward_node: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    selected = cluster.select(**{role: role for role in ROLES})
    reward = RewardTable(role="reward", address=f"127.0.0.1:{port}", function="exact_match")
    run = selected.run.model_copy(update={"steps": 2, "directory": tmp_path})
    services = {**selected.services, "reward": reward}
    data = within_reach(selected.data, tmp_path)
    rollout = selected.rollout.model_copy(update={"temperature": 0.3})
    config = selected.model_copy(update={"services": services, "run": run, "data": data, "rollout": rollout})
    path = write_config(config, tmp_path / "run.toml")
    processes = Processes()
    with (
        (tmp_path / "reward.log").open("w") as log,
        node_reward.serving(reward_node, "exact_match") as address,
    ):
        processes.start("python", "-m", "services", "reward", "--config", str(path), stdout=log, stderr=log)
        try:
            ours, our_config = ran(cluster, config, reward.address)
        finally:
            processes.kill()
        theirs, their_config = ran(cluster, config, address)
    assert len(ours) == 3
    assert all(0 < line["score/mean"] < 1 for line in ours[1:])
    assert theirs == ours
    changed = [line for line in difflib.ndiff(our_config, their_config) if line[0] in "-+"]
    assert changed == [f'- address = "{reward.address}"', f'+ address = "{address}"']


TEXTS = [("2", "2"), (" 2\n", "2"), ("2\x1c", "2"), ("\ufeff2", "2"), ("2", "3"), ("", "2"), ("\x85x ", "x"),
         ("2", "2 ")]  # fmt: skip


def rows(texts: Sequence[tuple[str, str]]) -> Any:
    found = [reward_pb2.TextRow(response=response, ground_truth=truth) for response, truth in texts]
    return reward_pb2.ComputeRewardRequest(text_rows=found)


def test_its_exact_match_is_that_of_python(reward_node: Path) -> None:
    expected = [find_function("exact_match")("", response, truth, {}) for response, truth in TEXTS]
    with node_reward.serving(reward_node, "exact_match") as address, stub(address) as reward:
        answer = reward.ComputeReward(rows(TEXTS), timeout=TIMEOUT_S)
    assert [score.score for score in answer.scores] == expected
    assert {score.WhichOneof("verdict") for score in answer.scores} == {"score"}


def test_its_exact_match_needs_a_ground_truth(reward_node: Path) -> None:
    with node_reward.serving(reward_node, "exact_match") as address, stub(address) as reward:
        answer = reward.ComputeReward(rows([("2", ""), ("", " ")]), timeout=TIMEOUT_S)
    assert ["no ground truth" in score.error for score in answer.scores] == [True, True]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think> b", 1),
        ("<think>a\nb</think>\nc\n", 1),
        ("b", 0),
        ("<think></think> b", 0),
        ("<think>a</think>", 0),
        ("<think>a</think> " + "\U0001f600" * 200, 1),
        ("<think>a</think> " + "b" * 225, 0.75),
        ("<think>a</think> " + "b" * 400, 0),
    ],
)
def test_format_scores_form_and_length(
    response: str, score: float, reward_node: Path, format_stub: Any
) -> None:
    answer = format_stub.ComputeReward(rows([(response, "")]), timeout=TIMEOUT_S)
    assert [found.score for found in answer.scores] == [score]


@pytest.fixture(scope="module")
def format_stub(reward_node: Path) -> Iterator[Any]:
    with node_reward.serving(reward_node, "format") as address, stub(address) as reward:
        yield reward


def own_reward(reward_node: Path, directory: Path, source: str) -> Path:
    """A copy of the example with rewards of one's own."""
    for name in ("server.js", "package.json"):
        (directory / name).write_text((reward_node / name).read_text())
    (directory / "node_modules").symlink_to(reward_node / "node_modules")
    (directory / "rewards.js").write_text(source)
    return directory


def test_a_row_that_fails_carries_its_error_and_the_others_their_scores(
    reward_node: Path, tmp_path: Path
) -> None:
    source = """
    export async function odd({ response, metadata }) {
      if (response === "throw") throw new Error(`level ${metadata.level.a[0]}`);
      return { nan: NaN, text: "1", none: undefined, hole: [1, undefined], tokens: [0.5, 2] }[response];
    }"""
    request = rows([(name, "") for name in ("throw", "nan", "text", "none", "hole", "tokens")])
    request.text_rows[0].metadata.update({"level": {"a": [3]}})
    with (
        node_reward.serving(own_reward(reward_node, tmp_path, source), "odd") as address,
        stub(address) as reward,
    ):
        scores = reward.ComputeReward(request, timeout=TIMEOUT_S).scores
    assert [score.WhichOneof("verdict") for score in scores] == [*["error"] * 5, "token_scores"]
    assert "odd failed: Error: level 3" in scores[0].error
    assert list(scores[5].token_scores.scores) == [0.5, 2.0]


SLOW = """
import { setTimeout as sleep } from "node:timers/promises";
export async function slow({ response }) {
  console.log(`scoring ${response}`);
  await sleep(300);
  return 1;
}"""


def test_a_call_past_its_deadline_ends_and_is_worked_on_no_further(reward_node: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    processes = Processes()
    try:
        process = node_reward.start(processes, own_reward(reward_node, tmp_path, SLOW), port, "slow")
        with stub(f"127.0.0.1:{port}") as reward:
            started = time.monotonic()
            with pytest.raises(grpc.RpcError) as raised:
                reward.ComputeReward(rows([(str(i), "") for i in range(100)]), timeout=0.5)
            code: Any = raised.value
            assert code.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            reward.ComputeReward(rows([("last", "")]), timeout=TIMEOUT_S)
            assert time.monotonic() - started < 100 * 0.3 / 2
        process.terminate()
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        assert out.splitlines().count("scoring 99") == 0
    finally:
        processes.kill()


def test_sigterm_lets_the_running_call_end_and_refuses_the_next(reward_node: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    processes = Processes()
    try:
        process = node_reward.start(processes, own_reward(reward_node, tmp_path, SLOW), port, "slow")
        assert process.stdout is not None
        with stub(f"127.0.0.1:{port}") as reward:
            call: Any = reward.ComputeReward.future(
                rows([("1", ""), ("2", ""), ("3", "")]), timeout=TIMEOUT_S
            )
            assert process.stdout.readline() == "scoring 1\n"
            process.terminate()
            assert [score.score for score in call.result().scores] == [1, 1, 1]
            wait_until(lambda: process.poll() is not None, TIMEOUT_S, "the end")
            with pytest.raises(grpc.RpcError):
                reward.ComputeReward(rows([("4", "")]), timeout=2.0)
        assert process.wait() == 0
    finally:
        processes.kill()
        process.communicate()


def test_an_unknown_reward_is_an_error_that_lists_the_known_ones(reward_node: Path) -> None:
    processes = Processes()
    try:
        with pytest.raises(AssertionError, match="known: exact_match, format, shared"):
            node_reward.start(processes, reward_node, free_ports(1)[0], "nonsense")
    finally:
        processes.kill()
