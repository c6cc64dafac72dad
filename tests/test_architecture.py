"""The rooms of the house: imports point one way, and the controller needs no torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.contract import ROLES, group_methods
from services.runtime.worker import Worker, registered_methods

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "protos/rlhf": {"rlhf"},
    "settings": {"rlhf", "settings"},
    "nccl_transfer": {"rlhf", "nccl_transfer"},
    "services": {"rlhf", "settings", "nccl_transfer", "services"},
    "client": {"rlhf", "client"},
    "controller": {"rlhf", "settings", "reports", "nccl_transfer", "client", "controller"},
    "deploy": {"rlhf", "settings", "controller.config", "deploy"},
    "conformance": {"rlhf", "conformance"},
    "loadtest": {"rlhf", "reports", "nccl_transfer", "client", "loadtest"},
    "reports": {"reports"},
}
OURS = (
    "rlhf",
    "settings",
    "reports",
    "nccl_transfer",
    "services",
    "client",
    "controller",
    "deploy",
    "conformance",
    "loadtest",
)
ROLE_ROOMS = ("actor", "critic", "reference", "reward")
WITHOUT_TORCH = [
    "client.rank",
    "controller.cli",
    "controller.training.run",
    "controller.algorithms.ppo",
    "controller.algorithms.safe_rlhf",
    "nccl_transfer.fetch",
    "nccl_transfer.refs.protocols",
    "services.reward.worker",
    "services.runtime.server",
    "deploy.cli",
    "deploy.pipeline.cli",
    "conformance.cli",
    "loadtest.cli",
]


def sources(room: str) -> Iterator[Path]:
    for path in sorted((ROOT / room).rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def is_within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(room)
        for module in imports(path)
        if is_within(module, set(OURS)) and not is_within(module, MAY_IMPORT[room])
    ]
    assert wrong == []


@pytest.mark.parametrize("role", ROLE_ROOMS)
def test_roles_do_not_import_each_other(role: str) -> None:
    others = {f"services.{other}" for other in ROLE_ROOMS if other != role}
    wrong = [
        f"{path.name} imports {module}"
        for path in sources(f"services/{role}")
        for module in imports(path)
        if is_within(module, others)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_is_imported_where_torch_cannot_be(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import {module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def worker_class(role: str) -> type[Worker]:
    return getattr(importlib.import_module(f"services.{role}.worker"), f"{role.capitalize()}Worker")


@pytest.mark.parametrize("role", ROLES)
def test_every_method_of_a_proto_is_registered_with_the_protocol_it_declares(role: str) -> None:
    methods = registered_methods(worker_class(role))
    assert methods.keys() == group_methods(role).keys()
    for method, registration in methods.values():
        assert method.spec is not None
        assert registration.protocol == method.spec.transfer_protocol


def test_an_actor_with_adapters_has_the_methods_of_both_its_roles() -> None:
    worker = importlib.import_module("services.actor.lora").LoRAActorWorker
    both = group_methods("actor") | group_methods("reference")
    assert registered_methods(worker).keys() == both.keys()


def test_no_pickle_of_ours() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for room in MAY_IMPORT
        for path in sources(room)
        for module in imports(path)
        if module.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    ]
    assert wrong == []


def test_connections_are_opened_and_accepted_in_one_file() -> None:
    makers = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} calls {node.attr}"
        for room in MAY_IMPORT
        for path in sources(room)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in makers and path.name != "channels.py"
    ]
    assert wrong == []
