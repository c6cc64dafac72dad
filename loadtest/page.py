"""The result as one HTML page that loads nothing."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.charts import CHART_STYLE, Axis, Series, line_chart, linear_axis, log_axis
from loadtest.table import PERCENTILES, level_text, ramp_text, time_parts
from loadtest.units import rate_text, seconds_text

Json = Mapping[str, Any]

_SHOWN_SETTINGS = (
    "target", "arrivals", "rows", "prompt", "response", "vocabulary", "data", "duration_s", "warmup_s", "drain_s",
    "timeout_s", "connections", "seed",
)  # fmt: skip


def render(result: Json) -> str:
    """The page, as HTML that is well-formed XML too."""
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
    body = "\n".join(section for section in sections if section)
    title = _escape(f"{settings['role']} {settings['method']}")
    return _PAGE.format(title=title, style=_STYLE + CHART_STYLE, body=body)


def _header(result: Json, closed: bool) -> str:
    settings, steps = result["settings"], result["steps"]
    loop = "closed loop" if closed else f"open loop, {settings['arrivals']} arrivals"
    lines = [
        f"{result['service']['method']} at {settings['target']}: {loop}, {settings['rows']} rows per call"
    ]
    for name in ("knee", "capacity"):
        if result[name]:
            lines.append(f"{name}: {ramp_text(result[name], closed)}")
    warnings = [f"{level_text(step, closed)}: {text}" for step in steps for text in step["warnings"]]
    if result["interrupted"]:
        warnings.append("interrupted: these figures are of the time until then")
    missed = [verdict["objective"] for step in steps for verdict in step["objectives"] if not verdict["met"]]
    if missed:
        warnings.append(f"objectives missed: {', '.join(dict.fromkeys(missed))}")
    notes = "".join(f'<p class="note">{_escape(line)}</p>' for line in lines)
    alarms = "".join(f'<p class="warning">{_escape(line)}</p>' for line in warnings)
    title = _escape(f"{settings['role']} {settings['method']}")
    return f"<header><h1>{title}</h1>{notes}{alarms}</header>"


def _levels(steps: Sequence[Json], closed: bool) -> str:
    head = ["callers" if closed else "offered/s", "sent", "answered/s", "errors", *PERCENTILES]
    rows = []
    for step in steps:
        errors = ", ".join(f"{code} x {count}" for code, count in step["errors"].items()) or "0"
        latency = [seconds_text(step["latency_s"].get(name)) for name in PERCENTILES]
        throughput = rate_text(step["throughput_per_s"])
        rows.append([f"{step['level']:g}", str(step["sent"]), throughput, errors, *latency])
    return _card("Latency", _table(head, rows), "full")


def _time_parts(step: Json, where: str) -> str:
    head = ["part", "mean", "p50", "p99", "max"]
    rows = [
        [name, *(seconds_text(summary.get(key)) for key in head[1:])] for name, summary in time_parts(step)
    ]
    return _card(f"Where the time went{where}", _table(head, rows))


def _ramp_latency(result: Json, closed: bool) -> str:
    steps = [step for step in result["steps"] if step["latency_s"]]
    lines = [
        Series(name, [(step["level"], step["latency_s"][name]) for step in steps])
        for name in ("p50", "p99", "mean")
    ]
    y = _log_seconds(lines)
    if y is None:
        return ""
    x = linear_axis([step["level"] for step in steps], _plain)
    chart = line_chart(lines, x, y, _offered(closed), "Latency by load", _knee_mark(result))
    return _card("Latency by load", chart)


def _ramp_throughput(result: Json, closed: bool) -> str:
    steps = result["steps"]
    answered = Series("answered/s", [(step["level"], step["throughput_per_s"]) for step in steps])
    lines = (
        [answered]
        if closed
        else [answered, Series("offered/s", [(s["level"], s["sent_per_s"]) for s in steps])]
    )
    x = linear_axis([step["level"] for step in steps], _plain)
    y = linear_axis([y for line in lines for _, y in line.points if y is not None], _plain)
    chart = line_chart(lines, x, y, _offered(closed), "Throughput by load", _knee_mark(result))
    return _card("Throughput by load", chart)


def _latency_over_time(step: Json, where: str) -> str:
    lines = [
        Series(name, [(i["start_s"], i[f"{name}_s"]) for i in step["timeline"]]) for name in ("p50", "p99")
    ]
    y = _log_seconds(lines)
    if y is None:
        return ""
    x = linear_axis([i["start_s"] for i in step["timeline"]], _plain)
    return _card(f"Latency over time{where}", line_chart(lines, x, y, "due at, seconds", "Latency over time"))


def _answers_over_time(step: Json, where: str) -> str:
    line = Series("answered/s", [(i["start_s"], i["answered_per_s"]) for i in step["timeline"]])
    if not line.points:
        return ""
    x = linear_axis([point[0] for point in line.points], _plain)
    y = linear_axis([i["answered_per_s"] for i in step["timeline"]], _plain)
    return _card(f"Throughput over time{where}", line_chart([line], x, y, "seconds", "Throughput over time"))


def _distribution(step: Json, where: str) -> str:
    """Latency by percentile, on an axis on which each further nine takes as much room."""
    points = [(1 / share, seconds) for share, seconds in step["curve"] if share > 0 and seconds > 0]
    if len(points) < 2:
        return ""
    line = Series("latency", points)
    x = log_axis([1.0, *(point[0] for point in points)], _nines)
    y = _log_seconds([line])
    chart = "" if y is None else line_chart([line], x, y, "percentile", "Distribution of the latency")
    return _card(f"Distribution{where}", chart)


def _settings(result: Json) -> str:
    rows = [[name, str(result["settings"][name])] for name in _SHOWN_SETTINGS]
    rows += [[name, str(value)] for name, value in {**result["service"], **result["tester"]}.items()]
    return _card("Settings", _table(["setting", "value"], rows), "full")


def _log_seconds(lines: Sequence[Series]) -> Axis | None:
    values = [y for line in lines for _, y in line.points if y]
    return log_axis(values, seconds_text) if values else None


def _knee_mark(result: Json) -> list[tuple[float, str]]:
    return [(result["knee"]["level"], "knee")] if result["knee"] else []


def _offered(closed: bool) -> str:
    return "callers" if closed else "calls offered per second"


def _nines(inverse_share: float) -> str:
    return f"{100 * (1 - 1 / inverse_share):.6g}"


def _plain(value: float) -> str:
    return f"{value:,.6g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _card(title: str, content: str, kind: str = "") -> str:
    return content and f'<section class="card {kind}"><h2>{_escape(title)}</h2>{content}</section>'


def _escape(text: str) -> str:
    return html.escape(text)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #22272b; --muted: #69737b; --rule: #e6e7e6; --alarm: #a8321f;
  --c0: #2c6fae; --c1: #c46a24; --c2: #3b8a67;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2023; --ink: #e2e5e7; --muted: #98a2a9; --rule: #2f353a; --alarm: #f08a76;
    --c0: #6cabe3; --c1: #e39a5e; --c2: #6cbd97;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main {
  max-width: 1060px; margin: 0 auto; padding: 32px 20px 64px;
  display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px;
}
header, .full { grid-column: 1 / -1; }
h1 { font-size: 24px; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; font-weight: 600; margin: 0 0 10px; }
.note { color: var(--muted); margin: 0; font-size: 14px; }
.warning { color: var(--alarm); margin: 4px 0 0; font-size: 14px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--muted); }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
@media (max-width: 760px) {
  main { grid-template-columns: minmax(0, 1fr); padding: 20px 12px 40px; gap: 14px; }
  .card { padding: 14px; }
}
"""
