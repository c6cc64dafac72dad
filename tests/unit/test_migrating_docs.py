"""The page for users of other frameworks names keys that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TABLES = ("run", "data", "rollout", "algorithm", "checkpoint")


def documented() -> dict[str, set[str]]:
    """The keys of each table of configuration.md, which is made from the types; those of services by role."""
    keys: dict[str, set[str]] = {}
    section = ""
    for line in (DOCS / "configuration.md").read_text().splitlines():
        if line.startswith("## "):
            found = re.search(r'role = "(\w+)"', line) or re.search(r"\[+([\w.]+)\]+", line)
            section = found[1] if found and "every role" not in line else "every role"
        elif row := re.match(r"\| `(\w+)` \|", line):
            keys.setdefault(section, set()).add(row[1])
    return keys


def named() -> list[str]:
    """The keys of this package that the page names: dotted ones of the last column of its tables."""
    rows = [line for line in (DOCS / "migrating.md").read_text().splitlines() if line.startswith("| ")]
    last = " ".join(row.strip("| ").rpartition(" | ")[2] for row in rows)
    return sorted(set(re.findall(r"`((?:run|data|rollout|algorithm|checkpoint|services)\.[\w.]+)", last)))


def test_the_page_names_keys() -> None:
    assert len(named()) > 40


@pytest.mark.parametrize("key", named())
def test_every_key_of_the_page_exists(key: str) -> None:
    keys = documented()
    table, _, rest = key.partition(".")
    if table != "services":
        assert rest.removesuffix(".prompt") in keys[table]  # columns.prompt is a name in the table columns
        return
    role, name, *inner = rest.split(".")
    assert name in keys[role] | keys["every role"]
    assert not inner or inner == ["learning_rate"]
