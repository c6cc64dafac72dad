"""Chore `make check-cuda-wheels`: installs extra cu13 with vLLM and DeepSpeed into a scratch directory, on a machine
that needs no GPU, imports torch, cupy, DeepSpeed and vLLM, and compares the calls that this project makes to cupy, NCCL
and vLLM with their signatures. Takes 10 GB of disk, which it frees, and some minutes.

    python tests/check_cuda_wheels.py              installs and checks
    PYTHON tests/check_cuda_wheels.py --here       checks in the environment of PYTHON, which has the wheels
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "cupy", "deepspeed", "vllm")
NCCL_WITHOUT_TORCH = """
import sys
from nccl_transfer.transports.gpu.communicator import cupy_nccl
print(cupy_nccl().get_version())
assert "torch" not in sys.modules
"""

ADAPTERS: Mapping[str, Mapping[str, str]] = {
    "nccl_transfer/devices/cupy_cuda.py": {
        "runtime": "cupy.cuda.runtime",
        "_runtime": "cupy.cuda.runtime",
    },
    "nccl_transfer/transports/gpu/communicator.py": {
        "_runtime": "cupy.cuda.runtime",
        "nccl": "cupy.cuda.nccl",
        "_nccl": "cupy.cuda.nccl",
        "communicator": "cupy.cuda.nccl:NcclCommunicator",
        "_communicator": "cupy.cuda.nccl:NcclCommunicator",
        "_stream": "cupy.cuda:Stream",
        "_reached": "cupy.cuda:Event",
    },
    "services/rollout/vllm.py": {"_engine": "vllm.v1.engine.llm_engine:LLMEngine"},
    "services/rollout/vllm_engine.py": {"EngineArgs": "vllm.engine.arg_utils:EngineArgs"},
}
"""For each file that calls a library: the library's objects by the last names of the expressions that the file has them
in."""


def used(path: Path, names: Mapping[str, str]) -> Iterator[tuple[str, str, ast.Call | None]]:
    """Yields each attribute of the named objects that a file uses: the name of the object, the attribute ("" for a call
    of the object itself), and the call, or None where it is not called."""
    tree = ast.parse(path.read_text())
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := _last_name(node.value)) in names:
            yield owner, node.attr, called.get(id(node))
        elif id(node) in called and isinstance(node, ast.Name) and node.id in names:
            yield node.id, "", called[id(node)]


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def fault(target: Any, attribute: str, call: ast.Call | None) -> str:
    """Returns why a use of a library does not fit it; "" if it does.

    Args:
        target: The library's module or class.
        attribute: Attribute of it; "" for the object itself.
        call: The call; None for an attribute that is not called.
    """
    if attribute and not hasattr(target, attribute):
        return "" if call is None and is_documented_or_set(target, attribute) else "does not exist"
    member = getattr(target, attribute) if attribute else target
    if call is None or (inspect.isclass(member) and issubclass(member, BaseException)):
        return ""
    signature = signature_of(member, is_method=inspect.isclass(target) and bool(attribute))
    if signature is None:
        return "has no signature"
    try:
        signature.bind(*call.args, **{each.arg: each.value for each in call.keywords if each.arg})
    except TypeError as error:
        return f"{error}: {signature}"
    return ""


def is_documented_or_set(target: Any, attribute: str) -> bool:
    """Returns whether instances of a class have an attribute, by its docstring (Cython's have no source) or source."""
    if not inspect.isclass(target):
        return False
    try:
        text = inspect.getsource(target)
    except OSError:
        text = inspect.getdoc(target) or ""
    return re.search(rf"(self|{target.__name__})\.{attribute}\b", text) is not None


def signature_of(member: Any, *, is_method: bool) -> inspect.Signature | None:
    """Returns the signature of a function, method or class, without `self`; from the first line of its docstring
    where Cython left none, or the line of its class's constructor. None if there is no signature anywhere."""
    try:
        found = inspect.signature(member)
    except (TypeError, ValueError):
        text = re.match(r"\w+(?:\.\w+)*\(([^)]*)\)", inspect.getdoc(member) or "")
        if text is None:
            return None
        names = [
            re.match(r"\W*(?:[\w.\[\]* ]+ )?\*?(\w+)\s*(=)?", part)
            for part in text[1].split(",")
            if part.strip()
        ]
        empty, default = inspect.Parameter.empty, None
        found = inspect.Signature(
            [
                inspect.Parameter(
                    each[1], inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default if each[2] else empty
                )
                for each in names
                if each
            ]
        )
    parameters = list(found.parameters.values())
    if is_method and parameters and parameters[0].name == "self":
        return found.replace(parameters=parameters[1:])
    return found


def target_of(reference: str) -> Any:
    """Returns the module of "module", or the object of "module:object"."""
    module, _, name = reference.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def check() -> int:
    """Prints versions and every use of a library with what is wrong with it; returns the number of faults."""
    for name in PACKAGES:
        print(f"imported: {name} {importlib.import_module(name).__version__}", flush=True)
    torch, nccl = importlib.import_module("torch"), importlib.import_module("cupy.cuda.nccl")
    print(f"torch is built for CUDA {torch.version.cuda}, with NCCL {torch.cuda.nccl.version()}")
    print(f"cupy loads NCCL {nccl.get_version()}, and is built with {nccl.get_build_version()}")
    program = [sys.executable, "-c", NCCL_WITHOUT_TORCH]
    alone = int(subprocess.run(program, stdout=subprocess.PIPE, timeout=300, check=True).stdout)
    print(f"a process without torch loads NCCL {alone}")
    uses, faults = set(), int(alone != nccl.get_version())
    for path, names in ADAPTERS.items():
        for owner, attribute, call in used(ROOT / path, names):
            why = fault(target_of(names[owner]), attribute, call)
            uses.add((names[owner], attribute))
            if why:
                faults += 1
                print(f"WRONG: {path}:{call.lineno if call else '?'}: {names[owner]} {attribute}: {why}")
    print(f"{len(uses)} calls and constants of cupy, NCCL and vLLM: {faults} wrong")
    return faults


def main() -> None:
    """Installs the wheels into a scratch directory and checks them there; with --here, in this environment."""
    if "--here" in sys.argv:
        sys.exit(bool(check()))
    with tempfile.TemporaryDirectory() as scratch:
        python = f"{scratch}/bin/python"
        subprocess.run(["uv", "venv", "--quiet", "--python", "3.11", scratch], check=True, timeout=300)
        # Without this, setuptools leaves build/ in the checkout, and puts its old modules into later wheels.
        options = Path(scratch, "setuptools.cfg")
        options.write_text(f"[build]\nbuild_base = {scratch}/build\n")
        build = ["uv", "build", "--quiet", "--wheel", "--out-dir", f"{scratch}/wheels", str(ROOT)]
        subprocess.run(build, check=True, timeout=600, env={**os.environ, "DIST_EXTRA_CONFIG": str(options)})
        (wheel,) = Path(scratch, "wheels").glob("*.whl")
        install = ["uv", "pip", "install", "--quiet", "--no-cache", "--python", python]
        subprocess.run([*install, f"{wheel}[cu13,vllm,deepspeed]"], check=True, timeout=3600)
        ran = subprocess.run([python, __file__, "--here"], timeout=1800, check=False)
    sys.exit(ran.returncode)


if __name__ == "__main__":
    main()
