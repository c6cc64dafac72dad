"""With `algorithm.on_truncated` drop the policy is not trained on responses that were cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.simulated_run import SimulatedRanks, Simulation, simulate

from controller.algorithms import find_algorithm
from controller.config.config import load
from controller.role_groups.dataflow import FutureBatch
from controller.training.episodes import FINISHED, rows_that_ended
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError, InvalidRequest

DROP = "algorithm.on_truncated='drop'"
QUICKSTARTS = Path(__file__).parents[2] / "deploy" / "quickstart"


def lengths(run: Simulation, method: str) -> list[list[int]]:
    """Tokens of each row that a method was called with, by call."""
    return [[len(row) // 8 for row in entry.rows] for entry in run.log if entry.method == method]


@pytest.mark.parametrize(
    "settings", [(), ("run.ahead=1",), ("rollout.chunks=2",)], ids=["", "ahead", "chunks"]
)
def test_the_policy_learns_from_the_others_and_the_critic_from_all(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    run = simulate(tmp_path, "ppo", "run.steps=2", "rollout.max_response_tokens=4", DROP, *settings)
    learned, valued = lengths(run, "update_actor"), lengths(run, "update_critic")
    assert [sorted(set(rows)) for rows in valued] == [[2, 3, 4]] * 2
    assert [sorted(rows) for rows in learned] == [sorted(n for n in rows if n < 4) for rows in valued]


def test_a_response_of_most_tokens_that_has_ended_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = SimulatedRanks._generated

    def ended(ranks: SimulatedRanks, values: Any, request: Any) -> dict[str, Any]:
        return generated(ranks, values, request) | {"turn_end": ["stop"] * len(values["prompt"])}

    monkeypatch.setattr(SimulatedRanks, "_generated", ended)
    run = simulate(tmp_path, "ppo", "run.steps=2", "rollout.max_response_tokens=4", DROP)
    learned, valued = lengths(run, "update_actor"), lengths(run, "update_critic")
    assert [sorted(set(rows)) for rows in learned] == [[2, 3, 4]] * 2
    assert [sorted(rows) for rows in learned] == [sorted(rows) for rows in valued]


def test_baselines_are_those_of_all_responses(tmp_path: Path) -> None:
    every, ended = (
        simulate(tmp_path, "grpo", "run.steps=1", "rollout.max_response_tokens=4", *settings)
        for settings in ((), (DROP,))
    )
    assert ended.notes.metrics[1]["score/mean"] == every.notes.metrics[1]["score/mean"]
    assert ended.notes.metrics[1]["group/same_score"] == every.notes.metrics[1]["group/same_score"]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_all_are_trained_on_where_none_was_cut_off(tmp_path: Path, ahead: int) -> None:
    table = ("run.steps=4", "rollout.max_response_tokens=5", f"run.ahead={ahead}")
    every, ended = (simulate(tmp_path, "grpo", *table, *settings) for settings in ((), (DROP,)))
    found, expected = (  # column turn_end is one more
        {
            step: {name: value for name, value in each.items() if not name.startswith("transfer/")}
            for step, each in run.notes.metrics.items()
        }
        for run in (ended, every)
    )
    assert found == expected
    assert ended.states() == every.states()


def test_a_step_without_a_response_that_ended_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"step 1: all 8 responses were cut off, and none is left to train on"
    ):
        simulate(tmp_path, "grpo", "rollout.max_response_tokens=2", DROP)


def test_a_response_or_the_last_turn_of_an_episode_has_ended_whatever_its_length() -> None:
    batch = FutureBatch.of(turn_end=["stop", "length", "stop"])
    assert rows_that_ended(batch).tolist() == [0, 2]
    episodes = FutureBatch.of(**{FINISHED: np.array([0.0, 1.0, 1.0])})
    assert rows_that_ended(episodes).tolist() == [1, 2]


def test_responses_of_which_it_is_not_known_whether_they_ended_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no column 'turn_end'"):
        rows_that_ended(FutureBatch.of(response_ids=Jagged(np.arange(3), np.array([1, 2]))))


def test_an_algorithm_that_generates_nothing_has_no_such_key() -> None:
    found = find_algorithm("sft")
    with pytest.raises(ConfigError, match="on_truncated"):
        found.configure(load(QUICKSTARTS / f"{found.quickstart}.toml", (DROP,)))
