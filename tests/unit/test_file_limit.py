"""A rank keeps files for itself, however many connections others open to it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from rlhf.file_limit import MOST_CONNECTIONS, RESERVED_FILES, most_connections


@pytest.mark.parametrize(
    ("soft", "most"),
    [
        (resource.RLIM_INFINITY, MOST_CONNECTIONS),
        (1 << 20, MOST_CONNECTIONS),
        (1024, 1024 - RESERVED_FILES),
        (4096, 4096 - RESERVED_FILES),
        (256, 128),
    ],
)
def test_connections_leave_files_to_the_rank(soft: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (soft, soft))
    assert most_connections() == most


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = """
import resource
from rlhf.file_limit import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "(512, 512)"
