"""Configurations made in Python, from resource pools and tables as objects, are those of a config file, with the same
checks and the same keys in their errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from controller.api import (
    ActorTable,
    AlgorithmTable,
    Config,
    ConfigError,
    CriticTable,
    DataTable,
    OptimizerTable,
    ReferenceTable,
    ResourcePool,
    RewardTable,
    RolloutTable,
    RunTable,
    load,
    load_quickstart,
    make_config,
)
from controller.config.config import as_config

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"
MODEL = Path("runs/arithmetic/model")
DATA = DataTable(
    train=MODEL.with_name("train.jsonl"), heldout=MODEL.with_name("heldout.jsonl"), prompts_per_step=512
)
BOTH = ResourcePool("both", ["cpu:0", "cpu:1"])
FIRST, SECOND = ResourcePool("first", BOTH.devices[:1]), ResourcePool("second", BOTH.devices[1:])


def actor(**keys: Any) -> ActorTable:
    return ActorTable(role="actor", address="127.0.0.1:7101", model=MODEL, device="cpu", **keys)


def reward(**keys: Any) -> RewardTable:
    return RewardTable(role="reward", address="127.0.0.1:7104", **keys)


def test_the_quickstart_made_of_objects_is_that_of_its_file() -> None:
    made = make_config(
        BOTH.place(
            actor=actor(ranks=2, optimizer=OptimizerTable(learning_rate=5e-4)),
            critic=CriticTable(
                role="critic",
                address="127.0.0.1:7102",
                model=MODEL,
                device="cpu",
                optimizer=OptimizerTable(learning_rate=1e-3),
            ),
        ),
        FIRST.place(
            reference=ReferenceTable(role="reference", address="127.0.0.1:7103", model=MODEL, device="cpu")
        ),
        SECOND.place(reward=reward(kind="function", function="exact_match")),
        run=RunTable(name="quickstart", seed=0, steps=50, evaluate_every=10),
        data=DATA,
        rollout=RolloutTable(max_response_tokens=4, temperature=1.0),
        algorithm=AlgorithmTable(mini_batch_size=128),
    )
    settings = (
        'pools={both=["cpu:0","cpu:1"],first=["cpu:0"],second=["cpu:1"]}',
        *(f"services.{name}.pool={pool}" for name, pool in
          {"actor": "both", "critic": "both", "reference": "first", "reward": "second"}.items()),
    )  # fmt: skip
    assert made == load(QUICKSTART, settings)
    given = made.model_dump(exclude_unset=True)
    assert given["algorithm"] == {"mini_batch_size": 128}
    assert made.devices_of("actor") & made.devices_of("reference") == {"cpu:0"}
    assert not made.devices_of("reference") & made.devices_of("reward")


def test_the_configuration_on_the_page_of_the_docs_is_one() -> None:
    page = (QUICKSTART.parents[2] / "docs" / "python.md").read_text()
    (source,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "make_config(" in block
    )
    names: dict[str, Any] = {}
    exec(source, names)
    config = names["config"]
    assert set(config.services) == {"actor", "critic", "reference", "reward"}
    assert config.devices_of("actor") == config.devices_of("critic") == {"cpu:0", "cpu:1"}


@pytest.mark.parametrize("path", ["docs/python.md", "examples/from_python.py"])
def test_services_with_a_model_that_python_makes_compute_on_the_cpu(path: str) -> None:
    """They would be refused on a host whose GPUs are fewer than their ranks."""
    tables = re.findall(r"(?:Actor|Critic|Reference)Table\([^)]+", (QUICKSTART.parents[2] / path).read_text())
    assert tables
    assert all('device="cpu"' in table for table in tables)


def test_a_config_is_given_as_itself_as_tables_or_as_the_path_of_a_file() -> None:
    config = load(QUICKSTART)
    assert as_config(config) is config
    assert as_config(QUICKSTART) == as_config(str(QUICKSTART)) == config == load_quickstart()
    assert as_config(config.model_dump(exclude_unset=True)) == config
    assert as_config({"data": DATA, "services": {"reward": reward()}}).services["reward"].role == "reward"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"runs": {}}, "config given as tables: runs: unknown key; did you mean 'run'?"),
        ({"services": {"actor": {"role": "actor", "rank": 2}}}, "services.actor.rank: unknown key"),
        ("nowhere.toml", "config nowhere.toml: No such file"),
    ],
)
def test_a_config_that_is_wrong_names_the_key(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        as_config({"data": DATA, "services": {}, **given} if isinstance(given, dict) else given)
    assert message in str(raised.value)


def too_small() -> Config:
    return make_config(FIRST.place(actor=actor(ranks=2)), data=DATA)


def two_pools() -> Config:
    return make_config(FIRST.place(actor=actor()), ResourcePool("first", ["cpu:7"]).place(), data=DATA)


def two_services() -> Config:
    return make_config(FIRST.place(reward=reward()), data=DATA, services={"reward": reward()})


def one_address() -> Config:
    return make_config(BOTH.place(reward=reward(), cost=reward()), data=DATA)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (too_small, "services.actor.pool: 'first' has 1 device for 2 ranks"),
        (two_pools, "pools.first: there are two pools of this name"),
        (two_services, "services.reward: there are two services of this name"),
        (one_address, "services.cost.address: 127.0.0.1:7104 is taken by services.reward"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_with_its_key(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in str(raised.value)
