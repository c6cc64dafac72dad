"""Line charts as SVG text, from pure functions: no script, no font, nothing to load."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

CHART_STYLE = """
svg { display: block; width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: var(--muted); }
svg .value { fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .mark { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 4 4; }
svg .line { fill: none; stroke: var(--series); stroke-width: 2; stroke-linejoin: round; }
svg .dot { fill: var(--series); }
svg .bar { fill: var(--series); }
svg .c0 { --series: var(--c0); }
svg .c1 { --series: var(--c1); }
svg .c2 { --series: var(--c2); }
"""

WIDTH, HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 20, 34, 44
_COLOURS = 3


@dataclass(frozen=True)
class Series:
    """A line; points without a y are gaps in the data, and the line leaves them out."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Axis:
    """An axis: positions of ticks with their texts, and where a value lies from 0 to 1."""

    ticks: Sequence[tuple[float, str]]
    place: Callable[[float], float]


def linear_axis(values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """From zero to beyond the largest value, with round ticks."""
    step = _nice_step((max(values, default=0) or 1) / 4)
    top = step * math.ceil((max(values, default=0) or 1) / step - 1e-9)
    ticks = [(step * number, text(step * number)) for number in range(round(top / step) + 1)]
    return Axis(ticks, lambda value: value / top)


def log_axis(values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """Whole powers of ten that enclose the values, which are > 0."""
    low, high = math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)
    high = max(high, low + 1)
    ticks = [(10.0**power, text(10.0**power)) for power in range(low, high + 1)]
    return Axis(ticks, lambda value: (math.log10(value) - low) / (high - low))


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    x_label: str,
    label: str,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over two axes, with a legend.

    Args:
        label: Says what is shown to those who do not see it.
        marks: Values on the x axis, each with a name, that get an upright line.
    """
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def at(point: Point) -> tuple[float, float]:
        return _LEFT + x.place(point[0]) * (right - _LEFT), bottom - y.place(point[1]) * (bottom - _TOP)

    parts: list[str] = []
    for tick, text in y.ticks:
        height = bottom - y.place(tick) * (bottom - _TOP)
        parts += [_rule("grid", _LEFT, height, right, height), _text(_LEFT - 8, height + 4.5, text, "end")]
    for tick, text in x.ticks:
        parts.append(_text(_LEFT + x.place(tick) * (right - _LEFT), bottom + 18, text, "middle"))
    parts.append(_text((_LEFT + right) / 2, HEIGHT - 6, x_label, "middle"))
    for value, name in marks:
        where = at((value, 0))[0] if y.ticks[0][0] == 0 else _LEFT + x.place(value) * (right - _LEFT)
        parts += [_rule("mark", where, _TOP, where, bottom), _text(where - 4, _TOP + 12, name, "end")]
    parts += _legend([line.name for line in series])
    parts += [_line(line, number % _COLOURS, at) for number, line in enumerate(series)]
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def _line(series: Series, colour: int, at: Callable[[Point], tuple[float, float]]) -> str:
    points = [(px, py) for px, py in series.points if py is not None]
    places = [at(point) for point in points]
    path = " L".join(f"{px:.1f},{py:.1f}" for px, py in places)
    dots = "".join(
        f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="2.5">'
        f"<title>{html.escape(series.name)}: {point[0]:.4g}, {point[1]:.4g}</title></circle>"
        for (px, py), point in zip(places, points, strict=True)
    )
    drawn = f'<path class="line" d="M{path}"/>' if len(places) > 1 else ""
    return f'<g class="c{colour}">{drawn}{dots if len(places) <= 60 else ""}</g>'


def _legend(names: Iterable[str]) -> list[str]:
    parts, left = [], float(_LEFT)
    for number, name in enumerate(names):
        parts.append(
            f'<rect class="bar c{number % _COLOURS}" x="{left:.1f}" y="9" width="14" height="4" rx="2"/>'
        )
        parts.append(_text(left + 20, 15.5, name, "start", "value"))
        left += 38 + 7.2 * len(name)
    return parts


def _nice_step(at_least: float) -> float:
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= at_least * (1 - 1e-9))


def _rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
