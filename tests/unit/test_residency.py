"""Memory of devices that takes turns: which services are offloaded before a call, and runs whose services do not fit
beside each other."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from unit.simulated_run import ROLLOUT, Simulation, Weather, simulate

from controller.config.config import load
from controller.role_groups.residency import NO_MOVES, Demand, Moves, Residency
from rlhf.errors import ConfigError, RlhfError

pytestmark = pytest.mark.timeout(60)

LIMITED = "device_memory_gb=1e-6"
"""The models of simulated runs are not on this host, so that each takes a device of any size for itself."""
MODELS = ("actor", "critic", "reference")
CALLS = {
    "actor": ("generate_sequences", "compute_log_prob", "update_actor", "save_checkpoint"),
    "critic": ("compute_values", "update_critic", "verify_weights"),
    "reference": ("compute_ref_log_prob",),
    "reward": ("compute_reward",),
}


def demand(devices: str, held: int, stays: int, **stages: int) -> Demand:
    return Demand(frozenset(devices), held, stays, {"idle": held, **stages})


@pytest.mark.parametrize("seed", range(50))
def test_what_is_on_a_device_never_exceeds_its_memory_where_each_service_fits_alone(seed: int) -> None:
    chosen = random.Random(seed)
    demands, size = {}, 100
    for name in CALLS:
        held, stays = chosen.randint(10, 50), chosen.choice((0, 0, 5))
        stages = {
            stage: chosen.randint(held, 80) for stage in ("forward", "update", "generation", "transition")
        }
        devices = "".join(chosen.sample("abc", chosen.randint(1, 3)))
        demands[name] = demand(devices, held, stays, **stages)
    residency = Residency(demands, size)
    present = set(demands)
    for _ in range(300):
        name = chosen.choice([*demands])
        method = chosen.choice(CALLS[name])
        moves = residency.before(name, method)
        assert present.issuperset(moves.offload)
        assert name not in moves.offload
        present -= set(moves.offload)
        assert moves.onload == (name not in present)
        present.add(name)
        for device in demands[name].devices:
            others = [other for other in demands if other != name and device in demands[other].devices]
            beside = sum(demands[o].held if o in present else demands[o].stays for o in others)
            assert demands[name].during(method, size) + beside <= size


def test_those_are_offloaded_that_were_called_longest_ago_and_no_more_than_needed() -> None:
    residency = Residency(
        {
            "actor": demand("a", 40, 0, forward=45, update=75),
            "critic": demand("a", 30, 0, forward=35),
            "reference": demand("a", 15, 0, forward=20),
            "other": demand("b", 100, 0, forward=100),
        },
        100,
    )
    assert residency.before("other", "compute_values") == NO_MOVES
    assert residency.before("critic", "compute_values") == NO_MOVES
    assert residency.before("actor", "compute_log_prob") == NO_MOVES
    assert residency.before("reference", "compute_ref_log_prob") == NO_MOVES
    assert residency.before("actor", "update_actor") == Moves(("critic",)), "75 + 15 fit"
    assert residency.before("critic", "compute_values") == Moves((), onload=True), "35 + 40 + 15 fit"
    assert residency.before("actor", "update_actor") == Moves(("reference", "critic"))


def test_a_service_that_does_not_move_stays() -> None:
    residency = Residency(
        {"scorer": demand("a", 60, 60, forward=65), "actor": demand("a", 30, 0, update=90)}, 100
    )
    assert residency.before("actor", "update_actor") == NO_MOVES
    assert residency.before("scorer", "compute_reward") == NO_MOVES


def test_a_service_may_have_to_move_where_not_all_calls_fit_beside_all_services() -> None:
    def moving(size: int) -> frozenset[str]:
        demands = {
            "actor": demand("ab", 40, 0, update=75),
            "critic": demand("a", 30, 0, forward=35),
            "scorer": demand("a", 5, 5),
            "reference": demand("b", 15, 0, forward=20),
        }
        return Residency(demands, size).moving

    assert moving(109) == {"actor", "critic"}
    assert moving(89) == {"actor", "critic", "reference"}
    assert moving(110) == frozenset()


def test_calls_of_the_user_and_of_a_session_count() -> None:
    residency = Residency({"actor": demand("a", 60, 0), "critic": demand("a", 60, 0)}, 100)
    assert residency.before("actor", "begin_session") == NO_MOVES
    assert residency.before("critic", "begin_session") == NO_MOVES, "a session begins on all first"
    assert residency.before("actor", "synchronize") == NO_MOVES
    assert residency.before("critic", "offload") == NO_MOVES
    assert residency.before("actor", "verify_weights") == NO_MOVES
    assert residency.before("critic", "onload") == Moves(("actor",))
    assert residency.before("actor", "save_checkpoint") == Moves(("critic",), onload=True)


def present_at_each_call(run: Simulation) -> list[tuple[str, frozenset[str]]]:
    """Service of each call of a model, as its ranks executed it, and the models that were on the device then."""
    present, seen = set[str](MODELS), []
    for entry in run.log:
        if entry.method == "offload":
            present.remove(entry.service)
        elif entry.method == "onload":
            assert entry.service not in present
            present.add(entry.service)
        elif entry.service in MODELS:
            seen.append((entry.service, frozenset(present)))
    return seen


@pytest.mark.parametrize("ahead", [0, 1])
def test_services_that_share_a_device_take_turns_in_its_memory_with_the_same_numbers(
    ahead: int, tmp_path: Path
) -> None:
    settings = ("placement=colocate", f"run.ahead={ahead}", "run.evaluate_every=2")
    free = simulate(tmp_path, "ppo", *settings)
    assert not {"offload", "onload"} & {entry.method for entry in free.log}
    limited = simulate(tmp_path, "ppo", *settings, LIMITED, weather=Weather(seed=ahead, longest_s=0.004))
    moved = ("transfer/offload/bytes", "transfer/onload/bytes")
    assert all(name in metrics for step, metrics in limited.notes.metrics.items() if step for name in moved)
    metrics = {
        step: {name: value for name, value in line.items() if name not in moved}
        for step, line in limited.notes.metrics.items()
    }
    assert (metrics, limited.states()) == (free.notes.metrics, free.states())
    seen = present_at_each_call(limited)
    assert all(present == {service} for service, present in seen)
    shown = {(record.service, record.method) for _, record in limited.notes.records}
    assert shown >= {(name, method) for name in MODELS for method in ("offload", "onload")}


def test_services_on_devices_of_their_own_stay_there(tmp_path: Path) -> None:
    run = simulate(tmp_path, "ppo", "placement=standalone", LIMITED, ROLLOUT)
    assert not {"offload", "onload"} & {entry.method for entry in run.log}


def test_a_move_that_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    settings = ("placement=colocate", "run.steps=1", "run.evaluate_every=0", LIMITED)
    whole = simulate(tmp_path, "ppo", *settings)
    moves = [
        number for number, entry in enumerate(whole.log, start=1) if entry.method in ("offload", "onload")
    ]
    for number in moves[:6]:
        entry = whole.log[number - 1]
        with pytest.raises(RlhfError, match=rf"{entry.service}\.{entry.method}: struck by lightning"):
            simulate(tmp_path, "ppo", *settings, weather=Weather(fails=number))


def test_a_rollout_service_is_refused_on_a_device_that_others_use() -> None:
    config = Path(__file__).parents[2] / "deploy" / "quickstart" / "disaggregated.toml"
    with pytest.raises(
        ConfigError, match=r"device_memory_gb: services\.rollout computes with weights of anot"
    ):
        load(config, ("placement=colocate", "device_memory_gb=80"))
    assert load(config, ("placement=standalone", "device_memory_gb=80")).device_memory_gb == 80
