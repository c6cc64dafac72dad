"""Charts as SVG text, from pure functions: no script, no font, nothing to load.

Colours come from the page: the classes `c0`, `c1`, ... are its series colours (see `CHART_STYLE`), so a chart
follows light and dark mode. Sizes are in user units of the view box; charts scale with their container.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

CHART_STYLE = """
svg { display: block; width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: var(--muted); }
svg .value { fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .axis { stroke: var(--muted); stroke-width: 1; }
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
_CHARACTER_WIDTH = 7.2  # of 13 px text, on the safe side
_MAX_POINTS = 400
# Numbers below it are drawn as 0: their parts would be too small for a float.
_LEAST = 1e-280
_MAX_DOTS = 40
_MAX_NAME = 24


@dataclass(frozen=True)
class Series:
    """A line of a line chart. Points that are not finite break it."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Bar:
    """A bar of a bar chart: its length stands for `value`, `text` says it in words."""

    name: str
    value: float
    text: str


def nice_ticks(low: float, high: float, target: int = 5, whole: bool = False) -> list[float]:
    """Evenly spaced round numbers, 1, 2 or 5 times a power of ten apart, that enclose [low, high].

    Args:
        target: roughly how many intervals; there are at most `target` + 2.
        whole: only integers.
    """
    if high - low <= 1e-9 * max(abs(low), abs(high), _LEAST):
        margin = abs(low) / 2 if abs(low) > _LEAST else 0.5
        low, high = low - margin, high + margin
    step = _nice_step((high - low) / target)
    if whole:
        step = max(1.0, step)
    decimals = _decimals(step)
    first, last = low / step, high / step
    # What a division rounds off adds no tick.
    slack = 1e-9 + 4e-16 * max(abs(first), abs(last))
    return [round(i * step, decimals) for i in range(math.floor(first + slack), math.ceil(last - slack) + 1)]


def tick_label(value: float, step: float) -> str:
    """A tick with as many decimals as ticks `step` apart need."""
    if step < 1e-5 or step >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.{_decimals(step)}f}"


def thin(points: Sequence[Point], limit: int = _MAX_POINTS) -> list[Point]:
    """At most `limit` points with the same outline: of each of equal stretches the lowest and highest."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    stretches = (points[start : start + size] for start in range(0, len(points), size))
    return [point for stretch in stretches for point in sorted({min(stretch, key=_y), max(stretch, key=_y)})]


def line_chart(
    series: Sequence[Series],
    label: str,
    x_label: str,
    width: int = 440,
    height: int = 240,
    include: Sequence[float] = (),
) -> str:
    """A line chart over whole x such as steps, with ticks, grid, legend and a hover title at each point.

    Args:
        label: says what is shown to those who do not see it.
        include: values that the y axis has to reach.
    """
    xs = [x for line in series for x, y in line.points if math.isfinite(y)]
    ys = [y for line in series for _, y in line.points if math.isfinite(y)]
    if not xs:
        return ""
    y_ticks = nice_ticks(min([*ys, *include]), max([*ys, *include]), target=4)
    y_labels = [tick_label(tick, y_ticks[1] - y_ticks[0]) for tick in y_ticks]
    left, right = 10 + _text_width(y_labels), width - 14
    top, bottom = 34, height - 40
    to_x = _scale(min(xs), max(xs), left, right)
    to_y = _scale(y_ticks[0], y_ticks[-1], bottom, top)
    parts = [
        *_y_axis(y_ticks, y_labels, to_y, left, right),
        *_x_axis(min(xs), max(xs), to_x, bottom, left, right),
        _text((left + right) / 2, height - 4, x_label, "middle"),
        *_legend([line.name for line in series], left),
        *(_line(line, i % _NUM_COLOURS, x_label, to_x, to_y) for i, line in enumerate(series)),
    ]
    return _svg(parts, width, height, label)


def bar_chart(bars: Sequence[Bar], label: str, width: int = 440) -> str:
    """Horizontal bars from zero, one below the other, each with its name and its value in words.

    Args:
        label: says what is shown to those who do not see it.
    """
    names = [_shortened(bar.name) for bar in bars]
    row, height = 28, 16
    left = 10 + _text_width(names)
    room = max(40.0, width - left - 10 - _text_width([bar.text for bar in bars]))
    longest = max((bar.value for bar in bars), default=0) or 1
    parts = []
    for i, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y, length = i * row + (row - height) / 2, max(1.0, room * bar.value / longest)
        parts += [
            _text(left - 10, y + 12.5, name, "end"),
            f'<rect class="bar c0" x="{left:.1f}" y="{y:.1f}" width="{length:.1f}" '
            f'height="{height}" rx="3">{_title(f"{bar.name}: {bar.text}")}</rect>',
            _text(left + length + 8, y + 12.5, bar.text, "start", "value"),
        ]
    return _svg(parts, width, row * len(bars), label)


def _y_axis(
    ticks: Sequence[float], labels: Sequence[str], to_y: Callable[[float], float], left: float, right: float
) -> Iterable[str]:
    for tick, label in zip(ticks, labels, strict=True):
        yield _rule("grid", left, to_y(tick), right, to_y(tick))
        yield _text(left - 8, to_y(tick) + 4.5, label, "end")


def _x_axis(
    low: float, high: float, to_x: Callable[[float], float], bottom: float, left: float, right: float
) -> Iterable[str]:
    yield _rule("axis", left, bottom, right, bottom)
    ticks = nice_ticks(low, high, target=6, whole=True)
    for tick in ticks:
        if low <= tick <= high:
            yield _rule("axis", to_x(tick), bottom, to_x(tick), bottom + 4)
            yield _text(to_x(tick), bottom + 18, tick_label(tick, ticks[1] - ticks[0]), "middle")


def _legend(names: Sequence[str], left: float) -> Iterable[str]:
    for i, name in enumerate(names):
        yield f'<rect class="bar c{i % _NUM_COLOURS}" x="{left:.1f}" y="9" width="14" height="4" rx="2"/>'
        yield _text(left + 20, 15.5, name, "start", "value")
        left += 20 + _text_width([name]) + 18


def _line(
    series: Series, colour: int, x_label: str, to_x: Callable[[float], float], to_y: Callable[[float], float]
) -> str:
    runs = [
        thin(list(run))
        for finite, run in itertools.groupby(series.points, key=lambda point: math.isfinite(point[1]))
        if finite
    ]
    paths = [
        f'<path class="line" d="M{" L".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in run)}"/>'
        for run in runs
    ]
    drawn = [point for run in runs for point in run]
    marks = []
    for x, y in drawn:
        at = f'cx="{to_x(x):.1f}" cy="{to_y(y):.1f}"'
        if len(drawn) <= _MAX_DOTS:
            marks.append(f'<circle class="dot" {at} r="3"/>')
        title = _title(f"{series.name}, {x_label} {x:g}: {y:.4g}")
        marks.append(f'<circle class="hit" {at} r="6">{title}</circle>')
    return f'<g class="c{colour}">{"".join(paths)}{"".join(marks)}</g>'


def _scale(low: float, high: float, out_low: float, out_high: float) -> Callable[[float], float]:
    """The linear map of [low, high] to [out_low, out_high]; a single value goes to the middle."""
    if low == high:
        return lambda value: (out_low + out_high) / 2
    return lambda value: out_low + (value - low) / (high - low) * (out_high - out_low)


def _nice_step(at_least: float) -> float:
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= at_least * (1 - 1e-9))


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _y(point: Point) -> float:
    return point[1]


def _svg(parts: Iterable[str], width: int, height: int, label: str) -> str:
    label = html.escape(label)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _text_width(texts: Sequence[str]) -> float:
    return _CHARACTER_WIDTH * max((len(text) for text in texts), default=0)


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
