"""The NCCL that a process without torch loads: the one of torch's wheel."""

from __future__ import annotations

import _ctypes
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_cupy
import pytest

from nccl_transfer.transports.gpu import communicator
from nccl_transfer.transports.gpu.communicator import LIBRARY, NCCL_WHEELS, cupy_nccl


@pytest.fixture
def cupy_installed() -> Iterator[None]:
    fake_cupy.install(0)
    yield
    fake_cupy.remove()


@pytest.mark.usefixtures("cupy_installed")
@pytest.mark.parametrize("wheel", NCCL_WHEELS)
def test_cupy_gets_the_nccl_that_torch_depends_on(
    wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / f"{wheel.replace('-', '_')}-2.29.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    monkeypatch.setattr(communicator, "NCCL_WHEELS", (wheel,))  # whichever is installed here
    metadata.write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 2.29.7\n")
    library = tmp_path / LIBRARY
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert cupy_nccl().available  # a wheel without a library: cupy looks for one itself
    library.parent.mkdir(parents=True)
    shutil.copyfile(_ctypes.__file__, library)  # any library
    assert str(library) not in loaded_files()
    assert cupy_nccl().available
    assert str(library) in loaded_files()


def loaded_files() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
