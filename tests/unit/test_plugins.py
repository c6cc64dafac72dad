"""Plug-ins are found by name, entry point or `module:object`; a wrong one is told before anything starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from pydantic import field_validator

from rlhf.errors import ConfigError
from rlhf.plugins import PluginError, find_plugin, load_class, load_object, plugin_names
from settings.strict import Strict, validate

GROUP = "rlhf_cluster.test_plugins"
BUILT_IN = {"one": 1, "two": 2}


class Base(ABC):
    """Base class of plug-ins that are classes."""

    @abstractmethod
    def read(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Unfinished(Base):
    def close(self) -> None: ...


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with entry points three, broken and one."""
    (tmp_path / "numbers_of_mine.py").write_text("three = 3\nword = 'three'\none = 11\n")
    information = tmp_path / "numbers_of_mine-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: numbers-of-mine\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        f"[{GROUP}]\nthree = numbers_of_mine:three\nbroken = numbers_of_mine:four\none = numbers_of_mine:one\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_a_plug_in_is_found_by_each_kind_of_name() -> None:
    found = {
        name: find_plugin(GROUP, name, int, BUILT_IN) for name in ("two", "three", "numbers_of_mine:three")
    }
    assert found == {"two": 2, "three": 3, "numbers_of_mine:three": 3}
    assert plugin_names(GROUP, BUILT_IN) == ["broken", "one", "three", "two"]


@pytest.mark.usefixtures("installed")
def test_an_installed_package_does_not_replace_a_plug_in_of_the_project() -> None:
    assert find_plugin(GROUP, "one", int, BUILT_IN) == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "thre",
            r"'thre' is unknown; did you mean 'three'\?; known: broken, one, three, two, or module:object",
        ),
        ("broken", "'numbers_of_mine:four' cannot be imported: AttributeError: "),
        ("nothing_of_mine:x", "'nothing_of_mine:x' cannot be imported: ModuleNotFoundError: "),
        ("numbers_of_mine:word", "'numbers_of_mine:word' is of type str, not int"),
        ("builtins:bool", "'builtins:bool' is a class, not an instance of int"),
    ],
)
def test_a_name_that_stands_for_nothing_is_told_with_those_that_do(name: str, why: str) -> None:
    with pytest.raises(PluginError, match=why):
        find_plugin(GROUP, name, int, BUILT_IN)


def test_the_line_that_fails_in_an_import_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "options.py").write_text("import json\n\nVALUE = json.loads('{')\n")
    (package / "losses.py").write_text("from package_of_mine.options import VALUE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        PluginError, match=r"^'package_of_mine.losses:x' .*: JSONDecodeError: .* \(options\.py:3\)$"
    ):
        load_object("package_of_mine.losses:x", object)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{__name__}:Unfinished", "Unfinished' does not implement read"),
        (f"{__name__}:Base", "Base' does not implement close, read"),
        ("json:JSONDecoder", rf"'json:JSONDecoder' is no subclass of {__name__}\.Base"),
        ("json:dumps", "'json:dumps' is of type function, not a class"),
    ],
)
def test_a_class_that_is_no_plug_in_or_lacks_methods_is_refused(name: str, why: str) -> None:
    with pytest.raises(PluginError, match=why):
        load_class(name, Base)


def test_a_table_may_look_for_a_plug_in_as_it_is_validated() -> None:
    class Table(Strict):
        number: str

        @field_validator("number")
        @classmethod
        def _check(cls, number: str) -> str:
            find_plugin(GROUP, number, int, BUILT_IN)
            return number

    assert validate(Table, {"number": "one"}, "here").number == "one"
    with pytest.raises(ConfigError, match="config here: number: 'six' is unknown; known: one, two"):
        validate(Table, {"number": "six"}, "here")


def test_an_object_without_a_colon_is_told() -> None:
    with pytest.raises(PluginError, match=r"'rlhf\.plugins' is of type module, not int"):
        load_object("rlhf.plugins", int)


@pytest.mark.parametrize("reference", ["http://x/score", "my-module:f", "module:", ":f", ""])
def test_what_is_not_module_and_object_is_refused_by_its_form(reference: str) -> None:
    with pytest.raises(PluginError, match="is not of the form module:object"):
        load_object(reference, object)
