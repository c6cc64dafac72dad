"""rlhf-deploy over real processes: what it says, how it ends, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from python_path import python_path

from integration.harness import free_ports

HERE = Path(__file__).parent
FAKE_DEPLOY = [sys.executable, str(HERE / "fake_deploy.py")]
REAL_DEPLOY = [sys.executable, "-m", "deploy"]
TIMEOUT_S = 30.0
CONFIG_ERROR = 2

RUN_WITH_PARENT = (
    "import subprocess, sys; from deploy.with_parent import wrap; subprocess.run(wrap(sys.argv[1:]))"
)

TWO_RANKS = """\
import argparse, os
from pathlib import Path
from fake_service import serve
from settings.services import service_of
from settings.strict import read_tables

parser = argparse.ArgumentParser()
parser.add_argument("role")
parser.add_argument("--config", type=Path)
parser.add_argument("--name")
parser.add_argument("--set", action="append", default=[])
arguments = parser.parse_args()
table = service_of(read_tables(arguments.config, tuple(arguments.set)), arguments.name, arguments.config)
serve(table.address if os.environ["RANK"] == "0" else "127.0.0.1:0")
"""


class Host:
    """A directory with a config of two services, `one` and `two`, in which rlhf-deploy is run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "two.toml"
        self.logs = directory / "runs" / "logs" / "two"
        self.flags: dict[str, list[str]] = {}
        ports = free_ports(2)
        self.addresses = {"one": f"127.0.0.1:{ports[0]}", "two": f"127.0.0.1:{ports[1]}"}
        self.write_config()

    def write_config(self, restarts: int = 0, **keys: str) -> None:
        """Writes the config: how often both services may be lost, and TOML values for the table of service `two`."""
        table = {"role": '"reward"', "restarts": f"{restarts}"}
        tables = {name: table | {"address": f'"{at}"'} for name, at in self.addresses.items()}
        tables["two"] |= keys
        lines = ["[data]", 'train = "train.jsonl"', 'heldout = "heldout.jsonl"']
        for name, table in tables.items():
            lines += [f"[services.{name}]", *(f"{key} = {value}" for key, value in table.items())]
        self.config.write_text("\n".join(lines))

    def start(self, *arguments: str, program: list[str] = FAKE_DEPLOY) -> subprocess.Popen[str]:
        """rlhf-deploy with these arguments."""
        return subprocess.Popen(
            [*program, *arguments],
            cwd=self.directory,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def up(self, *arguments: str, program: list[str] = FAKE_DEPLOY) -> subprocess.Popen[str]:
        """`rlhf-deploy up` that has said that it is ready."""
        process = self.start("up", "two.toml", *arguments, program=program)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=TIMEOUT_S)
        return process

    def run(self, *arguments: str, program: list[str] = FAKE_DEPLOY) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of rlhf-deploy with these arguments."""
        return end_of(self.start(*arguments, program=program))

    def processes(self) -> list[psutil.Process]:
        """Living processes started here, supervisors included."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def services(self, supervisor: subprocess.Popen[str]) -> list[psutil.Process]:
        """Descendants of a supervisor."""
        return psutil.Process(supervisor.pid).children(recursive=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get("TMPDIR") == str(self.directory)
        return False

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "TMPDIR": str(self.directory),
            "FAKE_FLAGS": json.dumps(self.flags),
            "PYTHONPATH": python_path(HERE),
        }


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that is about to end."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def is_gone(process: psutil.Process) -> bool:
    """Whether the process has ended, be it reaped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Polls the condition until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition does not come true"
        time.sleep(0.02)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    left = host.processes()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, "processes are left behind"


def test_up_says_ready_once_and_ends_with_all_services_on_sigterm(host: Host) -> None:
    supervisor = host.up()
    services = host.services(supervisor)
    supervisor.send_signal(signal.SIGTERM)
    code, out, err = end_of(supervisor)
    assert (code, out) == (0, "")
    assert "one: healthy after" in err
    assert "two: healthy after" in err
    assert len(services) == 2
    assert all(is_gone(service) for service in services)


def test_up_waits_for_a_service_that_does_not_serve_no_longer_than_its_timeout(host: Host) -> None:
    host.flags = {"two": ["--not-serving"]}
    host.write_config(startup_timeout_s="1.5")
    code, out, err = host.run("up", "two.toml")
    assert (code, out) == (1, "")
    assert "error: service two: not healthy after 1.5 s" in err


def test_a_fatal_line_at_start_is_the_error_and_the_others_are_stopped(host: Host) -> None:
    host.flags = {"two": ["--fatal", "no tokenizer in there"]}
    code, out, err = host.run("up", "two.toml")
    assert (code, out) == (1, "")
    assert err.endswith("error: service two: no tokenizer in there\n")
    assert not host.processes()


def test_a_crash_is_told_with_exit_code_last_line_and_log(host: Host) -> None:
    host.flags = {"two": ["--crash", "ValueError: boom"]}
    _, _, err = host.run("up", "two.toml")
    log = host.logs / "two.log"
    assert err.endswith(f"error: service two: exited with code 3: ValueError: boom (log: {log})\n")


def test_a_service_that_dies_later_ends_up_and_is_named(host: Host) -> None:
    supervisor = host.up()
    one, two = host.services(supervisor)
    one.kill()
    code, _, err = end_of(supervisor)
    assert code == 1
    assert "error: service one: was killed by SIGKILL" in err
    assert is_gone(two)


def test_a_lost_service_is_told_before_the_others_have_ended(host: Host) -> None:
    host.flags = {"two": ["--ignore-sigterm"], "supervisor": ["--patient"]}
    supervisor = host.up()
    one, *others = host.services(supervisor)
    one.kill()
    assert supervisor.stderr is not None
    said = next(line for line in supervisor.stderr if line.startswith("error: "))
    assert "service one: was killed by SIGKILL" in said
    assert not any(is_gone(process) for process in others)
    for process in others:
        process.kill()
    code, _, rest = end_of(supervisor)
    assert (code, rest) == (1, "")


@pytest.mark.parametrize(
    ("flag", "processes"),
    [("--ignore-sigterm", 3), ("--hide-environment", 2)],
    ids=["ignores SIGTERM", "overwrites its environment"],
)
def test_a_service_of_bad_manners_ends_with_its_children_after_the_grace(
    host: Host, flag: str, processes: int
) -> None:
    host.flags = {"one": [flag]}
    supervisor = host.up()
    services = host.services(supervisor)
    assert len(services) == processes
    supervisor.send_signal(signal.SIGINT)
    code, _, _ = end_of(supervisor)
    assert code == 130
    assert all(is_gone(service) for service in services)


def up_that_waits_for_another(host: Host) -> tuple[subprocess.Popen[str], subprocess.Popen[str], Path]:
    """A supervisor that ends, one of another config that waits for its addresses, and the file that frees them."""
    end = host.directory / "end"
    host.flags = {"one": ["--linger", str(end)], "supervisor": ["--patient"]}
    supervisor = host.up()
    shutil.copy(host.config, host.directory / "other.toml")
    supervisor.send_signal(signal.SIGTERM)
    host.flags = {"supervisor": ["--note-waits"]}
    following = host.start("up", "other.toml")
    wait_until((host.directory / "waits").exists, TIMEOUT_S)
    return supervisor, following, end


def test_up_waits_for_services_of_another_config_that_are_about_to_end(host: Host) -> None:
    """So that a run can be resumed as soon as its controller was killed."""
    supervisor, following, end = up_that_waits_for_another(host)
    end.touch()
    assert following.stdout is not None
    assert following.stdout.readline() == "ready\n", following.communicate(timeout=TIMEOUT_S)
    following.send_signal(signal.SIGTERM)
    assert end_of(following)[0] == end_of(supervisor)[0] == 0


def test_ctrl_c_ends_the_wait_for_services_that_are_about_to_end(host: Host) -> None:
    supervisor, following, end = up_that_waits_for_another(host)
    following.send_signal(signal.SIGINT)
    code, out, err = end_of(following)
    assert (code, out) == (130, "")
    assert "started" not in err
    assert supervisor.poll() is None, "the wait was not over"
    end.touch()
    assert end_of(supervisor)[0] == 0


def test_logs_of_several_hosts_are_found_when_nothing_is_up(host: Host) -> None:
    for name in "ab":
        (host.logs / f"node-{name}").mkdir(parents=True)
        (host.logs / f"node-{name}" / "one.log").write_text(f"of {name}\n")
    code, out, _ = host.run("logs", "two.toml", "one")
    assert (code, out) == (0, "one | of a\none | of b\n")


def test_two_deployments_do_not_share_a_directory_of_logs(host: Host) -> None:
    supervisor = host.up()
    shutil.copy(host.config, host.directory / "other.toml")
    ports = free_ports(2)
    elsewhere = [
        f"services.{name}.address=127.0.0.1:{port}" for name, port in zip(("one", "two"), ports, strict=True)
    ]
    others = [part for setting in elsewhere for part in ("--set", setting)]
    code, _, err = host.run("up", "other.toml", "--log-dir", str(host.logs), *others)
    assert code == 1
    assert re.search(
        rf"error: {host.logs}: .*two.toml \(supervisor pid {supervisor.pid}\) writes its logs", err
    )
    supervisor.send_signal(signal.SIGTERM)
    assert end_of(supervisor)[0] == 0


def test_services_end_with_a_supervisor_that_is_killed(host: Host) -> None:
    supervisor = host.up()
    services = host.services(supervisor)
    supervisor.kill()
    end_of(supervisor)
    wait_until(lambda: all(is_gone(service) for service in services), timeout_s=5)


def test_up_ends_with_the_program_that_launched_it(host: Host) -> None:
    launcher = host.up(program=[sys.executable, "-c", RUN_WITH_PARENT, *FAKE_DEPLOY])
    launcher.kill()
    end_of(launcher)
    wait_until(lambda: not host.processes(), timeout_s=5)


def test_down_stops_what_a_killed_supervisor_left_and_is_idempotent(host: Host) -> None:
    host.flags = {"one": ["--ignore-sigterm"], "two": ["--ignore-sigterm"]}
    supervisor = host.up()
    services = host.services(supervisor)
    supervisor.kill()
    end_of(supervisor)
    assert not any(is_gone(service) for service in services)
    assert host.run("down", "two.toml")[:2] == (0, "two.toml: stopped what a killed supervisor had left\n")
    assert all(is_gone(service) for service in services)
    assert host.run("down", "two.toml")[:2] == (0, "two.toml: nothing is up\n")


def test_up_first_stops_what_a_killed_supervisor_left(host: Host) -> None:
    host.flags = {"one": ["--ignore-sigterm"]}
    killed = host.up()
    left = host.services(killed)
    killed.kill()
    end_of(killed)
    supervisor = host.up()
    assert all(is_gone(service) for service in left)
    supervisor.terminate()
    assert end_of(supervisor)[0] == 0


def test_a_config_that_is_up_is_refused_seen_by_status_and_stopped_by_down(host: Host) -> None:
    supervisor = host.up()

    code, _, err = host.run("up", "two.toml")
    assert code == 1
    assert f"error: {host.config} is up already (supervisor pid {supervisor.pid}" in err

    code, out, _ = host.run("status", "two.toml")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["SERVICE", "ADDRESS", "STATE", "RANKS", "EPOCH", "SUPERVISOR"],
        ["one", host.addresses["one"], "serving", "1", "7", str(supervisor.pid)],
        ["two", host.addresses["two"], "serving", "1", "7", str(supervisor.pid)],
    ]

    assert host.run("down", "two.toml")[:2] == (0, "two.toml: stopped\n")
    assert end_of(supervisor)[0] == 0


def test_status_fails_where_a_service_is_not_there(host: Host) -> None:
    supervisor = host.up("--only", "one")
    code, out, _ = host.run("status", "two.toml")
    assert code == 1
    assert f"two      {host.addresses['two']}  not reachable" in out
    supervisor.terminate()
    assert end_of(supervisor)[0] == 0


def test_a_port_in_use_is_told_by_its_key_before_anything_starts(host: Host) -> None:
    _, _, port = host.addresses["two"].rpartition(":")
    with socket.create_server(("127.0.0.1", int(port))):
        code, out, err = host.run("up", "two.toml")
    assert (code, out) == (CONFIG_ERROR, "")
    assert err.startswith(f"error: services.two.address: {host.addresses['two']} is in use; ")


def test_a_missing_model_is_told_by_its_key_before_anything_starts(host: Host) -> None:
    host.write_config(kind='"model"', model='"no/such/model"')
    code, _, err = host.run("up", "two.toml")
    assert code == CONFIG_ERROR
    assert err.startswith("error: services.two.model: there is no directory no/such/model")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "services.two.rank=3"], "did you mean 'ranks'?"),
        (["--only", "three"], "no service 'three'; there are: one, two"),
    ],
)
def test_a_wrong_command_line_is_one_line(host: Host, arguments: list[str], message: str) -> None:
    code, _, err = host.run("up", "two.toml", *arguments)
    assert code == CONFIG_ERROR
    assert message in err
    assert len(err.splitlines()) == 1


def two_ranks(host: Host) -> list[psutil.Process]:
    """Two ranks of service `two` that are up, detached, in their order."""
    module = host.directory / "services" / "__main__.py"
    module.parent.mkdir(parents=True)
    module.write_text(TWO_RANKS)
    code, out, err = host.run(
        "up", "two.toml", "--detach", "--only", "two", "--set", "services.two.ranks=2", program=REAL_DEPLOY
    )
    assert (code, out) == (0, "ready\n"), err
    ranks = [process for process in host.processes() if {"services", "reward"} <= set(process.cmdline())]
    return sorted(ranks, key=lambda process: process.environ()["RANK"])


def test_a_rank_that_is_killed_ends_its_peers_and_is_named(host: Host) -> None:
    _, rank_1 = two_ranks(host)
    rank_1.kill()
    wait_until(lambda: not host.processes(), timeout_s=10)
    log = (host.logs / "supervisor.log").read_text()
    assert "error: service two: rank 1 was killed by SIGKILL" in log


def test_a_reward_that_dies_is_started_again_each_time_and_the_others_go_on(host: Host) -> None:
    host.write_config(restarts=1)
    supervisor = host.up()
    one, two = host.services(supervisor)
    for _ in range(3):
        one.kill()
        assert supervisor.stderr is not None
        assert line_of(supervisor, "lost: ") == (
            f"lost: service one: was killed by SIGKILL (log: {host.logs / 'one.log'})\n"
        )
        assert line_of(supervisor, "one: started").startswith("one: started, 1 rank at ")
        assert line_of(supervisor, "one: healthy")
        (one,) = (each for each in host.services(supervisor) if each != two)
    assert not is_gone(two)
    supervisor.terminate()
    assert end_of(supervisor)[0] == 0
    assert is_gone(one)
    assert is_gone(two)


def test_a_reward_whose_log_was_removed_is_started_again_with_a_new_one(host: Host) -> None:
    host.write_config(restarts=1)
    supervisor = host.up()
    one, _ = host.services(supervisor)
    log = host.logs / "one.log"
    log.unlink()
    one.kill()
    assert line_of(supervisor, "lost: ") == f"lost: service one: was killed by SIGKILL (log: {log})\n"
    assert line_of(supervisor, "one: healthy")
    assert log.is_file()
    supervisor.terminate()
    assert end_of(supervisor)[0] == 0


def line_of(process: subprocess.Popen[str], start: str) -> str:
    """The next line on stderr that begins with a text."""
    assert process.stderr is not None
    return next((line for line in process.stderr if line.startswith(start)), "")


def test_a_reward_that_dies_leaves_no_child_to_the_one_that_is_started_again(host: Host) -> None:
    """And the ranks that are left end, if need be by SIGKILL, before new ones start."""
    host.write_config(restarts=3)
    rank_0, rank_1 = two_ranks(host)
    rank_1.kill()
    log = host.logs / "supervisor.log"
    wait_until(lambda: log.read_text().count("two: healthy") == 2, TIMEOUT_S)
    assert is_gone(rank_0)
    assert "lost: service two: rank 1 was killed by SIGKILL" in log.read_text()
    ranks = [process for process in host.processes() if {"services", "reward"} <= set(process.cmdline())]
    assert sorted(process.environ()["RANK"] for process in ranks) == ["0", "1"]
    assert host.run("down", "two.toml")[:2] == (0, "two.toml: stopped\n")


def test_a_reward_that_cannot_be_started_again_ends_up_with_the_cause(host: Host) -> None:
    host.write_config(restarts=2)
    host.flags = {"one": ["--once", str(host.directory / "was-started")]}
    supervisor = host.up()
    one, two = host.services(supervisor)
    one.kill()
    code, _, err = end_of(supervisor)
    assert code == 1
    assert err.count("lost: service one: ") == 3
    assert "error: service one: exited with code 3" in err
    assert is_gone(two)


def test_a_rank_that_a_signal_without_a_name_has_killed_is_named(host: Host) -> None:
    """As a real-time signal, of which Python names the first and the last alone."""
    supervisor = host.up()
    one, _ = host.services(supervisor)
    one.send_signal(40)
    code, _, err = end_of(supervisor)
    assert (code, err.splitlines()[-1]) == (
        1,
        f"error: service one: was killed by signal 40 (log: {host.logs / 'one.log'})",
    )


def test_a_failure_of_the_supervisor_itself_is_told_before_the_services_are_stopped(host: Host) -> None:
    """A controller reads the cause from this line. Here the supervisor may open no file any more."""
    host.write_config(restarts=1)
    supervisor = host.up()
    one, two = host.services(supervisor)
    psutil.Process(supervisor.pid).rlimit(resource.RLIMIT_NOFILE, (0, 0))
    one.kill()
    code, _, err = end_of(supervisor)
    assert code == 1
    assert re.search(r"^error: rlhf-deploy has failed: OSError: .*Too many open files", err, re.MULTILINE), (
        err
    )
    wait_until(lambda: is_gone(two), TIMEOUT_S)


def test_status_tells_the_settings_that_services_were_started_with(host: Host) -> None:
    two_ranks(host)
    _, out, _ = host.run("status", "two.toml")
    assert out.splitlines()[-1] == "started with --set services.two.ranks=2"
    assert "with --set services.two.ranks=2\n" in (host.logs / "supervisor.log").read_text()
    assert host.run("down", "two.toml")[0] == 0


def test_commands_take_the_settings_that_services_were_started_with_and_refuse_others(host: Host) -> None:
    given, others = ("--set", "services.two.ranks=2"), ("--set", "services.two.ranks=3")
    two_ranks(host)
    for command in (("stacks", "two.toml", "one"), ("logs", "two.toml", "two"), ("down", "two.toml")):
        code, _, err = host.run(*command, *others)
        assert code == CONFIG_ERROR
        assert err == (
            "error: two.toml was started with --set services.two.ranks=2; give the same, or leave out --set\n"
        )
    assert "no ranks of a service 'one' run here" in host.run("stacks", "two.toml", "one", *given)[2]
    assert host.run("logs", "two.toml", "two", *given)[0] == 0
    assert host.run("down", "two.toml", *given)[:2] == (0, "two.toml: stopped\n")
    assert host.run("down", "two.toml", *given)[:2] == (0, "two.toml: nothing is up\n")


def test_down_returns_when_the_process_of_the_supervisor_has_ended(host: Host) -> None:
    host.flags["supervisor"] = ["--slow-exit"]
    up = host.up()
    assert host.run("down", "two.toml")[0] == 0
    assert up.poll() is not None
    end_of(up)


def test_logs_shows_what_services_have_said_also_after_their_end(host: Host) -> None:
    host.logs.mkdir(parents=True)
    for name in ("one", "two"):
        (host.logs / f"{name}.log").write_text(f"ready: {name}\n")
    assert host.run("logs", "two.toml", "one") == (0, "ready: one\n", "")
    assert host.run("logs", "two.toml") == (0, "one | ready: one\ntwo | ready: two\n", "")
    code, _, err = host.run("logs", "two.toml", "three")
    assert (code, err) == (CONFIG_ERROR, "error: no service 'three'; there are: one, two\n")


def test_logs_follow_what_is_added_until_ctrl_c(host: Host) -> None:
    host.logs.mkdir(parents=True)
    log = host.logs / "one.log"
    log.write_text("first\n")
    following = host.start("logs", "two.toml", "one", "--follow")
    assert following.stdout is not None
    assert following.stdout.readline() == "first\n"
    with log.open("a") as file:
        file.write("second\n")
    assert following.stdout.readline() == "second\n"
    following.send_signal(signal.SIGINT)
    assert end_of(following) == (0, "", "")


def test_check_says_what_up_would_refuse_and_starts_nothing(host: Host) -> None:
    assert host.run("check", "two.toml") == (0, "two.toml: one, two can be started\n", "")
    _, _, port = host.addresses["two"].rpartition(":")
    with socket.create_server(("127.0.0.1", int(port))):
        code, _, err = host.run("check", "two.toml")
    assert code == CONFIG_ERROR
    assert err.startswith(f"error: services.two.address: {host.addresses['two']} is in use; ")


def test_up_detached_gives_the_error_of_its_supervisor(host: Host) -> None:
    host.write_config(kind='"model"', model='"no/such/model"')
    code, out, err = host.run("up", "two.toml", "--detach", program=REAL_DEPLOY)
    assert (code, out) == (CONFIG_ERROR, "")
    assert err.startswith("error: services.two.model: there is no directory no/such/model")
