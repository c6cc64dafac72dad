"""Placements by name: which services share devices, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller import algorithms
from controller.config.config import Config, load
from controller.config.placements import Placement
from rlhf.errors import ConfigError
from settings.actor import ActorTable

CONFIG = Path(__file__).parents[2] / "deploy" / "quickstart" / "disaggregated.toml"
EXPECTED: dict[Placement, dict[str, str]] = {
    "colocate": {"actor": "ab", "rollout": "ab", "critic": "ab", "reference": "ab", "reward": "ab"},
    "standalone": {"actor": "ab", "rollout": "cd", "critic": "e", "reference": "f", "reward": "g"},
    "split": {"actor": "ab", "rollout": "ab", "critic": "c", "reference": "ab", "reward": "c"},
    "interleaved": {"actor": "ab", "rollout": "ab", "critic": "ab", "reference": "a", "reward": "b"},
    "disaggregated": {"actor": "ab", "rollout": "cd", "critic": "ab", "reference": "cd", "reward": "cd"},
}


def configured(*settings: str, algorithm: str = "ppo") -> Config:
    return algorithms.find_algorithm(algorithm).configure(load(CONFIG, settings))


@pytest.mark.parametrize("placement", EXPECTED)
def test_a_placement_says_which_services_share_devices(placement: Placement) -> None:
    config = configured(f"placement={placement}", f"devices={[*'abcdefg']}")
    found = {name: "".join(sorted(config.devices_of(name))) for name in config.services}
    assert found == EXPECTED[placement]
    # Without names there are as many devices as it needs, shared alike.
    unnamed = configured(f"placement={placement}")
    for one in found:
        for other in found:
            shared = unnamed.devices_of(one) & unnamed.devices_of(other)
            assert len(shared) == len({*found[one]} & {*found[other]})


def test_a_placement_is_of_the_services_that_the_algorithm_needs() -> None:
    config = configured("placement=split", "rollout.samples_per_prompt=4", algorithm="dapo")
    assert sorted(config.services) == ["actor", "reward", "rollout"]
    assert config.devices_of("actor") == config.devices_of("rollout")
    assert not config.devices_of("actor") & config.devices_of("reward")
    # A resumed run reads its own resolved config.
    dapo = algorithms.find_algorithm("dapo")
    again = dapo.configure(Config.model_validate(dapo.resolved(config)))
    assert again.devices_of("actor") == config.devices_of("actor")


def test_an_external_service_is_not_placed() -> None:
    config = configured(
        "placement=colocate", "services.reward={role='reward',address='10.0.0.1:7104',external=true}"
    )
    assert config.devices_of("reward") == {"reward/0"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["placement=spread"], r"placement: must be 'colocate', .*disaggregated' \(given: 'spread'\)"),
        (
            ["devices=['a','b','c']"],
            r"devices: placement disaggregated needs 4 for these services \(actor 0-1, .*, and there are 3",
        ),
        (["devices=['a','b','c','a']"], r"devices: a device is named twice \(given: a, b, c, a\)"),
        (["pools.p=['a','b']"], r"placement: disaggregated places all services, so pools has to be left out"),
        (["services.actor.pool='p'"], r"so services\.actor\.pool has to be left out"),
        (
            ["services.rollout={role='reward',address='127.0.0.1:1'}"],
            r"disaggregated needs a service of role rollout",
        ),
        (
            ["services.rollout.rollout_engine='none'"],
            r"services\.rollout: rollout_engine: none is not allowed: a rollout service generates responses",
        ),
    ],
)
def test_a_placement_that_cannot_be_had_is_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load(CONFIG, tuple(settings))
    assert "\n" not in str(raised.value)


def test_devices_without_a_placement_are_refused() -> None:
    with pytest.raises(ConfigError, match="devices: they need a placement: colocate, standalone, "):
        load(CONFIG.with_name("quickstart.toml"), ("devices=['a']",))


def test_the_service_named_rollout_generates_for_the_actor_alone() -> None:
    assert configured().generators == {"actor": "rollout"}
    actor = load(CONFIG, ("services.actor.rollout_engine='none'",)).services["actor"]
    assert isinstance(actor, ActorTable)
    assert not actor.generates
    assert load(CONFIG.with_name("quickstart.toml")).generators == {}
    supervised = load(CONFIG, ("placement=colocate",))
    assert (
        "rollout"
        not in algorithms.find_algorithm("sft")
        .configure(supervised.model_copy(update={"algorithm": type(supervised.algorithm)()}))
        .services
    )
