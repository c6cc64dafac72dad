"""Futures and placement: what waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from client.session import StepContext
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import Promise, all_of, awaited, resolve_after, resolved, then
from controller.role_groups.loop import Loop
from controller.role_groups.placement import Place, Placement
from nccl_transfer.refs.batch import Column, LocalColumn
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


def test_a_closed_loop_keeps_no_descriptors_and_may_be_closed_again() -> None:
    counts = []
    for _ in range(20):
        loop = Loop()
        loop.close()
        loop.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] < counts[0] + 10


def test_an_error_passes_through_to_whoever_asks() -> None:
    failed: Future[int] = Future()
    failed.set_exception(InvalidRequest("no"))
    with pytest.raises(InvalidRequest, match="no"):
        then(failed, lambda x: x + 1).result(TIMEOUT_S)


@pytest.mark.parametrize("error", [InvalidRequest("no"), CancelledError()], ids=["failed", "cancelled"])
def test_a_future_that_fails_after_its_wait_was_cancelled_is_logged_by_nobody(error: Exception) -> None:
    logged = []

    async def give_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        pending: Future[int] = Future()
        wait = asyncio.ensure_future(awaited([pending]))
        await asyncio.sleep(0)
        wait.cancel()
        await asyncio.wait([wait])
        pending.set_exception(error)
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(give_up())
    assert logged == []


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
    actor = placement.enter(both, "actor", 1.0)
    reference = placement.enter(first, "reference", 1.0)
    reward = placement.enter(second, "reward", 1.0)
    critic = placement.enter(both, "critic", 1.0)
    assert actor.first == []
    assert reference.first == [actor.ended]
    assert reward.first == [actor.ended]
    assert set(critic.first) == {reference.ended, reward.ended}


def test_the_wait_for_all_calls_is_one_that_a_thread_can_wait() -> None:
    placement, step, call = Placement(), StepContext(1), Future[None]()
    for _ in range(3):
        placement.enter(frozenset({"0"}), "actor", threading.TIMEOUT_MAX / 2)
    step.made(call)
    ending = threading.Timer(0.05, call.set_result, (None,))
    ending.start()
    step.wait(placement.longest_wait_s() + 5.0)
    ending.join()


def test_a_second_call_of_a_group_waits_until_the_first_was_sent_and_others_until_both_have_ended() -> None:
    placement, device = Placement(), frozenset({"0"})
    before, first, second = (placement.enter(device, queue, 1.0) for queue in ("reward", "actor", "actor"))
    other = placement.enter(device, "critic", 1.0)
    first.was_sent()
    assert second.first == [first.sent]
    assert second.first[0].done()
    second.was_sent()
    second.leave()
    before.leave()
    assert not second.ended.done()
    first.leave()
    assert other.first == [second.ended]
    assert second.ended.done()


def test_a_call_that_is_never_sent_holds_up_the_next_of_its_group_until_its_devices_are_free() -> None:
    placement, device = Placement(), frozenset({"0"})
    before, failed, second = (placement.enter(device, queue, 1.0) for queue in ("reward", "actor", "actor"))
    failed.leave()
    assert not second.first[0].done()
    before.leave()
    assert second.first[0].done()


def test_rows_of_a_step_stay_rows_of_that_step() -> None:
    step = StepContext(1)
    rows = FutureBatch.of(prompt=["a", "b"]).of_step(step)
    scores = FutureBatch.of(scores=np.array([1.0, 2.0]))
    for batch in (
        rows | scores,
        scores | rows,
        rows.select(["prompt"]),
        rows.drop("prompt"),
        rows.rename(prompt="question"),
        rows.repeat(2),
        FutureBatch.concat([FutureBatch.of(prompt=["c"]), rows]),
        rows.checked(lambda record: record),
    ):
        assert batch.step is step


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


def test_hundreds_of_calls_that_failed_early_do_not_block_those_behind_them() -> None:
    futures: list[Future[None]] = [Future() for _ in range(1000)]
    for before, after in itertools.pairwise(futures):
        resolve_after([before], after)
    futures[0].set_result(None)
    assert all(future.done() for future in futures)


def test_a_call_may_wait_as_long_as_the_unfinished_calls_before_it_may_take() -> None:
    placement = Placement()
    first, second = (placement.enter(frozenset({name}), name, 10.0) for name in ("actor", "critic"))
    assert (first.patience_s, second.patience_s) == (10.0, 20.0)
    first.leave()
    assert placement.enter(frozenset({"actor"}), "actor", 5.0).patience_s == 15.0


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


@pytest.mark.timeout(20)
def test_tens_of_thousands_of_results_take_no_time_that_grows_with_their_square() -> None:
    futures = [Promise() for _ in range(20_000)]
    together, ended = all_of(futures), Promise()
    resolve_after(futures, ended)
    for number, future in enumerate(futures):
        future.set_result(number)
    assert together.result(TIMEOUT_S) == list(range(20_000))
    assert ended.result(TIMEOUT_S) is None


def test_an_error_of_one_is_that_of_all() -> None:
    failed: Future[int] = Future()
    failed.set_exception(InvalidRequest("no"))
    with pytest.raises(InvalidRequest, match="no"):
        all_of([resolved(1), failed]).result(TIMEOUT_S)


def test_the_order_of_calls_that_have_ended_is_forgotten() -> None:
    """A run makes calls as long as it goes on, and each waits for the one before it. None is left to the garbage
    collector, which a controller runs rarely."""
    placement, queues, device = Placement(), [object(), object()], frozenset({"gpu"})
    with uncollected():
        before = len(living(Place, Future))
        for number in range(0, 300, 2):
            first, second = (placement.enter(device, queues[n % 2], 1.0) for n in (number, number + 1))
            second.leave()
            first.was_sent()
            first.leave()
        del first, second
        assert len(living(Place, Future)) - before < 10


def test_futures_of_several_leave_nothing_to_the_garbage_collector() -> None:
    with uncollected():
        before = len(living(Future))
        for _ in range(100):
            futures: list[Future[int]] = [Future() for _ in range(3)]
            together, ended = all_of(futures), Promise()
            resolve_after(futures, ended)
            for future in futures:
                future.set_result(1)
            assert (together.result(TIMEOUT_S), ended.result(TIMEOUT_S)) == ([1, 1, 1], None)
        del futures, future, together, ended
        assert len(living(Future)) - before < 10


def living(*types: type) -> list[object]:
    """Returns the objects of these types that are in memory."""
    return [each for each in gc.get_objects() if issubclass(type(each), types)]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Context manager that disables garbage collection in its block, after one collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
