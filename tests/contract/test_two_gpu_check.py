"""The check that ships for machines with two GPUs passes where nccl works, and fails in a line where it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_transfer.refs.dtypes import ITEM_BYTES

TESTS = Path(__file__).parents[1]


CHECK = [sys.executable, "-m", "contract.two_gpu_check_on_the_host"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Standard output and errors as one text."""
    command = [*CHECK, *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50, cwd=TESTS
    )


def test_all_checks_pass():
    done = run()
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "all checks passed"), done.stdout
    for name in ("1", "4096", str(4 << 20), *ITEM_BYTES):
        assert sum(line.startswith(f"{name}: ") for line in lines) >= 2, name
    for what, text in (
        ("rows of another epoch", "the epoch is 2, the rows are of epoch 1"),
        ("a reader that does not enter the group", "transfer: no answer by the deadline"),
        ("a source that is stopped", "prepare: no answer by the deadline"),
        ("a source that is killed", "source rank 0 at "),
    ):
        assert any(line.startswith(f"{what}: told after") and text in line for line in lines), what


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("wrong bytes", "column '4096', shard 2: the bytes from 0 on do not match"),
        ("no start", "the source has died before it served: exit code 3"),
        ("hangs", "the source does not serve after 1.0 s"),
        ("too late", r"a source that is stopped: told after .* s, the deadline was 1\.0 s"),
        ("foreign", "RuntimeError: an illegal memory access"),
    ],
)
def test_the_first_check_that_fails_is_told_in_a_line_and_ends_it_with_1(fault, text):
    done = run(fault)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1, done.stdout
    assert last.startswith("failed: "), done.stdout
    assert re.search(text, last)


def test_the_source_ends_also_where_the_check_is_killed():
    check = subprocess.Popen(CHECK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS)
    assert check.stdout is not None
    assert check.stdout.readline().startswith("1: 1 bytes")
    check.kill()
    check.communicate(timeout=20)  # the source has the other end of it too
