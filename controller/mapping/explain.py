"""Why a given plan is slower than the best one, or does not fit, and how many devices would do."""

from __future__ import annotations

from dataclasses import replace

from controller.mapping.dataflow import STAGES
from controller.mapping.devices import GB, DeviceGroup
from controller.mapping.layouts import layouts
from controller.mapping.mapper import find_plan, on
from controller.mapping.output import pool_name
from controller.mapping.problem import Model, Problem
from controller.mapping.report import layout_text
from controller.mapping.search import MappedPlan
from controller.mapping.simulate import Site
from reports.units import counted, seconds_text

MOST_DEVICES = 256
"""Most devices for which a fit is looked for; beyond, one search takes minutes."""


def misfits(problem: Problem, plan: MappedPlan) -> list[str]:
    """Returns a line for each pool that needs more than a device has: by how much, and the service that needs most."""
    lines = []
    for pool in plan.pools:
        capacity = problem.devices[pool.kind].capacity
        if pool.nbytes > capacity:
            largest = max(range(len(pool.models)), key=lambda i: pool.options[i].extra)
            name, option = problem.models[pool.models[largest]].name, pool.options[largest]
            lines.append(
                f"{pool_name(problem, pool)} needs {pool.nbytes / GB:.2f} GB on a device of {capacity / GB:.2f} GB, "
                f"{(pool.nbytes - capacity) / GB:.2f} GB too much: {sum(o.idle for o in pool.options) / GB:.2f} GB "
                f"between calls, and {option.extra / GB:.2f} GB more in the largest stage of {name}"
            )
    return lines


def comparison(problem: Problem, given: MappedPlan, best: MappedPlan) -> list[str]:
    """Returns lines that say why a plan is slower than the best one: by stage, which pool the others wait for, and by
    service, which layout takes how much longer. Largest losses first."""
    lines = [
        f"step: {seconds_text(given.cost)}, best {seconds_text(best.cost)}: "
        f"{given.cost / best.cost:.2f} times as long"
    ]
    for stage, name in enumerate(STAGES):
        lost = given.stages[stage] - best.stages[stage]
        slowest = max(given.pools, key=lambda pool: pool.times[stage])
        if abs(lost) > 0.005 * best.cost:
            word = "longer" if lost > 0 else "shorter"
            lines.append(
                f"{name}: {seconds_text(abs(lost))} {word}; it waits for {pool_name(problem, slowest)} on "
                f"{counted(slowest.count, 'device')}"
            )
    losses = sorted(_services(problem, given, best), reverse=True)
    return lines + [text for lost, text in losses if abs(lost) > 0.005 * best.cost]


def _services(problem: Problem, given: MappedPlan, best: MappedPlan) -> list[tuple[float, str]]:
    found = []
    ours = {n: (pool, o) for pool in given.pools for n, o in zip(pool.models, pool.options, strict=True)}
    theirs = {n: (pool, o) for pool in best.pools for n, o in zip(pool.models, pool.options, strict=True)}
    for number, model in enumerate(problem.models):
        (pool, option), (best_pool, best_option) = ours[number], theirs[number]
        lost = sum(option.times) - sum(best_option.times)
        layout, best_layout = layout_text(option), layout_text(best_option)
        found.append(
            (
                lost,
                f"{model.name}: {seconds_text(abs(lost))} {'longer' if lost > 0 else 'shorter'} as {layout} on "
                f"{counted(pool.count, 'device')} than as {best_layout} on {best_pool.count}",
            )
        )
    return found


def why_nothing_fits(problem: Problem) -> list[str]:
    """Returns lines that say why a problem has no plan: the models that fit nowhere alone, with what they lack, and the
    least number of devices of the first kind that has a plan."""
    lines = []
    for model in problem.models:
        needed = [least for group in problem.devices if (least := _least_bytes(problem, model, group))]
        roomiest = max(group.capacity for group in problem.devices)
        if needed and min(needed) > roomiest:
            lines.append(
                f"{model.name} needs at least {min(needed) / GB:.2f} GB on each device, and a device has "
                f"{roomiest / GB:.2f} GB: {(min(needed) - roomiest) / GB:.2f} GB too much"
            )
    least = least_devices(problem)
    group = problem.devices[0]
    found = f"it takes at least {least}" if least else f"no number up to {MOST_DEVICES} is enough"
    return [*(lines or ["each model fits alone, but not all of them together"]), f"{group.name}: {found}"]


def _least_bytes(problem: Problem, model: Model, group: DeviceGroup) -> int | None:
    """Returns the fewest bytes of a device that a model needs on the devices of a group, in any layout; None where no
    mesh divides it."""
    table = group.table.model_copy(update={"memory_gb": 1e9})
    endless = replace(group, table=table)
    found = [
        option.idle + option.extra
        for ranks in range(1, group.count + 1)
        for option in layouts(on(model, group), Site(endless, group.per_machine), ranks, problem.workload)
    ]
    return min(found, default=None)


def least_devices(problem: Problem) -> int | None:
    """Returns the least number of devices of the first kind, the others left as they are, for which there is a plan;
    None beyond `MOST_DEVICES`."""
    group, *others = problem.devices

    def fits(count: int) -> bool:
        return find_plan(replace(problem, devices=(replace(group, count=count), *others))) is not None

    low, high = 0, max(1, group.count)
    while not fits(high):
        if high >= MOST_DEVICES:
            return None
        low, high = high, min(2 * high, MOST_DEVICES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
