"""Pareto-optimal combinations of the layouts of colocated models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from controller.mapping.layouts import Option, costs_of
from controller.mapping.pareto import not_dominated_rows

GRAINS = 256
"""Number of steps per device memory to which bytes are rounded down, so that fewer combinations remain."""
Key = tuple[int, ...]
"""Kinds of the models of a set, ascending."""


@dataclass(frozen=True, eq=False)
class Front:
    """Combinations of layouts of a set of models.

    Attributes:
        costs: [combinations, stages + 3] Seconds of each stage, and of preparation that stays if steps overlap; bytes
            held between calls, and peak bytes above these. Or [..., stages + 1]: the seconds only.
        places: [combinations, models] int64 Index of the layout of each model.
    """

    costs: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class _Table:
    """Layouts of one model, with rounded or exact bytes.

    Attributes:
        number: Number that is equal for tables of equal costs.
        costs: As of `Front`, one a layout.
        options: The layouts.
    """

    number: int
    costs: np.ndarray
    options: Sequence[Option]


class Fronts:
    """Combinations of layouts by set of models, kind of devices and number of devices.

    Bytes are rounded down at first, so a combination may exceed the memory, but no combination that fits, and no
    faster one, is missing. `refine` computes the exact bytes for one set of models.

    Args:
        capacities: Bytes of a device, by kind of devices.
        options: As of `Search`.
        is_fast: Returns which combinations may be in a plan that is looked for: of the seconds of their stages
            [combinations, stages], or any lower bound on these, a mask [combinations].
        ahead: As of `Search`.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        options: Callable[[int, int, int], Sequence[Option]],
        is_fast: Callable[[np.ndarray], np.ndarray],
        ahead: int,
    ) -> None:
        self._capacities = capacities
        self._options = options
        self._is_fast = is_fast
        self._ahead = ahead
        self._tables: dict[tuple[int, int, int], _Table] = {}
        self._numbers: dict[tuple[int, int, bytes], int] = {}
        self._combined: dict[tuple[int, ...], Front] = {}
        self._fitting: dict[tuple[int, ...], Front] = {}
        self._exact: dict[tuple[Key, int, int], Front] = {}

    def fitting(self, key: Key, kind: int, count: int) -> Front:
        """Returns the combinations of a set that fit into a device of a kind, on `count` of these, by seconds of the
        stages alone."""
        exact = self._exact.get((key, kind, count))
        if exact is not None:
            return exact
        tables = [self._rounded(model, kind, count) for model in key]
        place = kind, *(table.number for table in tables)
        if place not in self._fitting:
            self._fitting[place] = self._fast(self._combine(tables, kind), kind)
        return self._fitting[place]

    def least(self, model: int, kind: int, count: int) -> np.ndarray:
        """Returns the least seconds [stages] of each stage of a model in any layout; [0] where it has none."""
        costs = self._rounded(model, kind, count).costs
        return costs[:, :-3].min(axis=0) if len(costs) else np.zeros(0)

    def refine(self, key: Key, kind: int, count: int) -> None:
        """Makes the combinations of a set on `count` devices exact, from now on."""
        front = self._combine_exactly([self._table(model, kind, count) for model in key], kind)
        self._exact[key, kind, count] = self._fast(front, kind)

    def chosen(self, key: Key, kind: int, count: int, number: int) -> list[Option]:
        """Returns the layouts of a combination of `fitting`, in the order of the key."""
        is_exact = (key, kind, count) in self._exact
        table = self._table if is_exact else self._rounded
        places = self.fitting(key, kind, count).places[number]
        return [
            table(model, kind, count).options[place]
            for model, place in zip(key, places.tolist(), strict=True)
        ]

    def _fast(self, front: Front, kind: int) -> Front:
        """Returns the combinations that fit and are not dominated by seconds alone."""
        costs = front.costs
        rows = np.flatnonzero(costs[:, -2] + costs[:, -1] <= self._capacities[kind])
        times = costs[rows, :-2]
        kept = not_dominated_rows(times)
        return Front(times[kept], front.places[rows[kept]])

    def _table(self, model: int, kind: int, count: int) -> _Table:
        """Returns the layouts of a kind of models with exact bytes."""
        options = self._options(model, kind, count)
        costs = costs_of(options)
        kept_s = [each.times[1] if self._ahead and each.is_kept else 0.0 for each in options]
        return _Table(-1, np.insert(costs, costs.shape[1] - 2, kept_s, axis=1), options)

    def _rounded(self, model: int, kind: int, count: int) -> _Table:
        """Returns the layouts with rounded bytes, without those that are dominated then."""
        place = model, kind, count
        if place not in self._tables:
            exact = self._table(model, kind, count)
            costs, grain = exact.costs.copy(), self._capacities[kind] / GRAINS
            costs[:, -2:] = np.floor(costs[:, -2:] / grain) * grain
            kept = not_dominated_rows(costs)
            costs = costs[kept]
            number = self._numbers.setdefault((model, kind, costs.tobytes()), len(self._numbers))
            self._tables[place] = _Table(number, costs, [exact.options[i] for i in kept.tolist()])
        return self._tables[place]

    def _combine(self, tables: Sequence[_Table], kind: int) -> Front:
        """Returns the combinations of the layouts of models; sets that begin alike share theirs."""
        place = kind, *(table.number for table in tables)
        if place not in self._combined:
            *others, last = tables
            own = Front(last.costs, np.arange(len(last.costs))[:, None])
            self._combined[place] = self._joined(self._combine(others, kind), own, kind) if others else own
        return self._combined[place]

    def _combine_exactly(self, tables: Sequence[_Table], kind: int) -> Front:
        """Returns the combinations, without those that are too slow or too large with the least of every other
        model."""
        least = [table.costs.min(axis=0) for table in tables]
        front = Front(tables[0].costs, np.arange(len(tables[0].costs))[:, None])
        for number, table in enumerate(tables[1:], 1):
            own = Front(table.costs, np.arange(len(table.costs))[:, None])
            front = self._joined(front, own, kind, least[number + 1 :])
        return front

    def _joined(self, front: Front, own: Front, kind: int, least: Sequence[np.ndarray] = ()) -> Front:
        """Returns the combinations of a front with the layouts of one more model, to which models with at least the
        costs `least` will be joined."""
        models = front.places.shape[1] + 1
        if not len(own.costs) or not len(front.costs):
            return Front(np.zeros((0, 3)), np.zeros((0, models), np.int64))
        costs = front.costs[:, None, :] + own.costs[None, :, :]
        costs[:, :, -1] = np.maximum(front.costs[:, None, -1], own.costs[None, :, -1])
        flat = costs.reshape(-1, own.costs.shape[1])
        times, idle, extra = flat[:, :-2], flat[:, -2], flat[:, -1]
        for each in least:
            times, idle, extra = times + each[:-2], idle + each[-2], np.maximum(extra, each[-1])
        fits = np.flatnonzero((idle + extra <= self._capacities[kind]) & self._is_fast(times[:, :-1]))
        kept = fits[not_dominated_rows(flat[fits])]
        places = np.concatenate(
            (front.places[kept // len(own.costs)], own.places[kept % len(own.costs)]), axis=1
        )
        return Front(flat[kept], places)
