"""Renders the result of a load test as one HTML page without external resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loadtest.table import PERCENTILES, capacity_text, level_text, ramp_text, time_parts
from reports.axes import Axis, linear_axis, log_axis
from reports.charts import Mark, Series, line_chart
from reports.page import card, escape, page, table
from reports.units import counted, rate_text, seconds_text

Json = Mapping[str, Any]

_SHOWN_SETTINGS = (
    "target", "arrivals", "rows", "prompt", "response", "vocabulary", "data", "duration_s", "warmup_s", "drain_s",
    "timeout_s", "connections", "seed",
)  # fmt: skip


def render(result: Json) -> str:
    """Renders a result as an HTML page that is well-formed XML too: all levels and, in detail, the knee's level; where
    there is no knee, the last one."""
    settings, steps = result["settings"], result["steps"]
    closed = settings["arrivals"] == "closed"
    sections = [_header(result, closed), _levels(steps, closed)]
    if len(steps) > 1:
        sections += [_ramp_latency(result, closed), _ramp_throughput(result, closed)]
    knee = result["knee"]
    shown = [step for step in steps if knee and step["level"] == knee["level"]] or steps[-1:]
    for step in shown:
        where = f", {level_text(step, closed)}"
        sections += [_latency_over_time(step, where), _answers_over_time(step, where)]
        sections += [_distribution(step, where), _time_parts(step, where)]
    sections.append(_settings(result))
    return page(f"{settings['role']} {settings['method']}", sections)


def _header(result: Json, closed: bool) -> str:
    settings, steps = result["settings"], result["steps"]
    loop = "closed loop" if closed else f"open loop, {settings['arrivals']} arrivals"
    lines = [
        f"{result['service']['method']} at {settings['target']}: {loop}, {counted(settings['rows'], 'row')} per call"
    ]
    if result["knee"]:
        lines.append(f"knee: {ramp_text(result['knee'], closed)}")
    if result["capacity"]:
        lines.append(f"capacity: {capacity_text(result, closed)}")
    warnings = [f"{level_text(step, closed)}: {text}" for step in steps for text in step["warnings"]]
    if result["interrupted"]:
        warnings.append("interrupted: these figures are of the time until then")
    missed = [verdict["objective"] for step in steps for verdict in step["objectives"] if not verdict["met"]]
    if missed:
        warnings.append(f"objectives missed: {', '.join(dict.fromkeys(missed))}")
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in lines)
    alarms = "".join(f'<p class="warning">{escape(line)}</p>' for line in warnings)
    title = escape(f"{settings['role']} {settings['method']}")
    return f"<header><h1>{title}</h1>{notes}{alarms}</header>"


def _levels(steps: Sequence[Json], closed: bool) -> str:
    head = ["callers" if closed else "offered/s", "sent", "answered/s", "errors", *PERCENTILES]
    rows = []
    for step in steps:
        errors = ", ".join(f"{code} x {count}" for code, count in step["errors"].items()) or "0"
        latency = [seconds_text(step["latency_s"].get(name)) for name in PERCENTILES]
        throughput = rate_text(step["throughput_per_s"])
        rows.append([f"{step['level']:g}", str(step["sent"]), throughput, errors, *latency])
    return card("Latency", _table(head, rows), is_wide=True)


def _time_parts(step: Json, where: str) -> str:
    head = ["part", "mean", "p50", "p99", "max"]
    rows = [
        [name, *(seconds_text(summary.get(key)) for key in head[1:])] for name, summary in time_parts(step)
    ]
    return card(f"Where the time went{where}", _table(head, rows))


def _ramp_latency(result: Json, closed: bool) -> str:
    steps = [step for step in result["steps"] if step["latency_s"]]
    lines = [
        Series(name, [(step["level"], step["latency_s"][name]) for step in steps])
        for name in ("p50", "p99", "mean")
    ]
    y = _log_seconds(lines)
    if y is None:
        return ""
    x = linear_axis([0, *(step["level"] for step in steps)])
    chart = line_chart(lines, x, y, _offered(closed), "Latency by load", marks=_knee_mark(result))
    return card("Latency by load", chart)


def _ramp_throughput(result: Json, closed: bool) -> str:
    steps = result["steps"]
    answered = Series("answered/s", [(step["level"], step["throughput_per_s"]) for step in steps])
    lines = (
        [answered]
        if closed
        else [answered, Series("offered/s", [(s["level"], s["sent_per_s"]) for s in steps])]
    )
    x = linear_axis([0, *(step["level"] for step in steps)])
    y = linear_axis([0, *(value for line in lines for _, value in line.points)])
    chart = line_chart(lines, x, y, _offered(closed), "Throughput by load", marks=_knee_mark(result))
    return card("Throughput by load", chart)


def _latency_over_time(step: Json, where: str) -> str:
    lines = [
        Series(name, [(i["start_s"], i[f"{name}_s"]) for i in step["timeline"] if i[f"{name}_s"] is not None])
        for name in ("p50", "p99")
    ]
    y = _log_seconds(lines)
    if y is None:
        return ""
    x = linear_axis([0, *(i["start_s"] for i in step["timeline"])])
    return card(f"Latency over time{where}", line_chart(lines, x, y, "due at, seconds", "Latency over time"))


def _answers_over_time(step: Json, where: str) -> str:
    line = Series("answered/s", [(i["start_s"], i["answered_per_s"]) for i in step["timeline"]])
    if not line.points:
        return ""
    x = linear_axis([0, *(time for time, _ in line.points)])
    y = linear_axis([0, *(rate for _, rate in line.points)])
    return card(f"Throughput over time{where}", line_chart([line], x, y, "seconds", "Throughput over time"))


def _distribution(step: Json, where: str) -> str:
    """Renders a chart of the latency by percentile, on an axis on which 90 %, 99 %, 99.9 % are equally far apart; ""
    where there are fewer than two points."""
    points = [(1 / share, seconds) for share, seconds in step["curve"] if share > 0 and seconds > 0]
    if len(points) < 2:
        return ""
    line = Series("latency", points)
    x = log_axis([1.0, *(point[0] for point in points)], _nines)
    y = _log_seconds([line])
    chart = "" if y is None else line_chart([line], x, y, "percentile", "Distribution of the latency")
    return card(f"Distribution{where}", chart)


def _settings(result: Json) -> str:
    rows = [[name, str(result["settings"][name])] for name in _SHOWN_SETTINGS]
    rows += [[name, str(value)] for name, value in {**result["service"], **result["tester"]}.items()]
    return card("Settings", _table(["setting", "value"], rows), is_wide=True)


def _log_seconds(lines: Sequence[Series]) -> Axis | None:
    values = [y for line in lines for _, y in line.points if y]
    return log_axis(values, seconds_text) if values else None


def _knee_mark(result: Json) -> list[Mark]:
    return [(result["knee"]["level"], "knee")] if result["knee"] else []


def _offered(closed: bool) -> str:
    return "callers" if closed else "calls offered per second"


def _nines(inverse_share: float) -> str:
    return f"{100 * (1 - 1 / inverse_share):.6g}"


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return table(head, [[escape(cell) for cell in row] for row in rows])
