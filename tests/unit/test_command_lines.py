"""Command lines: every option says what it is, in which unit and with which default, and wrong input is refused by one
line, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from conformance.cli import main as conformance
from controller.cli import main as controller
from controller.mapping.cli import main as mapping
from deploy.cli import main as deploy
from deploy.pipeline.cli import main as pipeline
from loadtest.cli import main as loadtest
from rlhf.roles import find_role
from services.runtime.main import command as rank
from settings.commands import USAGE_ERROR

PROGRAMS = {
    "rlhf-controller": controller,
    "rlhf-deploy": deploy,
    "rlhf-map": mapping,
    "rlhf-loadtest": loadtest,
    "rlhf-conformance": conformance,
}
MODULES = {"deploy.pipeline": pipeline, "services actor": rank(find_role("actor"))}
"""Command lines of modules, `python -m`."""
QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart" / "quickstart.toml"


def commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(f"{name} {inner.name}", inner)


COMMANDS = dict(each for name, program in {**PROGRAMS, **MODULES}.items() for each in commands(name, program))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is_and_what_it_is_by_default(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        assert option.help, option.name
        assert option.help.endswith("."), option.name
        if option.is_flag:
            continue
        assert option.metavar or isinstance(option.type, click.Choice), f"{option.name} has no metavar"
        if option.to_info_dict()["default"] not in (None, "", ()):
            assert option.show_default or "Default: " in option.help, f"{option.name} hides its default"


FILES = {"nowhere.toml", "directory", "text.toml", "package.toml", "binary.toml"}
READERS = [
    ("rlhf-controller", "--algo", "ppo", "--dry-run", "--config"),
    *(("rlhf-deploy", name) for name in ("up", "check", "status", "logs")),
    *(("rlhf-map", name, "--devices", "H100:8") for name in ("find", "explain", "simulate", "probe")),
]
# These find what is up by the path, also where the file has changed since.
FINDERS = [("rlhf-deploy", "down"), ("rlhf-deploy", "stacks")]


@pytest.mark.parametrize(
    ("command", "configs"),
    [
        *((command, FILES) for command in READERS),
        *((command, {"nowhere.toml", "directory"}) for command in FINDERS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_no_config_is_refused_by_a_line_that_names_it(
    command: tuple[str, ...], configs: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    Path("text.toml").write_text("not TOML [")
    Path("package.toml").write_text('[package]\nname = "mine"\n')
    Path("binary.toml").write_bytes(bytes(range(128, 256)))
    program, *arguments = command
    for config in configs:
        done = CliRunner().invoke(PROGRAMS[program], [*arguments, config])
        assert done.exit_code == USAGE_ERROR, config
        assert done.stderr.startswith(f"error: config {config}: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rlhf-deploy check CONFIG --set =3", "setting '=3': expected key.path=value"),
        ("rlhf-deploy check CONFIG --set run..steps=3", "setting 'run..steps=3': expected key.path=value"),
        ("rlhf-deploy health nonsense", "'nonsense' is not host:port"),
        ("rlhf-deploy certs CONFIG", "CONFIG is no directory"),
        ("rlhf-conformance reward --target nonsense", "'nonsense' is not host:port"),
        ("rlhf-conformance reward --target a:1 --rows nowhere", "--rows nowhere: No such file or directory"),
        ("rlhf-conformance reward --target a:1 --rows CONFIG", "--rows CONFIG: not JSONL: Expecting value"),
        ("rlhf-loadtest actor --target nonsense --method Check", "'nonsense' is not host:port"),
        (
            "rlhf-loadtest reward --target 127.0.0.1:1 --method ComputeReward --data nowhere",
            "--data: nowhere: ",
        ),
        ("rlhf-loadtest --compare nowhere nowhere", "--compare: nowhere: No such file or directory"),
        ("rlhf-loadtest --compare CONFIG CONFIG", "--compare: CONFIG: not JSON: Expecting value"),
        ("rlhf-map find CONFIG --devices H100", "devices 'H100': no count; write KIND:COUNT; known kinds: "),
        ("rlhf-map find CONFIG --devices Moon:3", "devices 'Moon:3': no kind 'Moon'; write KIND:COUNT"),
        ("rlhf-deploy health a:1 --security CONFIG", "--security: CONFIG has no table [security]"),
        ("rlhf-conformance reward --target a:1 --security CONFIG", "CONFIG has no table [security]"),
        ("rlhf-loadtest actor --target a:1 --method Check --security CONFIG", "has no table [security]"),
        ("rlhf-controller --report nowhere", "run directory nowhere: no such directory"),
        ("rlhf-controller --report .", "run directory .: it has neither metrics.jsonl nor config.toml"),
    ],
)
def test_wrong_input_is_refused_by_its_name(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *arguments = (word.replace("CONFIG", str(QUICKSTART)) for word in command.split())
    done = CliRunner().invoke(PROGRAMS[program], arguments)
    assert done.exit_code == USAGE_ERROR, done.output
    assert message.replace("CONFIG", str(QUICKSTART)) in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_run_that_ended_early_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    done = CliRunner().invoke(controller, ["--report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("name", ["rlhf-deploy status", "rlhf-deploy check", "rlhf-map explain"])
def test_ctrl_c_ends_a_command_with_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, command = name.split()

    def interrupted(*parts: object) -> None:
        raise KeyboardInterrupt

    for module in ("deploy.cli", "controller.mapping.cli"):
        monkeypatch.setattr(f"{module}.load", interrupted)
    devices = ["--devices", "CPU:2"] if program == "rlhf-map" else []
    result = CliRunner().invoke(PROGRAMS[program], [command, str(QUICKSTART), *devices])
    assert (result.exit_code, result.output) == (130, "stopped by SIGINT\n")


@pytest.mark.parametrize(
    "arguments",
    [("status", "{loop}"), ("up", QUICKSTART, "--log-dir", "{loop}/logs"), ("certs", "{loop}/certs")],
    ids=["config", "log directory", "certificates"],
)
def test_a_path_in_a_loop_of_links_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.setattr("deploy.supervisor.preflight.check", lambda *_: None)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    ran = CliRunner().invoke(deploy, [str(each).format(loop=tmp_path / "a") for each in arguments])
    assert ran.exit_code in (1, USAGE_ERROR), ran.output
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.endswith("Too many levels of symbolic links\n")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "logs"])
def test_the_directory_of_logs_in_a_loop_of_links_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("deploy.supervisor.preflight.check", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("again")
    (tmp_path / "again").symlink_to("runs")
    ran = CliRunner().invoke(deploy, [command, str(QUICKSTART)])
    assert ran.exit_code in (1, USAGE_ERROR), ran.output
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("evaluate",), ("export", "--out", "model")], ids=lambda words: words[0])
def test_a_checkpoint_in_a_loop_of_links_is_refused_in_a_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    ran = CliRunner().invoke(PROGRAMS["rlhf-controller"], [*command, str(tmp_path / "a")])
    assert ran.exit_code == USAGE_ERROR, ran.output
    assert ran.stderr.startswith(f"error: {tmp_path / 'a'}")
    assert ran.stderr.count("\n") == 1
