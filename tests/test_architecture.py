"""The rooms of the house: imports point one way, and the controller needs no torch."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf.contract import group_methods
from rlhf.roles import BUILT_IN
from services.runtime.worker import Worker, registered_methods

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "protos/rlhf": {"rlhf"},
    "settings": {"rlhf", "settings"},
    "nccl_transfer": {"rlhf", "nccl_transfer"},
    "services": {"rlhf", "settings", "nccl_transfer", "services"},
    "client": {"rlhf", "client"},
    "controller": {"rlhf", "settings", "reports", "nccl_transfer", "client", "controller"},
    "deploy": {"rlhf", "settings", "reports", "controller.config", "deploy"},
    "conformance": {"rlhf", "settings", "conformance"},
    "loadtest": {"rlhf", "settings", "reports", "nccl_transfer", "client", "loadtest"},
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
LONG_FILE, LONGEST_FILE, LONGEST_CLASS, LONGEST_FUNCTION = 300, 500, 250, 60
"""Lines. At most a tenth of the files are long."""
WITHOUT_TORCH = [
    "client.rank",
    "controller.api",
    "controller.cli",
    "controller.mapping.cli",
    "controller.training.run",
    "controller.algorithms.ppo",
    "controller.algorithms.safe_rlhf",
    "nccl_transfer.fetch",
    "nccl_transfer.refs.protocols",
    "services.reward.worker",
    "services.runtime.server",
    "deploy.cli",
    "deploy.pipeline.cli",
    "settings.memory.services",
    "settings.memory.predict",
    "conformance.cli",
    "loadtest.cli",
]


def sources(room: str) -> Iterator[Path]:
    for path in sorted((ROOT / room).rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield path


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
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


@pytest.mark.parametrize("role", BUILT_IN)
def test_roles_do_not_import_each_other(role: str) -> None:
    others = {package(other) for other in BUILT_IN if other != role}
    wrong = [
        f"{path.name} imports {module}"
        for path in sources(package(role).replace(".", "/"))
        for module in imports(path)
        if is_within(module, others)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_is_imported_where_torch_cannot_be(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import {module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_sets_the_verbosity_of_grpc_before_it_imports_it(command: str) -> None:
    ran = run_command(
        command,
        "assert name != 'grpc' or 'GRPC_VERBOSITY' in os.environ",
        "assert 'grpc' in sys.modules",
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(command: str) -> None:
    ran = run_command(command, "name == 'click' and signal.raise_signal(signal.SIGINT)")
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + signal.SIGINT, "", "")


def run_command(command: str, on_import: str, after_help: str = "pass") -> subprocess.CompletedProcess[str]:
    """Calls the entry point of a command with --help in a process of its own.

    Args:
        command: Name of the command.
        on_import: Statement that is executed before each import of a module `name`.
        after_help: Statement that is executed after the help.
    """
    module, _, function = COMMANDS[command].partition(":")
    code = (
        "import os, signal, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        {on_import}\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"sys.argv = [{command!r}, '--help']\n"
        f"from {module} import {function}\n"
        "try:\n"
        f"    {function}()\n"
        "except SystemExit as ended:\n"
        "    if ended.code: raise\n"
        f"{after_help}"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment
    )


def package(role: str) -> str:
    """The package that serves a role, such as services.actor."""
    return BUILT_IN[role].worker.partition(":")[0].rpartition(".")[0]


def worker_class(role: str) -> type[Worker]:
    return getattr(importlib.import_module(f"{package(role)}.worker"), f"{role.capitalize()}Worker")


def paths_of(role: str) -> set[str]:
    return {method.path for method in group_methods(role).values()}


@pytest.mark.parametrize("role", BUILT_IN)
def test_every_method_of_a_proto_is_registered_with_the_protocol_it_declares(role: str) -> None:
    methods = registered_methods(worker_class(role))
    declared = {path for each in (role, *worker_class(role).also_serves) for path in paths_of(each)}
    assert methods.keys() == declared
    for method, registration in methods.values():
        assert method.spec is not None
        assert registration.protocol == method.spec.transfer_protocol


def test_an_actor_with_adapters_has_the_methods_of_all_its_roles() -> None:
    worker = importlib.import_module("services.actor.lora").LoRAActorWorker
    roles = ("actor", "rollout", "reference")
    assert registered_methods(worker).keys() == {path for role in roles for path in paths_of(role)}


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


def test_grpc_servers_are_made_in_the_same_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in MAY_IMPORT
        for path in sources(room)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("grpc.server", "grpc.aio.server", "aio.server")
        and path.name != "channels.py"
    ]
    assert wrong == []


@dataclass(frozen=True)
class Module:
    """A file of the product and the modules of ours that it imports, by where: at its top, or inside a function."""

    path: Path
    imports: frozenset[str]
    inner: tuple[tuple[int, str], ...]

    @property
    def folder(self) -> str:
        return str(self.path.parent.relative_to(ROOT))


@functools.cache
def modules() -> dict[str, Module]:
    """All modules of the product, by name."""
    paths = {name_of(path): path for room in MAY_IMPORT for path in sources(room)}
    return {name: read_module(path, paths.keys()) for name, path in paths.items()}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "protos" else parts).removesuffix(".__init__")


def read_module(path: Path, known: Collection[str]) -> Module:
    found, inner = set(), []
    for node, is_inner in walk(parsed(path)):
        for module in imported(node):
            target = next((name for name in (module, module.rpartition(".")[0]) if name in known), None)
            if target is None or target == name_of(path):
                continue
            found.add(target)
            if is_inner:
                inner.append((node.lineno, target))
    return Module(path, frozenset(found), tuple(inner))


def walk(node: ast.AST, is_inner: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements below a node, and whether each is inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, is_inner
        yield from walk(child, is_inner or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def imported(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(graph: Mapping[str, Set[str]]) -> list[str]:
    """Nodes that can be reached from themselves."""

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), list(graph[start])
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(graph.get(node, ()))
        return seen

    return sorted(node for node in graph if node in reached(node))


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles({name: module.imports for name, module in modules().items()}) == []


def test_no_folder_imports_itself_by_way_of_others() -> None:
    found = modules()
    graph: dict[str, set[str]] = {}
    for module in found.values():
        others = {found[name].folder for name in module.imports}
        graph.setdefault(module.folder, set()).update(others - {module.folder})
    assert circles(graph) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_an_import_inside_a_function_has_its_reason_beside_it() -> None:
    wrong = []
    for module in modules().values():
        lines = module.path.read_text().splitlines()
        for line, target in module.inner:
            if "#" not in lines[line - 1] and not lines[line - 2].strip().startswith("#"):
                wrong.append(f"{module.path.relative_to(ROOT)}:{line} imports {target}")
    assert wrong == []


def test_a_transport_is_known_by_the_registry_alone() -> None:
    """The checks of GPUs are about transports between GPUs."""
    shared = {
        "nccl_transfer.transports.base",
        "nccl_transfer.transports.common",
        "nccl_transfer.transports.host",
    }
    own = {name for name in modules() if name.startswith("nccl_transfer.transports.")} - shared
    may = re.compile(r"nccl_transfer\.(transports\..+|registry|testing\.(two_gpu_.+|hooked_nccl))")
    wrong = [
        f"{name} imports {module}"
        for name, found in modules().items()
        for module in sorted(found.imports & own)
        if not may.fullmatch(name)
    ]
    assert wrong == []


def test_processes_that_tests_start_import_the_code_that_the_tests_do() -> None:
    """Also in a checkout that is not the installed one, which only PYTHONPATH names."""
    sets = re.compile(r"""PYTHONPATH("[:,]|=)""")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if sets.search(line) and not re.search(r"python_path\(|sys\.path", line)
    ]
    assert not wrong, "use python_path"


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for room in MAY_IMPORT:
        for path in sources(room):
            yield path.relative_to(ROOT), parsed(path)


def test_a_public_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_docstrings_begin_with_their_subject() -> None:
    wrong = [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (ast.get_docstring(node) or "").startswith("What")
    ]
    assert wrong == []


def length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_classes_and_functions_are_of_a_size_to_read() -> None:
    wrong, long_files, files = [], 0, 0
    for path, tree in trees():
        lines = len((ROOT / path).read_text().splitlines())
        files += 1
        long_files += lines > LONG_FILE
        if lines > LONGEST_FILE:
            wrong.append(f"{path} has {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and length(node) > LONGEST_CLASS:
                wrong.append(f"{path}: class {node.name} has {length(node)} lines")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > LONGEST_FUNCTION:
                wrong.append(f"{path}: {node.name} has {length(node)} lines")
    assert wrong == []
    assert long_files <= files / 10
