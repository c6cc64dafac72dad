"""The search for the fastest plan (HybridFlow, algorithm 1): set partitions of the models, allocations of devices to
the sets, and layouts of the models. Exact: no plan has a lower cost.

Costs of a set are vectors of seconds by stage. A layout is left out only where another is at least as good in every
stage and in memory; a partial plan only where no completion can cost less than the best plan so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from controller.mapping.layouts import Option
from controller.mapping.pareto import not_dominated_rows

Times = tuple[float, ...]
Rounding = Literal["none", "up", "down"]
GRAINS = 256
"""Parts of a device's memory to which a search rounds bytes."""


@dataclass(frozen=True)
class Pool:
    """Colocated models of a plan.

    Attributes:
        models: Numbers of the models.
        kind: Number of the kind of devices.
        count: Number of devices.
        options: Layout of each model.
    """

    models: tuple[int, ...]
    kind: int
    count: int
    options: tuple[Option, ...]

    @property
    def times(self) -> Times:
        """Seconds of each stage: the sum over the models, which take turns."""
        return tuple(map(sum, zip(*(option.times for option in self.options), strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes of a device: what all models take between calls, and the most that one takes beyond."""
        return sum(option.idle for option in self.options) + max(option.extra for option in self.options)


@dataclass(frozen=True)
class MappedPlan:
    """A placement of models.

    Attributes:
        pools: Sets of colocated models with their devices.
        ahead: Steps by which generation may be ahead of updates.
    """

    pools: tuple[Pool, ...]
    ahead: int = 0

    @property
    def stages(self) -> Times:
        """Seconds of each stage: of the slowest pool (d_cost of HybridFlow, algorithm 1)."""
        return tuple(map(max, zip(*(pool.times for pool in self.pools), strict=True)))

    @property
    def cost(self) -> float:
        """Seconds of a step; see `period`."""
        return period(self.stages, max(sum(pool.times) for pool in self.pools), self.ahead)


def period(stages: Sequence[float], busiest: float, ahead: int) -> float:
    """Returns the seconds from one step to the next: the stages of a step, one after another, shared by `ahead` + 1
    steps that are under way, but at least the time in which the busiest pool computes.

    Args:
        stages: Seconds of each stage.
        busiest: Most seconds that a pool computes in a step.
        ahead: Steps by which generation may be ahead of updates.
    """
    return max(busiest, sum(stages) / (ahead + 1))


def partitions(items: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yields all partitions of items into sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for found in partitions(rest):
        yield [(first,), *found]
        for number, each in enumerate(found):
            yield [*found[:number], (first, *each), *found[number + 1 :]]


@dataclass(frozen=True, eq=False)
class Front:
    """Combinations of layouts of a set of models on a number of devices, of which none is better than another in all.

    Attributes:
        costs: [combinations, stages + 2] Seconds of each stage; bytes between calls, and most bytes beyond.
        choices: Layouts of each combination, in the order of the set.
    """

    costs: np.ndarray
    choices: tuple[tuple[Option, ...], ...]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Pools of a set of models with its combinations, one a row.

    Attributes:
        kinds, counts: [rows] int64 Kind of the devices, and their number.
        numbers: [rows] int64 Number of the combination among those of its pool.
        costs: [rows, stages] Seconds of each stage.
        busy: [rows] Seconds of all stages.
    """

    kinds: np.ndarray
    counts: np.ndarray
    numbers: np.ndarray
    costs: np.ndarray
    busy: np.ndarray


class Search:
    """One search.

    Args:
        kinds: Kind of each model: models of one kind have equal layouts.
        counts: Number of devices of each kind of devices.
        capacities: Bytes of a device, by kind of devices.
        options: Function that returns the layouts of a kind of models in a pool: of kind of models, kind of devices
            and number of devices. A pool of more devices must have all layouts of a pool of fewer, or equal ones.
        ahead: Steps by which generation may be ahead of updates.
        known: A plan, if one is known already. Default: none.
        rounding: Whether bytes are exact, or rounded "up" or "down" to GRAINS parts of a device, which leaves few
            combinations: no plan costs less than those that are found with bytes rounded down, and all that are found
            with bytes rounded up fit. Default: exact.
    """

    def __init__(
        self,
        kinds: Sequence[int],
        counts: Sequence[int],
        capacities: Sequence[int],
        options: Callable[[int, int, int], Sequence[Option]],
        ahead: int = 0,
        known: MappedPlan | None = None,
        rounding: Rounding = "none",
    ) -> None:
        self._rounding = rounding
        self._kinds = kinds
        self._counts = counts
        self._capacities = capacities
        self._options = options
        self._ahead = ahead
        self._combined: dict[tuple[tuple[int, ...], int, int], Front] = {}
        self._fitting: dict[tuple[tuple[int, ...], int, int], Front] = {}
        self._floor = self._fastest_stages()
        self._best = known
        self._cost = float("inf") if known is None else known.cost

    def run(
        self, pool_counts: Sequence[Sequence[int]], sets: Sequence[tuple[int, ...]] | None = None
    ) -> MappedPlan | None:
        """Returns a plan of the lowest cost; None where no plan fits.

        Args:
            pool_counts: Numbers of devices that a pool may have, ascending, by kind of devices.
            sets: The sets of models of the plan, by their numbers. Default: the best of all partitions.
        """
        found = [list(sets)] if sets else sorted(partitions(range(len(self._kinds))), key=len)
        if not sets:
            self._colocate()
        for sets in found:
            self._allocate(sets, pool_counts)
        return self._best

    def _fastest_stages(self) -> np.ndarray:
        """Returns the least seconds of each stage: of the slowest model, each in its fastest layout for the stage."""
        floors = []
        for model in set(self._kinds):
            times = [
                option.times
                for kind, count in enumerate(self._counts)
                for option in self._options(model, kind, count)
            ]
            if times:
                floors.append(np.min(times, axis=0))
        return np.max(floors, axis=0) if floors else np.zeros(1)

    def _colocate(self) -> None:
        """Finds plans with all models on all devices of a kind, which bound the combinations that are looked at.
        Layouts are chosen one by one, by their seconds and a price of memory."""
        models = tuple(range(len(self._kinds)))
        for kind, count in enumerate(self._counts):
            layouts = [self._options(model, kind, count) for model in self._kinds]
            if not all(layouts):
                continue
            for price in (0.0, *(2.0**power / self._capacities[kind] for power in range(-6, 16))):
                chosen = [
                    min(each, key=lambda x: sum(x.times) + price * (x.idle + x.extra)) for each in layouts
                ]
                pool = Pool(models, kind, count, tuple(chosen))
                plan = MappedPlan((pool,), self._ahead)
                if pool.nbytes <= self._capacities[kind] and plan.cost < self._cost:
                    self._best, self._cost = plan, plan.cost

    def _allocate(self, sets: list[tuple[int, ...]], pool_counts: Sequence[Sequence[int]]) -> None:
        """Looks for a better plan with these sets."""
        choices = [self._candidates(self._key(each), pool_counts) for each in sets]
        if not all(len(each.counts) for each in choices):
            return
        floors = [each.costs.min(axis=0) for each in choices]
        # The sets with the highest costs come first.
        order = sorted(range(len(sets)), key=lambda i: -floors[i].sum())
        # Of the sets that are still to place, by their number: seconds of the stages, of the busiest pool, and devices.
        after, busy_after, least = [np.zeros_like(floors[0])], [0.0], [0]
        for i in reversed(order):
            after.append(np.maximum(after[-1], floors[i]))
            busy_after.append(max(busy_after[-1], float(choices[i].busy.min())))
            least.append(least[-1] + int(choices[i].counts.min()))
        plan: list[tuple[int, int, int, int]] = []

        def extend(place: int, stages: np.ndarray, busiest: float, left: np.ndarray) -> None:
            if place == len(order):
                cost = period(stages.tolist(), busiest, self._ahead)
                if cost < self._cost:
                    self._cost = cost
                    self._best = self._plan(sets, plan)
                return
            each, rest = choices[order[place]], len(order) - place - 1
            joined = np.maximum(each.costs, stages)
            shared = np.maximum(joined, after[rest]).sum(axis=1) / (self._ahead + 1)
            bounds = np.maximum(shared, np.maximum(each.busy, max(busiest, busy_after[rest])))
            has_room = (each.counts <= left[each.kinds]) & (left.sum() - each.counts >= least[rest])
            rows = np.flatnonzero(has_room & (bounds < self._cost))
            for row in rows[np.argsort(bounds[rows], kind="stable")]:
                if bounds[row] >= self._cost:
                    break
                kind, count = int(each.kinds[row]), int(each.counts[row])
                less = left.copy()
                less[kind] -= count
                plan.append((order[place], kind, count, int(each.numbers[row])))
                extend(place + 1, joined[row], max(busiest, float(each.busy[row])), less)
                plan.pop()

        extend(0, np.zeros_like(floors[0]), 0.0, np.array(self._counts))

    def _key(self, models: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(self._kinds[model] for model in models))

    def _candidates(self, key: tuple[int, ...], pool_counts: Sequence[Sequence[int]]) -> Candidates:
        """Returns the pools that a set fits into; of their combinations only those that are in some stage faster than
        any of a smaller pool."""
        found: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        for kind, counts in enumerate(pool_counts):
            smaller: np.ndarray | None = None
            for count in counts:
                times = self._fit(key, kind, count).costs
                if not len(times):
                    continue
                smaller = np.zeros((0, times.shape[1])) if smaller is None else smaller
                is_faster = ~np.any((smaller[None] <= times[:, None]).all(axis=2), axis=1)
                if is_faster.any():
                    found.append((kind, count, np.flatnonzero(is_faster), times[is_faster]))
                    both = np.concatenate((smaller, times[is_faster]))
                    smaller = both[not_dominated_rows(both)]
        sizes = [len(numbers) for _, _, numbers, _ in found]
        costs = np.concatenate([times for *_, times in found]) if found else np.zeros((0, 1))
        return Candidates(
            np.repeat(np.array([kind for kind, *_ in found], np.int64), sizes),
            np.repeat(np.array([count for _, count, *_ in found], np.int64), sizes),
            np.concatenate([np.zeros(0, np.int64), *(numbers for _, _, numbers, _ in found)]),
            costs,
            costs.sum(axis=1),
        )

    def _fit(self, key: tuple[int, ...], kind: int, count: int) -> Front:
        """Returns the combinations of a set that fit into a device, by seconds of the stages alone."""
        place = key, kind, count
        if place not in self._fitting:
            front = self._combine(key, kind, count)
            fits = front.costs[:, -2] + front.costs[:, -1] <= self._capacities[kind]
            rows = np.flatnonzero(fits)
            times = front.costs[rows, :-2]
            kept = not_dominated_rows(times)
            self._fitting[place] = Front(times[kept], tuple(front.choices[i] for i in rows[kept]))
        return self._fitting[place]

    def _combine(self, key: tuple[int, ...], kind: int, count: int) -> Front:
        """Returns the combinations of layouts of a set."""
        place = key, kind, count
        if place not in self._combined:
            *others, last = key
            options = self._options(last, kind, count)
            width = len(options[0].times) + 2 if options else 2
            own = np.array([(*each.times, each.idle, each.extra) for each in options]).reshape(-1, width)
            own, options = self._rounded(own, options, self._capacities[kind])
            if not others:
                self._combined[place] = Front(own, tuple((each,) for each in options))
            else:
                self._combined[place] = self._joined(
                    self._combine(tuple(others), kind, count), own, options, kind
                )
        return self._combined[place]

    def _rounded(
        self, costs: np.ndarray, options: Sequence[Option], capacity: int
    ) -> tuple[np.ndarray, Sequence[Option]]:
        """Returns costs with rounded bytes, without the layouts that are dominated then."""
        if self._rounding == "none" or not len(costs):
            return costs, options
        grain, costs = capacity / GRAINS, costs.copy()
        whole = np.ceil if self._rounding == "up" else np.floor
        costs[:, -2:] = whole(costs[:, -2:] / grain) * grain
        kept = not_dominated_rows(costs)
        return costs[kept], [options[i] for i in kept]

    def _joined(self, front: Front, own: np.ndarray, options: Sequence[Option], kind: int) -> Front:
        """Returns the combinations of a front with the layouts of one more model."""
        if not len(own) or not len(front.choices):
            return Front(np.zeros((0, 2)), ())
        costs = front.costs[:, None, :] + own[None, :, :]
        costs[:, :, -1] = np.maximum(front.costs[:, None, -1], own[None, :, -1])
        flat = costs.reshape(-1, own.shape[1])
        is_fast = self._least_cost(flat[:, :-2]) < self._cost
        fits = np.flatnonzero((flat[:, -2] + flat[:, -1] <= self._capacities[kind]) & is_fast)
        kept = fits[not_dominated_rows(flat[fits])]
        return Front(
            flat[kept],
            tuple((*front.choices[i // len(own)], options[i % len(own)]) for i in kept.tolist()),
        )

    def _least_cost(self, times: np.ndarray) -> np.ndarray:
        """Returns the least seconds of a step [combinations] with a pool that takes `times` [combinations, stages]: as
        long as it computes, and in each stage as long as any model on all devices."""
        shared = np.maximum(times, self._floor).sum(axis=1) / (self._ahead + 1)
        return np.maximum(shared, times.sum(axis=1))

    def _plan(self, sets: list[tuple[int, ...]], chosen: Sequence[tuple[int, int, int, int]]) -> MappedPlan:
        pools = []
        for place, kind, count, number in chosen:
            models = sorted(sets[place], key=lambda model: self._kinds[model])
            front = self._fit(self._key(sets[place]), kind, count)
            by_model = sorted(zip(models, front.choices[number], strict=True), key=lambda pair: pair[0])
            pools.append(
                Pool(tuple(m for m, _ in by_model), kind, count, tuple(option for _, option in by_model))
            )
        return MappedPlan(tuple(sorted(pools, key=lambda pool: pool.models)), self._ahead)
