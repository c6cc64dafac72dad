"""Shows the result of a load test in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.units import counted, rate_text, seconds_text

Json = Mapping[str, Any]

PERCENTILES = ("mean", "p50", "p90", "p99", "p99.9", "max")


def console() -> Console:
    """Returns a console for standard output, which shows texts as they are, without markup; where standard output is
    no terminal, it is 120 columns wide."""
    shown = Console(markup=False, emoji=False)
    return shown if shown.is_terminal else Console(width=120, markup=False, emoji=False)


def progress_line(step: Json, closed: bool) -> str:
    """Returns one line of text about a step that has ended."""
    latency = step["latency_s"]
    told = (
        f"p50 {seconds_text(latency['p50'])}, p99 {seconds_text(latency['p99'])}" if latency else "no answer"
    )
    errors = sum(step["errors"].values())
    return (
        f"{level_text(step, closed)}: {rate_text(step['throughput_per_s'])}/s, {told}"
        + (f", {counted(errors, 'error')}" if errors else "")
        + ("" if step["sustained"] else ", not sustained")
    )


def level_text(step: Json, closed: bool) -> str:
    """Returns the load of a step as text: callers of a closed loop, or calls per second."""
    return counted(step["level"], "caller") if closed else f"{step['level']:g}/s offered"


def report(result: Json) -> RenderableType:
    """Renders a result for the terminal: a row per level, the parts of the latency if there is one level, and notes."""
    settings, closed = result["settings"], result["settings"]["arrivals"] == "closed"
    steps = result["steps"]
    loop = "closed loop" if closed else f"open loop, {settings['arrivals']}"
    title = f"{result['service']['method'][1:]} at {settings['target']} ({loop}, {counted(settings['rows'], 'row')})"
    parts: list[RenderableType] = [_levels(steps, closed, title)]
    if len(steps) == 1:
        parts.append(_parts(steps[0]))
    parts += [Text(line, style="bold" if bold else "") for line, bold in _notes(result, closed)]
    return Group(*parts)


def _levels(steps: Iterable[Json], closed: bool, title: str) -> Table:
    # Text, for rich would read the brackets of an IPv6 address as markup.
    table = Table(title=Text(title, style="table.title"), title_justify="left")
    for name in ("callers" if closed else "offered/s", "sent", "answered/s", "errors", *PERCENTILES):
        table.add_column(name, justify="right")
    for step in steps:
        latency = [seconds_text(step["latency_s"].get(name)) for name in PERCENTILES]
        counts = (f"{step['level']:g}", str(step["sent"]), rate_text(step["throughput_per_s"]))
        table.add_row(*counts, str(sum(step["errors"].values())), *latency)
    return table


def _parts(step: Json) -> Table:
    table = Table(title="Where the time went", title_justify="left")
    table.add_column("part")
    for name in ("mean", "p50", "p99", "max"):
        table.add_column(name, justify="right")
    for part, summary in time_parts(step):
        table.add_row(part, *(seconds_text(summary.get(name)) for name in ("mean", "p50", "p99", "max")))
    return table


def time_parts(step: Json) -> list[tuple[str, Json]]:
    """Returns (name, mean and percentiles in seconds) of each part of a step's latency: the delay of sends and, where
    the ranks report their times, those and the rest. Parts without a call are left out."""
    parts = [("tester: sent late by", step["lag_s"])]
    parts += [(f"service: {part}", summary) for part, summary in step["server_s"].items()]
    if step["rest_s"]:
        parts.append(("network, gRPC, rest", step["rest_s"]))
    return [(name, summary) for name, summary in parts if summary]


def _notes(result: Json, closed: bool) -> Iterable[tuple[str, bool]]:
    steps = result["steps"]
    if not steps or not any(step["server_s"] for step in steps):
        yield "The service does not say where its time goes (no Outcome.timing).", False
    if len(steps) == 1 and steps[0]["expected_queue_s"] is not None:
        expected, queue = seconds_text(steps[0]["expected_queue_s"]), steps[0]["server_s"]["queue"]["mean"]
        yield f"One server with these computing times would queue calls for {expected} (M/G/1); measured " \
              f"{seconds_text(queue)}.", False  # fmt: skip
    for step in steps:
        where = f"{level_text(step, closed)}: " if len(steps) > 1 else ""
        for code, count in step["errors"].items():
            cause = step["causes"].get(code, "")
            yield f"{where}{code} x {count}" + (f": {cause[:300]}" if cause else ""), False
        for warning in step["warnings"]:
            yield f"{where}{warning}", True
        if step["overrun"]:
            yield f"{where}stopped early: too many calls had no answer or could not be sent", True
        if step["testers_limit"]:
            yield f"{where}the tester can send no faster; what the service can do is not known", True
        for verdict in step["objectives"]:
            yield (
                f"{where}{verdict['objective']}: {'met' if verdict['met'] else 'MISSED'}",
                not verdict["met"],
            )
    if result["knee"]:
        yield f"knee: {ramp_text(result['knee'], closed)} (most throughput per latency)", True
    if result["capacity"]:
        yield f"capacity: {capacity_text(result, closed)} (highest throughput kept up)", True
    if result["interrupted"]:
        yield "interrupted: these figures are of the time until then", True


def capacity_text(result: Json, closed: bool) -> str:
    """Returns the capacity of a ramp as text, with "at least" where it is that of the last level."""
    is_last = result["capacity"]["level"] == result["steps"][-1]["level"]
    return ("at least, the ramp ends here: " if is_last else "") + ramp_text(result["capacity"], closed)


def ramp_text(level: Json, closed: bool) -> str:
    """Returns a level of a ramp as text: load, throughput and mean latency."""
    offered = counted(level["level"], "caller") if closed else f"{level['level']:g} calls/s"
    return f"{offered}: {rate_text(level['throughput'])}/s answered, mean {seconds_text(level['latency_s'])}"
