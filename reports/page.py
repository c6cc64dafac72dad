"""HTML pages that load nothing: one column of cards on phones, two on wide screens. A page is well-formed XML too."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from reports.charts import CHART_STYLE

_NOT_IN_HTML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def page(title: str, sections: Iterable[str]) -> str:
    """Renders an HTML page from a title, which is escaped, and sections in HTML, of which empty ones are left out."""
    body = "\n".join(section for section in sections if section)
    return _PAGE.format(title=escape(title), style=_STYLE + CHART_STYLE, body=body)


def card(title: str, content: str, *, is_wide: bool = False, note: str = "") -> str:
    """Renders a titled box as HTML; returns an empty text where `content` is empty.

    Args:
        title: Title as text.
        content: Content as HTML.
        is_wide: Whether the box takes both columns of the page.
        note: Text below the content.
    """
    if not content:
        return ""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    kind = "card full" if is_wide else "card"
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{content}{below}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Renders a table as HTML that scrolls where it is too wide. `head` has the names of columns as text, or is empty:
    the first cell of each row is then its name. Cells are HTML."""
    top = f"<thead><tr>{_cells('th', map(escape, head))}</tr></thead>" if head else ""
    body = "".join(
        f"<tr>{_cells('td', row) if head else _cells('th', row[:1]) + _cells('td', row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def escape(text: str) -> str:
    """Escapes a text for HTML, quotes included; characters that HTML does not allow, which a policy may well sample,
    become U+FFFD."""
    return html.escape(_NOT_IN_HTML.sub("\N{REPLACEMENT CHARACTER}", text))


def code(text: str) -> str:
    """Returns HTML of a text in a fixed-width font that keeps its line breaks."""
    return f"<code>{escape(text)}</code>"


def _cells(kind: str, contents: Iterable[str]) -> str:
    return "".join(f"<{kind}>{content}</{kind}>" for content in contents)


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
  --c0: #2c6fae; --c1: #c46a24; --c2: #3b8a67; --c3: #8460b0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2023; --ink: #e2e5e7; --muted: #98a2a9; --rule: #2f353a; --alarm: #f08a76;
    --c0: #6cabe3; --c1: #e39a5e; --c2: #6cbd97; --c3: #b496dc;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main {
  max-width: 1060px; margin: 0 auto; padding: 32px 20px 64px;
  display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px;
}
header, .tiles, .full, main > .note { grid-column: 1 / -1; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; }
h1 { font-size: 24px; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; font-weight: 600; margin: 0 0 10px; }
.state, .note { color: var(--muted); margin: 0; font-size: 14px; }
.card .note { margin-top: 10px; }
.warning { color: var(--alarm); margin: 4px 0 0; font-size: 14px; }
.tiles { display: flex; flex-wrap: wrap; gap: 20px 40px; margin: 0 0 4px; }
.tiles dt { color: var(--muted); font-size: 14px; }
.tiles dd { margin: 0; font-size: 24px; font-variant-numeric: tabular-nums; }
.tiles .long dd { font: 13px/1.6 ui-monospace, monospace; overflow-wrap: anywhere; padding-top: 6px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px; }
.narrow { display: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--muted); }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td small { display: block; color: var(--muted); }
code, pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { margin: 10px 0 0; }
summary { cursor: pointer; color: var(--muted); }
@media (max-width: 760px) {
  main { grid-template-columns: minmax(0, 1fr); padding: 20px 12px 40px; gap: 14px; }
  .card { padding: 14px; }
  .wide { display: none; }
  .narrow { display: block; }
}
"""
