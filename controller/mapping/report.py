"""Plans for people: tables of services and of placements, and a picture of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from controller.mapping.dataflow import STAGES
from controller.mapping.devices import GB
from controller.mapping.layouts import Option
from controller.mapping.output import generation_mesh, in_order, joined, pool_name
from controller.mapping.problem import Problem
from controller.mapping.search import MappedPlan
from reports import svg
from reports.page import card, page
from reports.units import counted, seconds_text

WIDTH, ROW, TOP = 900, 30, 34
"""Sizes of the picture: its width, the height of a service, and that of the stages' names."""


def plan_table(problem: Problem, plan: MappedPlan) -> Table:
    """Returns the table of a plan: a line for each service, with its layout, its seconds in each stage, and the bytes
    of a device; and for each pool the bytes of all of its services."""
    titles = ("devices", "service", "ranks", "mesh", "generation", *stage_names(plan), "GB idle", "GB most")
    table = Table(*titles, box=None, pad_edge=False)
    for pool in in_order(problem, plan):
        group = problem.devices[pool.kind]
        where = f"{pool.count} {group.name}"
        for number, option in zip(pool.models, pool.options, strict=True):
            table.add_row(
                where,
                problem.models[number].name,
                str(option.ranks),
                layout_text(option),
                generation_text(problem, option),
                *(seconds_text(each) if each else "" for each in option.times[: len(stage_names(plan))]),
                f"{option.idle / GB:.1f}",
                f"{(option.idle + option.extra) / GB:.1f}",
            )
            where = ""
        if len(pool.models) > 1:
            of = f"of {group.capacity / GB:.1f}"
            empty = [""] * (len(titles) - 4)
            table.add_row("", "together", *empty, of, f"{pool.nbytes / GB:.1f}", style="dim")
    return table


def stage_names(plan: MappedPlan) -> Sequence[str]:
    """Returns the names of the stages of a plan: the last only where weights move."""
    return STAGES if plan.stages[-1] else STAGES[:-1]


def layout_text(option: Option) -> str:
    """Returns mesh, sharding and recomputation of a layout, such as "1-4-2 sharded recomputes"."""
    use = option.use
    words = [joined(use.mesh) if use.engine in ("3d", "none") else use.engine]
    words += ["sharded"] if use.shards_over_data else []
    words += ["recomputes"] if use.activation_checkpointing else []
    return " ".join(words)


def generation_text(problem: Problem, option: Option) -> str:
    """Returns mesh and rows of generation, such as "1-2-2-4, 64 rows"; empty for models that do not generate."""
    use, rows = option.use, problem.workload.row_sizes()
    if use.rollout is None or not use.generates:
        return ""
    length = rows.prompt_tokens + rows.response_tokens
    together = counted(use.rollout.cache_tokens // length, "row")
    return f"{generation_mesh(use)}, {together}" if use.engine == "3d" else together


def summary(problem: Problem, plan: MappedPlan) -> str:
    """Returns one line: seconds of the stages and of a step, and tokens per second."""
    pairs = zip(stage_names(plan), plan.stages, strict=False)
    stages = ", ".join(f"{name} {seconds_text(each)}" for name, each in pairs)
    ahead = f" with {plan.ahead} ahead" if plan.ahead else ""
    rate = problem.workload.tokens / plan.cost
    return f"step{ahead} {seconds_text(plan.cost)} ({stages}), {rate:,.0f} tokens/s"


def placements_table(problem: Problem, plans: Mapping[str, MappedPlan | None]) -> Table:
    """Returns a table of the best plan of each placement, by name."""
    names = max((stage_names(plan) for plan in plans.values() if plan), key=len, default=STAGES)
    table = Table("placement", "step", "tokens/s", *names, "pools", box=None, pad_edge=False)
    for name, plan in plans.items():
        if plan is None:
            table.add_row(name, "does not fit")
            continue
        pools = ", ".join(f"{pool_name(problem, pool)}: {pool.count}" for pool in in_order(problem, plan))
        rate = f"{problem.workload.tokens / plan.cost:,.0f}"
        table.add_row(
            name, seconds_text(plan.cost), rate, *map(seconds_text, plan.stages[: len(names)]), pools
        )
    return table


def timeline_page(problem: Problem, plan: MappedPlan) -> str:
    """Returns an HTML page with a picture of one step: a line for each service, with the stages that it works in. A
    stage begins when all pools have ended the one before; services of a pool take turns."""
    note = (
        summary(problem, plan)
        + ". Lines of one pool are side by side; a service that waits has nothing on its line."
    )
    return page("Plan", [card("One step", _picture(problem, plan), is_wide=True, note=note)])


def _picture(problem: Problem, plan: MappedPlan) -> str:
    names = [
        f"{problem.models[number].name} ({pool.count})"
        for pool in in_order(problem, plan)
        for number in pool.models
    ]
    left = 14 + svg.text_width(names)
    scale = (WIDTH - left - 10) / (sum(plan.stages) or 1)
    height = TOP + ROW * len(names) + 10
    parts, start = [], 0.0
    for name, seconds in zip(STAGES, plan.stages, strict=True):
        at = left + start * scale
        parts.append(svg.rule("mark", at, 6, at, height - 6))
        if seconds * scale > svg.text_width([name]):
            parts.append(svg.text(at + 5, 18, name, "start"))
        start += seconds
    for row, name in enumerate(names):
        parts.append(svg.text(left - 8, TOP + ROW * row + 17, name, "end", "value"))
    for row, colour, name, first, seconds in spans(problem, plan):
        box = (
            f'x="{left + first * scale:.1f}" y="{TOP + ROW * row + 3}" width="{max(1.0, seconds * scale):.1f}" '
            f'height="{ROW - 8}" rx="3"'
        )
        parts.append(
            f'<rect class="bar c{colour % 4}" {box}>{svg.title(f"{name}: {seconds_text(seconds)}")}</rect>'
        )
    return svg.document(parts, WIDTH, height, "Services and stages of one step")


def spans(problem: Problem, plan: MappedPlan) -> Iterator[tuple[int, int, str, float, float]]:
    """Yields (line, pool, text, start, seconds) of each service in each stage of a step."""
    begins = [sum(plan.stages[:stage]) for stage in range(len(STAGES))]
    row = 0
    for colour, pool in enumerate(in_order(problem, plan)):
        taken = list(begins)
        for number, option in zip(pool.models, pool.options, strict=True):
            for stage, seconds in enumerate(option.times):
                if seconds:
                    yield (
                        row,
                        colour,
                        f"{problem.models[number].name}, {STAGES[stage]}",
                        taken[stage],
                        seconds,
                    )
                taken[stage] += seconds
            row += 1
