"""Generates the Python module of each proto of this package at install; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import grpc_tools
from grpc_tools import protoc
from setuptools import setup
from setuptools.command.build_py import build_py

import rlhf

PACKAGE = "rlhf_example"
INCLUDES = (
    ".",
    Path(rlhf.__file__).parent.parent,  # rlhf/v1/common.proto of the installed rlhf-cluster
    Path(grpc_tools.__file__).parent / "_proto",  # google/protobuf/*.proto
)


def generate(out: Path) -> list[str]:
    """Writes *_pb2.py of every proto of this package below `out`; returns the paths."""
    protos = sorted(map(str, Path(PACKAGE).rglob("*.proto")))
    out.mkdir(parents=True, exist_ok=True)
    flags = [*(f"-I{path}" for path in INCLUDES), f"--python_out={out}"]
    if protoc.main(["protoc", *flags, *protos]):
        raise RuntimeError(f"protoc failed on {protos}")
    return [str(out / proto.replace(".proto", "_pb2.py")) for proto in protos]


class BuildWithProtos(build_py):
    """build_py that adds the generated modules: to the source tree when editable, else to the build tree."""

    def run(self) -> None:
        self.generated = generate(Path() if self.editable_mode else Path(self.build_lib))
        super().run()

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *getattr(self, "generated", [])]


setup(cmdclass={"build_py": BuildWithProtos})
