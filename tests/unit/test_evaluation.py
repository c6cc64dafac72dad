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
from controller.config.rollout import EvaluationTable
from controller.data.prompts import load_data
from controller.evaluate import evaluate
from controller.plan import Plan
from controller.role_groups.dataflow import FutureBatch
from controller.training.evaluation import Evaluation, Measured, batches
from controller.training.policy_evaluation import SCORES, SOURCES, PolicyEvaluation, is_share, pass_at_k
from controller.training.roles import Rollout
from controller.training.run import Run
from controller.training.scoring import groups_of
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2, worker_pb2

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


def summarized(config: Config, values: dict[str, np.ndarray]) -> dict[str, float]:
    """The metrics of measured values, of a reward between 0 and 1."""
    unused, groups = SimpleNamespace(), {"reward": SimpleNamespace(description=said(0, 1))}
    evaluation = PolicyEvaluation(config, groups, *(unused,) * 3)  # type: ignore[arg-type]
    return evaluation.evaluation().summarize(values)


@pytest.mark.parametrize(("policy", "dropped"), [("stop", None), ("drop_group", 3.0)])
def test_rows_that_a_reward_or_a_cost_did_not_score_are_counted(policy: str, dropped: float | None) -> None:
    nan = math.nan
    config = load(QUICKSTARTS / "quickstart.toml", (f"algorithm.on_failed_reward='{policy}'",))
    scores, costs = np.array([1.0, nan, nan, 0.0]), np.array([nan, nan, 2.0, 4.0])
    found = summarized(config, {SCORES: scores, "cost": costs})
    assert found.pop("rows_dropped", None) == dropped
    assert found == {"accuracy": 0.5, "cost": 3.0}


def test_responses_that_were_not_scored_are_not_wrong() -> None:
    """Of two prompts with four responses each, one right response and three without a score, and all right but one."""
    nan = math.nan
    scores = np.array([1.0, nan, nan, nan, 1.0, 1.0, 0.0, 1.0])
    sampled = ("rollout.evaluation.samples=4", "rollout.evaluation.temperature=1")
    config = load(QUICKSTARTS / "quickstart.toml", (*sampled, "algorithm.on_failed_reward='drop_group'"))
    assert summarized(config, {SCORES: scores}) == {
        "accuracy": 0.8,
        "pass_at_1": (1 + 3 / 4) / 2,
        "pass_at_2": 1.0,  # of the second prompt alone
        "pass_at_4": 1.0,
        "rows_dropped": 3.0,
    }


def test_each_source_has_its_own_share_of_solved_prompts() -> None:
    settings = ("samples=3", "temperature=1", "solved_at=0.5")
    sources = "data.sources=[{path='a.jsonl',name='easy',heldout_rows=2},{path='b.jsonl',name='hard',heldout_rows=1}]"
    config = load(
        QUICKSTARTS / "quickstart.toml",
        ("data.train=''", "data.heldout=''", sources, *(f"rollout.evaluation.{each}" for each in settings)),
    )
    scores, sources = np.array([0.5, 0, 0, 1, 1, 0, 0, 0, 0]), np.repeat(["easy", "easy", "hard"], 3)
    easy = summarized(config, {SCORES: scores[:6], SOURCES: sources[:6]})
    assert easy["accuracy"] == pytest.approx(2.5 / 6)
    assert easy["pass_at_1"] == pytest.approx(1 / 2)
    assert easy["pass_at_2"] == pytest.approx((2 / 3 + 1) / 2)
    hard = summarized(config, {SCORES: scores[6:], SOURCES: sources[6:]})
    both = summarized(config, {SCORES: scores, SOURCES: sources})
    assert [each["pass_at_3"] for each in (both, easy, hard)] == [pytest.approx(2 / 3), 1, 0]


def test_each_prompt_counts_once_however_many_responses_its_source_has(tmp_path: Path) -> None:
    config = load(
        QUICKSTARTS / "quickstart.toml", two_sources(tmp_path, "evaluation={samples=4,temperature=1}")
    )
    scores = np.array([0, 1, 1, 1, 1, 1.0, 0, 0])
    values = {SCORES: scores, SOURCES: np.array(["math", "math", "math", "math", *["aime"] * 4])}
    assert summarized(config, values) == {"accuracy": pytest.approx((0 + 1 + 1 + 1 + 1 / 2) / 5)}
    assert summarized(config, {name: each[4:] for name, each in values.items()}) == {
        "accuracy": 0.5,
        "pass_at_1": 0.5,
        "pass_at_2": pytest.approx(5 / 6),
        "pass_at_4": 1.0,
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("samples=2",),
            "temperature: 0 takes the most probable token; samples, top_k, top_p and min_p need one above 0",
        ),
        (("top_p=0.9",), "temperature: 0 takes the most probable token"),
        (("top_k=5",), "temperature: 0 takes the most probable token"),
        (("min_p=0.1",), "temperature: 0 takes the most probable token"),
        (("temperature=1e-9",), "temperature: 0, or at least 1e-06"),
    ],
)
def test_options_of_sampling_need_a_temperature(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(QUICKSTARTS / "quickstart.toml", tuple(f"rollout.evaluation.{each}" for each in settings))


def test_a_repetition_penalty_is_of_evaluations_alone() -> None:
    settings = (
        "min_p=0.05",
        "stop_token_ids=[7]",
        "evaluation={repetition_penalty=1.2,temperature=1,min_p=0.1}",
    )
    config = load(QUICKSTARTS / "quickstart.toml", tuple(f"rollout.{each}" for each in settings))
    sent: list[actor_pb2.Sampling] = []
    group: Any = SimpleNamespace(generate_sequences=lambda rows, sampling, **options: sent.append(sampling))
    rollout, prompts = Rollout(group, config, returns_text=False), FutureBatch.of(prompt=["1+1="])
    rollout.generate_sequences(prompts)
    rollout.generate_sequences(prompts, greedy=True)
    rollout.generate_for_eval(prompts)
    assert [each.repetition_penalty for each in sent] == [0, 0, 1.2]
    assert [each.min_p for each in sent] == [0.05, 0.05, 0.1]
    assert [list(each.stop_token_ids) for each in sent] == [[7]] * 3


def test_the_temperature_is_one_that_the_engine_samples_at() -> None:
    settings = ("services.actor.rollout_engine='vllm'", "rollout.evaluation.temperature=0.001")
    with pytest.raises(
        ConfigError, match=r"rollout\.evaluation\.temperature: .*services.actor samples at .* from 0.01"
    ):
        load(QUICKSTARTS / "quickstart.toml", settings)


def two_sources(directory: Path, of_aime: str = "", of_math: str = "", aime: int = 2) -> tuple[str, ...]:
    """Settings of two sources with twelve rows, math, and rows to evaluate on alone, aime, and keys of their own."""
    lines = (f'{{"prompt": "aime {row}", "ground_truth": "x", "response": "y"}}\n' for row in range(aime))
    (directory / "aime.jsonl").write_text("".join(lines))
    math_, aime_ = (f",{keys}" if keys else "" for keys in (of_math, of_aime))
    sources = (
        f"data.sources=[{{name='math',path='{directory}/train.jsonl',heldout='{directory}/heldout.jsonl'{math_}}},"
        f"{{name='aime',heldout='{directory}/aime.jsonl'{aime_}}}]"
    )
    return "data.train=''", "data.heldout=''", sources


def test_what_an_algorithm_measures_itself_is_there_for_each_source(tmp_path: Path) -> None:
    """A number of each row, and three of each row; rows of two sources are in one batch."""

    def measured(run: Run) -> None:
        def measure(heldout: FutureBatch) -> Measured:
            made = run.actor().generate_sequences(heldout, greedy=True)
            texts = heldout.result(["prompt"])["prompt"].texts  # type: ignore[union-attr]
            is_aime = np.array([text.startswith("aime") for text in texts], float)
            return {"aime": is_aime, "thrice": np.repeat(is_aime, 3)}, [made]

        def summarize(values: Any) -> dict[str, float]:
            return {
                "rows": len(values["aime"]),
                "share": values["aime"].mean(),
                "of": values["thrice"].mean(),
            }

        for step in run.steps(Evaluation(measure, summarize)):
            step.finish(step.prompts | run.actor().generate_sequences(step.prompts))

    table = ("run.steps=2", "run.evaluation_rows=8", *two_sources(tmp_path))
    run = simulate(tmp_path, "grpo", *table, algorithm=measured)
    found = {name: value for name, value in run.notes.metrics[2].items() if name.startswith("evaluation/")}
    assert found == {
        **{"evaluation/rows": 14.0, "evaluation/share": 2 / 14, "evaluation/of": 2 / 14},
        **{"evaluation/rows_math": 12.0, "evaluation/share_math": 0.0, "evaluation/of_math": 0.0},
        **{"evaluation/rows_aime": 2.0, "evaluation/share_aime": 1.0, "evaluation/of_aime": 1.0},
    }


def test_numbers_that_belong_to_no_row_are_refused_where_there_are_several_sources(tmp_path: Path) -> None:
    def measured(run: Run) -> None:
        def measure(heldout: FutureBatch) -> Measured:
            return {"x": np.zeros(heldout.rows + 1)}, []

        run.evaluate(Evaluation(measure, lambda values: {}))

    with pytest.raises(InvalidRequest, match="15 numbers 'x' of 14 held-out rows"):
        simulate(tmp_path, "grpo", *two_sources(tmp_path), algorithm=measured)


def test_a_source_has_sampling_of_its_own(tmp_path: Path) -> None:
    """Greedy responses to the rows of one, and three sampled ones to each of the other, in batches of eight rows."""
    own = "evaluation={samples=3,temperature=0.6,top_p=0.95,solved_at=0.5}"
    table = ("run.steps=2", "run.evaluation_rows=8")
    run = simulate(tmp_path, "grpo", *table, *two_sources(tmp_path, own, aime=3))
    made = [each.rows for each in run.log if (each.method, each.step) == ("generate_sequences", 2)][1:]
    assert [len(rows) for rows in made] == [8, 4, 6, 3]
    assert all(len(set(rows)) == len(rows) for rows in made[2:])
    found = {name.removeprefix("evaluation/") for name in run.notes.metrics[2] if "evaluation/" in name}
    sampled = {f"pass_at_{k}_aime" for k in (1, 2, 3)}
    assert found == {"reward", "reward_math", "reward_aime", *sampled}
    alone = simulate(tmp_path, "grpo", *table, *two_sources(tmp_path, aime=3))
    assert run.states() == alone.states()
    for name in ("reward_math", "score/mean"):
        key = name if "/" in name else f"evaluation/{name}"
        assert run.notes.metrics[2][key] == alone.notes.metrics[2][key]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("{samples=2}", r"data\.sources\.1\.evaluation\.temperature: 0 takes the most probable token"),
        (
            "{temperatur=1}",
            r"data\.sources\.1\.evaluation\.temperatur: unknown key; did you mean 'temperature'",
        ),
        ("{samples=0}", r"data\.sources\.1\.evaluation\.samples: must be at least 1"),
    ],
)
def test_sampling_of_a_source_that_cannot_be_is_refused(own: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load(QUICKSTARTS / "quickstart.toml", two_sources(tmp_path, f"evaluation={own}"))


def test_at_most_as_many_rows_of_a_source_are_evaluated(tmp_path: Path) -> None:
    rows = "".join(f'{{"prompt": "{row}", "ground_truth": "x"}}\n' for row in range(12))
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    settings = two_sources(tmp_path, "evaluated_rows=5", "evaluated_rows=3")
    config = load(QUICKSTARTS / "quickstart.toml", settings)
    train, heldout = load_data(config)
    assert (train.sizes, heldout.sizes) == ((12,), (3, 2))
    chosen = [int(heldout[row].text) for row in range(3)]
    assert chosen == sorted(set(chosen)) != [0, 1, 2]
    whole = load_data(load(QUICKSTARTS / "quickstart.toml", two_sources(tmp_path)))[1]
    assert (heldout.fingerprints(), whole.sizes) == (whole.fingerprints(), (12, 2))
    one = (
        f"data.train='{tmp_path}/train.jsonl'",
        f"data.heldout='{tmp_path}/heldout.jsonl'",
        "data.evaluated_rows=3",
    )
    _, alone = load_data(load(QUICKSTARTS / "quickstart.toml", one))
    assert [int(alone[row].text) for row in range(len(alone))] == chosen


@pytest.mark.parametrize("own", ["", "evaluation={samples=3,temperature=0.7}"])
def test_samples_are_of_every_source_in_turn_and_written_together(tmp_path: Path, own: str) -> None:
    """Trackers keep one table of a step. With settings of its own, a source has batches of its own."""
    run = simulate(tmp_path, "grpo", "run.steps=1", "run.samples=5", *two_sources(tmp_path, own))
    assert [step for step, _ in run.notes.samples_of] == [0, 1]
    shown = [(sample.source, sample.prompt) for sample in run.notes.samples_of[0][1]]
    assert shown == [
        *(("math", f"heldout {row}") for row in range(3)),
        *(("aime", f"aime {row}") for row in range(2)),
    ]


def test_samples_of_a_single_source_have_no_source(tmp_path: Path) -> None:
    run = simulate(tmp_path, "grpo", "run.steps=1", "run.samples=5", "run.evaluation_rows=2")
    ((_, shown), _) = run.notes.samples_of
    assert [list(sample.fields) for sample in shown] == [["prompt", "response", "ground_truth", "reward"]] * 5


def test_held_out_prompts_are_sampled_in_batches_of_whole_prompts(tmp_path: Path) -> None:
    """Twelve prompts with three responses each in batches of at most eight; the first response to each of the first
    three prompts is shown."""
    sampled = ("rollout.evaluation.samples=3", "rollout.evaluation.temperature=0.7")
    run = simulate(tmp_path, "grpo", "run.steps=1", "run.evaluation_rows=8", "run.samples=3", *sampled)
    made = [entry.rows for entry in run.log if (entry.method, entry.step) == ("generate_sequences", 0)]
    assert [len(rows) for rows in made] == [6] * 6
    assert all(len(set(rows)) == len(rows) for rows in made)
    shown = [sample for step, rows in run.notes.samples_of for sample in rows if step == 0]
    assert [sample.prompt for sample in shown] == ["heldout 0", "heldout 1", "heldout 2"]


def test_the_responses_to_a_held_out_prompt_are_a_group_for_rewards() -> None:
    data: Any = SimpleNamespace(sizes=(10,), batch=lambda rows: FutureBatch.of(length=rows))
    made = batches(data, np.array([4, 5, 9]), [EvaluationTable()], lambda table: 2)
    assert [groups_of(batch.repeat(2)).tolist() for batch in made] == [[0, 0, 1, 1], [2, 2]]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_training_is_the_same_however_held_out_prompts_are_sampled(
    tmp_path: Path, name: str, ahead: int
) -> None:
    sampled = ("rollout.evaluation.samples=3", "rollout.evaluation.temperature=0.7")
    greedy, other = (simulate(tmp_path, name, f"run.ahead={ahead}", *settings) for settings in ((), sampled))
    assert other.states() == greedy.states()
    assert "evaluation/pass_at_3" in other.notes.metrics[0]


def test_an_evaluation_of_distill_has_as_many_responses_in_a_batch(tmp_path: Path) -> None:
    sampled = ("rollout.evaluation.samples=3", "rollout.evaluation.temperature=0.7")
    run = simulate(tmp_path, "distill", "run.steps=1", "run.evaluation_rows=8", *sampled)
    made = [len(each.rows) for each in run.log if (each.method, each.step) == ("generate_sequences", 0)]
    assert sorted(made) == [2] * 6 + [6] * 6
    assert {"evaluation/pass_at_1", "evaluation/pass_at_3", "evaluation/reverse_kl"} <= run.notes.metrics[
        0
    ].keys()


def test_distill_measures_each_source_whatever_the_number_of_its_responses(tmp_path: Path) -> None:
    own = "evaluation={samples=3,temperature=0.7}"
    run = simulate(tmp_path, "distill", "run.steps=1", *two_sources(tmp_path, own))
    found = run.notes.metrics[0]
    assert {
        "evaluation/pass_at_3_aime",
        "evaluation/reward_math",
        "evaluation/reverse_kl_aime",
    } <= found.keys()
    assert "evaluation/pass_at_3" not in found
    kl, math_, aime = (found[f"evaluation/reverse_kl{end}"] for end in ("", "_math", "_aime"))
    assert min(math_, aime) < kl < max(math_, aime)


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


def test_a_source_that_is_only_evaluated_on_has_metrics_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "contest.jsonl").write_text('{"prompt": "contest", "ground_truth": "x"}\n')
    alone = simulate(tmp_path, "grpo", "run.steps=2")
    sources = (
        f"data.sources=[{{name='contest',heldout='{tmp_path}/contest.jsonl'}},"
        f"{{name='sums',path='{tmp_path}/train.jsonl',heldout='{tmp_path}/heldout.jsonl'}}]"
    )
    run = simulate(tmp_path, "grpo", "run.steps=2", "data.train=''", "data.heldout=''", sources)
    found = {name for name in run.notes.metrics[2] if name.startswith("evaluation/reward_")}
    assert found == {"evaluation/reward_contest", "evaluation/reward_sums"}
    generated = [
        [entry.rows for entry in each.log if entry.method == "generate_sequences" and entry.step == 1]
        for each in (alone, run)
    ]
    assert generated[0] == generated[1]
