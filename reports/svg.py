"""Elements of SVG as text. Sizes are in user units of the view box; a chart scales with its container."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_CHARACTER_WIDTH = 7.2  # of 13 px text, on the safe side


def document(parts: Iterable[str], width: float, height: float, label: str) -> str:
    """Returns an SVG element with these parts, which are SVG; `label`, text, describes it to readers who do not see
    it."""
    label = html.escape(label)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Returns a straight line from (x1, y1) to (x2, y2) with CSS class `kind`."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    """Returns a text element at (x, y) with CSS class `kind`, if any. `anchor`, "start", "middle" or "end", is the
    place of the text that lies at x."""
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(content)}</text>'


def title(content: str) -> str:
    """Returns a title element, which browsers show when the pointer is over the element that contains it."""
    return f"<title>{html.escape(content)}</title>"


def text_width(texts: Sequence[str]) -> float:
    """Returns an upper bound of the width of the longest text, in user units; 0 for no texts."""
    return _CHARACTER_WIDTH * max((len(each) for each in texts), default=0)
