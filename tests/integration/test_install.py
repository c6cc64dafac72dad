"""Contents of `pip install .`: the contract and the controller, no torch, no tests."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a clean checkout: tracked files only, so no stub of this environment is in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, timeout=30)
    names = [name for name in tracked.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_stubs_are_generated_at_install(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for role in ("actor", "critic", "reference", "reward", "worker", "transfer", "common"):
        assert {f"rlhf/v1/{role}_pb2.py", f"rlhf/v1/{role}_pb2_grpc.py", f"rlhf/v1/{role}_pb2.pyi"} <= names
        assert f"rlhf/v1/{role}.proto" in names
    assert "deploy/quickstart/quickstart.toml" in names


def test_only_our_rooms_are_installed(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "rlhf", "settings", "reports", "nccl_transfer", "services", "client", "controller", "deploy", "conformance",
        "loadtest",
    }  # fmt: skip


def test_every_module_of_our_rooms_is_installed(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for room in (
        "settings",
        "reports",
        "nccl_transfer",
        "services",
        "client",
        "controller",
        "deploy",
        "conformance",
        "loadtest",
    ):
        for path in (ROOT / room).rglob("*.py"):
            assert str(path.relative_to(ROOT)) in names


def test_type_checkers_find_the_types_of_the_python_interface(wheel: zipfile.ZipFile) -> None:
    """PEP 561: without the marker mypy takes everything that is imported from a package for Any."""
    assert {"rlhf/py.typed", "settings/py.typed", "controller/py.typed"} <= set(wheel.namelist())


def test_torch_comes_with_an_extra_only(wheel: zipfile.ZipFile) -> None:
    metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    requires = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist") or []
    heavy = ("torch", "transformers", "cupy", "vllm", "deepspeed", "nvidia")
    assert [need for need in requires if need.startswith(heavy) and "extra ==" not in need] == []
    extras = set(Parser().parsestr(wheel.read(metadata).decode()).get_all("Provides-Extra") or [])
    assert {"cpu", "cu12", "cu13", "vllm", "deepspeed"} <= extras
