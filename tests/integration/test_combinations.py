"""Features drawn at random and used together: a configuration is refused before anything starts, by a line that names a
key, or it has the results of the plain one, and goes on after a kill with the same bits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from controller.algorithms import find_algorithm
from controller.config.config import Config, load
from controller.plan import Plan
from integration.conftest import Task
from integration.harness import ROOT, Processes, free_ports, write_config
from integration.resuming import Results, resumable, with_tables
from rlhf.errors import ConfigError

pytestmark = pytest.mark.timeout(600)

Features = Mapping[str, Sequence[tuple[str, ...]]]
"""Alternatives by name, each as settings of the command line."""

ALGORITHMS = ("ppo", "safe_rlhf", "grpo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "remax", "sft", "cispo")
ROLLOUT = ("services.rollout.role='rollout'",)
VALUES = ("services.values.role='values'",)
TURNS = (
    "rollout.environment.factory='toy_environments:Nines'",
    "rollout.environment.turn_tokens=3",
    "rollout.max_response_tokens=16",
)
SAME: Features = {
    "steps": [("run.ahead=1",), ("run.ahead=2", "rollout.segments=2")],
    "sampling": [("rollout.temperature=0.7",), ("rollout.stop=['1', '22']",), ("rollout.top_p=0.9",), TURNS],
    "reward": [
        ("services.reward.function='toy_rewards:digit_tokens'",),
        ("services.reward.function='toy_rewards:digit_mean_async'",),
    ],
    "update": [("algorithm.epochs=2",), ("algorithm.mini_batch_size=16",), ("run.balance=false",)],
    "rate": [("services.actor.optimizer.schedule='cosine'", "services.actor.optimizer.total_steps=8")],
    "adapters": [("services.actor.lora.rank=4",)],
}
"""Features that change numbers; both runs have the same."""
OTHER: Features = {
    "chunks": [("rollout.chunks=2",), ("rollout.chunks=3",)],
    "actor": [
        ("services.actor.ranks=2", "services.actor.sequence_parallel=2"),
        ("services.actor.ranks=2", "services.actor.generation_mesh='1-2-1'"),
        ("services.actor.ranks=2", "services.actor.engine='zero'", "services.actor.zero.stage=3"),
        (
            "services.actor.ranks=4",
            "services.actor.engine='3d'",
            "services.actor.mesh='2-2-1'",
            "services.actor.generation_mesh='1-2-2-1'",
        ),
    ],
    "critic": [
        ("services.critic.ranks=2", "services.critic.engine='3d'", "services.critic.mesh='1-2-1'"),
        ("services.critic.ranks=2", "services.critic.engine='zero'"),
    ],
    "reference": [("services.reference.ranks=2", "services.reference.sequence_parallel=2")],
    "rollout": [
        (*ROLLOUT, "services.rollout.ranks=2", "services.rollout.mesh='1-2-1'"),
        (*ROLLOUT, "services.rollout.second_buffer=false", "services.actor.rollout_engine='none'"),
    ],
    "values": [VALUES, (*VALUES, "services.values.packing=false")],
    "placement": [("placement='colocate'",), ("placement='split'",), ("placement='disaggregated'",)],
    "memory": [
        ("services.actor.micro_batch_tokens=32",),
        ("services.actor.activation_checkpointing=true", "services.actor.rollout_sleep=true"),
    ],
    "checks": [("run.verify_every=1", "services.actor.checksums=true")],
}
"""Features that do not change numbers but by rounding; one of the two runs has them."""
APART = ("transfer/", "rollout/kl", "rollout/parity", "actor/rollout_cut")
"""Metrics that depend on where rows are, or are rounding itself."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("algorithm", "same", "other"),
    [
        ("grpo", ("run.ahead=2", "rollout.segments=2"), ("rollout.chunks=3", *OTHER["rollout"][1])),
        ("ppo", ("algorithm.critic_warmup_steps=2",), (*OTHER["rollout"][1], *OTHER["actor"][3])),
        ("ppo", (*TURNS, *SAME["reward"][0], *SAME["adapters"][0]), (*VALUES, *OTHER["critic"][0])),
    ],
)
def test_features_that_meet(
    algorithm: str, same: tuple[str, ...], other: tuple[str, ...], task: Task, tmp_path: Path
) -> None:
    check(algorithm, same, other, task, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_features_drawn_at_random(seed: int, task: Task, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    source, refused = random.Random(seed), "not drawn yet"
    algorithm, same, other = "", (), ()
    while refused:
        algorithm = source.choice(ALGORITHMS)
        services = {
            *find_algorithm(algorithm).configure(tiny(algorithm, (), task)).services,
            "rollout",
            "values",
        }
        same, other = (drawn(source, features, services) for features in (SAME, OTHER))
        refused = refusal(algorithm, (*same, *other), task)
    print(algorithm, same, other)
    check(algorithm, same, other, task, tmp_path)


def refusal(algorithm: str, settings: tuple[str, ...], task: Task) -> str:
    """The line by which a config is refused before anything starts, which names a key of the settings; empty for one
    that is accepted."""
    try:
        Plan.of(find_algorithm(algorithm), tiny(algorithm, settings, task))
    except ConfigError as error:
        line = str(error)
    else:
        return ""
    keys = [setting.partition("=")[0].rpartition(".")[2] for setting in settings]
    assert any(key in line for key in keys), line
    return line


def drawn(source: random.Random, features: Features, services: set[str]) -> tuple[str, ...]:
    """Settings of some of the features, which are of none but these services."""
    chosen = [source.choice(list(options)) for options in features.values() if source.random() < 0.4]
    names = [{key.split(".")[1] for key in settings if key.startswith("services.")} for settings in chosen]
    return tuple(
        x for settings, used in zip(chosen, names, strict=True) if used <= services for x in settings
    )


def tiny(algorithm: str, settings: tuple[str, ...], task: Task) -> Config:
    """The config of an algorithm's quickstart on a tiny task, each service on one rank, with further settings."""
    found = find_algorithm(algorithm)
    path = ROOT / "deploy" / "quickstart" / f"{found.quickstart}.toml"
    pairs = "pairs_" if found.quickstart == "pairs" else ""
    common = [
        f"data.train='{task.directory}/{pairs}train.jsonl'",
        f"data.heldout='{task.directory}/{pairs}heldout.jsonl'",
        "data.prompts_per_step=8",
        "data.max_prompt_tokens=12",
        f"rollout.samples_per_prompt={1 if pairs else 2}",
        "rollout.max_response_tokens=6",
        "algorithm.mini_batch_size=8",
    ]
    # Where gradients are 0 but for rounding, AdamW takes steps of full size: no run may have such.
    common += [] if pairs else ["services.reward.function='toy_rewards:digit_mean'"]
    names = load(path).services.keys() | {x.split(".")[1] for x in settings if x.startswith("services.")}
    for name, port in zip(sorted(names), free_ports(len(names)), strict=True):
        common.append(f"services.{name}.address='127.0.0.1:{port}'")
        if name not in ("reward", "cost"):
            common += [
                f"services.{name}.{key}" for key in (f"model='{task.model}'", "matmul='mkl'", "ranks=1")
            ]
    return load(path, (*common, *settings))


def check(algorithm: str, same: tuple[str, ...], other: tuple[str, ...], task: Task, directory: Path) -> None:
    """Compares the runs with and without the `other` features, and that with them with one that is killed."""
    plain = results(algorithm, tiny(algorithm, same, task), directory / "plain", kills=False)
    found = results(algorithm, tiny(algorithm, (*same, *other), task), directory / "other", kills=True)
    assert found.samples == plain.samples
    for line, expected in zip(found.metrics, plain.metrics, strict=True):
        mine, theirs = (
            {name: value for name, value in each.items() if not name.startswith(APART)}
            for each in (line, expected)
        )
        assert mine == pytest.approx(theirs, rel=2e-5, abs=2e-6, nan_ok=True), line["step"]


def results(algorithm: str, config: Config, directory: Path, *, kills: bool) -> Results:
    """The results of a run on services of its own; with `kills`, also after a kill and a resume."""
    every = 2 if config.run.ahead else 1
    run = {"steps": 4, "evaluate_every": 2, "samples": 3}
    config = find_algorithm(algorithm).configure(with_tables(config, run=run, checkpoint={"every": every}))
    roots = {"output_roots": (directory,)}
    services = {name: table.model_copy(update=roots) for name, table in config.services.items()}
    config, processes = config.model_copy(update={"services": services}), Processes()
    directory.mkdir()
    try:
        processes.serve(write_config(config, directory / "services.toml"), directory / "logs")
        with resumable(config, directory / "whole", algorithm=algorithm) as whole:
            whole.finish(whole.start())
            expected = Results.of(whole.run_dir)
        if kills:
            with resumable(config, directory / "killed", algorithm=algorithm) as killed:
                killed.kill_after(killed.start(), every)
                killed.finish(killed.resume())
                assert Results.of(killed.run_dir) == expected
        return expected
    finally:
        processes.kill()
