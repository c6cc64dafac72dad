"""Steps that overlap: however long calls take and whichever fails, those that matter keep the order of the loop."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.simulated_run import QUICKSTARTS, ROLLOUT, VALUES, Entry, Simulation, Weather, simulate

from controller import algorithms
from controller.advantage.columns import row_sums
from controller.algorithms.grpo import compute_advantage
from controller.config.config import load
from controller.restarts import LOST
from controller.role_groups.dataflow import FutureBatch
from controller.training.columns import texts_of
from controller.training.deferral import future_columns
from controller.training.evaluation import Evaluation, Measured
from controller.training.run import Run
from controller.training.step import Step
from nccl_transfer.refs.columns import Jagged
from rlhf import plugins
from rlhf.errors import ConfigError, InvalidRequest, RlhfError

pytestmark = pytest.mark.timeout(60)

NAMES = ("ppo", "grpo", "rloo", "dapo", "safe_rlhf", "remax", "reinforce_pp", "distill")
ENTRY_POINTS = cache(entry_points)
ADAPTIVE = ("algorithm.kl_target=0.01", "algorithm.kl_horizon=200", "algorithm.kl_reward_coefficient=0.05")
ROLES = {
    "ppo": ("actor", "critic", "reference", "reward"),
    "safe_rlhf": ("actor", "critic", "cost_critic", "reference", "reward", "cost"),
    "dapo": ("actor", "reward"),
}


def results(run: Simulation) -> Any:
    """Metrics and states at the end. Rows in chunks may be sent once more, before the update."""
    metrics = {
        step: {name: value for name, value in found.items() if name != "transfer/controller_bytes"}
        for step, found in run.notes.metrics.items()
    }
    return metrics, run.states()


def of_actor(run: Simulation, method: str) -> list[Entry]:
    """Calls of a method of the actor, or of its rollout service."""
    return [each for each in run.log if each.service in ("actor", "rollout") and each.method == method]


def check_rows(run: Simulation, ahead: int) -> None:
    """Every row that was trained on was generated once, trained on once, and is at most `ahead` updates old; every
    evaluation is of the version of its step, and so is every checkpoint."""
    made = {row: entry for entry in of_actor(run, "generate_sequences") for row in entry.rows}
    born = {
        row: version
        for entry in of_actor(run, "generate_sequences")
        for row, version in zip(entry.rows, entry.born, strict=True)
    }
    trained = Counter(row for entry in of_actor(run, "update_actor") for row in entry.rows)
    assert set(trained.values()) == {1}
    for entry in of_actor(run, "update_actor"):
        ages = [entry.version - born[row] for row in entry.rows]
        assert {made[row].step for row in entry.rows} == {entry.step}
        assert all(0 <= age <= ahead for age in ages)
        assert run.notes.metrics[entry.step].get("staleness/max", 0) == max(ages)
    assert [entry.step for entry in of_actor(run, "update_actor")] == sorted(run.notes.metrics)[1:]
    updated = 0
    for entry in run.log:
        if entry.service == "actor" and entry.method == "update_actor":
            updated = entry.step
        elif (
            entry.service in ("actor", "rollout")
            and entry.method == "generate_sequences"
            and entry.step <= updated
        ):
            assert entry.version == entry.step, "an evaluation is of the version of its step"
    assert all(states["actor"][1] == step for step, (_, states) in run.saver.saved.items())


@pytest.mark.parametrize("name", NAMES)
def test_overlapping_steps_repeat_and_train_each_row_once(name: str, tmp_path: Path) -> None:
    for ahead in (1, 2):
        calm = simulate(tmp_path, name, f"run.ahead={ahead}")
        check_rows(calm, ahead)
        assert max(metrics.get("staleness/max", 0) for metrics in calm.notes.metrics.values()) == ahead
        stormy = simulate(tmp_path, name, f"run.ahead={ahead}", weather=Weather(seed=ahead, longest_s=0.004))
        assert results(stormy) == results(calm)


@pytest.mark.parametrize("name", NAMES)
def test_segments_of_responses_come_with_the_weights_of_their_steps(name: str, tmp_path: Path) -> None:
    for ahead, segments in ((1, 2), (2, 2), (2, 3)):
        table = (f"run.ahead={ahead}", f"rollout.segments={segments}", ROLLOUT)
        calm = simulate(tmp_path, name, *table)
        check_rows(calm, ahead)
        stormy = simulate(tmp_path, name, *table, weather=Weather(seed=ahead, longest_s=0.004))
        assert results(stormy) == results(calm)


def test_a_response_goes_on_after_the_next_step_has_generated_and_before_the_update(tmp_path: Path) -> None:
    table = ("run.ahead=1", "rollout.segments=2", "run.steps=3", "run.evaluate_every=0", ROLLOUT)
    run = simulate(tmp_path, "ppo", *table)
    seen = [(e.step, e.method) for e in run.log if e.service == "rollout" and e.method != "describe_weights"]
    generate, commit = "generate_sequences", "commit_weights"
    calls = [entry for entry in seen if entry[1] in (generate, commit)]
    assert calls[2:-1] == [
        (1, generate),
        (2, generate),
        (1, generate),
        (1, commit),
        (3, generate),
        (2, generate),
        (2, commit),
        (3, generate),
        (3, commit),
    ]
    assert [run.notes.metrics[step]["staleness/max"] for step in (1, 2, 3)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("rollout.segments=2",), "rollout.segments: 2 is more than run.ahead . 1, 1"),
        (("rollout.segments=3", "run.ahead=1"), "rollout.segments: 3 is more than run.ahead . 1, 2"),
        (
            ("rollout.segments=2", "run.ahead=1", "rollout.stop=['x']"),
            "rollout.stop: does not go with rollout.segments 2",
        ),
    ],
)
def test_segments_that_cannot_be_had_are_refused(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(QUICKSTARTS / "quickstart.toml", settings)


@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_a_rollout_service_generates_with_the_weights_that_the_actor_would(name: str, tmp_path: Path) -> None:
    for ahead in (0, 1, 2):
        table = (f"run.ahead={ahead}", "run.evaluate_every=2")
        own = simulate(tmp_path, name, *table)
        stormy = Weather(seed=ahead, longest_s=0.004)
        placed = simulate(tmp_path, name, *table, ROLLOUT, weather=stormy)
        check_rows(placed, ahead)
        moved = {"transfer/weights/bytes": 0.0}
        assert placed.notes.metrics == {
            step: metrics | (moved if step else {}) for step, metrics in own.notes.metrics.items()
        }
        assert {each.service for each in of_actor(placed, "generate_sequences")} == {"rollout"}
        updates = len(of_actor(placed, "update_actor"))
        assert len(of_actor(placed, "commit_weights")) == updates + 1, (
            "once for each update, and at the start"
        )
        states = placed.states()
        assert states.pop("rollout") == states["actor"]
        assert states == own.states()


def test_new_weights_arrive_while_the_rollout_service_generates(tmp_path: Path) -> None:
    steps, generate = range(2, 6), "rollout.generate_sequences"
    table = ("run.ahead=1", "run.evaluate_every=0", ROLLOUT)
    # Each generation goes on until the weights of the update before have begun to arrive, and gets none of them.
    weather = Weather(after={(generate, step, 1): ("rollout.load_weights", step - 1) for step in steps})
    run = simulate(tmp_path, "ppo", *table, weather=weather)
    assert results(run) == results(simulate(tmp_path, "ppo", *table))


def test_without_ahead_calls_come_as_the_algorithm_makes_them(tmp_path: Path) -> None:
    run = simulate(tmp_path, "ppo", "run.steps=2", "run.evaluate_every=0")
    order = ["generate_sequences", "compute_log_prob", "update_actor"]
    of_steps = [(entry.step, entry.method) for entry in run.log if entry.service == "actor"]
    assert of_steps[1:-1] == [(step, method) for step in (1, 2) for method in order]
    assert not any("staleness/max" in metrics for metrics in run.notes.metrics.values())


def test_generation_is_ahead_of_the_updates_and_what_learns_is_not(tmp_path: Path) -> None:
    run = simulate(tmp_path, "ppo", "run.ahead=1", "run.steps=3", "run.evaluate_every=0")
    of_steps = [(entry.step, entry.method) for entry in run.log if entry.service == "actor"][1:-1]
    assert of_steps == [
        (1, "generate_sequences"),
        (2, "generate_sequences"),
        (1, "compute_log_prob"),
        (1, "update_actor"),
        (3, "generate_sequences"),
        (2, "compute_log_prob"),
        (2, "update_actor"),
        (3, "compute_log_prob"),
        (3, "update_actor"),
    ]
    critic = [(entry.step, entry.method) for entry in run.log if entry.service == "critic"]
    assert critic == [(step, each) for step in (1, 2, 3) for each in ("compute_values", "update_critic")]


def test_a_slow_reward_runs_beside_the_update_of_the_step_before(tmp_path: Path) -> None:
    scored, updated = "reward.compute_reward", "actor.update_actor"
    weather = Weather(after={(scored, step, 1): (updated, step - 1) for step in range(2, 6)})
    check_rows(simulate(tmp_path, "grpo", "run.ahead=1", "run.evaluate_every=0", weather=weather), 1)


def test_an_evaluation_holds_up_no_generation(tmp_path: Path) -> None:
    weather = Weather(after={("reward.compute_reward", 2, 2): ("actor.generate_sequences", 4)})
    check_rows(simulate(tmp_path, "grpo", "run.ahead=1", "run.steps=4", weather=weather), 1)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "safe_rlhf"])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    settings = ("run.ahead=1", "run.steps=6", *(ADAPTIVE if name in ("ppo", "safe_rlhf") else ()))
    settings = (*settings, "rollout.segments=2") if name in ("ppo", "dapo") else settings
    whole = simulate(tmp_path, name, *settings, every=2, weather=Weather(seed=3, longest_s=0.002))
    assert whole.saver.cuts == [2, 4, 6]
    check_rows(whole, 1)
    for step in (2, 4):
        rest = simulate(tmp_path, name, *settings, every=2, resumed=whole.saver.saved[step])
        assert rest.states() == whole.states()
        later = {number: found for number, found in whole.notes.metrics.items() if number > step}
        assert rest.notes.metrics == later


@pytest.mark.parametrize("ahead", [0, 1])
def test_values_of_a_service_of_their_own_are_those_of_the_critic(ahead: int, tmp_path: Path) -> None:
    settings = (f"run.ahead={ahead}", "run.steps=4", "run.evaluate_every=0")
    alone = simulate(tmp_path, "ppo", *settings)
    stormy = Weather(seed=5, longest_s=0.003)
    placed = simulate(tmp_path, "ppo", *settings, VALUES, weather=stormy)
    for step, metrics in placed.notes.metrics.items():
        own = {name: value for name, value in metrics.items() if not name.startswith("transfer/weights/")}
        assert own == alone.notes.metrics[step]
    assert {name: placed.states()[name] for name in alone.states()} == alone.states()
    assert {entry.service for entry in placed.log if entry.method == "compute_values"} == {"values"}


STORMS = (False, True, False, True, False)
"""Whether a call fails in each of the schedules of a configuration."""


def random_rewards(name: str, seed: int) -> list[str]:
    """Settings of some runs: rewards that are normalized by all so far, where they are learned from, and rounds of
    generation."""
    chosen = random.Random(f"rewards {seed}")
    is_running = chosen.random() < 0.3 and name != "distill"
    running = ["algorithm.reward_normalization='running'"] if is_running else []
    has_rounds = name in ("grpo", "rloo", "reinforce_pp") and chosen.random() < 0.3
    return [*running, *(["algorithm.options={max_rounds=3}"] if has_rounds else [])]


def random_runs(directory: Path, seed: int) -> None:
    """Runs of a random algorithm on random pools, with random delays and rows in chunks, that have the results of one
    without delays and in one chunk, also from its first checkpoint on, or one of whose calls fails, with the error of
    the call."""
    chosen = random.Random(seed)
    name = chosen.choice(NAMES)
    ahead, every = chosen.choice((0, 1, 1, 2, 3)), chosen.choice((0, 2, 3))
    roles = ROLES.get(name, ("actor", "reference", "reward"))
    pools = [f"pools.p{i}={chosen.sample(['d0', 'd1', 'd2'], chosen.randint(2, 3))}" for i in range(2)]
    rollout = [ROLLOUT] if chosen.random() < 0.5 else []
    roles = (*roles, "rollout") if rollout else roles
    placed = [f"services.{role}.pool='p{chosen.randint(0, 1)}'" for role in roles if chosen.random() < 0.8]
    table = [
        f"run.ahead={ahead}",
        f"rollout.segments={chosen.randint(1, min(ahead + 1, 4))}",
        f"run.steps={chosen.randint(2, 5)}",
        f"run.evaluate_every={chosen.randint(0, 3)}",
    ]
    values = [VALUES] if "critic" in roles and chosen.random() < 0.5 else []
    table += [*rollout, *values, *pools, *placed, *random_rewards(name, seed)]
    calm = simulate(directory, name, *table, every=every)
    check_rows(calm, ahead)
    table.append(f"rollout.chunks={chosen.randint(1, 4)}")
    if chosen.random() < 0.5:
        table.append("algorithm.aggregation='seq-mean-token-sum'")
    if 0 < (step := every) < max(calm.notes.metrics):
        weather = Weather(len(STORMS) * seed, 0.003)
        rest = simulate(directory, name, *table, every=every, weather=weather, resumed=calm.saver.saved[step])
        metrics, states = results(calm)
        assert results(rest) == ({at: metrics[at] for at in metrics if at > step}, states)
    for number, fails in enumerate(STORMS):
        weather = Weather(
            len(STORMS) * seed + number, 0.003, chosen.randint(1, len(calm.log)) if fails else 0
        )
        if fails:
            with pytest.raises(RlhfError, match="struck by lightning"):
                simulate(directory, name, *table, every=every, weather=weather)
        else:
            stormy = simulate(directory, name, *table, every=every, weather=weather)
            check_rows(stormy, ahead)
            assert results(stormy) == results(calm)


@pytest.fixture
def known_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has entry points looked up once: a run does so once, which takes as long as the rest of a simulated one."""
    monkeypatch.setattr(plugins, "entry_points", ENTRY_POINTS)


@pytest.mark.parametrize("part", range(6))
@pytest.mark.usefixtures("known_plugins")
def test_random_schedules(part: int, tmp_path: Path) -> None:
    """300 schedules in all."""
    for seed in range(10 * part, 10 * (part + 1)):
        random_runs(tmp_path, seed)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("known_plugins")
def test_3000_random_schedules(tmp_path: Path) -> None:
    for seed in range(1000, 1600):
        random_runs(tmp_path, seed)
        if seed % 10 == 0:
            gc.collect()  # runs that fail are kept by their errors, with the files of their data


def waits_for_all(run: Run) -> None:
    """Reads log-probabilities and the metrics of an update in the loop itself."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch = reward.score(batch)
        columns = run.fetch(batch, "log_probs", "rewards", "group")
        assert len(columns["rewards"]) == batch.rows
        batch |= compute_advantage(run, step, batch)
        updated = actor.update_actor(batch)
        step.metrics["seen"] = float(len(updated.records()))
        assert run.evaluate()["time/evaluation_s"] > 0
        step.finish(batch, updated)


def test_a_loop_that_waits_for_what_was_updated_goes_on(tmp_path: Path) -> None:
    run = simulate(tmp_path, "dr_grpo", "run.ahead=2", algorithm=waits_for_all)
    check_rows(run, 0)
    assert [run.notes.metrics[step]["seen"] for step in range(1, 6)] == [1.0] * 5


def reads_the_metrics_of_updates(run: Run) -> None:
    """Waits for nothing of a step before its update."""
    actor, reward = run.actor(), run.reward()
    for step in run.steps():
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch = reward.score(batch)
        batch |= compute_advantage(run, step, batch)
        updated = actor.update_actor(batch)
        step.metrics["seen"] = float(len(updated.records()))
        step.finish(batch, updated)


@pytest.mark.parametrize("ahead", [1, 2])
def test_an_update_whose_metrics_are_read_waits_for_the_evaluation_of_the_step_before(
    ahead: int, tmp_path: Path
) -> None:
    table = (f"run.ahead={ahead}", "run.evaluate_every=1", "run.evaluation_rows=4")
    calm = simulate(tmp_path, "dr_grpo", *table, algorithm=reads_the_metrics_of_updates)
    check_rows(calm, ahead)
    stormy = Weather(seed=ahead, longest_s=0.004)
    repeated = simulate(tmp_path, "dr_grpo", *table, algorithm=reads_the_metrics_of_updates, weather=stormy)
    assert results(repeated) == results(calm)


def test_a_loop_that_waits_for_a_thread_that_waits_for_what_is_held_back_ends(tmp_path: Path) -> None:
    """The thread cannot begin the calls that its column needs, as the loop does that when it goes on."""

    def stuck(run: Run) -> None:
        actor = run.actor()
        for step in run.steps():
            batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
            batch |= actor.compute_log_prob(batch)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(run.fetch, batch, "log_probs").result(20)
            step.finish(batch)

    table = ("run.ahead=1", "run.call_timeout_s=0.2", "run.save_timeout_s=0.3")
    with pytest.raises(
        RlhfError, match=r"^step 1: 1 of 1 .* after 0\.3 s: .* are held back \(run\.ahead\)"
    ) as caught:
        simulate(tmp_path, "dr_grpo", *table, algorithm=stuck)
    assert not isinstance(caught.value, LOST), "a restart would repeat it"


def test_a_thread_may_wait_for_what_is_held_back_while_the_loop_goes_on(tmp_path: Path) -> None:
    seen = []

    def beside(run: Run) -> None:
        actor = run.actor()
        with ThreadPoolExecutor(1) as pool:
            for step in run.steps():
                batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
                batch |= actor.compute_log_prob(batch)
                seen.append(pool.submit(run.fetch, batch, "log_probs"))
                step.finish(batch)

    simulate(tmp_path, "dr_grpo", "run.ahead=1", "run.evaluate_every=0", algorithm=beside)
    assert all("log_probs" in each.result(20) for each in seen)


def test_a_thread_may_wait_for_as_long_as_the_loop_makes_calls(tmp_path: Path) -> None:
    """The calls of a step may take longer together than the timeout of each."""
    seen, waiting = [], threading.Event()

    def wait(run: Run, batch: FutureBatch) -> dict[str, Any]:
        waiting.set()
        return run.fetch(batch, "log_probs")

    def slow(run: Run) -> None:
        actor = run.actor()
        with ThreadPoolExecutor(1) as pool:
            for step in run.steps():
                batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
                batch |= actor.compute_log_prob(batch)
                if step.number == 1:
                    seen.append(pool.submit(wait, run, batch))
                    assert waiting.wait(20)
                    for _ in range(10):
                        time.sleep(0.1)
                        actor.generate_sequences(step.prompts).records(20)
                step.finish(batch)

    table = ("run.ahead=1", "run.evaluate_every=0", "run.call_timeout_s=0.4", "run.save_timeout_s=0.5")
    simulate(tmp_path, "dr_grpo", *table, algorithm=slow)
    assert "log_probs" in seen[0].result(20)


def measures_rows_of_its_own(run: Run) -> None:
    """Its evaluation makes new rows, which belong to no step, and waits for the actor's log-probabilities of them."""
    actor, reward = run.actor(), run.reward()

    def measure(heldout: FutureBatch) -> Measured:
        rows = FutureBatch.of(prompt=[f"Think first. {text}" for text in texts_of(heldout, "prompt")])
        batch = rows | actor.generate_sequences(rows)
        batch |= actor.compute_log_prob(batch)
        return {"sums": row_sums(run.fetch(batch, "log_probs")["log_probs"])}, [batch]

    for step in run.steps(Evaluation(measure, lambda values: {"sum": float(values["sums"].sum())})):
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch = reward.score(batch)
        batch |= compute_advantage(run, step, batch)
        step.finish(batch, actor.update_actor(batch))


@pytest.mark.parametrize("ahead", [1, 2])
def test_new_rows_of_an_evaluation_belong_to_its_step(ahead: int, tmp_path: Path) -> None:
    table = (f"run.ahead={ahead}", "run.evaluate_every=1")
    calm = simulate(tmp_path, "dr_grpo", *table, algorithm=measures_rows_of_its_own)
    check_rows(calm, ahead)
    made = Counter(entry.step for entry in of_actor(calm, "generate_sequences"))
    assert made == {0: 1, **dict.fromkeys(range(1, 6), 2)}
    for seed in range(3):
        weather = Weather(seed=seed, longest_s=0.004)
        stormy = simulate(tmp_path, "dr_grpo", *table, algorithm=measures_rows_of_its_own, weather=weather)
        assert results(stormy) == results(calm)


@future_columns("advantages")
def with_new_rows(run: Run, step: Step, batch: FutureBatch) -> FutureBatch:
    """Has the reference compute new rows, which belong to no step."""
    lengths = run.lengths(batch)
    ids = Jagged(np.arange(lengths.sum()), lengths)
    rows = FutureBatch.of(prompt_ids=ids, response_ids=ids)
    found = run.fetch(run.reference().compute_ref_log_prob(rows), "ref_log_probs")
    return FutureBatch.of(advantages=row_sums(found["ref_log_probs"]))


def computes_rows_of_its_own(run: Run) -> None:
    actor = run.actor()
    for step in run.steps():
        batch = step.prompts | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= with_new_rows(run, step, batch)
        step.finish(batch, actor.update_actor(batch))


def test_new_rows_of_a_later_function_belong_to_its_step(tmp_path: Path) -> None:
    for seed in range(3):
        weather = Weather(seed=seed, longest_s=0.004)
        table = ("run.ahead=1", "run.evaluate_every=0")
        run = simulate(tmp_path, "grpo", *table, weather=weather, algorithm=computes_rows_of_its_own)
        steps = [entry.step for entry in run.log if entry.method == "compute_ref_log_prob"]
        assert steps == list(range(1, 6))


def stops_at_three(run: Run) -> None:
    for step in run.steps():
        batch = step.prompts | step.groups | run.actor().generate_sequences(step.prompts)
        batch |= run.actor().compute_log_prob(batch)
        if step.number == 3:
            step.stop()
        step.finish(batch)


def test_a_step_that_is_made_the_last_ends_the_run(tmp_path: Path) -> None:
    run = simulate(tmp_path, "dr_grpo", "run.ahead=2", algorithm=stops_at_three)
    assert list(run.notes.metrics) == [0, 1, 2, 3]


def test_a_later_function_cannot_end_the_run(tmp_path: Path) -> None:
    def late(run: Run) -> None:
        for step in run.steps():
            batch = step.prompts | run.actor().generate_sequences(step.prompts)

            def work(step: Step = step, batch: Any = batch) -> Any:
                step.stop()
                return batch

            step.finish(batch | step.later(work, ["response_ids"], batch.rows))

    with pytest.raises(InvalidRequest, match="only be called by the loop"):
        simulate(tmp_path, "dr_grpo", "run.ahead=1", algorithm=late)


def test_a_loop_that_fails_leaves_nothing_waiting(tmp_path: Path) -> None:
    def broken(run: Run) -> None:
        for step in run.steps():
            batch = step.prompts | run.actor().generate_sequences(step.prompts)
            batch |= run.actor().compute_log_prob(batch)
            if step.number == 2:
                raise ValueError("mine")
            step.finish(batch)

    with pytest.raises(ValueError, match="mine"):
        simulate(tmp_path, "dr_grpo", "run.ahead=2", algorithm=broken)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.top_k=5", "does not go with rollout.top_k, rollout.top_p or rollout.min_p"),
        ("rollout.top_p=0.9", "does not go with rollout.top_k, rollout.top_p or rollout.min_p"),
        ("rollout.min_p=0.1", "does not go with rollout.top_k, rollout.top_p or rollout.min_p"),
        (
            "algorithm.recompute_log_probs=false",
            "algorithm.recompute_log_probs: must be true with run.ahead 1",
        ),
        ("algorithm.max_log_prob_drift=0.1", "algorithm.max_log_prob_drift: must be 0 with run.ahead 1"),
    ],
)
def test_what_an_update_off_policy_needs_is_checked(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(QUICKSTARTS / "quickstart.toml", ("run.ahead=1", setting))


def test_rows_of_older_weights_are_corrected_for_unless_the_config_says_otherwise() -> None:
    ppo = algorithms.find_algorithm("ppo")

    def correction(*settings: str) -> str:
        return ppo.configure(load(QUICKSTARTS / "quickstart.toml", settings)).algorithm.rollout_correction

    assert correction() == "none"
    assert correction("run.ahead=1") == "taper"
    assert correction("run.ahead=1", "algorithm.rollout_correction='none'") == "none"
    assert correction("run.ahead=1", "algorithm.rollout_correction='mask'") == "mask"
