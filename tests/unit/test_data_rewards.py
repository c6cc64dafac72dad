"""Rewards made of several, by weight and by the rows' source, and rows that could not be scored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from client.session import StepContext
from controller.config.config import Config
from controller.role_groups.chunks import ChunkedColumn
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import Promise, all_of, then
from controller.training.rewards import Failures, Reward
from controller.training.scoring import rows_to_keep
from nccl_transfer.refs.batch import LocalColumn, concat_columns
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import RewardFailed

Score = Callable[[str], "float | list[float] | None"]


class Group:
    """A reward service whose scores are a function of the response; None is a failure."""

    scores_groups = False

    def __init__(self, score: Score) -> None:
        self.score = score
        self.asked: list[list[str]] = []

    def try_reward(self, batch: FutureBatch) -> FutureBatch:
        texts = column_of(batch, "response").texts
        self.asked.append(texts)
        scores = [self.score(text) for text in texts]
        errors = [
            "" if score is not None else f"no score for {text}"
            for score, text in zip(scores, texts, strict=True)
        ]
        if any(isinstance(score, list) for score in scores):
            rows = [np.asarray(score or [], np.float64) for score in scores]
            lengths = np.asarray([len(row) for row in rows], np.int64)
            return FutureBatch.of(rewards=Jagged(np.concatenate(rows), lengths), reward_errors=errors)
        values = np.asarray([np.nan if score is None else score for score in scores], np.float64)
        return FutureBatch.of(rewards=values, reward_errors=errors)

    def compute_reward(self, batch: FutureBatch) -> FutureBatch:
        tried = self.try_reward(batch)

        def scored(columns: Any) -> Any:
            failed = [cause for cause in columns[1].texts if cause]
            if failed:
                raise RewardFailed(failed[0])
            return columns[0]

        rewards = then(all_of([tried["rewards"], tried["reward_errors"]]), scored)
        return FutureBatch(batch.rows, {"rewards": rewards})


STEP = StepContext(1)


def column_of(batch: FutureBatch, name: str) -> Any:
    column = batch.result([name])[name]
    assert isinstance(column, LocalColumn)
    return column


def reward_of(
    groups: dict[str, Group],
    recipes: dict[str, dict[str, float]],
    policy: str = "stop",
    trained: tuple[str, ...] = (),
) -> Reward:
    made: Any = groups
    return Reward("reward", made, recipes, Failures(policy, retries=2), lambda _: STEP, trained)


def rewards(batch: FutureBatch, name: str = "rewards") -> list[float]:
    return column_of(batch, name).values.tolist()


LENGTH, DIGITS = (lambda text: float(len(text))), (lambda text: float(sum(c.isdigit() for c in text)))
ROWS = ["ab", "c1", "def22", "4"]


def test_a_reward_is_the_weighted_sum_of_its_services() -> None:
    reward = reward_of({"a": Group(LENGTH), "b": Group(DIGITS)}, {"all": {"a": 1.0, "b": -0.5}})
    assert rewards(reward.compute_reward(FutureBatch.of(response=ROWS))) == [2, 1.5, 4, 0.5]


@pytest.mark.parametrize("policy", ["stop", "retry", "drop_group"])
def test_a_reward_of_several_services_keeps_what_each_of_them_says(policy: str) -> None:
    reward = reward_of(
        {"a": Group(LENGTH), "b": Group(DIGITS)}, {"x": {"a": 1.0, "b": -0.5}, "y": {"a": 2.0}}, policy
    )
    batch = FutureBatch.of(response=ROWS, source=["x", "y", "x", "y"], group=np.arange(4))
    scored = reward.score(batch, baselines=batch)
    for name in ("rewards", "baselines"):
        assert rewards(scored, name) == [2, 4, 4, 2]
        assert rewards(scored, f"{name}/a") == [2, 2, 5, 1]
        np.testing.assert_equal(rewards(scored, f"{name}/b"), [0, np.nan, 2, np.nan])


@pytest.mark.parametrize("policy", ["stop", "retry", "drop_group"])
def test_a_step_of_one_source_has_the_columns_of_every_service_of_the_mixture(policy: str) -> None:
    groups = {"math": Group(DIGITS), "length": Group(LENGTH), "exact": Group(LENGTH)}
    reward = reward_of(groups, {"x": {"math": 1.0, "length": 0.5}, "y": {"exact": 1.0}}, policy)
    scored = reward.score(FutureBatch.of(response=ROWS, source=["y"] * 4))
    assert rewards(scored) == rewards(scored, "rewards/exact") == [2, 2, 5, 1]
    for service in ("math", "length"):
        np.testing.assert_equal(rewards(scored, f"rewards/{service}"), [np.nan] * 4)


@pytest.mark.parametrize("policy", ["stop", "retry", "drop_group"])
def test_the_reward_of_a_source_that_is_only_evaluated_on_has_no_part_in_a_step(policy: str) -> None:
    groups = {"math": Group(DIGITS), "length": Group(LENGTH), "bench": Group(LENGTH)}
    recipes = {"x": {"math": 1.0, "length": 0.5}, "contest": {"bench": 2.0}}
    reward = reward_of(groups, recipes, policy, trained=("x",))
    scored = reward.score(FutureBatch.of(response=ROWS, source=["x"] * 4))
    assert rewards(scored) == [1, 2, 4.5, 1.5]
    assert {name for name in scored.columns if "/" in name} == {"rewards/math", "rewards/length"}
    mixed = reward.score_for_eval(FutureBatch.of(response=ROWS, source=["x", "x", "contest", "contest"]))
    assert rewards(mixed) == [1, 2, 10, 2]


def test_it_does_not_make_a_step_wait_for_all_chunks_of_its_rows() -> None:
    def chunked() -> tuple[ChunkedColumn, list[Promise[Any]]]:
        chunks: list[Promise[Any]] = [Promise(), Promise()]
        return ChunkedColumn(then(all_of(chunks), concat_columns), chunks, [1, 3]), chunks

    (one, first), (other, second) = chunked(), chunked()
    columns = {"math": one, "length": other}
    groups: Any = {
        name: SimpleNamespace(
            compute_reward=lambda batch, made=made: FutureBatch(batch.rows, {"rewards": made})
        )
        for name, made in columns.items()
    }
    recipes = {"x": {"math": 1.0, "length": 0.5}, "contest": {"bench": 2.0}}
    reward = reward_of(groups, recipes, trained=("x",))
    made = reward.compute_reward(FutureBatch.of(response=ROWS, source=["x"] * 4))["rewards"]
    assert isinstance(made, ChunkedColumn)
    for chunks in (first, second):
        chunks[0].set_result(LocalColumn(np.array([2.0])))
    assert made.chunks[0].result(timeout=5).values.tolist() == [3.0]  # type: ignore[union-attr]
    assert not made.done()
    for chunks in (first, second):
        chunks[1].set_result(LocalColumn(np.array([4.0, 6.0, 8.0])))
    assert made.result(timeout=5).values.tolist() == [3, 6, 9, 12]  # type: ignore[union-attr]


def test_rows_go_to_the_reward_of_their_source_and_come_back_in_order() -> None:
    first, second = Group(LENGTH), Group(lambda text: -1.0)
    reward = reward_of({"a": first, "b": second}, {"x": {"a": 2.0}, "y": {"b": 1.0}})
    batch = FutureBatch.of(response=ROWS, source=["y", "x", "y", "x"])
    assert rewards(reward.compute_reward(batch)) == [-1, 4, -1, 2]
    assert (first.asked, second.asked) == ([["c1", "4"]], [["ab", "def22"]])


def test_scores_of_tokens_add_up_token_by_token() -> None:
    per_token = Group(lambda text: [float(ord(c)) for c in text])
    reward = reward_of(
        {"a": per_token, "b": Group(lambda text: [1.0] * len(text))}, {"all": {"a": 1, "b": 10}}
    )
    column = column_of(reward.compute_reward(FutureBatch.of(response=["ab", "", "c"])), "rewards").values
    assert (column.values.tolist(), column.lengths.tolist()) == ([107, 108, 109], [2, 0, 1])


def test_scores_of_tokens_and_of_responses_do_not_mix() -> None:
    reward = reward_of({"a": Group(LENGTH), "b": Group(lambda text: [1.0, 2.0])}, {"all": {"a": 1, "b": 1}})
    with pytest.raises(RewardFailed, match=r"services\.b gives a response a score for each of 2 tokens"):
        rewards(reward.compute_reward(FutureBatch.of(response=["ab"])))


def failing(*texts: str) -> Score:
    return lambda text: None if text in texts else float(len(text))


def test_a_row_without_a_score_stops_the_run() -> None:
    reward = reward_of({"a": Group(failing("c1"))}, {"all": {"a": 1.0}})
    with pytest.raises(RewardFailed, match="no score for c1"):
        rewards(reward.score(FutureBatch.of(response=ROWS)))


def test_a_row_is_sent_again_and_only_it() -> None:
    answers = iter([None, None, 7.0])
    group = Group(lambda text: next(answers) if text == "c1" else float(len(text)))
    reward = reward_of({"a": group}, {"all": {"a": 1.0}}, "retry")
    assert rewards(reward.score(FutureBatch.of(response=ROWS))) == [2, 7, 5, 1]
    assert group.asked == [ROWS, ["c1"], ["c1"]]


def test_a_row_whose_environment_has_failed_is_not_sent_again() -> None:
    group = Group(failing("c1"))
    batch = FutureBatch.of(
        response=ROWS, environment_error=["" if text != "c1" else "broken" for text in ROWS]
    )
    with pytest.raises(RewardFailed, match="1 of 4 rows could not be scored"):
        reward_of({"a": group}, {"all": {"a": 1.0}}, "retry").score(batch)
    assert len(group.asked) == 1


def test_a_row_that_fails_again_and_again_stops_the_run() -> None:
    group = Group(failing("c1"))
    with pytest.raises(RewardFailed, match=r"1 of 4 rows could not be scored; row 1: no score for c1"):
        reward_of({"a": group}, {"all": {"a": 1.0}}, "retry").score(FutureBatch.of(response=ROWS))
    assert len(group.asked) == 3


@pytest.mark.parametrize("column", ["group", "prompt_number"])
def test_the_group_of_a_row_without_a_score_is_dropped(column: str) -> None:
    """Algorithms without groups, as ppo and remax, have the number of the prompt alone."""
    reward = reward_of({"a": Group(failing("c1"))}, {"all": {"a": 1.0}}, "drop_group")
    numbers = {column: np.array([3, 3, 5, 5])}
    scored = reward.score(FutureBatch.of(response=ROWS, **numbers))
    assert (rewards(scored), column_of(scored, "response").texts) == ([5, 1], ["def22", "4"])


@pytest.mark.parametrize("policy", ["drop_group", "retry"])
def test_a_row_of_token_scores_that_one_service_fails_is_the_only_one(policy: str) -> None:
    groups = {
        "a": Group(lambda text: [1.0] * len(text)),
        "b": Group(lambda text: None if text == "c1" else [2.0] * len(text)),
    }
    reward = reward_of(groups, {"all": {"a": 1.0, "b": 1.0}}, policy)
    batch = FutureBatch.of(response=ROWS)
    if policy == "retry":
        with pytest.raises(RewardFailed, match=r"1 of 4 rows could not be scored; row 1: no score for c1"):
            reward.score(batch)
        return
    values = column_of(reward.score(batch), "rewards").values
    assert (values.values.tolist(), values.lengths.tolist()) == ([3.0] * 8, [2, 5, 1])


def test_column_group_names_the_rows_that_are_dropped_before_the_number_of_the_prompt() -> None:
    reward = reward_of({"a": Group(failing("c1"))}, {"all": {"a": 1.0}}, "drop_group")
    batch = FutureBatch.of(response=ROWS, prompt_number=np.zeros(4, np.int64), group=np.array([3, 3, 5, 5]))
    assert rewards(reward.score(batch)) == [5, 1]


def test_without_groups_only_the_row_is_dropped() -> None:
    reward = reward_of({"a": Group(failing("c1"))}, {"all": {"a": 1.0}}, "drop_group")
    assert rewards(reward.score(FutureBatch.of(response=ROWS))) == [2, 5, 1]


def test_rows_that_belong_together_are_dropped_together() -> None:
    reward = reward_of({"a": Group(failing("c1", "z"))}, {"all": {"a": 1.0}}, "drop_group")
    others = FutureBatch.of(response=["long", "b", "longer", "z"])
    scored = reward.score(FutureBatch.of(response=ROWS), baselines=others)
    assert (rewards(scored), rewards(scored, "baselines")) == ([2, 5], [4, 6])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("stop", ([2, 2, 5, 1], [4, 4, 6, 6])), ("drop_group", ([2, 2, 5, 1], [4, 4, 6, 6]))],
)
def test_one_row_may_belong_to_several_and_is_scored_once(
    policy: str, expected: tuple[list[float], list[float]]
) -> None:
    group = Group(failing())
    scored = reward_of({"a": group}, {"all": {"a": 1.0}}, policy).score(
        FutureBatch.of(response=ROWS), baselines=FutureBatch.of(response=["long", "longer"])
    )
    assert (rewards(scored), rewards(scored, "baselines")) == expected
    assert group.asked == [ROWS, ["long", "longer"]]


def test_where_one_row_of_several_has_no_score_they_are_all_dropped() -> None:
    reward = reward_of({"a": Group(failing("long"))}, {"all": {"a": 1.0}}, "drop_group")
    others = FutureBatch.of(response=["long", "longer"])
    scored = reward.score(FutureBatch.of(response=ROWS), baselines=others)
    assert (rewards(scored), rewards(scored, "baselines")) == ([5, 1], [6, 6])


def test_a_batch_without_any_score_is_an_error() -> None:
    reward = reward_of({"a": Group(failing(*ROWS))}, {"all": {"a": 1.0}}, "drop_group")
    with pytest.raises(RewardFailed, match="4 of 4 rows could not be scored"):
        reward.score(FutureBatch.of(response=ROWS))


def test_a_failure_is_never_a_zero_in_an_evaluation() -> None:
    reward = reward_of({"a": Group(failing("c1"))}, {"all": {"a": 1.0}}, "drop_group")
    assert np.isnan(rewards(reward.score_for_eval(FutureBatch.of(response=ROWS)))).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_rows_to_keep_by_hand() -> None:
    group = np.array([0, 1, 0, 2, 1])
    assert rows_to_keep(np.array([1]), group).tolist() == [0, 2, 3]
    assert rows_to_keep(np.array([], np.int64), group).tolist() == [0, 1, 2, 3, 4]


def test_sources_have_rewards_of_their_own_and_costs_in_common() -> None:
    source = {"path": "a.jsonl", "heldout": "b.jsonl"}
    config = Config.model_validate(
        {
            "data": {
                "sources": [
                    {**source, "name": "x", "reward": "math"},
                    {**source, "name": "y", "reward": "mix"},
                ]
            },
            "rewards": {"mix": {"math": 1.0, "form": 0.5}},
            "services": {
                name: {"role": "reward", "address": f"127.0.0.1:{port}"}
                for port, name in enumerate(("math", "form", "cost"), 7000)
            },
        }
    )
    assert config.recipes("reward") == {"x": {"math": 1.0}, "y": {"math": 1.0, "form": 0.5}}
    assert config.recipes("cost") == {"x": {"cost": 1.0}, "y": {"cost": 1.0}}
