"""Finds the fastest plan of a problem: the tables of layouts behind the search."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from controller.mapping.devices import DeviceGroup
from controller.mapping.layouts import Bounds, Option, layouts, merged, meshes, not_dominated
from controller.mapping.problem import Model, Problem
from controller.mapping.search import MappedPlan, Search
from controller.mapping.simulate import Site
from settings.memory.predict import predict


class LayoutTables:
    """Layouts by kind of model, kind of devices, and number of devices; each is computed once. Identical models share
    theirs.

    Args:
        problem: The problem.
        bounds: Layouts that are looked at. Default: all.
    """

    def __init__(self, problem: Problem, bounds: Bounds | None = None) -> None:
        self._problem = problem
        self._bounds = bounds or Bounds()
        keys = list(dict.fromkeys(model.key for model in problem.models))
        self.kinds = [keys.index(model.key) for model in problem.models]
        self._of_kind = [problem.models[self.kinds.index(kind)] for kind in range(len(keys))]
        self._exact: dict[tuple[int, int, int, int], list[Option]] = {}
        self._up_to: dict[tuple[int, int, int], list[list[Option]]] = {}
        self._sizes: dict[tuple[int, int], list[int]] = {}

    def options(self, kind: int, devices: int, count: int) -> Sequence[Option]:
        """Returns the Pareto-optimal layouts of a kind of model on at most `count` devices of a kind, with the
        alignment of a pool of `count` devices."""
        alignment = self._problem.devices[devices].alignment(count)
        return self._accumulated(kind, devices, alignment, count)

    def _accumulated(self, kind: int, devices: int, alignment: int, count: int) -> list[Option]:
        sizes = self.mesh_sizes(kind, devices)
        # By the number of sizes: the layouts of the smallest ones.
        found = self._up_to.setdefault((kind, devices, alignment), [[]])
        for ranks in sizes[len(found) - 1 : bisect_right(sizes, count)]:
            more = self._layouts(kind, devices, alignment, ranks)
            found.append(merged(found[-1], more) if more else found[-1])
        return found[bisect_right(sizes, count)]

    def _layouts(self, kind: int, devices: int, alignment: int, ranks: int) -> list[Option]:
        key = kind, devices, alignment, ranks
        if key not in self._exact:
            group = self._problem.devices[devices]
            model = on(self._of_kind[kind], group)
            self._exact[key] = not_dominated(
                list(layouts(model, Site(group, alignment), ranks, self._problem.workload, self._bounds))
            )
        return self._exact[key]

    def mesh_sizes(self, kind: int, devices: int) -> list[int]:
        """Returns the numbers of ranks that have a mesh for a kind of model, ascending."""
        group, model = self._problem.devices[devices], self._of_kind[kind]
        site = Site(group, group.per_machine)
        key = kind, devices
        if key not in self._sizes:
            self._sizes[key] = [
                ranks
                for ranks in range(1, group.count + 1)
                if (ranks.bit_count() == 1 or not self._bounds.doubling)
                and next(meshes(model, site, ranks, self._problem.workload), None)
            ]
        return self._sizes[key]

    def pool_counts(self) -> list[list[int]]:
        """Returns the numbers of devices that a pool may have, by kind of devices: those that a mesh has, and these
        rounded up to whole machines."""
        found = []
        for devices, group in enumerate(self._problem.devices):
            sizes = {size for kind in set(self.kinds) for size in self.mesh_sizes(kind, devices)}
            whole = {-(-size // group.per_machine) * group.per_machine for size in sizes}
            found.append(sorted(size for size in sizes | whole if size <= group.count))
        return found


def on(model: Model, group: DeviceGroup) -> Model:
    """Returns a model whose memory is predicted for devices of a group."""
    return replace(model, use=replace(model.use, on_gpu=group.on_gpu))


def find_plan(problem: Problem, sets: Sequence[tuple[int, ...]] | None = None) -> MappedPlan | None:
    """Returns a plan of the lowest cost; None where no plan fits.

    A plan with meshes of powers of two is found first, and bounds the layouts that are looked at.

    Args:
        problem: The problem.
        sets: The sets of models that are colocated, by their numbers. Default: the best of all partitions.
    """
    known = best_plan(problem, LayoutTables(problem, Bounds(doubling=True)), sets)
    tables = LayoutTables(problem, Bounds(math.inf if known is None else known.cost))
    return best_plan(problem, tables, sets, known)


def best_plan(
    problem: Problem,
    tables: LayoutTables,
    sets: Sequence[tuple[int, ...]] | None = None,
    known: MappedPlan | None = None,
) -> MappedPlan | None:
    """Returns a plan of the lowest cost among the layouts of tables; None where no plan fits.

    Args:
        problem: The problem.
        tables: Its layouts.
        sets: As of `find_plan`.
        known: A plan, if one is known already. It is returned where none costs less. Default: none.
    """
    search = Search(
        tables.kinds,
        [group.count for group in problem.devices],
        [group.capacity for group in problem.devices],
        tables.options,
        problem.ahead,
        known,
    )
    return search.run(tables.pool_counts(), sets)


def named_plans(problem: Problem) -> dict[str, MappedPlan | None]:
    """Returns the best plan of each placement that HybridFlow compares (section 8.3), if the models allow it: all
    models on the same devices; each model on its own devices; actor, rollout and reference on some devices and the
    others on the rest. If services receive weights, also: models that learn on some devices and the others on the
    rest."""
    names = [model.name for model in problem.models]
    numbers = range(len(names))
    first = tuple(i for i in numbers if names[i] in ("actor", "rollout", "reference"))
    others = tuple(i for i in numbers if i not in first)
    placements = {"colocate": [tuple(numbers)], "standalone": [(i,) for i in numbers]}
    if len(first) > 1 and others:
        placements["split"] = [first, others]
    learning = tuple(i for i in numbers if problem.models[i].use.learns)
    if any(model.receives for model in problem.models):
        placements["disaggregated"] = [learning, tuple(i for i in numbers if i not in learning)]
    return {name: find_plan(problem, sets) for name, sets in placements.items()}


def predicted_bytes(problem: Problem, plan: MappedPlan) -> list[int]:
    """Returns the bytes of a device of each pool of a plan as `settings.memory` predicts them, without the tables of
    the search."""
    needed = []
    for pool in plan.pools:
        idle, beyond = 0, 0
        for model, option in zip(pool.models, pool.options, strict=True):
            found = predict(option.use, problem.models[model].rows(problem.workload))
            host = 0 if option.use.on_gpu else 1
            sizes = {name: each.device_bytes + host * each.host_bytes for name, each in found.items()}
            idle += sizes["idle"]
            beyond = max(beyond, max(sizes.values()) - sizes["idle"])
        needed.append(idle + beyond)
    return needed
