"""The search is exact: it equals a naive enumeration of all plans."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from benchmarks.paper_setup import ppo_problem
from controller.mapping import fronts
from controller.mapping.devices import DeviceGroup, built_in_devices
from controller.mapping.layouts import Option
from controller.mapping.mapper import LayoutTables, find_plan
from controller.mapping.pareto import merged_rows, not_dominated_rows
from controller.mapping.search import MappedPlan, Search, partitions
from controller.mapping.workload import LengthShares, Workload
from settings.memory.shape import ModelShape
from settings.memory.use import ModelUse

USE = ModelUse(ModelShape("llama", 64, 8, 16, 2, 2, 2, 4))
Options = Callable[[int, int, int], Sequence[Option]]


def all_assignments(number: int) -> Iterator[tuple[int, ...]]:
    """Every function from models to labels; equal partitions occur several times, which is no matter to a minimum."""
    return itertools.product(range(number), repeat=number)


def cheapest_by_enumeration(
    kinds: Sequence[int], counts: Sequence[int], capacities: Sequence[int], options: Options, ahead: int
) -> float:
    """Cost of the best plan: all labels of models, all devices for each label, all layouts of each model."""
    best = math.inf
    for labels in set(all_assignments(len(kinds))):
        used = sorted(set(labels))
        places = [(kind, count) for kind, most in enumerate(counts) for count in range(1, most + 1)]
        for chosen in itertools.product(places, repeat=len(used)):
            taken = [sum(count for kind, count in chosen if kind == each) for each in range(len(counts))]
            if any(a > b for a, b in zip(taken, counts, strict=True)):
                continue
            where = dict(zip(used, chosen, strict=True))
            layouts = [options(kind, *where[label]) for kind, label in zip(kinds, labels, strict=True)]
            for picked in itertools.product(*layouts):
                best = min(best, cost_of(labels, where, picked, capacities, ahead))
    return best


def cost_of(labels, where, picked, capacities, ahead) -> float:
    slowest, busiest = [0.0] * 4, 0.0
    for label, (kind, _) in where.items():
        mine = [option for option, each in zip(picked, labels, strict=True) if each == label]
        needed = sum(option.idle for option in mine) + max(option.extra for option in mine)
        if needed > capacities[kind]:
            return math.inf
        times = [sum(option.times[stage] for option in mine) for stage in range(4)]
        slowest = [max(a, b) for a, b in zip(slowest, times, strict=True)]
        busiest = max(busiest, sum(times))
    return max(busiest, sum(slowest) / (ahead + 1), chain(labels, picked) if ahead else 0.0)


def chain(labels, picked) -> float:
    """Seconds from one generation to the next, where an actor or a critic is on the devices of a rollout service.
    Models are these three, and further ones that do not learn; or have no roles."""
    if len(picked) < 3 or not picked[2].use.generates or labels[2] not in labels[:2]:
        return 0.0

    def seconds(label: int, stage: int) -> float:
        return sum(option.times[stage] for each, option in zip(labels, picked, strict=True) if each == label)

    learner, here = labels[0], labels[2]
    kept = sum(option.times[1] for label, option in zip(labels[:2], picked[:2], strict=True) if label == here)
    slowest = [max(seconds(label, stage) for label in labels) for stage in (2, 3)]
    to_here = seconds(learner, 2) + max(seconds(learner, 3), seconds(here, 3))
    return seconds(here, 0) + max(seconds(here, 1) + to_here, kept + sum(slowest))


def random_instance(seed: int) -> tuple[list[int], list[int], list[int], Options, int]:
    draw = random.Random(seed)
    models = draw.choice([1, 2, 2, 3, 3, 3])
    kinds = [draw.randrange(models) for _ in range(models)]
    counts = draw.choice([[1], [2], [3], [1, 1], [1, 2]] if models > 2 else [[4], [3, 2], [2, 2]])
    capacities = [draw.randint(15, 45) for _ in counts]
    table: dict[tuple[int, int, int], list[Option]] = {}

    def options(kind: int, devices: int, count: int) -> list[Option]:
        """Layouts of at most `count` ranks."""
        found = []
        for ranks in range(1, count + 1):
            key = kind, devices, ranks
            if key not in table:
                own = random.Random(f"{seed} {key}")
                table[key] = [random_option(own, kind) for _ in range(own.randint(0, 2))]
            found += table[key]
        return found

    return kinds, counts, capacities, options, draw.choice([0, 0, 1, 3])


def random_option(draw: random.Random, kind: int) -> Option:
    """A layout. Kinds 0 and 1 move weights after an update."""
    times = [float(draw.choice([0, 1, 2, 3, 5, 8])) for _ in range(3)]
    moving = float(draw.choice([0, 1, 2])) if kind < 2 else 0.0
    return Option((*times, moving), draw.randint(1, 12), draw.randint(1, 20), USE)


def search(instance: tuple[list[int], list[int], list[int], Options, int]) -> MappedPlan | None:
    kinds, counts, capacities, options, ahead = instance
    found = Search(kinds, counts, capacities, options, ahead)
    return found.run([range(1, most + 1) for most in counts])


@pytest.mark.parametrize("grains", [1, 8, 256])
@pytest.mark.parametrize("block", range(6))
def test_equals_brute_force(block: int, grains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """240 random instances of up to three models on up to two kinds of devices, with steps ahead and without; however
    coarsely bytes are rounded at first."""
    monkeypatch.setattr(fronts, "GRAINS", grains)
    fitting = 0
    for seed in range(40 * block, 40 * block + 40):
        instance = random_instance(seed)
        plan = search(instance)
        assert (math.inf if plan is None else plan.cost) == least_cost(seed), seed
        fitting += plan is not None
    assert fitting > 10


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("memory_gb", [0.02, 0.004])
@pytest.mark.parametrize(
    ("services", "count", "per_machine"),
    [
        (("actor", "critic", "rollout"), 3, 8),
        (("actor", "critic", "rollout"), 3, 2),
        (("actor", "critic", "rollout", "reference"), 2, 1),
    ],
)
def test_a_rollout_service_is_placed_as_by_brute_force(
    ahead: int, memory_gb: float, services: tuple[str, ...], count: int, per_machine: int
) -> None:
    """Real costs, of a model whose generation and weights are a service's. On machines of two, a pool of three has no
    tensor parallelism, and one of two has."""
    table = built_in_devices()["A100-80GB"].model_copy(update={"memory_gb": memory_gb})
    work = Workload(8, LengthShares.of(64), LengthShares.of(64), mini_batches=2)
    shape = ModelShape("llama", 256, 64, 128, 4, 4, 2, 16)
    group = DeviceGroup("A100-80GB", table, count, per_machine)
    problem = ppo_problem(dict.fromkeys(services, shape), group, work, ahead)
    tables = LayoutTables(problem)
    expected = cheapest_by_enumeration(tables.kinds, [count], [group.capacity], tables.options, ahead)
    plan = find_plan(problem)
    assert plan is not None or memory_gb < 0.02
    assert (math.inf if plan is None else plan.cost) == pytest.approx(expected, rel=1e-12)


@functools.cache
def least_cost(seed: int) -> float:
    return cheapest_by_enumeration(*random_instance(seed))


@pytest.mark.parametrize("seed", range(0, 240, 7))
def test_a_plan_is_within_its_devices_and_their_memory(seed: int) -> None:
    kinds, counts, capacities, options, _ = instance = random_instance(seed)
    plan = search(instance)
    if plan is None:
        return
    assert sorted(model for pool in plan.pools for model in pool.models) == list(range(len(kinds)))
    for kind, most in enumerate(counts):
        assert sum(pool.count for pool in plan.pools if pool.kind == kind) <= most
    for pool in plan.pools:
        assert pool.nbytes <= capacities[pool.kind]
        for model, option in zip(pool.models, pool.options, strict=True):
            assert option in options(kinds[model], pool.kind, pool.count)


@pytest.mark.parametrize(("models", "number"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52)])
def test_there_are_as_many_partitions_as_bells_numbers(models: int, number: int) -> None:
    found = {frozenset(each) for each in partitions(range(models))}
    assert len(found) == len(list(partitions(range(models)))) == number


def test_rows_that_are_dominated_are_left_out() -> None:
    costs = np.array([[2.0, 2.0], [1.0, 3.0], [2.0, 2.0], [3.0, 3.0], [0.0, 9.0]])
    assert sorted(map(tuple, costs[not_dominated_rows(costs)])) == [(0, 9), (1, 3), (2, 2)]


def test_merging_two_fronts_leaves_what_filtering_both_leaves() -> None:
    draw = np.random.default_rng(0)
    for _ in range(100):
        front, more = (draw.integers(0, 6, (draw.integers(0, 9), 3)).astype(float) for _ in range(2))
        front, more = front[not_dominated_rows(front)], more[not_dominated_rows(more)]
        both = np.concatenate((front, more))
        expected = both[not_dominated_rows(both)]
        assert sorted(map(tuple, both[merged_rows(front, more)])) == sorted(map(tuple, expected))
