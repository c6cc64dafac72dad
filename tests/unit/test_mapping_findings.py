"""Findings of HybridFlow (sections 6 and 8) looked for in what the search chooses. No constant is fitted to them."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.paper import generation_by_tensor_size, paper_problem, transitions
from benchmarks.paper_setup import LLAMA_SHAPES, paper_workload, ppo_problem
from controller.mapping.devices import device_group
from controller.mapping.mapper import find_plan, predicted_bytes
from controller.mapping.problem import Problem
from controller.mapping.search import MappedPlan
from settings.memory.shape import ModelShape


@cache
def found(size: str, count: int) -> tuple[Problem, MappedPlan]:
    problem = paper_problem(size, count)
    plan = find_plan(problem)
    assert plan is not None, f"{size} fits on {count} GPUs"
    assert max(predicted_bytes(problem, plan)) <= problem.devices[0].capacity
    return problem, plan


def devices_of(problem: Problem, plan: MappedPlan) -> dict[str, int]:
    return {
        problem.models[number].name: option.ranks
        for pool in plan.pools
        for number, option in zip(pool.models, pool.options, strict=True)
    }


def actor_and_critic_are_apart(size: str, count: int) -> bool:
    problem, plan = found(size, count)
    names = [{problem.models[number].name for number in pool.models} for pool in plan.pools]
    return not any({"actor", "critic"} <= each for each in names)


EVERY = [("7B", 8), ("7B", 128), ("13B", 64), ("34B", 64), ("70B", 64), ("70B", 128)]
QUICK = [("7B", 8)]


def cases(slow: list[tuple[str, int]], quick: list[tuple[str, int]]) -> list[object]:
    return [*quick, *(pytest.param(*case, marks=pytest.mark.full) for case in slow if case not in quick)]


@pytest.mark.parametrize(("size", "count"), cases(EVERY, QUICK))
def test_the_actor_has_at_least_as_many_devices_as_any_other(size: str, count: int) -> None:
    """Generation cannot overlap other models."""
    devices = devices_of(*found(size, count))
    assert devices["actor"] == max(devices.values())


@pytest.mark.parametrize(
    ("size", "count"),
    [
        *cases([("7B", 16), ("7B", 32), ("13B", 16), ("13B", 32), ("34B", 32)], QUICK),
        pytest.param(
            *("70B", 64),
            marks=[
                pytest.mark.full,
                pytest.mark.xfail(
                    strict=True,
                    reason="generation weights gathered apart stay while others compute: two pools",
                ),
            ],
        ),
    ],
)
def test_on_small_clusters_all_models_are_colocated(size: str, count: int) -> None:
    assert len(found(size, count)[1].pools) == 1


@pytest.mark.full
@pytest.mark.parametrize(("size", "count"), [("7B", 128), ("13B", 128), ("34B", 128), ("70B", 128)])
def test_on_large_clusters_actor_and_critic_are_apart(size: str, count: int) -> None:
    assert actor_and_critic_are_apart(size, count)


@pytest.mark.full
def test_rates_grow_more_slowly_than_clusters() -> None:
    """Data parallelism loses efficiency as the batch of a rank shrinks."""
    rates = {
        count: problem.workload.tokens / plan.cost
        for count in (8, 128)
        for problem, plan in [found("7B", count)]
    }
    assert 1 < rates[128] / rates[8] < 16


def test_too_small_a_tensor_size_of_generation_is_limited_by_the_cache() -> None:
    seconds = generation_by_tensor_size("7B")
    assert seconds[1] is not None
    assert seconds[2] is not None
    assert seconds[1] > 1.1 * seconds[2]


@pytest.mark.xfail(
    strict=True,
    reason="the paper measures 60.3 % less; the model has no overhead of a decoding step that grows with the tensor "
    "size but all-reduces over NVLink, so tensor sizes 2 to 8 are within 8 % of each other (docs/mapping.md)",
)
def test_a_smaller_tensor_size_of_generation_is_much_faster() -> None:
    seconds = generation_by_tensor_size("7B")
    smaller = min(each for tensor, each in seconds.items() if tensor < 8 and each is not None)
    assert seconds[8] is not None
    assert smaller < 0.8 * seconds[8]


@pytest.mark.parametrize(("size", "tensor"), [("7B", 2), ("13B", 4), ("70B", 8)])
def test_the_transition_within_micro_dp_groups_moves_least(size: str, tensor: int) -> None:
    seconds = transitions(size, 128, tensor)
    assert seconds["hybridflow"] < 0.45 * seconds["gather_all"]
    assert seconds["hybridflow"] <= seconds["hybridflow_v"] <= seconds["gather_all"]


@pytest.mark.full
def test_the_largest_searches_find_a_plan() -> None:
    """PPO on 128 devices, and five models on 1,024; `python -m benchmarks.paper` prints how long the first take."""
    for size in ("7B", "70B"):
        assert find_plan(paper_problem(size, 128))
    models = ("actor", "critic", "cost_critic", "reference", "reward")
    shapes: dict[str, ModelShape] = dict.fromkeys(models, LLAMA_SHAPES["7B"])
    assert find_plan(ppo_problem(shapes, device_group("A100-80GB:1024"), paper_workload()))
