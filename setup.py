"""Generates the gRPC stubs from the protos at install; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROTO_ROOT = Path("protos")


def generate_stubs(out: Path) -> list[str]:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py of every proto below `out`; returns their paths."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO_ROOT}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *protos,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status} on {protos}")
    return [
        str(out / (proto.removesuffix(".proto") + suffix))
        for proto in protos
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    ]


class BuildWithStubs(build_py):
    """build_py that adds the stubs: to the source tree when editable, else to the build tree."""

    def run(self) -> None:
        self.stubs = generate_stubs(PROTO_ROOT if self.editable_mode else Path(self.build_lib))
        super().run()

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *getattr(self, "stubs", [])]


setup(cmdclass={"build_py": BuildWithStubs})
