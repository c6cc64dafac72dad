"""rlhf-deploy: starts, watches and stops the services of a config on this host."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from controller.config.config import Config, load
from controller.config.devices import ranks_line
from deploy import health, preflight, state
from deploy.certificates import write_certificates
from deploy.devices import gpus_by_service, visible_gpus
from deploy.hosts import HostPlan, check_stores
from deploy.launch import LaunchOptions
from deploy.logs import read_lines
from deploy.memory import GB, memory_table, predict_memory
from deploy.processes import POLL_S
from deploy.profiling import request_traces
from deploy.stacks import print_stacks, running_ranks
from deploy.state import Deployment
from deploy.supervisor import Supervisor, service_names
from reports.units import counted
from rlhf.errors import ConfigError, RlhfError
from rlhf.security import adopt
from settings.commands import Commands, address_given, set_option
from settings.function_check import check_function
from settings.model import optimizer_without_end
from settings.security import security_option

READY = "ready"
"""The line on stdout that says that all services are healthy."""
TABLE_WIDTH = 140
"""Characters of a line of the table of memory."""


_config_argument = click.argument("config", type=click.Path(path_type=Path))
_host_option = click.option(
    "--host",
    metavar="NAME",
    help="Name of this host in a config with several: HOST of devices HOST/gpu:N or HOST/cpu:N, or the host of an "
    "address. Default: the one that is this host, by its name or address.",
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlhf-cluster")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Start, watch and stop the services of a config on this host."""
    # A user's own plug-ins may be in the working directory.
    sys.path.append(str(Path.cwd()))
    ctx.obj = ctx.obj or LaunchOptions()


@main.command()
@_config_argument
@set_option
@_host_option
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Directory of the logs. Default: runs/logs/<stem of CONFIG>, and there, with several hosts, the directory "
    "<name of the host>.",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Start only this service; repeatable. Default: all."
)
@click.option("--detach", is_flag=True, help="Return when ready; the services stay up until `down`.")
@click.pass_obj
def up(
    launcher: LaunchOptions,
    config: Path,
    settings: tuple[str, ...],
    host: str | None,
    log_dir: Path | None,
    only: tuple[str, ...],
    detach: bool,
) -> None:
    """Start the services of CONFIG, and watch them until Ctrl-C.

    Prints `ready` when all are healthy. Where CONFIG has several hosts, start the ranks of one of them, and run the
    same command on each of the others. When a service ends, the others are stopped and the exit code is 1; a reward
    that does not learn is started again.
    """
    loaded = _load(config, settings)
    host = HostPlan.of(loaded, service_names(loaded, only), host).host
    log_dir = Path(os.path.realpath(log_dir)) if log_dir else _log_dir(config, host)
    deployment = Deployment(os.path.realpath(config), str(log_dir), settings, host)
    if detach:
        _up_detached(config, deployment, only)
    else:
        _up(launcher, loaded, deployment, only)


@main.command()
@_config_argument
@set_option
@_host_option
def status(config: Path, settings: tuple[str, ...], host: str | None) -> None:
    """Show the services of CONFIG.

    With --host, those with ranks on that host. The exit code is 1 unless all of them serve. Without --set, the settings
    are those that `up` was given.
    """
    deployment = state.find(config, host)
    supervisor = state.supervisor(deployment) if deployment else None
    loaded = _load(config, settings or (deployment.settings if deployment else ()))
    names = HostPlan.of(loaded, service_names(loaded), host).names if host else loaded.services
    services = {name: loaded.services[name] for name in names}
    with ThreadPoolExecutor(max_workers=max(1, len(services))) as pool:
        answers = list(pool.map(health.ask, [table.address for table in services.values()]))
    rows = [("SERVICE", "ADDRESS", "STATE", "RANKS", "EPOCH", "SUPERVISOR")]
    for (name, table), answer in zip(services.items(), answers, strict=True):
        ranks = table.ranks if answer.ranks is None else answer.ranks
        epoch = "-" if answer.epoch is None else answer.epoch
        pid = supervisor.pid if supervisor else "-"
        rows.append((name, table.address, answer.state, str(ranks), str(epoch), str(pid)))
    _print_table(rows)
    for name, answer in zip(services, answers, strict=True):
        # That nothing listens is what "not reachable" says.
        if answer.why and answer.why != "Connection refused":
            _say(f"{name}: {answer.why}")
    if deployment and deployment.settings:
        click.echo(f"started with {_flags(deployment.settings)}")
    if any(answer.state != health.SERVING for answer in answers):
        sys.exit(1)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Name or address of a host of services; repeatable.",
)
@click.option(
    "--days",
    default=365,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Days until the end of validity.",
)
def certs(directory: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make a CA, certificates and tokens in DIRECTORY.

    For tests and closed networks. Prints the table [security] that uses them. The certificate of services is valid for
    this host's loopback and for each HOST.
    """
    click.echo(write_certificates(directory, hosts, days), nl=False)


@main.command("health")
@click.argument("address", metavar="HOST:PORT", callback=address_given)
@security_option
def check_health(address: str) -> None:
    """Print the health of the service at an address.

    The exit code is 1 unless it serves. For probes that run in the service's own container, where gRPC probes of the
    platform have no certificate.
    """
    answer = health.ask(address)
    click.echo(f"{address}: {answer.state}")
    if answer.why:
        _say(answer.why)
    if answer.state != health.SERVING:
        sys.exit(1)


@main.command()
@_config_argument
@set_option
@_host_option
@click.pass_obj
def down(launcher: LaunchOptions, config: Path, settings: tuple[str, ...], host: str | None) -> None:
    """Stop what `up` of CONFIG started on this host.

    Returns when it is gone. --set, where it is given, has to be as it was for `up`.
    """
    deployment = _deployment(config, settings, host)
    if deployment is None:
        click.echo(f"{config}: nothing is up")
    elif state.stop(deployment, launcher.grace_s):
        click.echo(f"{config}: stopped")
    else:
        click.echo(f"{config}: stopped what a killed supervisor had left")


@main.command()
@_config_argument
@set_option
@_host_option
@click.option(
    "--only", multiple=True, metavar="NAME", help="Check only this service; repeatable. Default: all."
)
@click.option(
    "--device-memory-gb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="Memory of one GPU, in 10^9 bytes. Default: device_memory_gb of CONFIG, or without it, on a host without "
    "GPUs, its available memory.",
)
def check(
    config: Path,
    settings: tuple[str, ...],
    host: str | None,
    only: tuple[str, ...],
    device_memory_gb: float | None,
) -> None:
    """Check that the services of CONFIG can be started here, and fit.

    Checks packages, models, addresses, reward functions and GPUs of this host, and prints the memory that the services
    are predicted to need, by stage, and the device of each rank. The exit code is 1 if they are predicted to need more
    memory than is available.
    """
    loaded = load(config, settings)
    plan = HostPlan.of(loaded, service_names(loaded, only), host)
    names = plan.names
    for name in names:
        preflight.check_model(name, loaded.services[name])
    memory_gb = device_memory_gb or loaded.device_memory_gb
    ranks = {name: len(plan.ranks(name)) for name in names}
    report = predict_memory(loaded, names, None if memory_gb is None else int(memory_gb * GB), ranks)
    if report.services:
        rows = next(iter(report.services.values())).rows
        # Names of services are shown as they are, also those that rich would read as markup.
        console = Console(width=TABLE_WIDTH, highlight=False, markup=False, emoji=False)
        console.print(memory_table(report))
        click.echo(f"for rows of {rows.prompt_tokens} + {rows.response_tokens} tokens; docs/memory.md")
    if report.misfits:
        raise RlhfError("; ".join(report.misfits))
    preflight.check(loaded, names, plan.elsewhere)
    check_stores(loaded, plan)
    for name in names:
        check_function(name, loaded.services[name])
        preflight.check_sandbox(name, loaded.services[name])
    if lacking := [name for name in names if optimizer_without_end(loaded.services[name])]:
        _say(
            f"note: total_steps of the optimizer is not given for {', '.join(lacking)}: rlhf-controller --launch "
            "computes it, and up needs it"
        )
    gpus = gpus_by_service(loaded, names, visible_gpus(os.environ), plan.host)
    for name in filter(loaded.is_placed, names):
        sees = f" (CUDA_VISIBLE_DEVICES {','.join(gpus[name])})" if name in gpus else ""
        click.echo(f"{name}: {ranks_line(loaded.device_order(name), loaded.services[name].ranks)}{sees}")
    click.echo(f"{config}: {', '.join(names)} can be started{f' on {plan.host}' if plan.host else ''}")


@main.command()
@_config_argument
@click.argument("service", required=False)
@set_option
@_host_option
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines until Ctrl-C.")
def logs(
    config: Path, service: str | None, settings: tuple[str, ...], host: str | None, follow: bool
) -> None:
    """Show the log of SERVICE, or the logs of all services.

    Without SERVICE, those of all services of CONFIG that have one. --set, where it is given, has to be as it was for
    `up`.
    """
    deployment = _deployment(config, settings, host)
    directory = Path(deployment.log_dir) if deployment else _log_dir(config, host or "")
    services = load(config, deployment.settings if deployment else settings).services
    if service is not None and service not in services:
        raise ConfigError(f"no service {service!r}; there are: {', '.join(services)}")
    # Those of each of several hosts are in a directory of their own.
    places = (
        [directory] if deployment or host else [directory, *sorted(filter(Path.is_dir, directory.glob("*")))]
    )
    names = [service] if service else list(services)
    found = [log for place in places for name in names if (log := place / f"{name}.log").exists()]
    if not found:
        raise RlhfError(f"there is no log of {service or 'a service'} in {directory}")
    with contextlib.suppress(KeyboardInterrupt):
        for log, line in read_lines(found, follow):
            click.echo(f"{log.stem} | {line}" if len(found) > 1 else line)


@main.command("stacks")
@_config_argument
@click.argument("service", required=False)
@set_option
@_host_option
def show_stacks(config: Path, service: str | None, settings: tuple[str, ...], host: str | None) -> None:
    """Show the stacks of the ranks of SERVICE, or of all services.

    They are those of the threads and tasks of each rank, which it prints into its log; it goes on. Without SERVICE, of
    all services that `up` of CONFIG started on this host. --set, where it is given, has to be as it was for `up`.
    """
    deployment = _deployment(config, settings, host)
    if deployment is None:
        raise RlhfError(f"{config}: nothing is up")
    ranks = running_ranks(deployment)
    names = list(dict.fromkeys(each.service for each in ranks))
    if service is not None and service not in names:
        raise ConfigError(f"no ranks of a service {service!r} run here; there are: {', '.join(names)}")
    print_stacks(deployment, [each for each in ranks if service in (None, each.service)], click.echo)


@main.command("profile")
@_config_argument
@click.argument("service")
@set_option
@_host_option
@click.option(
    "--calls",
    default=8,
    show_default=True,
    type=click.IntRange(1, 100),
    metavar="N",
    help="Calls to trace on each rank.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Directory of the traces on the ranks' hosts. Default: traces in run.directory.",
)
def profile_calls(
    config: Path, service: str, settings: tuple[str, ...], host: str | None, calls: int, out: Path | None
) -> None:
    """Trace the next calls of SERVICE with torch's profiler.

    On each of its ranks, also while a run uses it.
    """
    deployment = state.find(config, host)
    loaded = _load(config, settings or (deployment.settings if deployment else ()))
    if service not in loaded.services:
        raise ConfigError(f"no service {service!r}; there are: {', '.join(loaded.services)}")
    directory = Path(os.path.realpath(out or loaded.run.directory / "traces"))
    address = loaded.services[service].address
    for rank, (where, path) in enumerate(request_traces(service, address, directory, calls)):
        click.echo(f"{service} rank {rank} at {where}: {path}, after {counted(calls, 'call')}")


def _load(path: Path, settings: tuple[str, ...]) -> Config:
    """Reads a config, and gives this process the credentials of its table `[security]`."""
    config = load(path, settings)
    adopt(config.security.load())
    return config


def _deployment(config: Path, settings: tuple[str, ...], host: str | None) -> Deployment | None:
    """Finds the deployment of a config as `state.find` does. Raises ConfigError if there is neither a deployment nor
    such a file, or settings are given and it was started with others."""
    deployment = state.find(config, host)
    if deployment is None and not config.is_file():
        raise ConfigError(
            f"config {config}: there is no such file, and nothing is up that was started with it"
        )
    if deployment and settings and set(settings) != set(deployment.settings):
        started = f"with {_flags(deployment.settings)}" if deployment.settings else "without --set"
        raise ConfigError(f"{config} was started {started}; give the same, or leave out --set")
    return deployment


def _log_dir(config: Path, host: str) -> Path:
    """Directory of logs without --log-dir; of each host one, since hosts may share the file system."""
    return Path(
        os.path.realpath(Path("runs/logs") / config.stem / host)
    )  # Path.resolve raises in a loop of links


def _up(launcher: LaunchOptions, config: Config, deployment: Deployment, only: tuple[str, ...]) -> None:
    received = _catch_signals()
    with (
        state.claim(deployment, launcher.grace_s),
        Supervisor(config, deployment, only, launcher, say=_say) as supervisor,
    ):
        supervisor.start(lambda: bool(received))
        if deployment.settings:
            _say(f"with {_flags(deployment.settings)}")
        ready = False
        while not received:
            try:
                healthy = supervisor.poll()
            except Exception as error:
                # Printed before the other services are stopped: calls between them fail from then on, and a controller
                # reads the cause here.
                if isinstance(error, RlhfError):
                    _say(f"error: {error}")
                    sys.exit(1)
                _say(f"error: rlhf-deploy has failed: {type(error).__name__}: {error}")
                raise
            if healthy and not ready:
                ready = True
                click.echo(READY)
            time.sleep(POLL_S)
        _say(f"stopping on {received[0].name}")
    if received[0] is signal.SIGINT:
        sys.exit(128 + signal.SIGINT)


def _up_detached(config: Path, deployment: Deployment, only: tuple[str, ...]) -> None:
    log_dir, host = Path(deployment.log_dir), ("--host", deployment.host) if deployment.host else ()
    command = [sys.executable, "-m", "deploy", "up", str(config), "--log-dir", str(log_dir), *host]
    command += [part for setting in deployment.settings for part in ("--set", setting)]
    command += [part for name in only for part in ("--only", name)]
    log = log_dir / "supervisor.log"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        sink = log.open("a+")
    except OSError as error:
        raise RlhfError(f"log {log}: {error.strerror}") from None
    received = _catch_signals()
    with sink:
        begin = sink.tell()
        supervisor = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sink, start_new_session=True
        )
        assert supervisor.stdout is not None
        while not received and not select.select([supervisor.stdout], [], [], POLL_S)[0]:
            pass
        if received:
            supervisor.terminate()
            supervisor.wait()
        is_ready = not received and supervisor.stdout.readline() == f"{READY}\n".encode()
        sink.seek(begin)
        click.echo(sink.read(), err=True, nl=False)
    if received:
        sys.exit(128 + received[0])
    if not is_ready:
        sys.exit(supervisor.wait())
    click.echo(READY)
    _say(
        f"supervisor pid {supervisor.pid}, log {log}; stop with: rlhf-deploy down {shlex.join((str(config), *host))}"
    )


def _catch_signals() -> list[signal.Signals]:
    """Records signals that ask this process to stop, from now on, instead of ending it; the list grows as they
    arrive."""
    received: list[signal.Signals] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup and shells' background jobs ask to ignore some.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    return received


def _flags(settings: tuple[str, ...]) -> str:
    return shlex.join(part for setting in settings for part in ("--set", setting))


def _say(line: str) -> None:
    click.echo(line, err=True)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
