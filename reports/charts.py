"""Charts as SVG text, from pure functions: no script, no font, nothing to load.

Colours come from the page: the classes `c0`, `c1`, ... are its series colours (see `CHART_STYLE`), so a chart
follows light and dark mode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reports import svg
from reports.axes import Axis

Point = tuple[float, float]
Mark = tuple[float, str]
"""A value on the x axis and its name."""

CHART_STYLE = """
svg { display: block; width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: var(--muted); }
svg .value { fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .axis { stroke: var(--muted); stroke-width: 1; }
svg .mark { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 4 4; }
svg .line { fill: none; stroke: var(--series); stroke-width: 2; stroke-linejoin: round; }
svg .dot { fill: var(--series); }
svg .hit { fill: transparent; }
svg .hit:hover { fill: var(--series); fill-opacity: 0.35; }
svg .bar { fill: var(--series); }
svg .c0 { --series: var(--c0); }
svg .c1 { --series: var(--c1); }
svg .c2 { --series: var(--c2); }
svg .c3 { --series: var(--c3); }
"""

_NUM_COLOURS = 4
_MAX_POINTS = 400
_MAX_DOTS = 40
_MAX_NAME = 24


@dataclass(frozen=True)
class Series:
    """Line of a line chart, with its name and its points (x, y). Points whose y is not finite interrupt the line."""

    name: str
    points: Sequence[Point]

    @property
    def finite(self) -> list[Point]:
        """Points whose y is finite."""
        return [point for point in self.points if math.isfinite(point[1])]


@dataclass(frozen=True)
class Bar:
    """A bar of a bar chart: its length stands for `value`, `text` says it in words."""

    name: str
    value: float
    text: str


@dataclass(frozen=True)
class _Frame:
    """The area between the axes, in the SVG's user units, and the axes, which place values in it."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float

    def to_x(self, value: float) -> float:
        return self.left + self.x.place(value) * (self.right - self.left)

    def to_y(self, value: float) -> float:
        return self.bottom - self.y.place(value) * (self.bottom - self.top)


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    x_label: str,
    label: str,
    *,
    width: int = 440,
    height: int = 240,
    marks: Sequence[Mark] = (),
) -> str:
    """Renders a line chart as SVG, with ticks, grid, legend and a hover title at each point.

    Args:
        label: Describes the chart to readers who do not see it.
        marks: Places on the x axis that get an upright line with a name.
    """
    left = 10 + svg.text_width([text for _, text in y.ticks])
    frame = _Frame(x, y, left, width - 14, 34, height - 40)
    parts = [
        *_y_axis(frame),
        *_x_axis(frame),
        svg.text((frame.left + frame.right) / 2, height - 4, x_label, "middle"),
        *_marks(frame, marks),
        *_legend([line.name for line in series], left),
        *(_line(line, i % _NUM_COLOURS, x_label, frame) for i, line in enumerate(series)),
    ]
    return svg.document(parts, width, height, label)


def bar_chart(bars: Sequence[Bar], label: str) -> str:
    """Renders a bar chart as SVG: horizontal bars from zero, each with its name and its value as text.

    Args:
        label: Describes the chart to readers who do not see it.
    """
    names = [_shortened(bar.name) for bar in bars]
    width, row, height = 440, 28, 16
    left = 10 + svg.text_width(names)
    room = max(40.0, width - left - 10 - svg.text_width([bar.text for bar in bars]))
    longest = max((bar.value for bar in bars), default=0) or 1
    parts = []
    for i, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y, length = i * row + (row - height) / 2, max(1.0, room * bar.value / longest)
        parts += [
            svg.text(left - 10, y + 12.5, name, "end"),
            f'<rect class="bar c0" x="{left:.1f}" y="{y:.1f}" width="{length:.1f}" '
            f'height="{height}" rx="3">{svg.title(f"{bar.name}: {bar.text}")}</rect>',
            svg.text(left + length + 8, y + 12.5, bar.text, "start", "value"),
        ]
    return svg.document(parts, width, row * len(bars), label)


def thin(points: Sequence[Point]) -> list[Point]:
    """Returns at most about `_MAX_POINTS` points, those with the lowest and the highest y of each of equally long runs
    of points; all points where there are no more."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / (_MAX_POINTS // 2))
    stretches = (points[start : start + size] for start in range(0, len(points), size))
    return [point for stretch in stretches for point in sorted({min(stretch, key=_y), max(stretch, key=_y)})]


def _y_axis(frame: _Frame) -> Iterable[str]:
    for tick, text in frame.y.ticks:
        height = frame.to_y(tick)
        yield svg.rule("grid", frame.left, height, frame.right, height)
        yield svg.text(frame.left - 8, height + 4.5, text, "end")


def _x_axis(frame: _Frame) -> Iterable[str]:
    yield svg.rule("axis", frame.left, frame.bottom, frame.right, frame.bottom)
    for tick, text in frame.x.ticks:
        at = frame.to_x(tick)
        yield svg.rule("axis", at, frame.bottom, at, frame.bottom + 4)
        yield svg.text(at, frame.bottom + 18, text, "middle")


def _marks(frame: _Frame, marks: Iterable[Mark]) -> Iterable[str]:
    for value, name in marks:
        at = frame.to_x(value)
        yield svg.rule("mark", at, frame.top, at, frame.bottom)
        yield svg.text(at - 4, frame.top + 12, name, "end")


def _legend(names: Sequence[str], left: float) -> Iterable[str]:
    for i, name in enumerate(names):
        yield f'<rect class="bar c{i % _NUM_COLOURS}" x="{left:.1f}" y="9" width="14" height="4" rx="2"/>'
        yield svg.text(left + 20, 15.5, name, "start", "value")
        left += 20 + svg.text_width([name]) + 18


def _line(series: Series, colour: int, x_label: str, frame: _Frame) -> str:
    runs = [
        thin(list(run))
        for finite, run in itertools.groupby(series.points, key=lambda point: math.isfinite(point[1]))
        if finite
    ]
    paths = [
        f'<path class="line" d="M{" L".join(f"{frame.to_x(x):.1f},{frame.to_y(y):.1f}" for x, y in run)}"/>'
        for run in runs
    ]
    drawn = [point for run in runs for point in run]
    marks = []
    for x, y in drawn:
        at = f'cx="{frame.to_x(x):.1f}" cy="{frame.to_y(y):.1f}"'
        if len(drawn) <= _MAX_DOTS:
            marks.append(f'<circle class="dot" {at} r="3"/>')
        title = svg.title(f"{series.name}, {x_label} {frame.x.text(x)}: {frame.y.text(y)}")
        marks.append(f'<circle class="hit" {at} r="6">{title}</circle>')
    return f'<g class="c{colour}">{"".join(paths)}{"".join(marks)}</g>'


def _y(point: Point) -> float:
    return point[1]


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
