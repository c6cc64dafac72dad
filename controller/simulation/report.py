"""Simulated runs for people: the timeline of some steps, and a table of all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from statistics import median

from rich.table import Table

from controller.simulation.run import Trace
from reports.units import seconds_text

NAME_WIDTH, LEAST_BARS = 34, 30


def timeline_lines(trace: Trace, steps: int) -> Iterator[str]:
    """Yields a line for each call of the last `steps` steps, as wide as the terminal, with a bar from its start to its
    end."""
    shown = [each for each in trace.calls if each.step > len(trace.metrics) - steps]
    if not shown:
        return
    first, last = min(each.start for each in shown), max(each.end for each in shown)
    columns = shutil.get_terminal_size((120, 24)).columns
    bars = max(columns - NAME_WIDTH - 28, LEAST_BARS)
    scale = bars / ((last - first) or 1.0)
    for each in sorted(shown, key=lambda call: (call.start, call.end)):
        start = min(int((each.start - first) * scale), bars - 1)
        length = max(round((each.end - each.start) * scale), 1)
        bar = (" " * start + "#" * length)[:bars]
        name = f"{each.service}.{each.method}"
        times = f"{each.start:10.3f} {each.end - each.start:9.3f}"
        yield f"{each.step:4d} {name:{NAME_WIDTH}.{NAME_WIDTH}} {times} |{bar}".rstrip()


def steps_table(trace: Trace) -> Table:
    """Returns a table with a line for each step: its seconds, the share of them in which calls run on disjoint devices
    at the same time, the mean share in which a device waits, seconds lost to stragglers, and the staleness of rows."""
    table = Table(
        "step", "step s", "overlap", "idle", "stragglers", "stale mean", "most", box=None, pad_edge=False
    )
    for number, metrics in enumerate(trace.metrics, start=1):
        overlap, idle = (metrics[f"time/{name}_share"] for name in ("overlap", "idle"))
        stale = [metrics.get(f"staleness/{name}") for name in ("mean", "max")]
        table.add_row(
            str(number),
            f"{metrics['time/step_s']:.3f}",
            f"{overlap:.0%}",
            f"{idle:.0%}",
            seconds_text(late) if (late := max(0.0, trace.straggling.get(number, 0.0))) else "",
            *("" if each is None else f"{each:g}" for each in stale),
        )
    return table


def summary(trace: Trace) -> str:
    """Returns one line: the median step, and the work of the controller."""
    steps = len(trace.metrics)
    usual = median(metrics["time/step_s"] for metrics in trace.metrics)
    return (
        f"step {usual:.3f} s (median of {steps}); controller {trace.controller_s / steps:.3f} s of CPU a step on this "
        f"host, {trace.requests / steps:,.0f} requests of {trace.nbytes / steps / 1e6:,.1f} MB"
    )
