"""Rewards that are lost in a step and replaced: a run goes on as if nothing had been lost, or ends with the cause."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.simulated_run import Simulation, Weather, simulate

from controller.role_groups.admission import check_same
from controller.role_groups.rejoining import introduce
from controller.role_groups.replacement import LostAgain, Replaced, Replacement, is_loss
from rlhf.errors import (
    CallCancelled,
    ConfigError,
    DeadlineExceeded,
    PeerFailed,
    Refused,
    Restarted,
    RlhfError,
    ServiceLost,
    ShuttingDown,
    from_status,
    to_status,
)
from rlhf.v1 import common_pb2, worker_pb2
from settings.model import OptimizerTable
from settings.reward import RewardTable

RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("ppo", ()),
    "one device": ("ppo", ("placement=colocate",)),
    "steps that overlap": ("grpo", ("run.ahead=2",)),
    "rows in chunks": ("ppo", ("rollout.chunks=4",)),
    "rounds": ("dapo", ("run.ahead=1",)),
    "a baseline": ("remax", ()),
    "a reward and a cost": ("safe_rlhf", ()),
    "rows sent again": ("grpo", ("algorithm.on_failed_reward=retry", "algorithm.reward_retries=1")),
}


def found(run: Simulation) -> Any:
    """All that a run has computed: metrics that count no losses, and the states of its services."""
    metrics = {
        step: {name: value for name, value in line.items() if not name.startswith(("restarts/", "transfer/"))}
        for step, line in run.notes.metrics.items()
    }
    return metrics, run.states()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_loses_rewards_has_the_results_of_one_that_loses_none(
    name: str, seed: int, tmp_path: Path
) -> None:
    algorithm, settings = RUNS[name]
    expected = found(simulate(tmp_path, algorithm, *settings))
    drawn = random.Random(seed)
    losses = frozenset(drawn.sample(range(1, 12), 4))
    # Of four losses, all may be of one call.
    rewards = ("reward", "cost") if algorithm == "safe_rlhf" else ("reward",)
    again = (f"services.{each}.restarts=4" for each in rewards)
    weather = Weather(seed, 0.01, losses=losses)
    run = simulate(tmp_path, algorithm, *settings, *again, weather=weather)
    assert found(run) == expected
    assert run.replaced
    assert len(run.said) == 2 * len(run.replaced)


def test_the_metrics_of_a_step_count_the_losses_in_it(tmp_path: Path) -> None:
    settings = ("run.evaluate_every=0", "run.steps=3")
    # The first call is the evaluation before step 1, the third and the fourth are those of step 2.
    run = simulate(tmp_path, "grpo", *settings, weather=Weather(losses=frozenset({3, 4})))
    assert [line.get("restarts/reward") for line in run.notes.metrics.values()] == [None, None, 2, None]
    assert [(each.service, each.step) for each in run.replaced] == [("reward", 2)] * 2
    assert run.said[1].endswith("sent again: compute_reward of step 2 (1 of 3)")
    assert run.said[3].endswith("sent again: compute_reward of step 2 (2 of 3)")


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_metrics_of_a_step_count_the_losses_in_its_evaluation(ahead: int, tmp_path: Path) -> None:
    settings = ("services.reward.restarts=5", "run.evaluate_every=1", "run.steps=2", f"run.ahead={ahead}")
    run = simulate(tmp_path, "grpo", *settings, weather=Weather(losses=frozenset({1, 3, 5, 7, 9})))
    lost = Counter(each.step for each in run.replaced)
    assert lost.keys() == {0, 1, 2}
    assert {step: line["restarts/reward"] for step, line in run.notes.metrics.items()} == lost


def test_a_call_that_is_lost_too_often_ends_the_run(tmp_path: Path) -> None:
    settings = ("services.reward.restarts=2", "run.evaluate_every=0")
    with pytest.raises(LostAgain) as raised:
        simulate(tmp_path, "grpo", *settings, weather=Weather(losses=frozenset({3, 4, 5})))
    assert str(raised.value) == (
        "reward: compute_reward of step 2 was lost with the service 3 times, and services.reward.restarts is 2; the "
        "last time: a process has ended (see the log of services.reward); reward: gone with the wind"
    )


def test_with_restarts_0_a_loss_is_an_error_as_ever(tmp_path: Path) -> None:
    with pytest.raises(ServiceLost, match=r"^reward: gone with the wind$"):
        simulate(tmp_path, "grpo", "services.reward.restarts=0", weather=Weather(losses=frozenset({2})))


def reported(error: RlhfError) -> RlhfError:
    """An error as a rank of service `reward` reports it."""
    return from_status(to_status(error, {"service": "reward"}), "reward rank 0")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ServiceLost("cannot be reached"), True),
        (reported(ShuttingDown("the service is shutting down")), True),
        (reported(ServiceLost("actor rank 0: cannot be reached")), False),
        (reported(PeerFailed("rank 1 has left")), True),
        (reported(Restarted("another epoch")), True),
        (DeadlineExceeded("no answer"), False),
        (CallCancelled("cancelled"), False),
        (RlhfError("a defect"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_loss_is_of_the_service_itself(error: RlhfError, expected: bool) -> None:
    assert is_loss(error) is expected


class Launcher:
    """A launcher that reports losses, and may fail."""

    def __init__(self, *losses: str, fails: bool = False) -> None:
        self.losses, self.fails = list(losses), fails

    def take_loss(self, service: str) -> str:
        return self.losses.pop(0) if self.losses else ""

    def has_failed(self) -> bool:
        return self.fails


class Lost:
    """A service whose replacement takes a moment, or does as `rejoin` does."""

    def __init__(
        self,
        rejoin: Callable[[], None] = lambda: None,
        wait_s: float = 5.0,
        launcher: Launcher | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        self.rejoined, self.said, self.reported = list[bool](), list[str](), list[Replaced]()
        self._rejoin, self._is_new = rejoin, is_new
        self.replacement = Replacement(
            "reward", 3, wait_s, self.again, self.said.append, self.reported.append, launcher
        )

    async def again(self, deadline: float, may_be_same: bool) -> bool:
        await asyncio.sleep(0.01)
        self.rejoined.append(may_be_same)
        self._rejoin()
        return self._is_new

    async def lose(self, losses: int = 1, number: int = 0, error: RlhfError | None = None) -> bool:
        error = error or ServiceLost("reward rank 0: gone")
        return await self.replacement.after(error, "compute_reward", 7, number, losses)


def test_calls_that_are_lost_together_wait_for_one_replacement() -> None:
    lost = Lost(launcher=Launcher("was killed by SIGKILL (log: reward.log)"))

    async def main() -> list[bool]:
        together = await asyncio.gather(*(lost.lose() for _ in range(3)), lost.lose(2))
        return [*together, await lost.lose()]  # which learns of it late

    assert asyncio.run(main()) == [True, False, False, False, False]
    assert len(lost.rejoined) == len(lost.reported) == 1
    assert lost.said[1] == (
        "reward: was killed by SIGKILL (log: reward.log); it was started again, sent again: compute_reward of step 7 "
        "(1 of 3), 3 calls, compute_reward of step 7 (2 of 3)"
    )
    assert lost.reported[0].cause == "was killed by SIGKILL (log: reward.log)"


def test_a_service_that_is_lost_while_it_is_taken_into_the_session_is_waited_for_again() -> None:
    attempts = iter([ServiceLost("refused"), PeerFailed("left"), None])

    def rejoin() -> None:
        if error := next(attempts):
            raise error

    lost = Lost(rejoin)
    assert asyncio.run(lost.lose()) is True
    # A rank that reports of another that has left is about to end.
    assert lost.rejoined == [True, True, False]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ServiceLost("no answer"), True),
        (reported(ShuttingDown("the service is shutting down")), False),
        (reported(PeerFailed("rank 1 has left")), False),
        (reported(Restarted("another epoch")), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_processes_that_did_not_say_that_they_end_may_be_those_of_before(
    error: RlhfError, expected: bool
) -> None:
    lost = Lost()
    asyncio.run(lost.lose(error=error))
    assert lost.rejoined == [expected]


def test_a_service_that_answers_again_was_not_started_again_and_the_launcher_is_not_asked_why() -> None:
    launcher = Launcher("was killed by SIGKILL")
    lost = Lost(launcher=launcher, is_new=False)
    asyncio.run(lost.lose())
    assert lost.said[1] == (
        "reward: it could not be reached; it answers again, sent again: compute_reward of step 7 (1 of 3)"
    )
    assert [each.cause for each in lost.reported] == ["it could not be reached"]
    assert launcher.losses


def test_a_loss_does_not_end_before_it_began_where_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = Lost(lambda: monkeypatch.setattr(time, "time", lambda: 0.0))
    asyncio.run(lost.lose())
    assert lost.reported[0].lost_s < lost.reported[0].serves_s


@pytest.mark.parametrize(
    ("error", "wait_s", "launcher", "expected"),
    [
        (ServiceLost("refused"), 0.05, None, "reward rank 0: gone; refused"),
        (ServiceLost("refused"), 600.0, Launcher(fails=True), "reward rank 0: gone; refused"),
        (ConfigError("threads was 1 and is 2"), 600.0, None, "threads was 1 and is 2"),
    ],
    ids=["deadline", "the launcher has ended", "another service"],
)
def test_a_replacement_that_fails_is_the_error_of_all_calls(
    error: RlhfError, wait_s: float, launcher: Launcher | None, expected: str
) -> None:
    def rejoin() -> None:
        raise error

    lost = Lost(rejoin, wait_s, launcher)

    async def main() -> None:
        for call in (lost.lose, lost.lose, lost.replacement.ready):
            with pytest.raises(type(error)) as raised:
                await call()
            assert str(raised.value) == expected
            assert raised.value.called == ("reward" if isinstance(error, ServiceLost) else "")

    asyncio.run(main())
    assert not lost.reported


def test_a_launcher_that_fails_ends_the_wait_for_a_service() -> None:
    """As when an actor dies while the reward is started again, or soon after."""
    launcher, ends = Launcher(), list[str]()

    async def wait(deadline: float, may_be_same: bool) -> bool:
        launcher.fails = True
        try:
            await asyncio.sleep(600)
        finally:
            ends.append("rejoin")
        return True

    lost = Lost(launcher=launcher)
    lost.replacement = Replacement("reward", 3, 600.0, wait, lost.said.append, lost.reported.append, launcher)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ServiceLost, match=r"^reward rank 0: gone; the launcher stops all services$"):
                await lost.lose()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert ends == ["rejoin"]


class Introduced:
    """A role group of a rank that takes introductions, or fails to."""

    def __init__(
        self, name: str, error: RlhfError | None = None, replacement: Replacement | None = None
    ) -> None:
        endpoint = common_pb2.Endpoint(address=f"{name}:1", service=name)
        self.name, self.description = name, worker_pb2.DescribeResponse(ranks=[{"endpoint": endpoint}])
        self.error, self.replacement, self.known = error, replacement, set[str]()

    async def introduce(self, endpoints: list[common_pb2.Endpoint]) -> None:
        if self.error:
            raise self.error
        self.known = {endpoint.service for endpoint in endpoints}


@pytest.mark.parametrize(
    "error",
    [
        ServiceLost("cost rank 0: cannot be reached"),
        reported(ShuttingDown("the service is shutting down")),
        reported(Refused("session 'run' is not open on this rank")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_two_services_that_are_lost_together_do_not_keep_each_other_from_the_session(
    error: RlhfError,
) -> None:
    """The other is lost still, ends, or is a new process in which the session has not begun."""
    reward, cost, actor = Introduced("reward"), Introduced("cost", error), Introduced("actor")
    groups: list[Any] = [reward, cost, actor]
    asyncio.run(introduce(groups, again="reward"))
    assert reward.known == actor.known == {"reward", "cost", "actor"}
    for again in ("", "cost"):
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(introduce(groups, again=again))
    cost.replacement = Lost().replacement
    asyncio.run(introduce(groups))
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(introduce(groups, again="cost"))


def test_a_service_that_is_silent_when_another_is_taken_into_the_session_ends_the_wait() -> None:
    groups: list[Any] = [
        Introduced("reward"),
        Introduced("actor", DeadlineExceeded("actor rank 0: no answer")),
    ]
    with pytest.raises(DeadlineExceeded, match="actor rank 0: no answer"):
        asyncio.run(introduce(groups, again="reward"))


MODEL = RewardTable(role="reward", address="127.0.0.1:1", kind="model", model=Path("m"), input="tensor")
FUNCTION = RewardTable(role="reward", address="127.0.0.1:1")


@pytest.mark.parametrize(
    ("table", "changed", "found"),
    [
        (MODEL, {"matmul": "onednn"}, 'matmul was "mkl" and is "onednn"'),
        (MODEL, {"torch": "2.14"}, 'torch was "2.13" and is "2.14"'),
        (FUNCTION, {"matmul": "onednn", "cpu": "another"}, ""),
        (FUNCTION, {"scores_groups": True}, "scores_groups was false and is true"),
    ],
)
def test_a_service_that_would_give_other_bits_is_not_the_one_that_was_lost(
    table: RewardTable, changed: dict[str, Any], found: str
) -> None:
    facts: dict[str, Any] = {"matmul": "mkl", "torch": "2.13", "cpu": "one"}
    before, now = (worker_pb2.DescribeResponse(**said) for said in (facts, facts | changed))
    if not found:
        return check_same("reward", table, before, now)
    with pytest.raises(ConfigError) as raised:
        check_same("reward", table, before, now)
    assert str(raised.value) == (
        f"services.reward: the service that was started again at 127.0.0.1:1 is not the one before: {found}. "
        "Results would not be bitwise equal"
    )


def test_a_reward_that_learns_is_not_replaced() -> None:
    learning = MODEL.model_copy(update={"optimizer": OptimizerTable()})
    assert (FUNCTION.allowed_restarts, MODEL.allowed_restarts, learning.allowed_restarts) == (3, 3, 0)
