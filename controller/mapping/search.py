"""The search for the fastest plan (HybridFlow, algorithm 1): set partitions of the models, allocations of devices to
the sets, and layouts of the models. Exact: no plan has a lower cost.

Costs of a set are vectors of seconds by stage. A layout is left out only where another is at least as good in every
stage and in memory; a partial plan only where no completion can cost less than the best plan so far. Bytes of sets are
rounded down until a plan is found in which one does not fit in truth; the bytes of that set are then exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from controller.mapping.fronts import Fronts, Key
from controller.mapping.layouts import Option
from controller.mapping.pareto import not_dominated_rows

Times = tuple[float, ...]


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
        """Peak bytes of a device: the bytes that all models hold between calls, plus the largest `extra` of a model."""
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
        """Seconds of a step; see `period`, and `_chain_s`."""
        busiest = max(sum(pool.times) for pool in self.pools)
        return max(period(self.stages, busiest, self.ahead), self._chain_s() if self.ahead else 0.0)

    def _chain_s(self) -> float:
        """Returns the seconds of a chain of calls that steps ahead cannot overlap; 0 where there is none.

        A run keeps the calls of what learns, and of a values service, until a later step generates; on the devices that
        generate they come after that. The step that they belong to ends with its updates and transfers, and the
        generation after that one waits for it.
        """
        generating = [pool for pool in self.pools if any(each.use.generates for each in pool.options)]
        learning = [pool for pool in self.pools if any(each.is_policy for each in pool.options)]
        if not generating or not learning:
            return 0.0
        here, policy, stages = generating[0].times, learning[0].times, self.stages
        kept = [each for each in generating[0].options if each.is_kept]
        prepared_s = sum(each.times[1] for each in kept)
        if prepared_s:
            # Other preparation on these devices comes after the transfer to them.
            to_here = here[0] + here[1] + policy[2] + max(policy[3], here[3])
            return max(to_here, here[0] + prepared_s + stages[2] + stages[3])
        if not kept:
            return 0.0
        # Values on the policy's devices receive their critic's weights before the policy is updated there.
        is_after = any(each.is_kept and each.use.receives for each in learning[0].options)
        return here[0] + here[2] + here[3] + (policy[2] if is_after else 0.0)


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
            and number of devices.
        ahead: Steps by which generation may be ahead of updates.
        known: A plan, if one is known already. Default: none.
    """

    def __init__(
        self,
        kinds: Sequence[int],
        counts: Sequence[int],
        capacities: Sequence[int],
        options: Callable[[int, int, int], Sequence[Option]],
        ahead: int = 0,
        known: MappedPlan | None = None,
    ) -> None:
        self._kinds = kinds
        self._counts = counts
        self._capacities = capacities
        self._options = options
        self._ahead = ahead
        self._best = known
        self._cost = float("inf") if known is None else known.cost
        self._fronts = Fronts(capacities, options, lambda times: self._least_cost(times) < self._cost, ahead)
        self._candidates: dict[Key, Candidates] = {}
        self._floor = np.zeros(1)

    def run(
        self, pool_counts: Sequence[Sequence[int]], sets: Sequence[tuple[int, ...]] | None = None
    ) -> MappedPlan | None:
        """Returns a plan of the lowest cost; None where no plan fits.

        Args:
            pool_counts: Numbers of devices that a pool may have, ascending, by kind of devices.
            sets: The sets of models of the plan, by their numbers. Default: the best of all partitions.
        """
        self._floor = self._fastest_stages(pool_counts)
        found = [list(sets)] if sets else sorted(partitions(range(len(self._kinds))), key=len)
        if not sets:
            self._colocate()
        # Of partitions that differ in models of one kind alone, one is enough.
        alike = {tuple(sorted(map(self._key, each))): each for each in reversed(found)}
        for each in reversed(alike.values()):
            self._allocate(each, pool_counts)
        return self._best

    def _fastest_stages(self, pool_counts: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns the least seconds of each stage: of the slowest model, each in its fastest layout for the stage, in
        any pool."""
        floors = []
        for model in set(self._kinds):
            places = [(kind, count) for kind, counts in enumerate(pool_counts) for count in counts]
            times = [self._fronts.least(model, kind, count) for kind, count in places]
            times = [each for each in times if len(each)]
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
        keys = [self._key(each) for each in sets]
        misfits: list[tuple[Key, int, int]] | None = None
        while misfits is None or misfits:
            for place in misfits or ():
                self._fronts.refine(*place)
                self._candidates.pop(place[0], None)
            choices = [self._candidates_of(key, pool_counts) for key in keys]
            if not all(len(each.counts) for each in choices):
                return
            misfits = self._descend(sets, choices)

    def _descend(
        self, sets: list[tuple[int, ...]], choices: Sequence[Candidates]
    ) -> list[tuple[Key, int, int]]:
        """Takes the best plan of these candidates. Ends early at one that would be better, but whose pools do not all
        fit in truth, and returns these."""
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

        def extend(
            place: int, stages: np.ndarray, busiest: float, left: np.ndarray
        ) -> list[tuple[Key, int, int]]:
            if place == len(order):
                return self._take(sets, plan)
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
                misfits = extend(place + 1, joined[row], max(busiest, float(each.busy[row])), less)
                plan.pop()
                if misfits:
                    return misfits
            return []

        return extend(0, np.zeros_like(floors[0]), 0.0, np.array(self._counts))

    def _take(
        self, sets: list[tuple[int, ...]], chosen: Sequence[tuple[int, int, int, int]]
    ) -> list[tuple[Key, int, int]]:
        """Takes a plan if it costs less than the best one and fits; if it does not fit, returns the pools that do
        not."""
        plan = self._plan(sets, chosen)
        if plan.cost >= self._cost:
            return []
        misfits = [pool for pool in plan.pools if pool.nbytes > self._capacities[pool.kind]]
        if not misfits:
            self._best, self._cost = plan, plan.cost
        return [(self._key(pool.models), pool.kind, pool.count) for pool in misfits]

    def _key(self, models: Sequence[int]) -> Key:
        return tuple(sorted(self._kinds[model] for model in models))

    def _candidates_of(self, key: Key, pool_counts: Sequence[Sequence[int]]) -> Candidates:
        """Returns the pools that a set fits into; of their combinations only those that are in some stage faster than
        any of a smaller pool."""
        if key not in self._candidates:
            parts = [self._of_kind(key, kind, counts) for kind, counts in enumerate(pool_counts)]
            rows = np.concatenate([rows for rows in parts if len(rows)] or [np.zeros((0, 4))])
            kinds, counts, numbers = rows[:, :3].astype(np.int64).T
            self._candidates[key] = Candidates(kinds, counts, numbers, rows[:, 3:], rows[:, 3:].sum(axis=1))
        return self._candidates[key]

    def _of_kind(self, key: Key, kind: int, counts: Sequence[int]) -> np.ndarray:
        """Returns the candidates of a set on devices of a kind: [rows, 3 + stages] kind, count and number of the
        combination, and seconds of the stages."""
        fronts, last = [], None
        for count in counts:
            front = self._fronts.fitting(key, kind, count)
            if front is not last and len(front.costs):
                numbers = np.arange(len(front.costs))[:, None]
                places = np.broadcast_to((kind, count), (len(numbers), 2))
                fronts.append(np.concatenate((places, numbers, front.costs), axis=1))
            last = front
        if not fronts:
            return np.zeros((0, 4))
        rows = np.concatenate(fronts)
        rows = rows[self._least_cost(rows[:, 3:-1]) < self._cost]
        kept = not_dominated_rows(rows[:, [1, *range(3, rows.shape[1])]])
        return rows[kept, :-1]

    def _least_cost(self, times: np.ndarray) -> np.ndarray:
        """Returns the least seconds of a step [combinations] with a pool that takes `times` [combinations, stages]: as
        long as it computes, and in each stage as long as any model on all devices."""
        shared = np.maximum(times, self._floor).sum(axis=1) / (self._ahead + 1)
        return np.maximum(shared, times.sum(axis=1))

    def _plan(self, sets: list[tuple[int, ...]], chosen: Sequence[tuple[int, int, int, int]]) -> MappedPlan:
        pools = []
        for place, kind, count, number in chosen:
            models = sorted(sets[place], key=lambda model: self._kinds[model])
            options = self._fronts.chosen(self._key(sets[place]), kind, count, number)
            by_model = sorted(zip(models, options, strict=True), key=lambda pair: pair[0])
            pools.append(
                Pool(tuple(m for m, _ in by_model), kind, count, tuple(option for _, option in by_model))
            )
        return MappedPlan(tuple(sorted(pools, key=lambda pool: pool.models)), self._ahead)
