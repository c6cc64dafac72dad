"""Errors of calls that an algorithm does not wait for: the step raises them at its end, unless the algorithm has read
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from unit.simulated_run import ROLLOUT, VALUES, Weather, simulate

from client.session import StepContext
from controller.advantage import kl_controller
from controller.algorithms.ppo import compute_advantage
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import Promise, all_of, resolved, results, then
from controller.training.run import Run
from controller.training.step import Step
from rlhf.errors import CallCancelled, DeadlineExceeded, RlhfError, UpdateRejected

pytestmark = pytest.mark.timeout(60)

WAYS = [
    (),
    ("run.ahead=1",),
    ("run.ahead=2", ROLLOUT),
    ("run.ahead=1", "rollout.segments=2", ROLLOUT),
    ("rollout.chunks=2",),
    (VALUES,),
]


@dataclass
class Strikes(Weather):
    """Has the first call `service.method` of a step fail."""

    call: tuple[str, int] = ("", 0)
    error: type[RlhfError] = UpdateRejected

    async def pass_over(self, call: str, step: int) -> None:
        first = not self._begun[call, step]
        await super().pass_over(call, step)
        if first and (call, step) == self.call:
            raise self.error("struck by lightning")


def ppo_that(end: Callable[[Run, Step, FutureBatch], None]) -> Callable[[Run], None]:
    """PPO whose updates are made by a function of the run, a step and its batch."""

    def algorithm(run: Run) -> None:
        kl = run.keep("kl", kl_controller(run.config.algorithm))
        for step in run.steps():
            batch = step.prompts | run.actor().generate_sequences(step.prompts)
            batch |= run.actor().compute_log_prob(batch)
            batch |= run.critic().compute_values(batch)
            batch |= run.reference().compute_ref_log_prob(batch)
            batch = run.reward().score(batch)
            batch |= compute_advantage(run, step, batch, kl)
            end(run, step, batch)

    return algorithm


def unread(run: Run, step: Step, batch: FutureBatch) -> None:
    run.critic().update_critic(batch)
    step.finish(batch, run.actor().update_actor(batch))


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_an_update_that_is_rejected_ends_the_run_although_nobody_waits_for_it(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    strikes = Strikes(call=("critic.update_critic", 3))
    with pytest.raises(UpdateRejected, match=r"^step 3: critic.update_critic: struck by lightning$"):
        simulate(tmp_path, "ppo", *settings, weather=strikes, algorithm=ppo_that(unread))


def test_so_does_a_transfer_of_weights(tmp_path: Path) -> None:
    strikes = Strikes(call=("critic.send_weights", 3), error=DeadlineExceeded)
    with pytest.raises(DeadlineExceeded, match=r"^step 3: critic.sync_weights: struck by lightning$"):
        simulate(tmp_path, "ppo", VALUES, weather=strikes, algorithm=ppo_that(unread))


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_updates_that_nobody_waits_for_change_no_number(settings: tuple[str, ...], tmp_path: Path) -> None:
    found, usual = (
        simulate(tmp_path, "ppo", *settings, "run.steps=3", algorithm=each)
        for each in (ppo_that(unread), None)
    )
    assert found.states() == usual.states()


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_an_error_that_the_loop_has_read_is_the_loops_own(settings: tuple[str, ...], tmp_path: Path) -> None:
    read = []

    def again(run: Run, step: Step, batch: FutureBatch) -> None:
        try:
            run.critic().update_critic(batch).records()
        except UpdateRejected:
            read.append(step.number)
            run.critic().update_critic(batch)
        step.finish(batch, run.actor().update_actor(batch))

    strikes = Strikes(call=("critic.update_critic", 3))
    simulate(tmp_path, "ppo", *settings, weather=strikes, algorithm=ppo_that(again))
    assert read == [3]


def test_a_call_that_was_cancelled_is_no_error(tmp_path: Path) -> None:
    strikes = Strikes(call=("critic.update_critic", 3), error=CallCancelled)
    simulate(tmp_path, "ppo", weather=strikes, algorithm=ppo_that(unread))


class TestStep:
    def test_it_raises_the_error_of_the_call_that_was_made_first_and_once(self) -> None:
        step, calls = StepContext(7), [Promise() for _ in range(3)]
        for number, call in enumerate(calls):
            step.made(call, f"critic.call_{number}")
        calls[2].set_exception(UpdateRejected("last"))
        calls[0].set_result(None)
        calls[1].set_exception(ValueError("first"))
        with pytest.raises(RlhfError, match=r"^step 7: critic.call_1: first$") as raised:
            step.raise_unread()
        assert isinstance(raised.value.__cause__, ValueError)
        step.raise_unread()

    def test_calls_that_fail_later_are_raised_later(self) -> None:
        step, call = StepContext(7), Promise()
        step.made(call, "critic.update_critic")
        step.raise_unread()
        call.set_exception(UpdateRejected("late"))
        with pytest.raises(UpdateRejected, match="late"):
            step.raise_unread()

    def test_errors_of_calls_with_columns_are_raised_where_these_are_read(self) -> None:
        step, call = StepContext(7), Promise()
        step.made(call)
        call.set_exception(UpdateRejected("of columns"))
        step.raise_unread()

    def test_a_call_that_fails_by_an_input_has_been_read_with_it(self) -> None:
        step, rows = StepContext(7), Promise()
        update = then(all_of([resolved(0), rows]), lambda inputs: inputs)
        step.made(update, "critic.update_critic")
        rows.set_exception(UpdateRejected("the rows"))
        with pytest.raises(UpdateRejected):
            results([rows])
        step.raise_unread()

    def test_all_that_a_wait_asked_for_is_read_where_it_raises_an_error(self) -> None:
        step, calls = StepContext(7), [Promise(), Promise()]
        for call in calls:
            step.made(call, "critic.update_critic")
        calls[1].set_exception(UpdateRejected("one"))
        with pytest.raises(UpdateRejected, match="one"):
            results(calls)
        calls[0].set_exception(UpdateRejected("other"))
        step.raise_unread()

    def test_a_wait_that_ends_too_early_has_read_nothing(self) -> None:
        step, call = StepContext(7), Promise()
        step.made(call, "critic.update_critic")
        with pytest.raises(DeadlineExceeded):
            results([call], 0.01)
        call.set_exception(UpdateRejected("after that"))
        with pytest.raises(UpdateRejected, match="after that"):
            step.raise_unread()
