"""Metrics on held-out rows: their names, accuracy or reward, and pass@k; and what can be evaluated."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomli_w
from unit.simulated_run import simulate

from controller import evaluate as evaluating
from controller import job
from controller.algorithms import find_algorithm, names
from controller.algorithms.sft import mean_loss
from controller.checkpoints.journal import FORMAT
from controller.checkpoints.store import CheckpointStore
from controller.config.config import Config, load
from controller.evaluate import evaluate
from controller.plan import Plan
from controller.role_groups.dataflow import FutureBatch
from controller.training.evaluation import Evaluation, Measured
from controller.training.pass_at_k import pass_at_k, sampled_evaluation
from controller.training.policy_evaluation import SCORES, PolicyEvaluation, is_share
from controller.training.run import Run
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

QUICKSTARTS = Path(__file__).parents[2] / "deploy" / "quickstart"
WITH_A_POLICY = tuple(name for name in names() if name != "reward_model")


def said(lowest: float, highest: float) -> worker_pb2.DescribeResponse:
    return worker_pb2.DescribeResponse(score_range=worker_pb2.ScoreRange(lowest=lowest, highest=highest))


SERVICES = {
    "answer": said(0, 1),
    "form": said(0, 1),
    "judge": said(0, 10),
    "model": worker_pb2.DescribeResponse(),
}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"answer": 1.0}, True),
        ({"answer": 0.8, "form": 0.2}, True),
        ({"judge": 0.1}, True),
        ({"answer": 1.0, "form": 0.2}, False),
        ({"answer": 1.0, "form": -0.2}, False),
        ({"judge": 1.0}, False),
        ({"model": 1.0}, False),
        ({"answer": 0.5, "model": 0.5}, False),
    ],
)
def test_a_reward_is_an_accuracy_where_it_lies_between_0_and_1(
    weights: dict[str, float], expected: bool
) -> None:
    assert is_share(weights, SERVICES) is expected


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_that_contain_a_right_one(samples: int) -> None:
    for solved in range(samples + 1):
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(range(samples), k))
            share = sum(min(draw) < solved for draw in draws) / len(draws)
            assert pass_at_k(np.array([solved]), np.array([samples]), k) == pytest.approx([share])


@pytest.mark.parametrize(("policy", "dropped"), [("stop", None), ("drop_group", 3.0)])
def test_rows_that_a_reward_or_a_cost_did_not_score_are_counted(policy: str, dropped: float | None) -> None:
    nan, unused = math.nan, SimpleNamespace()
    config = load(QUICKSTARTS / "quickstart.toml", (f"algorithm.on_failed_reward='{policy}'",))
    groups: Any = {"reward": SimpleNamespace(description=said(0, 1))}
    made: Any = PolicyEvaluation(config, groups, *(unused,) * 3)  # type: ignore[arg-type]
    scores, costs = np.array([1.0, nan, nan, 0.0]), np.array([nan, nan, 2.0, 4.0])
    found = made.evaluation().summarize({SCORES: scores, "cost": costs})
    assert found.pop("rows_dropped", None) == dropped
    assert found == {"accuracy": 0.5, "cost": 3.0}


def test_responses_that_were_not_scored_are_not_wrong() -> None:
    """Of two prompts with four responses each, one right response and three without a score, and all right but one."""
    nan = math.nan
    scores = np.array([1.0, nan, nan, nan, 1.0, 1.0, 0.0, 1.0])
    actor: Any = SimpleNamespace(generate_sequences=lambda rows: FutureBatch.of(response=np.zeros(rows.rows)))
    reward: Any = SimpleNamespace(score_for_eval=lambda batch: FutureBatch.of(rewards=scores))
    evaluation = sampled_evaluation(actor, reward, samples=4, solved_at=1.0)
    values, _ = evaluation.measure(FutureBatch.of(prompt=["a", "b"]))
    assert evaluation.summarize(values) == {
        "sampled_reward": 0.8,
        "pass_at_1": (1 + 3 / 4) / 2,
        "pass_at_2": 1.0,  # of the second prompt alone
        "pass_at_4": 1.0,
        "sampled_rows_dropped": 3.0,
    }


def test_numbers_of_any_type_are_those_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    def measured(run: Run) -> None:
        def measure(heldout: FutureBatch) -> Measured:
            made = run.actor().generate_sequences(heldout, greedy=True)
            return {"tokens": run.lengths(made).astype(np.float32)}, [made]

        for step in run.steps(Evaluation(measure, lambda values: {"tokens": values["tokens"].mean() / 10})):
            step.finish(step.prompts | run.actor().generate_sequences(step.prompts))

    table = ("run.steps=2", "run.evaluate_every=1")
    whole = simulate(tmp_path, "grpo", *table, algorithm=measured)
    rest = simulate(tmp_path, "grpo", *table, algorithm=measured, resumed=whole.saver.saved[1])
    histories = [run.saver.saved[2][0]["evaluations"] for run in (whole, rest)]
    assert histories[0] == histories[1]
    assert {type(found["tokens"]) for found in histories[0]} == {float}


def test_a_resumed_run_does_not_record_its_step_again(tmp_path: Path) -> None:
    found = []

    def measured(run: Run) -> None:
        run.recorder.samples = lambda step, rows: samples.append(step)  # type: ignore[method-assign]
        found.append(run.evaluate())
        for step in run.steps():
            step.finish(step.prompts | run.actor().generate_sequences(step.prompts))

    table = ("run.steps=2", "run.evaluate_every=1", "run.samples=1")
    samples: list[int] = []
    whole = simulate(tmp_path, "grpo", *table, algorithm=measured)
    assert samples == [0, 0, 1, 2]
    samples = []
    rest = simulate(tmp_path, "grpo", *table, algorithm=measured, resumed=whole.saver.saved[1])
    assert samples == [2]
    assert {step for step, _ in rest.notes.records} == {2}
    histories = [run.saver.saved[2][0]["evaluations"] for run in (whole, rest)]
    assert histories[0] == histories[1]
    assert all("evaluation/reward" in each for each in found)


def config_of(algorithm: str, directory: Path) -> Config:
    """The config of a run of an algorithm, with its options, as the run writes it."""
    (rows := directory / "rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    found = find_algorithm(algorithm)
    settings = [f"data.train='{rows}'", f"data.heldout='{rows}'", "data.sources=[]"]
    return found.configure(load(QUICKSTARTS / f"{found.quickstart}.toml", tuple(settings)))


def checkpoint_of(algorithm: str, directory: Path) -> Path:
    """A checkpoint of a run of an algorithm, without states of services."""
    resolved = find_algorithm(algorithm).resolved(config_of(algorithm, directory))
    store = CheckpointStore(directory)
    store.begin(1)
    content = {"format": FORMAT, "step": 1, "run": {}, "files": {}, "facts": {"config": resolved}}
    store.commit(1, json.dumps(content), {})
    return store.place(1)


class Opened(Exception):
    """A plan was made, which is to be opened."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of runs, which end when they are opened."""
    plans: list[Plan] = []

    def note(plan: Plan, *parts: Any, **options: Any) -> None:
        plans.append(plan)
        raise Opened

    monkeypatch.setattr(evaluating, "open_planned", note)
    monkeypatch.setattr(job, "open_planned", note)
    return plans


@pytest.mark.parametrize("algorithm", WITH_A_POLICY)
def test_a_checkpoint_of_every_algorithm_with_a_policy_is_evaluated(
    algorithm: str, tmp_path: Path, plans: list[Plan]
) -> None:
    place = checkpoint_of(algorithm, tmp_path)
    with pytest.raises(Opened):
        evaluate(place)
    assert plans[0].loads == {"actor": place / "actor"}
    assert {table.role for table in plans[0].config.services.values()} <= {"actor", "reward"}


def test_a_checkpoint_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy of a service of role actor, and the config has none"):
        evaluate(checkpoint_of("reward_model", tmp_path))


@pytest.mark.parametrize("algorithm", WITH_A_POLICY)
def test_a_model_is_evaluated_with_the_config_of_every_algorithm(
    algorithm: str, tmp_path: Path, plans: list[Plan]
) -> None:
    tables = config_of(algorithm, tmp_path).model_dump(mode="json", exclude_none=True)
    (path := tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Opened):
        evaluate(tmp_path, config_path=path)
    assert plans[0].config.services["actor"].model_directory == tmp_path


def test_a_model_is_that_of_the_service_of_role_actor_whatever_the_names(
    tmp_path: Path, plans: list[Plan]
) -> None:
    tables = config_of("dpo", tmp_path).model_dump(mode="json", exclude_none=True)
    tables["services"]["policy"] = tables["services"].pop("actor")
    (path := tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    (model := tmp_path / "Ann's model").mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(Opened):
        evaluate(model, config_path=path)
    assert plans[0].config.services["policy"].model_directory == model


@pytest.mark.parametrize("algorithm", names())
def test_a_run_by_hand_has_the_config_of_every_algorithm(
    algorithm: str, tmp_path: Path, plans: list[Plan]
) -> None:
    config = config_of(algorithm, tmp_path)
    with pytest.raises(Opened):
        job.open_run(config)
    assert plans[0].config.algorithm.options == config.algorithm.options
    assert plans[0].config.services.keys() == config.services.keys()


def test_a_model_whose_perplexity_exceeds_the_largest_float_is_evaluated() -> None:
    found = mean_loss({"loss": np.array([1600.0, 0.0]), "tokens": np.array([2, 0])})
    assert found == {"loss": 800.0, "perplexity": math.inf}
    found = mean_loss({"loss": np.array([1200.0, 200.0]), "tokens": np.array([1, 1])})
    assert found == {"loss": 700.0, "perplexity": math.exp(700.0)}
