"""Warm-up of critics: in the first steps of a run the critics are updated and the actor is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.simulated_run import QUICKSTARTS, ROLLOUT, Simulation, Weather, simulate

from controller.advantage import kl_controller
from controller.algorithms import find_algorithm
from controller.algorithms.ppo import compute_advantage
from controller.config.config import load
from controller.mapping.record import record_dataflow
from controller.role_groups.dataflow import FutureBatch
from controller.simulation.durations import CallTimes, Durations
from controller.simulation.run import simulate_run
from controller.training.algorithm import Algorithm, UnreadOptions
from controller.training.deferral import future_columns
from controller.training.run import Run
from controller.training.step import Step
from rlhf.errors import ConfigError

WARMUP = "algorithm.critic_warmup_steps=2"
STEPS = "run.steps=4"
BY_ROWS = "algorithm.aggregation='seq-mean-token-mean'"
ADAPTIVE = ("algorithm.kl_target=0.1", "algorithm.kl_horizon=100")
CRITICS = {"ppo": ("critic",), "safe_rlhf": ("critic", "cost_critic")}


def steps_of(run: Simulation, service: str, method: str) -> list[int]:
    return [entry.step for entry in run.log if (entry.service, entry.method) == (service, method)]


def results(run: Simulation) -> Any:
    return run.notes.metrics, run.states()


def without_transfers(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in found.items() if not name.startswith("transfer/")}
        for step, found in metrics.items()
    }


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(CRITICS))
def test_the_actor_is_updated_after_the_warm_up_and_the_critics_in_every_step(
    name: str, ahead: int, tmp_path: Path
) -> None:
    settings = (WARMUP, STEPS, f"run.ahead={ahead}", ROLLOUT)
    run = simulate(tmp_path, name, *settings)
    assert steps_of(run, "actor", "update_actor") == [3, 4]
    for critic in CRITICS[name]:
        assert steps_of(run, critic, "update_critic") == [1, 2, 3, 4]
    assert steps_of(run, "rollout", "commit_weights")[1:] == [3, 4], (
        "weights are sent where they have changed"
    )
    assert [version for step, version in versions(run) if step <= 3] == [0] * 3
    stormy = simulate(tmp_path, name, *settings, weather=Weather(seed=ahead, longest_s=0.004))
    assert results(stormy) == results(run)


def versions(run: Simulation) -> list[tuple[int, int]]:
    """Version of the weights that computed the log-probabilities of each step."""
    return [(entry.step, entry.version) for entry in run.log if entry.method == "compute_log_prob"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_it_is_the_algorithm_without_the_updates(ahead: int, tmp_path: Path) -> None:
    settings = (STEPS, f"run.ahead={ahead}", ROLLOUT)
    found = simulate(tmp_path, "ppo", WARMUP, *settings)
    by_hand = simulate(tmp_path, "ppo", *settings, algorithm=ppo_by_hand)
    assert results(found) == results(by_hand)


def ppo_by_hand(run: Run) -> None:
    actor, critic, reference, reward = run.actor(), run.critic(), run.reference(), run.reward()
    kl = kl_controller(run.config.algorithm)
    for step in run.steps():
        batch = step.prompts | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch) | critic.compute_values(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch = reward.score(batch)
        batch |= compute_advantage(run, step, batch, kl)
        updates = [critic.update_critic(batch)]
        if step.number > 2:
            updates.append(actor.update_actor(batch))
        step.finish(batch, *updates)


@pytest.mark.parametrize(
    ("name", "given"), [("ppo", ()), ("safe_rlhf", ("algorithm.options.lambda_learning_rate=0",))]
)
def test_the_first_step_is_that_of_a_run_without_but_for_the_actor(
    name: str, given: tuple[str, ...], tmp_path: Path
) -> None:
    settings = (*given, "run.steps=1", "run.evaluate_every=0")
    plain, found = (simulate(tmp_path, name, *settings, *more) for more in ((), (WARMUP,)))
    assert without_evaluation(found) == without_evaluation(plain)
    assert (found.states()["actor"][1], plain.states()["actor"][1]) == (0, 1)


def without_evaluation(run: Simulation) -> dict[str, Any]:
    """Results of the first step, but the weights of the actor."""
    metrics = without_transfers(run.notes.metrics)[1]
    kept = {name: value for name, value in metrics.items() if not name.startswith("evaluation/")}
    return kept | {name: state for name, state in run.states().items() if name != "actor"}


@pytest.mark.parametrize("name", sorted(CRITICS))
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_goes_on_in_the_midst_of_the_warm_up(name: str, ahead: int, tmp_path: Path) -> None:
    settings = (WARMUP, STEPS, *ADAPTIVE, f"run.ahead={ahead}", ROLLOUT)
    whole = simulate(tmp_path, name, *settings, every=1)
    for step in (1, 2, 3):
        rest = simulate(tmp_path, name, *settings, every=1, resumed=whole.saver.saved[step])
        assert rest.states() == whole.states()
        assert rest.notes.metrics == {n: found for n, found in whole.notes.metrics.items() if n > step}


@pytest.mark.parametrize("ahead", [0, 1])
def test_chunks_change_no_number(ahead: int, tmp_path: Path) -> None:
    settings = (WARMUP, STEPS, f"run.ahead={ahead}")
    whole = simulate(tmp_path, "ppo", *settings)
    found = simulate(tmp_path, "ppo", *settings, "rollout.chunks=2", weather=Weather(1, 0.003))
    assert without_transfers(found.notes.metrics) == without_transfers(whole.notes.metrics)
    assert found.states() == whole.states()


def by_group(run: Run) -> None:
    """An algorithm whose actor is updated from the first chunk on."""
    actor, critic, reward = run.actor(), run.critic(), run.reward()
    for step in run.steps():
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch) | critic.compute_values(batch)
        batch = reward.score(batch)
        batch |= scores(run, step, batch)
        batch |= FutureBatch.of(returns=np.zeros(batch.rows))
        step.finish(batch, critic.update_critic(batch), actor.update_actor(batch))


@future_columns("advantages", by_group=True)
def scores(run: Run, step: Step, batch: FutureBatch) -> FutureBatch:
    return FutureBatch.of(advantages=run.fetch(batch, "rewards")["rewards"].astype(np.float32))


def test_no_gradient_begins_early_in_the_warm_up(tmp_path: Path) -> None:
    settings = (WARMUP, STEPS, BY_ROWS, "rollout.chunks=2")
    run = simulate(tmp_path, "ppo", *settings, algorithm=by_group)
    assert steps_of(run, "actor", "prepare_update") == [3, 4]
    assert steps_of(run, "actor", "update_actor") == [3, 4]
    assert steps_of(run, "critic", "update_critic") == [1, 2, 3, 4]


@pytest.mark.parametrize("name", sorted(CRITICS))
def test_coefficients_that_steer_the_policy_stay_while_it_does(name: str, tmp_path: Path) -> None:
    run = simulate(tmp_path, name, WARMUP, "run.steps=5", *ADAPTIVE)
    steps = [run.notes.metrics[step] for step in range(1, 6)]
    betas = [step["kl/coefficient"] for step in steps]
    assert betas[:3] == betas[:1] * 3
    assert betas[3] != betas[2]
    assert all("kl/sequence_mean" in step for step in steps), "it is measured all the same"
    if name == "safe_rlhf":
        weights = [step["lambda"] for step in steps]
        assert weights[:2] == pytest.approx([1.0] * 2, rel=1e-15)
        assert weights[2] != weights[1]
        assert all("cost/recent_mean" in step for step in steps)


def critic_free(run: Run) -> None: ...


def test_it_is_refused_without_a_critic() -> None:
    config = load(QUICKSTARTS / "groups.toml", (WARMUP,))
    with pytest.raises(ConfigError, match=r"algorithm.critic_warmup_steps: grpo has no use for this"):
        find_algorithm("grpo").configure(config)
    own = Algorithm(critic_free, {"actor": "actor", "reward": "reward"})
    with pytest.raises(ConfigError, match=r"critic_warmup_steps: critic_free has no service of role critic"):
        own.configure(config)
    with_critic = load(QUICKSTARTS / "quickstart.toml", (WARMUP,))
    assert Algorithm(by_group).configure(with_critic).algorithm.critic_warmup_steps == 2


def test_placements_are_searched_and_simulated_for_the_steps_after_it() -> None:
    ppo = find_algorithm("ppo")
    plain, found = (
        ppo.configure(load(QUICKSTARTS / "quickstart.toml", settings)) for settings in ((), (WARMUP,))
    )
    assert record_dataflow(ppo, found) == record_dataflow(ppo, plain)
    methods = ("generate_sequences", "compute_log_prob", "update_actor")
    seconds = {("actor", method): [1.0] for method in methods}
    seconds |= {("critic", method): [1.0] for method in ("compute_values", "update_critic")}
    seconds |= {("reference", "compute_ref_log_prob"): [1.0], ("reward", "compute_reward"): [1.0]}
    one, other = (
        simulate_run(config, ppo, Durations(CallTimes(seconds)), [(8, 1.0)], [(8, 1.0)], 2)
        for config in (plain, found)
    )
    assert one.calls == other.calls


def test_a_checkpoint_is_evaluated_without_critics() -> None:
    config = find_algorithm("ppo").configure(load(QUICKSTARTS / "quickstart.toml", (WARMUP,)))
    actor = config.model_copy(update={"services": {"actor": config.services["actor"]}})
    assert set(Algorithm(critic_free, options=UnreadOptions).configure(actor).services) == {"actor"}


def before_the_first_step(run: Run) -> None:
    actor = run.actor()
    batch = FutureBatch.of(prompt=["1", "2", "3", "4"])
    batch |= actor.generate_sequences(batch)
    batch |= actor.compute_log_prob(batch)
    batch |= FutureBatch.of(advantages=np.zeros(4))
    actor.update_actor(batch).records()
    by_group(run)


@pytest.mark.parametrize(("given", "later"), [((), [1, 2, 3, 4]), ((WARMUP,), [3, 4])])
def test_an_update_before_the_first_step_is_made(
    given: tuple[str, ...], later: list[int], tmp_path: Path
) -> None:
    run = simulate(tmp_path, "ppo", STEPS, *given, algorithm=before_the_first_step)
    assert steps_of(run, "actor", "update_actor") == [0, *later]
