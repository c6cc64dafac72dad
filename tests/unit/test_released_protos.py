"""`make lint` compares the protos with those of the last release, `protos/released.binpb`: what old clients cannot read
is refused, and additions are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"
BUF = Path(sys.executable).with_name("buf")

pytestmark = pytest.mark.skipif(
    not BUF.exists(), reason="buf is not installed; it is among the extras `lint`"
)


def compared(directory: Path, file: str, old: str, new: str) -> subprocess.CompletedProcess[str]:
    """Compares a copy of the protos, in which a text of a file is replaced, with the released ones."""
    shutil.copytree(PROTOS, directory, ignore=shutil.ignore_patterns("*.py", "*.pyi", "__pycache__"))
    path = directory / "rlhf" / "v1" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    command = [str(BUF), "breaking", "--against", "released.binpb"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("common.proto", "uint64 sequence = 3;", "uint32 sequence = 3;", "changed type"),
        ("worker.proto", "rpc Watch(", "rpc Look(", '"Watch" on service "WorkerService" was deleted'),
        ("transfer.proto", "stream FetchResponse", "FetchResponse", "changed from server streaming"),
    ],
)
def test_a_change_that_breaks_old_clients_is_refused(
    tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    done = compared(tmp_path / "protos", file, old, new)
    assert done.returncode != 0
    assert said in done.stdout


def test_a_new_field_breaks_nobody(tmp_path: Path) -> None:
    new = "uint64 sequence = 3;\n  // A field that old clients do not know.\n  uint64 added = 900;"
    done = compared(tmp_path / "protos", "common.proto", "uint64 sequence = 3;", new)
    assert (done.returncode, done.stdout) == (0, "")
