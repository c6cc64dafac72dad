"""The page for users of other frameworks names keys that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TABLES = ("run", "data", "rollout", "algorithm", "checkpoint", "tracking", "services")


def documented() -> dict[str, set[str]]:
    """The keys of each table of configuration.md, which is made from the types; those of services as services.ROLE, and
    those of every role as services.NAME."""
    keys: dict[str, set[str]] = {}
    sections: list[str] = []
    for line in (DOCS / "configuration.md").read_text().splitlines():
        if line.startswith("## "):
            roles, table = re.findall(r'"(\w+)"', line), re.search(r"\[+([\w.]+)\]+", line)
            sections = [f"services.{role}" for role in roles] or ([table[1]] if table else [])
        elif row := re.match(r"\| `(\w+)` \|", line):
            for section in sections:
                keys.setdefault(section, set()).add(row[1])
    return keys


def named() -> list[str]:
    """The keys of this package that the page names: dotted ones of the last column of its tables."""
    rows = [line for line in (DOCS / "migrating.md").read_text().splitlines() if line.startswith("| ")]
    last = " ".join(row.strip("| ").rpartition(" | ")[2] for row in rows)
    return sorted(set(re.findall(rf"`((?:{'|'.join(TABLES)})\.[\w.]+)", last)))


def test_the_page_names_keys() -> None:
    assert len(named()) > 90


@pytest.mark.parametrize("key", named())
def test_every_key_of_the_page_exists(key: str) -> None:
    keys = documented()
    parts = re.fullmatch(r"(services\.\w+|\w+)\.(\w+)(?:\.(\w+))?", key)
    assert parts
    table, name, inner = parts.groups()
    shared = re.sub(r"^services\.\w+", "services.NAME", table)
    assert name in keys[table] | (keys[shared] if shared != table else set())
    if inner and name != "columns":  # whose keys are this package's names of fields
        assert inner in keys[f"{shared}.{name}"]
