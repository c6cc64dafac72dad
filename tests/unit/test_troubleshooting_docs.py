"""The messages in docs/troubleshooting.md, and the errors that other pages quote, are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("protos/rlhf", "settings", "client", "controller", "services", "deploy")
SHORTEST = 12
"""Characters of the shortest text that counts as a message of the code."""
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
BLOCKS = re.findall(r"\*\*Symptom\.\*\*[^\n]*(?:\n[^`\n]*)*?```\n(.*?)```", PAGE, re.S)
SYMPTOMS = [line for block in BLOCKS for line in block.splitlines()]
QUOTED = [
    line.strip()
    for path in sorted((ROOT / "docs").glob("*.md"))
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", path.read_text(), re.S | re.M)
    for line in block.splitlines()
    if not language and line.lstrip().startswith(("error: ", "fatal: "))
]
OF_TORCH = "OutOfMemoryError: CUDA out of memory"


def texts() -> set[str]:
    """All texts in the code that are long enough, without those around what is put into them."""
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        found.add(node.value.strip(" :;,.'\"()"))
    return {text for text in found if SHORTEST <= len(text) < 200}


@pytest.fixture(scope="module")
def known() -> set[str]:
    return texts()


def test_there_are_messages() -> None:
    assert len(SYMPTOMS) > 15
    assert len(QUOTED) > 12


@pytest.mark.parametrize("line", [*SYMPTOMS, *QUOTED])
def test_a_message_of_the_page_is_one_of_the_code(line: str, known: set[str]) -> None:
    assert line.startswith(OF_TORCH) or any(text in line for text in known)
