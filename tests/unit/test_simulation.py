"""Simulated runs: virtual time, order of calls, overlap, stragglers, and durations that a run has measured."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.simulation import many_ranks
from client import waiting
from client.waiting import counting, settle
from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.mapping.cli import main
from controller.mapping.record import record_dataflow
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import Promise, on_thread
from controller.role_groups.loop import Loop
from controller.role_groups.roles import ActorGroup
from controller.simulation.clock import VirtualTimeLoop
from controller.simulation.durations import CallTimes, Durations, TimedCall, measured
from controller.simulation.report import steps_table
from controller.simulation.run import SimulatedRun, Trace, simulate_run
from controller.tracking.timeline import Timeline
from controller.training.evaluation import Evaluation, Measured
from controller.training.loop import StepLoop
from controller.training.run import Run
from controller.training.step import Step
from rlhf.errors import ConfigError, DeadlineExceeded

QUICKSTART = Path(__file__).parents[2] / "deploy/quickstart/quickstart.toml"
SECONDS = {
    ("actor", "generate_sequences"): [4.0],
    ("actor", "compute_log_prob"): [1.0],
    ("critic", "compute_values"): [2.0],
    ("reference", "compute_ref_log_prob"): [1.5],
    ("reward", "compute_reward"): [3.0],
    ("critic", "update_critic"): [5.0],
    ("actor", "update_actor"): [7.0],
}
PROMPTS, RESPONSES = [(8, 1.0)], [(2, 0.5), (30, 0.5)]


def configured(name: str, *settings: str) -> Config:
    algorithm = find_algorithm(name)
    config = QUICKSTART.with_name(f"{algorithm.quickstart}.toml")
    sizes = ("data.prompts_per_step=64", "algorithm.mini_batch_size=16")
    return algorithm.configure(load(config, (*sizes, *settings)))


def trace_of(name: str, *settings: str, steps: int = 3, durations: Durations | None = None) -> Trace:
    found = durations or Durations(CallTimes(SECONDS))
    return simulate_run(configured(name, *settings), find_algorithm(name), found, PROMPTS, RESPONSES, steps)


def calls(trace: Trace, step: int) -> dict[str, tuple[float, float]]:
    return {f"{c.service}.{c.method}": (c.start, c.end) for c in trace.calls if c.step == step}


def seen(trace: Trace) -> tuple[list[TimedCall], list[Mapping[str, float]], dict[int, float], int, int]:
    return trace.calls, trace.metrics, trace.straggling, trace.requests, trace.nbytes


def test_a_step_takes_as_long_as_its_longest_path() -> None:
    began = time.monotonic()
    trace = trace_of("ppo")
    assert time.monotonic() - began < 20
    assert [metrics["time/step_s"] for metrics in trace.metrics] == pytest.approx([4 + 3 + 7] * 3)
    assert calls(trace, 2)["critic.update_critic"] == pytest.approx((14 + 7, 14 + 12))


def test_times_of_steps_add_up_to_the_run_where_evaluations_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(run: SimulatedRun, evaluation: Evaluation | None = None) -> Iterator[Step]:
        def measure(prompts: FutureBatch) -> Measured:
            made = run.actor().generate_sequences(prompts, greedy=True)
            made.records()  # waits
            return {"x": np.zeros(prompts.rows)}, (made,)

        return Run.steps(run, Evaluation(measure, lambda values: {"x": 0.0}))

    made = StepLoop.__init__
    monkeypatch.setattr(SimulatedRun, "steps", steps)
    monkeypatch.setattr(
        StepLoop,
        "__init__",
        lambda loop, table, *rest: made(loop, table.model_copy(update={"evaluate_every": 2}), *rest),
    )
    trace = trace_of("ppo", "run.ahead=1", steps=6)
    began = min(call.start for call in trace.calls if call.step == 1)
    ended = max(call.end for call in trace.calls if call.step == 6 and "update" in call.method)
    # Whether an evaluation or the next step generates first is not determined, and so neither is the time of one.
    assert [metrics.get("time/evaluation_s", 0) > 0 for metrics in trace.metrics] == [False, True] * 3
    assert sum(metrics["time/step_s"] for metrics in trace.metrics) == pytest.approx(ended - began)


def test_an_algorithm_may_evaluate_in_its_loop() -> None:
    ppo, found = find_algorithm("ppo"), list[dict[str, float]]()

    def evaluates(run: Run) -> None:
        found.append(run.evaluate())
        ppo.function(run)

    durations, algorithm = Durations(CallTimes(SECONDS)), replace(ppo, function=evaluates)
    trace = simulate_run(configured("ppo"), algorithm, durations, PROMPTS, RESPONSES, 2)
    assert len(trace.metrics) == 2
    assert [name for name in found[0] if name.startswith("evaluation/")] == []


def test_services_that_share_devices_take_turns() -> None:
    shared = (
        'pools={one=["a","b"]}',
        *(f"services.{name}.pool='one'" for name in ("actor", "critic", "reference")),
    )
    trace = trace_of("ppo", *shared)
    assert [metrics["time/step_s"] for metrics in trace.metrics] == pytest.approx(
        [4 + 1 + 2 + 1.5 + 5 + 7] * 3
    )


def test_steps_ahead_overlap_and_are_stale() -> None:
    trace = trace_of("dr_grpo", "run.ahead=1", steps=6)
    assert [metrics["staleness/max"] for metrics in trace.metrics] == [0, 1, 1, 1, 1, 1]
    generated, updated = calls(trace, 4)["actor.generate_sequences"], calls(trace, 3)["actor.update_actor"]
    assert generated[0] < updated[0]


def test_rewards_and_forward_passes_of_a_chunk_start_while_the_next_is_generated(tmp_path: Path) -> None:
    trace = trace_of("ppo", "rollout.chunks=4")
    # Only the actor's own log-probabilities wait for all chunks. A chunk takes a quarter of the time of the whole.
    assert [metrics["time/step_s"] for metrics in trace.metrics] == pytest.approx([4 + 1 + 7] * 3)
    scored = [c for c in trace.calls if c.step == 1 and c.method == "compute_reward"]
    assert [call.start for call in scored] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert [call.end - call.start for call in scored] == pytest.approx([0.75] * 4)
    assert len([c for c in trace.calls if c.step == 1 and c.method == "update_actor"]) == 1
    timeline = Timeline(tmp_path, 0.0)
    for number, call in enumerate(c for c in trace.calls if c.method == "compute_reward"):
        args = {"step": call.step, **({"chunk": number % 4} if number % 4 else {})}
        timeline.add(("controller", call.service), call.method, call.start, call.end, args)
    timeline.close()
    found = measured(tmp_path, ["reward"])
    assert found.calls.usual["reward", "compute_reward"] == pytest.approx([3.0])


def test_gradients_of_a_chunk_are_computed_while_the_next_is_scored() -> None:
    seconds = {
        **SECONDS,
        ("reward", "compute_reward"): [8.0],
        ("actor", "prepare_update"): [6.0],
        ("actor", "update_actor"): [2.0],
    }
    trace = trace_of("dr_grpo", "rollout.chunks=4", durations=Durations(CallTimes(seconds)))
    # Rows are scored at 3, 5, 7 and 9 s; log-probabilities end at 5 s, and each chunk has gradients of 2 s.
    assert [metrics["time/step_s"] for metrics in trace.metrics] == pytest.approx([4 + 1 + 8] * 3)
    early = [c for c in trace.calls if c.step == 1 and c.method == "prepare_update"]
    assert [call.start for call in early] == pytest.approx([5.0, 7.0, 9.0])
    assert trace.metrics[0]["time/prepare_update_s"] == pytest.approx(6.0)
    assert calls(trace, 1)["actor.update_actor"] == pytest.approx((11.0, 13.0))


def check_repeats(name: str, ahead: int) -> None:
    durations = Durations(CallTimes(SECONDS), spread=0.3, seed=7)
    both = [seen(trace_of(name, f"run.ahead={ahead}", durations=durations)) for _ in range(2)]
    assert both[0] == both[1]
    assert len(both[0][1]) == 3


@pytest.mark.parametrize(("name", "ahead"), [("ppo", 0), ("ppo", 2), ("dapo", 0), ("sft", 2)])
def test_the_same_seed_gives_the_same_trace(name: str, ahead: int) -> None:
    check_repeats(name, ahead)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "remax", "rloo", "reinforce_pp", "safe_rlhf", "dr_grpo", "gspo", "distill"]
)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_same_seed_gives_the_same_trace_of_any_algorithm(name: str, ahead: int) -> None:
    check_repeats(name, ahead)


def test_another_seed_gives_other_stragglers() -> None:
    durations = Durations(CallTimes(SECONDS), spread=0.3, seed=7)
    one, two = (trace_of("ppo", durations=replace(durations, seed=seed)) for seed in (7, 8))
    assert one.straggling != two.straggling
    assert one.straggling[1] > 0


def test_rounding_makes_no_straggler_negative() -> None:
    trace = trace_of("ppo")
    trace.straggling = {1: -1e-16, 2: 0.0, 3: 0.5}
    cells = [*steps_table(trace).columns[4].cells]
    assert cells == ["", "", "500 ms"]


def test_it_repeats_the_step_times_of_a_measured_run(tmp_path: Path) -> None:
    steps = trace_of("ppo", durations=Durations(CallTimes(SECONDS), spread=0.3, seed=7))
    durations = measured(written(tmp_path, steps.calls), list(configured("ppo").services))
    again = trace_of("ppo", steps=4, durations=durations)
    known = [metrics["time/step_s"] for metrics in steps.metrics]
    assert [metrics["time/step_s"] for metrics in again.metrics[:3]] == pytest.approx(known, abs=1e-4)
    assert min(known) * 0.7 < again.metrics[3]["time/step_s"] < max(known) * 1.3


def written(directory: Path, spans: Iterable[TimedCall]) -> Path:
    timeline = Timeline(directory, 0.0)
    for call in spans:
        timeline.add(("controller", call.service), call.method, call.start, call.end, {"step": call.step})
    timeline.close()
    return directory


def test_calls_begin_and_end_as_in_the_timeline_of_a_run(tmp_path: Path) -> None:
    """The controller works 0.5 s before each step, 0.1 s before it sends each call of the preparation, and 0.2 s on
    advantages: calls begin late by that, and nothing else takes time."""
    recorded, at = [], 0.0
    for step in (1, 2, 3):
        generated = at + 0.5 + 4.0 * step
        scored = [
            TimedCall(generated + 0.1, generated + 1.1, "actor", "compute_log_prob", step),
            TimedCall(generated + 0.2, generated + 2.2, "critic", "compute_values", step),
            TimedCall(generated + 0.3, generated + 1.8, "reference", "compute_ref_log_prob", step),
            TimedCall(generated + 0.4, generated + 3.4, "reward", "compute_reward", step),
        ]
        begin = generated + 3.4 + 0.2
        recorded += [
            TimedCall(at + (0.5 if at else 0.0), generated, "actor", "generate_sequences", step),
            *scored,
            TimedCall(begin, begin + 5.0, "critic", "update_critic", step),
            TimedCall(begin + 0.1, begin + 7.1, "actor", "update_actor", step),
        ]
        at = begin + 7.1
    durations = measured(written(tmp_path, recorded), list(configured("ppo").services))
    found = trace_of("ppo", durations=durations).calls
    assert {(c.step, c.service, c.method) for c in found} == {(c.step, c.service, c.method) for c in recorded}
    for call in recorded:
        (same,) = (
            c for c in found if (c.step, c.service, c.method) == (call.step, call.service, call.method)
        )
        assert (same.start, same.end) == pytest.approx((call.start, call.end), abs=1e-4), call


@pytest.mark.parametrize("text", [None, "{}", "[\n"], ids=["no file", "no timeline", "no calls"])
def test_a_directory_without_times_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(
        ConfigError, match=f"--times {tmp_path}: (not the directory of a run|no call of actor)"
    ):
        measured(tmp_path, ["actor"])


def test_a_thread_that_nothing_will_wake_is_told_so() -> None:
    with counting() as threads:
        loop = Loop(VirtualTimeLoop(threads))
        with pytest.raises(DeadlineExceeded, match="stuck"):
            settle([Promise()])
    loop.close()


def shares(trace: Trace, devices: Mapping[str, frozenset[str]], step: int) -> tuple[float, float]:
    """Overlap and waiting in the time between the last calls of two steps, from the trace."""
    start, end = (max((c.end for c in trace.calls if c.step == n), default=0.0) for n in (step - 1, step))
    inside = [
        (max(c.start, start), min(c.end, end), devices[c.service])
        for c in trace.calls
        if c.end > start and c.start < end
    ]
    together = busy = 0.0
    for first, last in pairwise(sorted({start, end, *(at for call in inside for at in call[:2])})):
        running = [names for begin, stop, names in inside if begin <= first and stop >= last]
        together += (last - first) * any(not one & other for one in running for other in running)
        busy += (last - first) * len(frozenset[str]().union(*running))
    every = frozenset[str]().union(*devices.values())
    return together / (end - start), 1 - busy / ((end - start) * len(every))


@pytest.mark.parametrize("settings", [(), ("placement='split'",), ("run.ahead=1",)], ids=str)
def test_metrics_have_the_shares_of_overlap_and_waiting_of_the_trace(settings: tuple[str, ...]) -> None:
    durations = Durations(CallTimes(SECONDS), spread=0.3, seed=7)
    trace = trace_of("ppo", *settings, steps=4, durations=durations)
    config = configured("ppo", *settings)
    devices = {name: config.devices_of(name) for name in config.services}
    for step, metrics in enumerate(trace.metrics, start=1):
        overlap, idle = shares(trace, devices, step)
        assert metrics["time/overlap_share"] == pytest.approx(overlap, abs=1e-3)
        assert metrics["time/idle_share"] == pytest.approx(idle, abs=1e-3)


def test_a_thread_that_executes_for_ever_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "EXECUTES_S", 0.05)
    with counting() as threads:
        threads.begin()  # stands for a thread that never waits
        loop = Loop(VirtualTimeLoop(threads))
        with pytest.raises(DeadlineExceeded, match=r"stuck: a thread has executed for 0.05 s without a wait"):
            settle([Promise()])
        loop.close()


def test_a_thread_of_an_earlier_simulation_is_not_counted_in_the_next() -> None:
    goes_on = threading.Event()
    with counting():
        ended = on_thread(lambda: goes_on.wait(20), "left over")
        (thread,) = (each for each in threading.enumerate() if each.name == "left over")
    with counting() as threads:
        goes_on.set()
        thread.join(20)
        assert ended.result(0)
        assert threads._count == 1, "this thread"


def test_the_command_prints_a_timeline(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, 0.0)
    timeline.add(("controller", "actor"), "generate_sequences", 0.0, 4.0, {"step": 1})
    timeline.close()
    args = [
        "simulate",
        str(QUICKSTART),
        "--prompts",
        "8",
        "--times",
        str(tmp_path),
        "--steps",
        "2",
        "--show",
        "1",
    ]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    assert "2 actor.generate_sequences" in done.output
    assert "step 4.000 s (median of 2)" in done.output
    assert json.dumps(done.output).count("actor.update_actor") == 1


def test_the_command_needs_one_source_of_durations() -> None:
    done = CliRunner().invoke(main, ["simulate", str(QUICKSTART), "--prompts", "8"])
    assert done.exit_code == 2
    assert "give either --devices KIND:COUNT or --times RUN_DIR" in done.output


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_thousand_ranks_for_twenty_steps() -> None:
    """The bar: at most two minutes of CPU for 20 steps of PPO on three services of 1,024 ranks each."""
    found = many_ranks(20)
    assert found.cpu_s < 120
    assert found.requests > 20 * 6 * 1024
    assert found.repeats


def test_sources_that_are_only_evaluated_on_change_no_time_of_a_step() -> None:
    sources = "data.sources=[{name='contest',heldout='c.jsonl'},{name='sums',path='s.jsonl',heldout_rows=1}]"
    trace = trace_of("ppo", "data.train=''", "data.heldout=''", sources)
    assert [metrics["time/step_s"] for metrics in trace.metrics] == pytest.approx([4 + 3 + 7] * 3)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_responses_of_the_maximum_length_are_trained_on_where_those_that_were_cut_off_are_not(
    name: str, ahead: int
) -> None:
    """They are the workload of a plan where no lengths are given."""
    settings = (f"run.ahead={ahead}", f"rollout.max_response_tokens={RESPONSES[-1][0]}")
    plain = configured(name, *settings)
    found = configured(name, *settings, "algorithm.on_truncated='drop'")
    algorithm, durations = find_algorithm(name), Durations(CallTimes(SECONDS))
    assert record_dataflow(algorithm, found)[1:] == record_dataflow(algorithm, plain)[1:]
    one, other = (
        simulate_run(config, algorithm, durations, PROMPTS, RESPONSES[-1:], 2) for config in (plain, found)
    )
    assert sorted(call.method for call in other.calls) == sorted(call.method for call in one.calls)


def test_files_of_rows_change_no_time_of_a_step() -> None:
    assert seen(trace_of("ppo", "run.rollouts_every=1")) == seen(trace_of("ppo"))


@pytest.mark.parametrize(
    ("responses", "share"),
    [([(30, 1.0)], 1.0), ([(2, 1.0)], 1.0), (RESPONSES, 0.5)],
    ids=["all as long as possible", "all shorter", "some"],
)
def test_responses_that_were_cut_off_are_dropped_where_the_workload_has_others(
    responses: list[tuple[int, float]], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("ppo", "rollout.max_response_tokens=30", "algorithm.on_truncated='drop'")
    rows = list[int]()
    update = ActorGroup.update_actor

    def noted(group: ActorGroup, batch: FutureBatch, *arguments: Any, **options: Any) -> FutureBatch:
        rows.append(batch.rows)
        return update(group, batch, *arguments, **options)

    monkeypatch.setattr(ActorGroup, "update_actor", noted)
    durations = Durations(CallTimes(SECONDS))
    simulate_run(config, find_algorithm("ppo"), durations, PROMPTS, responses, 3)
    assert [count / 64 for count in rows] == pytest.approx([share] * 3, abs=0.2 if share < 1 else 0)
