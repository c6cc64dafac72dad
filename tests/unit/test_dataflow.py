"""Futures and placement: what waits for what."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from controller.dataflow import (
    CallRecord,
    FutureBatch,
    Loop,
    Placement,
    all_of,
    resolve_after,
    resolved,
    then,
)
from nccl_transfer.batch import Column, LocalColumn
from rlhf.errors import InvalidRequest

TIMEOUT_S = 5


def test_a_batch_of_futures_waits_for_nothing_until_asked() -> None:
    pending: Future[Column] = Future()
    batch = FutureBatch.of(prompt=["a", "b"]) | FutureBatch(2, {"values": pending})
    doubled = batch.repeat(2).take(np.array([3, 0]))
    pending.set_result(LocalColumn(np.array([1.0, 2.0])))
    result = doubled.result(["prompt", "values"], TIMEOUT_S)
    assert result["prompt"].values == ["b", "a"]  # type: ignore[union-attr]
    assert result["values"].values.tolist() == [2.0, 1.0]  # type: ignore[union-attr]


def test_an_error_passes_through_to_whoever_asks() -> None:
    failed: Future[int] = Future()
    failed.set_exception(InvalidRequest("no"))
    with pytest.raises(InvalidRequest, match="no"):
        then(failed, lambda x: x + 1).result(TIMEOUT_S)


def record(metrics: dict[str, float]) -> CallRecord:
    return CallRecord("actor", "generate_sequences", 0.0, 1.0, metrics, 1, ())


def test_rows_are_there_once_their_call_has_passed_a_check() -> None:
    called: Future[CallRecord] = Future()
    batch = FutureBatch(1, FutureBatch.of(x=np.array([1.0])).columns, (called,))
    checked = batch.checked(lambda passed: passed)
    assert not checked["x"].done()
    called.set_result(record({"drift": 0.0}))
    assert checked.result(["x"], TIMEOUT_S)["x"].values.tolist() == [1.0]  # type: ignore[union-attr]
    assert checked.records(TIMEOUT_S) == batch.records(TIMEOUT_S)


def test_what_a_check_raises_becomes_of_the_rows_and_the_call() -> None:
    def refuse(_: CallRecord) -> CallRecord:
        raise InvalidRequest("too far")

    columns = FutureBatch.of(x=np.array([1.0])).columns
    checked = FutureBatch(1, columns, (resolved(record({})),)).checked(refuse)
    for ask in (lambda: checked.result(["x"], TIMEOUT_S), lambda: checked.records(TIMEOUT_S)):
        with pytest.raises(InvalidRequest, match="too far"):
            ask()


def test_batches_of_other_sizes_are_not_joined() -> None:
    with pytest.raises(InvalidRequest, match="3 and 2 rows"):
        _ = FutureBatch.of(x=["a", "b", "c"]) | FutureBatch.of(y=["a", "b"])


def test_calls_on_a_common_device_go_in_call_order_and_others_at_the_same_time() -> None:
    placement = Placement()
    both, first, second = frozenset({"0", "1"}), frozenset({"0"}), frozenset({"1"})
    before_actor, actor = placement.enter(both)
    before_reference, reference = placement.enter(first)
    before_reward, reward = placement.enter(second)
    before_critic, _ = placement.enter(both)
    assert before_actor == []
    assert before_reference == [actor]
    assert before_reward == [actor]
    assert set(before_critic) == {reference, reward}


def test_the_loop_runs_coroutines_for_other_threads_and_ends() -> None:
    loop = Loop()

    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    assert loop.run(answer(), TIMEOUT_S) == 42
    never = loop.start(asyncio.Event().wait())
    loop.close()
    assert never.cancelled()


def test_a_resolved_future_is_done() -> None:
    assert resolved(3).result(0) == 3


def test_a_call_that_failed_early_keeps_its_place_in_the_order() -> None:
    first, second, third = Future(), Future(), Future()
    resolve_after([first, second], third)
    second.set_result(None)
    assert not third.done()
    first.set_result(None)
    assert third.done()


def test_two_rewards_fit_into_one_batch_under_names_of_their_own() -> None:
    rewards, costs = (FutureBatch.of(rewards=np.array([x, x])) for x in (1.0, 2.0))
    both = rewards | costs.rename(rewards="costs")
    assert sorted(both.columns) == ["costs", "rewards"]
    with pytest.raises(InvalidRequest, match="no columns"):
        costs.rename(values="cost_values")


def test_batches_of_several_rounds_become_one_without_waiting() -> None:
    pending: Future[Column] = Future()
    first = FutureBatch.of(prompt=["a", "b"], only=["x", "y"]) | FutureBatch(2, {"scores": pending})
    second = FutureBatch.of(prompt=["c"], scores=np.array([3.0]))
    both = FutureBatch.concat([first, second, second.take(np.array([], int))])
    assert set(both.columns) == {"prompt", "scores"}
    pending.set_result(LocalColumn(np.array([1.0, 2.0])))
    result = both.result(["prompt", "scores"], TIMEOUT_S)
    assert result.rows == 3
    assert result["prompt"].values == ["a", "b", "c"]  # type: ignore[union-attr]
    assert result["scores"].values.tolist() == [1.0, 2.0, 3.0]  # type: ignore[union-attr]


def test_the_calls_of_batches_put_together_are_those_of_all_once() -> None:
    calls = [Future(), Future()]
    first = FutureBatch(1, FutureBatch.of(x=["a"]).columns, (calls[0],))
    second = FutureBatch(1, FutureBatch.of(x=["b"]).columns, (calls[0], calls[1]))
    assert FutureBatch.concat([first, second]).calls == tuple(calls)


def test_columns_are_dropped_where_they_are() -> None:
    batch = FutureBatch.of(x=["a"], y=["b"])
    assert set(batch.drop("y", "z").columns) == {"x"}


def test_all_results_come_in_order_once_the_last_is_there() -> None:
    futures: list[Future[int]] = [Future(), Future(), Future()]
    together = all_of(futures)
    for number in (2, 0, 1):
        assert not together.done()
        futures[number].set_result(number)
    assert together.result(TIMEOUT_S) == [0, 1, 2]


def test_an_error_of_one_is_that_of_all() -> None:
    failed: Future[int] = Future()
    failed.set_exception(InvalidRequest("no"))
    with pytest.raises(InvalidRequest, match="no"):
        all_of([resolved(1), failed]).result(TIMEOUT_S)
