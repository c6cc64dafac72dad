"""All pages: links lead to files and headings, TOML and command lines have keys and options that there are, Python
imports what exists, files, modules, names, chores and keys that sentences name exist, and counts are right."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from chaos.sandbox_attacks import ATTACKS
from pydantic import ValidationError

from conformance.cli import main as rlhf_conformance
from controller.cli import main as rlhf_controller
from controller.config.algorithm import AlgorithmTable
from controller.config.checkpoint import CheckpointTable
from controller.config.config import Config
from controller.config.data import DataTable
from controller.config.placements import Placement
from controller.config.rollout import RolloutTable
from controller.config.run import RunTable
from controller.config.tracking import TrackingTable
from controller.mapping.cli import main as rlhf_map
from controller.tracking import traces
from controller.training.run import Run
from deploy.cli import main as rlhf_deploy
from loadtest.cli import main as rlhf_loadtest
from nccl_transfer.refs import protocols
from rlhf.roles import BUILT_IN
from settings.security import SecurityTable
from settings.services import table_type
from settings.strict import Strict, override
from settings.transports import TRANSPORTS

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*/README.md", "tests/data/*.md")
    for path in sorted(ROOT.glob(pattern))
}
OF_NOW = [page for page in PAGES if page != "CHANGELOG.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PROGRAMS: dict[str, click.Command] = {
    "rlhf-conformance": rlhf_conformance,
    "rlhf-controller": rlhf_controller,
    "rlhf-deploy": rlhf_deploy,
    "rlhf-loadtest": rlhf_loadtest,
    "rlhf-map": rlhf_map,
}
BASE = (ROOT / "deploy" / "quickstart" / "quickstart.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
ROOMS = (
    "benchmarks|client|conformance|controller|deploy|docs|examples|loadtest|nccl_transfer|protos|reports|services"
    "|settings|tests"
)


def prose(page: str) -> str:
    return FENCE.sub("", PAGES[page])


def codes(page: str) -> list[str]:
    """The code in the sentences and tables of a page."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def errors_of_keys(given: dict[str, Any]) -> list[str]:
    """Unknown keys, and values of a wrong type, in tables over those of the quickstart. Rules between keys are left
    out: a page shows a part of a config."""
    tables = merged(tomllib.loads(BASE), given)
    if "sources" in given.get("data", {}):
        del tables["data"]["train"], tables["data"]["heldout"]
    try:
        Config.model_validate(tables)
    except ValidationError as error:
        return [f"{each['loc']}: {each['msg']}" for each in error.errors() if each["type"] != "value_error"]
    return []


def merged(tables: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    for key, value in given.items():
        mine = tables.get(key)
        tables[key] = merged(mine, value) if isinstance(value, dict) and isinstance(mine, dict) else value
    return tables


@pytest.mark.parametrize("page", PAGES)
def test_the_toml_of_a_page_has_keys_that_there_are(page: str) -> None:
    for language, block in FENCE.findall(PAGES[page]):
        if language == "toml" and "project" not in (tables := tomllib.loads(block)):
            assert not errors_of_keys(tables), block


def test_a_key_that_there_is_not_is_found() -> None:
    assert errors_of_keys({"run": {"stepss": 3}})
    assert errors_of_keys({"services": {"actor": {"lora": {"rnk": 3}}}})
    assert errors_of_keys({"rollout": {"chunks": "many"}})
    assert not errors_of_keys({"rollout": {"chunks": 4}})


def command_lines(page: str) -> Iterator[list[str]]:
    """The command lines of our programs on a page, whole ones in its blocks and parts in its sentences. Left out are
    those with a place for an address."""
    blocks = [block.replace("\\\n", " ") for language, block in FENCE.findall(PAGES[page]) if not language]
    for line in (*(line for block in blocks for line in block.splitlines()), *codes(page)):
        command = re.sub(r"^\s*(?:\w+=\S+ )*", "", line).replace("$R ", "")
        program, _, rest = command.partition(" ")
        if program in PROGRAMS and rest and "HOST:PORT" not in rest and "(" not in rest:
            with suppress(ValueError):  # a quotation that ends in another line
                yield shlex.split(re.split(r"\s[>&|;]", command)[0], comments=True)


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parameters of a command line; raises click.UsageError where it has an option that there is not."""
    program, arguments = PROGRAMS[words[0]], list(words[1:])
    while isinstance(program, click.Group) and arguments and arguments[0] in program.commands:
        program, arguments = program.commands[arguments[0]], arguments[1:]
    try:
        return program.make_context(words[0], arguments).params
    except (click.exceptions.Exit, click.MissingParameter, SystemExit):
        return {}


@pytest.mark.parametrize("page", OF_NOW)
def test_the_command_lines_of_a_page_have_options_and_keys_that_there_are(page: str) -> None:
    for words in command_lines(page):
        settings = parse(words).get("settings", ())
        assert not errors_of_keys(override({}, settings)), words


def test_an_option_that_there_is_not_is_found() -> None:
    for wrong in (
        "rlhf-controller --confg a.toml",
        "rlhf-deploy up a.toml --hots a",
        "rlhf-map find --device CPU:2",
    ):
        with pytest.raises(click.UsageError):
            parse(wrong.split())


@pytest.mark.parametrize("page", OF_NOW)
def test_files_modules_and_chores_that_a_page_names_exist(page: str) -> None:
    lines = [line for _, block in FENCE.findall(PAGES[page]) for line in block.splitlines()]
    for code in (*codes(page), *lines):
        for path in re.findall(rf"(?:^|\s)((?:{ROOMS})/[\w./-]*[\w/])", code):
            assert re.search("NAME|ROLE", path) or (ROOT / path).exists(), code
        for name in re.findall(r"(?:^|\s|/)(test_\w+\.py)\b", code):
            assert name == "test_rdma.py" or list((ROOT / "tests").rglob(name)), code
        for module in re.findall(r"python -m ([\w.]+)", code):
            assert importlib.util.find_spec(module) is not None, code
        for chore in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)\b", code):
            assert re.search(rf"^{chore}:", MAKEFILE, re.MULTILINE), code


TABLES: dict[str, type[Strict]] = {
    "algorithm": AlgorithmTable,
    "checkpoint": CheckpointTable,
    "data": DataTable,
    "rollout": RolloutTable,
    "run": RunTable,
    "security": SecurityTable,
    "tracking": TrackingTable,
}
OTHER_NAMES = {*dir(Run), "loader", "md", "toml", "json", "py"}
"""Names after `run.`, and suffixes of files, that look like keys and are none."""


@pytest.mark.parametrize("page", [page for page in OF_NOW if page != "docs/migrating.md"])
def test_a_key_that_a_page_names_exists(page: str) -> None:
    for code in codes(page):
        if found := re.fullmatch(rf"({'|'.join(TABLES)})\.(\w+)(?:[. =].*)?", code):
            assert found[2] in TABLES[found[1]].model_fields or found[2] in OTHER_NAMES, code


PACKAGES = {
    "rlhf": ROOT / "protos",
    "rlhf_example": ROOT / "examples" / "plugins",
    **{name: ROOT for name in ROOMS.split("|") if (ROOT / name / "__init__.py").exists()},
}
"""Directories that contain our packages, by name."""
ATTRIBUTES = {
    *re.findall(r'"(rlhf\.\w+)"', Path(traces.__file__).read_text()),
    *(f"rlhf.{name}" for name in traces.MEASURED),
}
"""Attributes of the spans of traces."""
NUMBERS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


@functools.cache
def defined(path: Path) -> frozenset[str]:
    """Names that a module defines or imports, those in its classes included; generated stubs define what they may."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                found.add(node.attr)
            case ast.alias():
                found.add(node.asname or node.name)
    return frozenset(found)


def exists(dotted: str) -> bool:
    """Whether a dotted name is a package or module of ours, or a name in one. What follows that name is not checked."""
    first, *rest = dotted.split(".")
    place = PACKAGES[first] / first
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if not rest:
        return True
    module = place / f"{rest[0]}.py"
    if module.is_file():
        return len(rest) == 1 or rest[1] in defined(module)
    return (place / f"{rest[0]}.proto").is_file() or (
        (place / "__init__.py").is_file() and rest[0] in defined(place / "__init__.py")
    )


@pytest.mark.parametrize("page", OF_NOW)
def test_python_on_a_page_is_valid_and_imports_what_exists(page: str) -> None:
    for language, block in FENCE.findall(PAGES[page]):
        for node in ast.walk(ast.parse(textwrap.dedent(block))) if language == "python" else ():
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                for alias in node.names:
                    name = alias.name.removesuffix("_grpc").removesuffix("_pb2")
                    assert exists(f"{node.module}.{name}"), f"from {node.module} import {alias.name}"


@pytest.mark.parametrize("page", OF_NOW)
def test_names_of_our_modules_in_sentences_exist(page: str) -> None:
    starts = "|".join(PACKAGES)
    for code in codes(page):
        for name in re.findall(rf"(?<![\w./:-])((?:{starts})(?:\.\w+)+)", code):
            is_file = name.rpartition(".")[2] in ("json", "pem", "key")
            # The table of a service, and a service of a proto.
            is_other = re.match(r"services\.\w+(\.|$)|rlhf\.v1\b", name)
            assert is_file or exists(name) or is_other or name in ATTRIBUTES, name


@pytest.mark.parametrize("page", OF_NOW)
def test_a_key_of_a_service_that_a_page_names_exists(page: str) -> None:
    tables = [table_type(role) for role in BUILT_IN]
    roles = {**{role: [table_type(role)] for role in BUILT_IN}, "NAME": tables}
    for code in codes(page):
        for role, key in re.findall(rf"(?<![\w./:-])services\.({'|'.join(roles)})\.(\w+)", code):
            known = any(key in table.model_fields for table in roles[role])
            assert known or exists(f"services.{role}.{key}"), code


def rows_of(page: str, start: str) -> list[str]:
    """The rows of a page's tables that begin with a text."""
    return [line for line in PAGES[page].splitlines() if line.startswith(start)]


def test_things_are_as_many_as_pages_say() -> None:
    declared = [each for each in vars(protocols).values() if isinstance(each, type) and "name" in vars(each)]
    names = [each.name for each in declared if each is not protocols.WholeGroups]
    types = [name for row in rows_of("docs/models.md", "| ")[1:] for name in row.split("|")[1].split(",")]
    assert f"[{len(types)} types]" in PAGES["README.md"]
    assert (
        f"{NUMBERS[len(names)]} protocols over [{NUMBERS[len(TRANSPORTS)]} transports]" in PAGES["README.md"]
    )
    assert f'`placement = "split"` and {NUMBERS[len(get_args(Placement)) - 1]} others' in PAGES["README.md"]
    changes = len(rows_of("docs/changes.md", "| ")) - 1
    assert f"{NUMBERS[changes].capitalize()} typical changes" in PAGES["docs/changes.md"]
    assert f"has {len(ATTACKS)} programs" in PAGES["docs/sandbox.md"]
    pairs = (ROOT / "tests" / "data" / "math_pairs.jsonl").read_text().splitlines()
    assert f"On {len(pairs)} pairs" in PAGES["docs/math.md"]
