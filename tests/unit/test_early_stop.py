"""Runs that end where evaluations stop improving: `run.patience`."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.simulated_run import QUICKSTARTS, Simulation, Weather, simulate

from controller import evaluate, export, plan
from controller.config.config import Config, load
from controller.mapping import probe
from controller.role_groups.dataflow import FutureBatch
from controller.tracking.contents import SUMMARY_FILE
from controller.training.evaluation import Evaluation, Measured, has_stalled
from controller.training.run import Run
from rlhf.errors import ConfigError

CURVE = {0: 0.1, 2: 0.5, 4: 0.4, 6: 0.5, 8: 0.9, 10: 1.0, 12: 1.0}
"""Held-out metric after each step with an evaluation: those of steps 4 and 6 are not better than that of step 2."""


def watching(patience: int, *further: str, best_is: str = "highest") -> tuple[str, ...]:
    best = ("checkpoint.every=2", "checkpoint.best='evaluation/x'", f"checkpoint.best_is='{best_is}'")
    return (f"run.patience={patience}", *best, *further)


def config_of(patience: int, best_is: str = "highest") -> Config:
    return load(QUICKSTARTS / "quickstart.toml", watching(patience, best_is=best_is))


@pytest.mark.parametrize(
    ("values", "best_is", "patience", "expected"),
    [
        ([0.1, 0.5, 0.4, 0.5], "highest", 2, True),
        ([0.1, 0.5, 0.4, 0.5], "highest", 3, False),
        ([0.1, 0.5, 0.4, 0.6], "highest", 2, False),
        ([0.1, 0.5, 0.4, 0.5, 0.9], "highest", 2, True),
        ([3.0, 2.0, 2.0, 1.0], "lowest", 2, False),
        ([3.0, 2.0, 2.5, 2.0], "lowest", 2, True),
        ([3.0, math.nan, math.nan], "lowest", 2, True),
        ([math.nan, 3.0, 2.0], "lowest", 2, False),
        ([1.0, 1.0, 1.0], "highest", 0, False),
        ([1.0], "highest", 1, False),
        ([], "highest", 1, False),
    ],
)
def test_a_run_has_stalled_after_as_many_evaluations_without_a_better_value(
    values: list[float], best_is: str, patience: int, expected: bool
) -> None:
    history = [{"x": value, "y": float(number)} for number, value in enumerate(values)]
    assert has_stalled(config_of(patience, best_is), history) is expected
    assert not has_stalled(config_of(patience, best_is), [{"y": 1.0}] * 9)


def measured(run: Run) -> None:
    """Updates an actor; the held-out metric is that of `CURVE`, or 0 after any other step."""

    def measure(heldout: FutureBatch) -> Measured:
        made = run.actor().generate_sequences(heldout, greedy=True)
        assert heldout.step is not None
        return {"step": np.full(heldout.rows, heldout.step.number)}, [made]

    def summarize(values: Any) -> dict[str, float]:
        return {"x": CURVE.get(int(values["step"][0]), 0.0)}

    actor, reward = run.actor(), run.reward()
    for step in run.steps(Evaluation(measure, summarize)):
        batch = step.prompts | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch = reward.score(batch)
        batch |= FutureBatch.of(advantages=np.ones(batch.rows)).of_step(step.context)
        step.finish(batch, actor.update_actor(batch))


def simulated(directory: Path, *settings: str, **options: Any) -> Simulation:
    table = ("run.steps=12", "run.evaluate_every=2", *settings)
    return simulate(directory, "grpo", *table, algorithm=measured, **options)


def test_a_run_ends_as_after_its_last_step(tmp_path: Path) -> None:
    stopped = simulated(tmp_path, *watching(2))
    whole = simulated(tmp_path, "run.steps=6")
    assert max(stopped.notes.metrics) == 6
    assert (stopped.notes.metrics, stopped.states()) == (whole.notes.metrics, whole.states())
    assert stopped.notes.said == [
        "run.patience: 2 evaluations in a row without a better value of checkpoint.best; the run ends after step 6"
    ]
    assert max(simulated(tmp_path, *watching(3)).notes.metrics) == 12


@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_run_that_goes_on_ends_after_the_same_step(ahead: int, every: int, tmp_path: Path) -> None:
    table = (f"run.ahead={ahead}", *watching(2))
    whole = simulated(tmp_path, *table, every=every)
    last = max(whole.notes.metrics)
    assert 6 <= last <= (6 + ahead + 1 if ahead else 6)
    assert "evaluation/x" in whole.notes.metrics[last]
    for seed in range(3):
        again = simulated(tmp_path, *table, every=every, weather=Weather(seed, 0.003))
        assert (again.notes.metrics, again.states()) == (whole.notes.metrics, whole.states())
    for step in [each for each in whole.saver.cuts if each % 4 == 0 or each == last]:
        rest = simulated(tmp_path, *table, every=every, resumed=whole.saver.saved[step])
        later = {number: found for number, found in whole.notes.metrics.items() if number > step}
        if every or not ahead or step == last:
            assert (rest.notes.metrics, rest.states()) == (later, whole.states())


def test_more_patience_goes_on(tmp_path: Path) -> None:
    stopped = simulated(tmp_path, *watching(2))
    rest = simulated(tmp_path, *watching(4), resumed=stopped.saver.saved[6])
    whole = simulated(tmp_path)
    assert list(rest.notes.metrics) == [*range(7, 13)]
    assert rest.states() == whole.states()


def test_a_run_that_has_ended_says_how_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / SUMMARY_FILE).write_text("{}")
    history = [{"x": value} for value in (0.1, 0.5, 0.4, 0.5)]
    point: Any = SimpleNamespace(run_dir=tmp_path, run={"is_ended": False, "evaluations": history}, step=6)
    with pytest.raises(
        ConfigError, match=r"run\.patience, 2, has ended the run after step 6; --set run.patience"
    ):
        plan._check_unfinished(point, config_of(2))
    plan._check_unfinished(point, config_of(3))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("run.patience=2",),
            r"run\.patience: needs checkpoint\.best, a metric of evaluations .*\(given: ''\)",
        ),
        (
            ("run.patience=2", "checkpoint.every=2", "checkpoint.best='kl/mean'"),
            r"run\.patience: needs checkpoint\.best, a metric of evaluations .*\(given: 'kl/mean'\)",
        ),
        (
            watching(2, "run.evaluate_every=0", "run.steps=4"),
            r"run\.patience: needs evaluations between the steps, and run\.evaluate_every is 0",
        ),
    ],
)
def test_patience_needs_evaluations_and_a_metric_of_them(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(QUICKSTARTS / "quickstart.toml", settings)


def test_configs_that_are_made_of_that_of_a_run_with_patience_are_valid(tmp_path: Path) -> None:
    """Those of an evaluation, an export and a probe, which have no checkpoints."""
    given, settings = QUICKSTARTS / "quickstart.toml", watching(2)
    point: Any = SimpleNamespace(facts={"config": config_of(2).model_dump(mode="json", exclude_none=True)})
    for made in (
        evaluate._config(tmp_path, None, given, settings),
        export._config(tmp_path, point, "actor", ()),
        probe._probe_config(load(given, settings)),
    ):
        Config.model_validate(made.model_dump(mode="json", exclude_none=True))
