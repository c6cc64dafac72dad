"""Mapping: dataflows recorded from algorithms' texts, costs, memory, and configs that launcher and controller take."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from click.testing import CliRunner, Result
from unit.test_memory_check import LLAMA_7B

from benchmarks.paper_setup import LLAMA_SHAPES, paper_workload, ppo_problem
from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.mapping import cli
from controller.mapping import devices as device_tables
from controller.mapping.cli import main
from controller.mapping.configured import described_calls, models_of, placeable
from controller.mapping.dataflow import Call
from controller.mapping.devices import built_in_devices, device_group, read_devices
from controller.mapping.layouts import layouts
from controller.mapping.mapper import find_plan, named_plans, predicted_bytes
from controller.mapping.output import planned_config
from controller.mapping.problem import Model, Problem
from controller.mapping.record import record_dataflow
from controller.mapping.simulate import Site, generation_s, inference_s, training_s, transition_s
from controller.mapping.work import decoded_weights, forward_flops
from controller.mapping.workload import LengthShares, Workload, workload_of
from controller.simulation.durations import CallTimes, Durations
from controller.simulation.run import simulate_run
from controller.training.algorithm import Algorithm
from controller.training.run import Run
from deploy.devices import gpus_by_service
from deploy.memory import predict_memory
from rlhf.errors import ConfigError
from settings.memory.predict import predict
from settings.memory.shape import ModelShape
from settings.model import ModelTable
from settings.reward import RewardTable
from settings.strict import read_toml, validate

QUICKSTARTS = Path(__file__).parents[2] / "deploy/quickstart"
SERVICES: tuple[str, ...] = ("actor", "critic", "reference", "reward")


def dataflow(name: str, *settings: str) -> tuple[Call, ...]:
    algorithm = find_algorithm(name)
    config = load(QUICKSTARTS / f"{algorithm.quickstart}.toml", settings)
    return record_dataflow(algorithm, algorithm.configure(config))


def called(flow: tuple[Call, ...]) -> list[str]:
    return [f"{call.service}.{call.method}" for call in flow]


def test_ppo_is_recorded_from_its_text() -> None:
    flow = dataflow("ppo")
    assert called(flow) == [
        "actor.generate_sequences",
        "actor.compute_log_prob",
        "critic.compute_values",
        "reference.compute_ref_log_prob",
        "reward.compute_reward",
        "critic.update_critic",
        "actor.update_actor",
    ]
    assert [call.stage for call in flow] == [0, 1, 1, 1, 1, 2, 2]
    assert [call.after for call in flow[:5]] == [(), (0,), (0,), (0,), (0,)]
    assert all(set(call.after) >= {1, 2, 3, 4} for call in flow[5:])
    assert flow[2].reads == ("prompt_ids", "response_ids")
    assert flow[1].reads == ()


def test_remax_generates_twice_and_has_no_critic() -> None:
    flow = dataflow("remax", "rollout.samples_per_prompt=4")
    generations = [call for call in flow if call.kind == "generation"]
    assert [call.rows for call in generations] == [2048, 512]
    assert not any("critic" in call.service for call in flow)


def test_safe_rlhf_has_two_critics_and_a_cost() -> None:
    flow = dataflow("safe_rlhf")
    assert {call.service for call in flow} == {
        "actor", "critic", "cost_critic", "reference", "reward", "cost"
    }  # fmt: skip
    assert called(flow)[-3:] == ["critic.update_critic", "cost_critic.update_critic", "actor.update_actor"]


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "rloo", "reinforce_pp", "distill", "sft", "dpo", "reward_model"]
)
def test_other_algorithms_are_recorded(name: str) -> None:
    assert dataflow(name)[-1].kind == "training"


@pytest.mark.parametrize("name", ["ppo", "grpo", "remax", "distill", "safe_rlhf"])
def test_what_happens_to_truncated_responses_changes_no_call(name: str) -> None:
    assert dataflow(name, "algorithm.on_truncated='drop'") == dataflow(name)


def test_a_plug_in_is_recorded_as_it_is() -> None:
    def mine(run: Run) -> None:
        actor, critic = run.actor(), run.critic()
        for step in run.steps():
            batch = step.prompts | actor.generate_sequences(step.prompts)
            batch |= critic.compute_values(batch)
            batch |= critic.compute_values(batch).rename(values="again")
            run.fetch(batch, "values")
            step.finish(batch)

    algorithm = Algorithm(mine)
    config = algorithm.configure(load(QUICKSTARTS / "quickstart.toml"))
    assert called(record_dataflow(algorithm, config)) == [
        "actor.generate_sequences",
        "critic.compute_values",
        "critic.compute_values",
    ]


def test_a_reward_of_texts_depends_on_the_responses_and_on_nothing_that_was_fetched() -> None:
    def mine(run: Run) -> None:
        actor, critic, reward = run.actor(), run.critic(), run.reward()
        for step in run.steps():
            batch = step.prompts | actor.generate_sequences(step.prompts)
            batch |= critic.compute_values(batch)
            run.fetch(batch, "values")
            step.finish(reward.score(batch))

    algorithm = Algorithm(mine)
    flow = record_dataflow(algorithm, algorithm.configure(load(QUICKSTARTS / "quickstart.toml")))
    assert called(flow)[-1] == "reward.compute_reward"
    assert flow[-1].after == (0,)


def test_a_rollout_and_a_values_service_are_recorded_with_their_transfers() -> None:
    ppo = find_algorithm("ppo")
    values = "services.values={role='values',address='127.0.0.1:7106',model='x'}"
    config = load(QUICKSTARTS / "disaggregated.toml", (values,))
    flow = record_dataflow(ppo, ppo.configure(config))
    assert called(flow) == [
        "rollout.generate_sequences",
        "actor.compute_log_prob",
        "values.compute_values",
        "reference.compute_ref_log_prob",
        "reward.compute_reward",
        "critic.update_critic",
        "critic.sync_weights",
        "values.sync_weights",
        "actor.update_actor",
        "actor.sync_weights",
        "rollout.sync_weights",
    ]
    assert set(flow[1].reads) >= {"prompt_ids", "response_ids"}
    assert [call.stage for call in flow[5:]] == [2, 3, 3, 2, 3, 3]
    assert flow[-1].after == (8,)


def test_an_algorithm_that_fails_is_told() -> None:
    def wrong(run: Run) -> None:
        for step in run.steps():
            run.critic().compute_values(step.prompts)

    algorithm = Algorithm(wrong)
    with pytest.raises(
        ConfigError, match=r"algorithm wrong: a step with made-up columns failed: .*needs columns"
    ):
        record_dataflow(algorithm, algorithm.configure(load(QUICKSTARTS / "quickstart.toml")))


def test_every_constant_has_a_source() -> None:
    text = Path(device_tables.__file__).with_name("devices.toml").read_text()
    constants = [line for line in text.splitlines() if re.match(r"\w+ = ", line)]
    assert len(constants) > 40
    assert [line for line in constants if "#" not in line] == []


def test_a_table_of_the_user_adds_and_replaces_devices(tmp_path: Path) -> None:
    table = built_in_devices()["H100"].model_dump()
    path = tmp_path / "devices.toml"
    path.write_text(tomli_w.dumps({"B200": {**table, "memory_gb": 180.0}}))
    assert device_group("B200:4", more=read_devices(path)).capacity == 180 * 10**9
    path.write_text(tomli_w.dumps({"B200": {**table, "efficiency": 2.0}}))
    with pytest.raises(ConfigError, match="efficiency"):
        read_devices(path)


@pytest.mark.parametrize("text", ["A100:8", "H100", "H100:0", "H100:x"])
def test_unknown_devices_are_refused_with_the_known(text: str) -> None:
    with pytest.raises(ConfigError, match=r"A100-80GB|no number of devices"):
        device_group(text)


@pytest.mark.parametrize("text", ["0", "-4", "a", "5:0", "5:x", ""])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="TOKENS:WEIGHT"):
        LengthShares.parse(text)


def test_lengths_are_a_distribution() -> None:
    lengths = LengthShares.parse("10:3,30:1")
    assert (lengths.mean, lengths.longest) == (15, 30)
    assert list(lengths.segments()) == [(0, 10, 1.0), (10, 30, 0.25)]


def paper(size: str, count: int, ahead: int = 0) -> Problem:
    shapes: dict[str, ModelShape] = dict.fromkeys(SERVICES, LLAMA_SHAPES[size])
    return ppo_problem(shapes, device_group(f"A100-80GB:{count}"), paper_workload(), ahead)


@pytest.mark.parametrize(("size", "count"), [("7B", 2), ("70B", 16)])
def test_the_tables_have_the_memory_that_the_predictor_predicts(size: str, count: int) -> None:
    problem = paper(size, count)
    group = problem.devices[0]
    checked = 0
    for model in problem.models:
        for option in list(layouts(model, Site(group, 8), count, problem.workload))[::7]:
            found = predict(option.use, model.rows(problem.workload))
            assert option.idle == found["idle"].device_bytes
            assert option.idle + option.extra == max(each.device_bytes for each in found.values())
            checked += 1
    assert checked > 4


def test_a_plan_fits_by_the_predictor_alone() -> None:
    problem = paper("7B", 8)
    plan = find_plan(problem)
    assert plan is not None
    assert max(predicted_bytes(problem, plan)) <= 80 * 10**9
    assert predicted_bytes(problem, plan) == [pool.nbytes for pool in plan.pools]


def test_steps_ahead_never_cost_more_and_are_bound_by_the_busiest_pool() -> None:
    plans = [find_plan(paper("7B", 8, ahead)) for ahead in (0, 1)]
    none, one = (plan for plan in plans if plan)
    assert max(sum(pool.times) for pool in one.pools) <= one.cost <= none.cost


def test_costs_grow_with_work_and_shrink_with_devices() -> None:
    problem = paper("7B", 8)
    site, work = Site(problem.devices[0], 8), problem.workload
    options = {option.use.mesh: option.use for option in layouts(problem.models[0], site, 8, work)}
    one = next(use for mesh, use in options.items() if mesh == (1, 4, 2))
    assert inference_s(one, site, 1024, work) < training_s(one, site, 1024, work)
    assert inference_s(one, site, 512, work) < inference_s(one, site, 1024, work)
    longer = Workload(1024, LengthShares.of(1024), LengthShares.of(2048), mini_batches=8, snapshots=False)
    short = Workload(1024, LengthShares.of(1024), LengthShares.of(128, 1024), mini_batches=8, snapshots=False)
    seconds = [generation_s(one, site, 1024, each, together=64) for each in (short, work, longer)]
    assert seconds == sorted(seconds)
    assert generation_s(one, site, 1024, work, together=256) < seconds[1]
    assert transition_s(one, site) > 0


SMALL = {
    **LLAMA_7B,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    services = {
        name: {
            "role": name,
            "address": f"127.0.0.1:{7101 + number}",
            "model": str(tmp_path),
            "dtype": "bfloat16",
            **({"kind": "model"} if name == "reward" else {}),
        }
        for number, name in enumerate(SERVICES)
    }
    tables = {
        "data": {
            "train": "a.jsonl",
            "heldout": "b.jsonl",
            "prompts_per_step": 1024,
            "max_prompt_tokens": 1024,
        },
        "rollout": {"max_response_tokens": 1024},
        "algorithm": {"mini_batch_size": 128},
        "services": services,
    }
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def rlhf_map(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("rollout", ["hf", "vllm"])
def test_a_plan_is_a_config_that_fits_and_is_the_fastest(config_file: Path, rollout: str) -> None:
    """The config that is written is valid, fits by `rlhf-deploy check`, and `explain` finds none that is faster."""
    planned, picture = config_file.with_name("plan.toml"), config_file.with_name("plan.html")
    engine = ("--set", f"services.actor.rollout_engine={rollout}")
    found = rlhf_map(
        "find", config_file, "--devices", "A100-80GB:8", *engine, "-o", planned, "--timeline", picture
    )
    assert found.exit_code == 0, found.output
    config = load(planned)
    assert sum(len(devices) for devices in config.pools.values()) <= 8
    assert predict_memory(config, list(config.services), 80 * 10**9).misfits == []
    assert find_algorithm("ppo").configure(config)
    assert "<svg" in picture.read_text()
    explained = rlhf_map("explain", planned, "--devices", "A100-80GB:8")
    assert explained.exit_code == 0, explained.output
    assert "1.00 times as long" in explained.output


RECEIVERS: dict[str, dict[str, object]] = {
    "rollout": {"role": "rollout", "address": "127.0.0.1:7105"},
    "values": {"role": "values", "address": "127.0.0.1:7106"},
}


@pytest.fixture
def disaggregated_file(config_file: Path) -> Path:
    """The config with a rollout and a values service."""
    tables = read_toml(config_file)
    more = {"model": str(config_file.parent), "dtype": "bfloat16"}
    tables["services"] |= {name: {**table, **more} for name, table in RECEIVERS.items()}
    path = config_file.with_name("disaggregated.toml")
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize("ahead", [0, 1])
def test_services_that_receive_weights_are_placed(disaggregated_file: Path, ahead: int) -> None:
    """The plan is a config that fits by `rlhf-deploy check`, names the seconds of the transfer, and is simulated."""
    planned = disaggregated_file.with_name("plan.toml")
    found = rlhf_map("find", disaggregated_file, "--devices", "A100-80GB:8", "--ahead", ahead, "-o", planned)
    assert found.exit_code == 0, found.output
    assert re.search(r"^step .* weights ", found.stdout, re.MULTILINE)
    assert re.search(r"^disaggregated ", found.stdout, re.MULTILINE)
    config = load(planned)
    report = predict_memory(config, list(config.services), 80 * 10**9)
    assert report.misfits == []
    assert not report.left_out
    assert find_algorithm("ppo").configure(config)
    explained = rlhf_map("explain", planned, "--devices", "A100-80GB:8", "--ahead", ahead)
    assert explained.exit_code == 0, explained.output
    assert "1.00 times as long" in explained.output
    ran = rlhf_map(
        "simulate", planned, "--devices", "A100-80GB:8", "--steps", 2, "--set", f"run.ahead={ahead}"
    )
    assert ran.exit_code == 0, ran.output
    assert re.search(r"rollout\.load_weights +[\d.]+ +0\.0*[1-9]", ran.output)


def test_a_device_that_only_generates_needs_no_optimizer(disaggregated_file: Path) -> None:
    """With generation on few devices of another kind, these hold no gradients and moments."""
    planned = disaggregated_file.with_name("plan.toml")
    kinds = ("--devices", "H100:4", "--devices", "L40S:4")
    ran = rlhf_map("find", disaggregated_file, *kinds, "--ahead", 1, "-o", planned)
    assert ran.exit_code == 0, ran.output
    config = load(planned)
    pools = {name: table.pool for name, table in config.services.items()}
    assert not config.devices_of("rollout") & config.devices_of("actor"), pools


def test_generation_on_other_devices_overlaps_with_updates() -> None:
    """With steps ahead, a step takes as long as the busiest of two sets, and at most as long as without."""
    shapes: dict[str, ModelShape] = dict.fromkeys((*SERVICES, "rollout"), LLAMA_SHAPES["7B"])
    plans = []
    for ahead in (0, 1):
        problem = ppo_problem(shapes, device_group("A100-80GB:16"), paper_workload(), ahead)
        plan = find_plan(problem, [(0, 1), (2, 3, 4)])
        assert plan is not None
        assert max(predicted_bytes(problem, plan)) <= 80 * 10**9
        assert plan.stages[3] > 0
        plans.append(plan)
    alone, overlapping = plans
    assert overlapping.cost < 0.9 * alone.cost
    busiest = max(sum(pool.times) for pool in overlapping.pools)
    assert overlapping.cost == max(busiest, sum(overlapping.stages) / 2)


@pytest.mark.parametrize(
    ("left_out", "ahead"),
    [
        pytest.param((), 1),
        pytest.param((), 0, marks=pytest.mark.full),
        *(
            pytest.param(names, ahead, marks=pytest.mark.full)
            for names in (("values",), ("rollout", "values"))
            for ahead in (0, 1)
        ),
    ],
)
def test_the_cost_of_a_plan_is_the_step_of_the_simulated_controller(
    disaggregated_file: Path, left_out: tuple[str, ...], ahead: int
) -> None:
    """For the fastest plan and each placement: the real controller on simulated ranks, with the durations of calls that
    the plan predicts, takes as long as the search says, also where steps overlap."""
    tables = read_toml(disaggregated_file)
    tables["services"] = {name: each for name, each in tables["services"].items() if name not in left_out}
    tables["run"] = {"ahead": ahead}
    ppo = find_algorithm("ppo")

    def models(config: Config) -> tuple[Model, ...]:
        return models_of(config, record_dataflow(ppo, config)).models

    given = ppo.configure(validate(Config, tables, "here"))
    group = device_group("A100-80GB:8")
    problem = Problem(tuple(map(placeable, models(given))), workload_of(given), (group,), ahead)
    plans = {"found": find_plan(problem), **named_plans(problem)}
    assert ("disaggregated" in plans) == ("rollout" not in left_out)
    for name, plan in plans.items():
        assert plan is not None, name
        config = ppo.configure(planned_config(tables, problem, plan)[1])
        calls = described_calls(config, replace(problem, models=models(config)), group)
        lengths = problem.workload.prompts.shares, problem.workload.responses.shares
        trace = simulate_run(config, ppo, Durations(CallTimes(calls)), *lengths, 7)
        ends = [max(call.end for call in trace.calls if call.step == step) for step in (3, 6)]
        assert (ends[1] - ends[0]) / 3 == pytest.approx(plan.cost, rel=0.05), name


def test_explain_says_what_a_worse_plan_loses(config_file: Path) -> None:
    (config_file.parent / "config.json").write_text(json.dumps(LLAMA_7B))
    keys = (
        "ranks=8",
        "engine='3d'",
        "mesh='1-8-1'",
        "activation_checkpointing=true",
        "rollout_tokens=131072",
    )
    settings = [part for key in keys for part in ("--set", f"services.actor.{key}")]
    ran = rlhf_map("explain", config_file, "--devices", "A100-80GB:16", *settings)
    assert ran.exit_code == 1
    assert re.search(r"critic needs .* GB on a device of 80.00 GB, .* GB too much", ran.output)
    assert re.search(r"critic: .* longer as fsdp on 1 device than as ", ran.output)


def test_a_mixture_of_experts_is_placed_in_engine_fsdp_and_computes_with_the_experts_of_a_token(
    config_file: Path,
) -> None:
    table = read_toml(config_file)
    directory = Path(table["services"]["actor"]["model"])
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "llama"
    sizes = {
        "num_key_value_heads": config["num_attention_heads"],
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    }
    mixture = {**config, "model_type": "mixtral", **sizes}
    (directory / "config.json").write_text(json.dumps(mixture))
    ran = rlhf_map("find", config_file, "--devices", "A100-80GB:8", "-o", config_file.with_name("plan.toml"))
    assert ran.exit_code == 0, ran.output
    tables = load(config_file.with_name("plan.toml")).services
    for name in ("actor", "critic", "reference"):
        placed = tables[name]
        assert isinstance(placed, ModelTable)
        assert (placed.engine, placed.mesh) == ("fsdp", "")
    dense, sparse = ModelShape.of(config), ModelShape.of(mixture)
    router = 4 * sparse.hidden * sparse.layers
    # One expert of four computes each token: as many operations as in the dense model, and those of the router.
    assert forward_flops(sparse, 1, 0, 0) == forward_flops(dense, 1, 0, 0) + 2 * router
    assert decoded_weights(sparse, 1) == decoded_weights(dense, 1) + router
    of_experts = 3 * sparse.layers * sparse.hidden * config["intermediate_size"]
    assert decoded_weights(sparse, 2) == pytest.approx(decoded_weights(sparse, 1) + 0.75 * of_experts)


def test_where_nothing_fits_the_least_devices_are_told(config_file: Path) -> None:
    (config_file.parent / "config.json").write_text(json.dumps(LLAMA_7B))
    ran = rlhf_map("find", config_file, "--devices", "A100-80GB:1")
    assert ran.exit_code == 1
    assert "actor needs at least " in ran.stderr
    least = re.search(r"A100-80GB: it takes at least (\d+)$", ran.stderr)
    assert least is not None
    assert rlhf_map("find", config_file, "--devices", f"A100-80GB:{least[1]}").exit_code == 0
    assert rlhf_map("find", config_file, "--devices", f"A100-80GB:{int(least[1]) - 1}").exit_code == 1


@pytest.mark.parametrize("zero", [False, True], ids=["fsdp", "zero"])
@pytest.mark.parametrize("learns", [False, True], ids=["scores", "learns"])
def test_a_sharded_reward_stays_sharded_and_recomputes_nothing(
    config_file: Path, learns: bool, zero: bool
) -> None:
    """Plans shard a reward by fsdp alone, which has no activation checkpointing there."""
    planned = config_file.with_name("plan.toml")
    keys = [
        "services.reward.sharded=true",
        *(["services.reward.optimizer.learning_rate=1e-5"] if learns else []),
        *(["services.reward.engine='zero'", "services.reward.zero.stage=3"] if zero else []),
    ]
    settings = [part for key in keys for part in ("--set", key)]
    ran = rlhf_map("find", config_file, "--devices", "A100-80GB:8", *settings, "-o", planned)
    assert ran.exit_code == 0, ran.output
    line = next(line for line in ran.stdout.splitlines() if re.search(r"\breward +\d", line))
    assert re.search(r"reward +\d+ +fsdp ", line)
    assert "recomputes" not in line
    reward = load(planned).services["reward"]
    assert isinstance(reward, RewardTable)
    assert reward.sharded
    assert predict_memory(load(planned), ["reward"], 80 * 10**9).misfits == []


@pytest.mark.parametrize("adapters", [False, True], ids=["3d", "adapters"])
def test_a_plan_for_ranks_that_divide_rows_takes_rows_as_long(config_file: Path, adapters: bool) -> None:
    """Plans divide rows over no ranks, so one rank computes what several did."""
    planned = config_file.with_name("plan.toml")
    keys = [
        *(f"services.{name}.sequence_parallel=2" for name in ("actor", "reference")),
        *(f"services.{name}.ranks=2" for name in ("actor", "reference")),
        *(f"services.{name}.micro_batch_tokens=1536" for name in ("actor", "reference")),
        *(["services.actor.lora.rank=8"] if adapters else []),
    ]
    settings = [part for key in keys for part in ("--set", key)]
    ran = rlhf_map("find", config_file, "--devices", "A100-80GB:16", *settings, "-o", planned)
    assert ran.exit_code == 0, ran.output
    services = load(planned).services
    for name in ("actor", "reference"):
        table = services[name]
        assert isinstance(table, ModelTable)
        assert (table.sequence_parallel, table.micro_batch_tokens) == (1, 3072)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--devices", "V100:8"), "no kind 'V100'"),
        (("--devices", "H100:8", "--devices", "H100:4"), "give each kind once"),
        (("--devices", "H100:8", "--prompts", "2000"), "--prompts: 2000 tokens are more than"),
        (("--devices", "H100:8", "--responses", "4:x"), "--responses: lengths '4:x': '4:x' is not TOKENS"),
        (("--devices", "H100:8", "--set", "data.max_prompt_tokens=0"), "data.max_prompt_tokens: set it"),
        (("--devices", "H100:8", "--algo", "none"), "none"),
    ],
)
def test_wrong_input_is_refused_in_a_line(config_file: Path, arguments: tuple[str, ...], text: str) -> None:
    ran = rlhf_map("find", config_file, *arguments)
    assert ran.exit_code == 2
    assert ran.stderr.count("\n") == 1
    assert text in ran.stderr


def test_names_are_shown_as_they_are_given(config_file: Path) -> None:
    """Also those that rich would read as markup."""
    table = config_file.with_name("devices.toml")
    rates = built_in_devices()["A100-80GB"].model_dump(exclude_none=True)
    table.write_text(tomli_w.dumps({"[/]": rates, "[red]A": rates}))
    for kind in ("[/]", "[red]A"):
        ran = rlhf_map("find", config_file, "--devices", f"{kind}:8", "--table", table)
        assert ran.exit_code == 0, ran.output
        assert f"8 {kind}" in ran.stdout


def test_rewards_that_are_functions_take_no_devices(config_file: Path) -> None:
    function = "services.reward={role='reward',address='127.0.0.1:7104'}"
    ran = rlhf_map("find", config_file, "--devices", "A100-80GB:8", "--set", function)
    assert ran.exit_code == 0, ran.output
    assert "reward is not placed: kind function" in ran.output


def test_two_kinds_of_devices_are_both_used(config_file: Path) -> None:
    planned = config_file.with_name("plan.toml")
    ran = rlhf_map(
        "find", config_file, "--devices", "H100:8", "--devices", "L40S:8", "--ahead", "1", "-o", planned
    )
    assert ran.exit_code == 0, ran.output
    kinds = {device.split("/")[0] for devices in load(planned).pools.values() for device in devices}
    assert "H100" in kinds


def test_a_plan_of_two_pools_on_one_host_is_started_on_disjoint_gpus(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_plan", lambda problem: named_plans(problem)["split"])
    planned = config_file.with_name("plan.toml")
    ran = rlhf_map("find", config_file, "--devices", "A100-80GB:8", "-o", planned)
    assert ran.exit_code == 0, ran.output
    config = load(planned)
    assert len(config.pools) == 2
    sees = gpus_by_service(config, list(config.services), [str(number) for number in range(8)])
    assert sorted(sees) == sorted(config.services)
    for name, table in config.services.items():
        assert len(sees[name]) == table.ranks == len(config.pools[table.pool])
        for other, its_table in config.services.items():
            assert bool({*sees[name]} & {*sees[other]}) == (table.pool == its_table.pool)


def test_the_quickstart_is_mapped_to_two_cores(tmp_path: Path) -> None:
    tiny = {**LLAMA_7B, "vocab_size": 20, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**tiny, "num_attention_heads": 4}))
    settings = [
        part
        for name in ("actor", "critic", "reference")
        for part in ("--set", f"services.{name}.model='{tmp_path}'")
    ]
    planned = tmp_path / "plan.toml"
    ran = rlhf_map(
        *("find", QUICKSTARTS / "quickstart.toml", "--devices", "CPU:2", "--prompts", "8"),
        *settings,
        "-o",
        planned,
    )
    assert ran.exit_code == 0, ran.output
    config = load(planned)
    assert {device for devices in config.pools.values() for device in devices} <= {
        "CPU/0/cpu:0",
        "CPU/0/cpu:1",
    }
    assert "pool" not in planned.read_text().split("[services.reward]")[1].split("[")[0]
