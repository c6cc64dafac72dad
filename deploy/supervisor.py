"""Starts the services of a config on this host, watches them, and stops all it started whatever happens."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from controller.config.config import Config
from deploy import preflight, processes, with_parent
from deploy.devices import gpu_variables, gpus_by_service, visible_gpus
from deploy.ending import never
from deploy.health import Probe
from deploy.hosts import HostPlan, check_stores, store_address, store_listens_on
from deploy.launch import Job, LaunchOptions, environment
from deploy.logs import evidence, explain_exit, size_of
from deploy.peers import PeerWatch
from deploy.service import StartedService
from deploy.state import Deployment
from reports.units import counted
from rlhf.errors import ConfigError, DeadlineExceeded, RlhfError, ServiceLost
from rlhf.rendezvous import RANK_0, LocalRendezvous, rank_environment
from settings.service import ServiceTable

LOST = "lost: "
"""Prefix of the line that says why a service was lost that is started again."""


class Supervisor:
    """Starts, watches and stops the services of one deployment, on this host.

    The ranks of a service are child processes of this one; when one of them ends, the service is lost: it is started
    again, where its table allows that, or else all are stopped.

    As a context manager it stops, on the way out, every process it started. Use it from the main thread: the
    ranks are told to end when the thread that started them ends, should this process be killed.
    """

    def __init__(
        self,
        config: Config,
        deployment: Deployment,
        only: tuple[str, ...] = (),
        launcher: LaunchOptions | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """
        Args:
            config: Config of the run, with the tables of the services.
            deployment: Gives the path of the config and its overrides, which the ranks read, the id that their
                environment has, the directory of the logs (a file per service, NAME.log), and the name of this host.
            only: Names of the services to start; empty: all that are not external. Of them, the ranks on this host are
                started.
            launcher: Command line of the ranks and grace of `stop`. Default: `LaunchOptions()`.
            say: Called with a line when a service has started and when it is healthy.

        Raises:
            ConfigError: `only` names a service that the config does not have, or see `HostPlan.of`.
        """
        self._config = config
        self._deployment = deployment
        self._plan = HostPlan.of(config, service_names(config, only), deployment.host or None)
        self._launcher = launcher or LaunchOptions()
        self._say = say
        self._log_dir = Path(deployment.log_dir)
        self._services: list[StartedService] = []
        self._gpus: dict[str, tuple[str, ...]] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, should_stop: Callable[[], bool] = never) -> None:
        """Starts all ranks of the services, and returns before the services are healthy.

        Args:
            should_stop: Returns True where no further service is to be started. Default: never.

        Raises:
            ConfigError: A service cannot run on this host; nothing was started.
            RlhfError: A log cannot be written.
        """
        plan = self._plan
        preflight.check(self._config, plan.names, plan.elsewhere, should_stop)
        check_stores(self._config, plan, should_stop)
        self._gpus = gpus_by_service(self._config, plan.names, visible_gpus(os.environ), plan.host)
        for name in plan.names:
            if should_stop():
                return
            self._start(name)

    def poll(self) -> bool:
        """Returns, without blocking, whether all services are healthy: each has answered a health check with SERVING
        once since it was started. A service that was healthy is then only watched for ranks that end, and for those on
        other hosts that no longer answer. One that is lost, and may be (`StartedService.may_restart`), is started
        again, and a line says why it was lost.

        Raises:
            ServiceLost: A rank of another service has ended, or does not answer; the text names the service and the
                cause.
            DeadlineExceeded: A service is not healthy within its `startup_timeout_s`.
        """
        for service in self._services:
            if service.restart is None and (ended := service.exit_codes()):
                cause = explain_exit(ended, service.table.ranks, service.log, service.log_bytes)
                if not service.may_restart():
                    raise ServiceLost(f"service {service.name}: {cause}")
                self._say(f"{LOST}service {service.name}: {cause}")
                service.begin_restart(self._deployment.id, self._launcher.grace_s)
        for service in self._services:
            if service.restart:
                if service.restart.is_due():
                    self._start_again(service)
            elif not service.healthy:
                self._look_for_health(service)
            elif service.peers:
                service.peers.poll()
        return all(service.healthy for service in self._services)

    def stop(self) -> None:
        """Ends every process of the deployment with SIGTERM, and those that are left after the grace with SIGKILL;
        blocks until they are gone.

        Raises:
            RlhfError: A process outlives SIGKILL.
        """
        started = [process for service in self._services for process in service.living()]
        processes.stop(self._deployment.id, self._launcher.grace_s, started)
        for service in self._services:
            for process in service.processes:
                process.wait(processes.KILL_TIMEOUT_S)
            service.close()
        self._services.clear()

    def _start(self, name: str) -> None:
        table = self._config.services[name]
        ranks, spans = self._plan.ranks(name), self._plan.spans(name)
        peers = PeerWatch(name, table.address, self._plan.first_ranks_elsewhere(name)) if spans else None
        local = None if spans else LocalRendezvous()
        log = self._log_dir / f"{name}.log"
        service = StartedService(name, table, ranks, [], local, peers, Probe(table.address), log)
        # Registered before its first rank starts, so that `stop` ends every rank that has started.
        self._services.append(service)
        self._start_ranks(service)

    def _start_again(self, service: StartedService) -> None:
        """Starts all ranks of a service whose processes have ended, which continue its log."""
        for process in service.processes:
            process.wait(processes.KILL_TIMEOUT_S)
        assert service.rendezvous is not None, "a service over several hosts is not started again"
        service.rendezvous.close()
        service.rendezvous, service.restart = LocalRendezvous(), None
        service.processes.clear()
        service.log_bytes = size_of(service.log)
        service.started = time.monotonic()
        self._start_ranks(service, again=True)

    def _start_ranks(self, service: StartedService, *, again: bool = False) -> None:
        """Starts the ranks of a service on this host. `again`: whether they continue its log."""
        name, table, local = service.name, service.table, service.rendezvous
        job = Job(name, table.role, table, Path(self._deployment.config), self._deployment.settings)
        gpus = self._gpus.get(name, ())
        variables = {**environment(table, self._deployment.id), **gpu_variables(gpus, os.environ)}
        common = {**variables, processes.SERVICE_MARK: name}
        with self._open(service.log, again=again) as sink:
            for rank in service.ranks:
                place = (
                    local.path if local else f"{RANK_0}{(store_address if rank else store_listens_on)(table)}"
                )
                own = rank_environment(rank, table.ranks, place, service.ranks, self._plan.number(name))
                service.processes.append(self._start_rank(job, {**common, **own}, sink))
        where = f", GPUs {', '.join(gpus)}" if gpus else ""
        self._say(
            f"{name}: started, {_ranks(table, service.ranks)} at {table.address}{where}, log {service.log}"
        )

    def _start_rank(self, job: Job, variables: dict[str, str], sink: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            with_parent.wrap(self._launcher.command(job)),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=variables,
            # Ctrl-C in the terminal is the supervisor's to handle.
            start_new_session=True,
        )

    def _open(self, log: Path, *, again: bool) -> BinaryIO:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            return log.open("ab") if again else log.open("wb")
        except OSError as error:
            raise RlhfError(f"log {log}: {error.strerror}") from None

    def _look_for_health(self, service: StartedService) -> None:
        waited = time.monotonic() - service.started
        if service.probe.serving():
            service.note_health()
            self._say(f"{service.name}: healthy after {waited:.1f} s")
        elif waited > service.table.startup_timeout_s:
            reason = f" ({service.probe.reason})" if service.probe.reason else ""
            raise DeadlineExceeded(
                f"service {service.name}: not healthy after {service.table.startup_timeout_s:g} s{reason}"
                f"{evidence(service.log, service.log_bytes)}"
            )


def service_names(config: Config, only: tuple[str, ...] = ()) -> list[str]:
    """Returns the names of the services to start on this host, in the config's order: those in `only`, or all where
    it is empty, both without external ones.

    Raises:
        ConfigError: `only` names a service that the config does not have.
    """
    for name in only:
        if name not in config.services:
            raise ConfigError(f"no service {name!r}; there are: {', '.join(config.services)}")
    return [
        name for name, table in config.services.items() if not table.external and (not only or name in only)
    ]


def _ranks(table: ServiceTable, here: range) -> str:
    if len(here) < table.ranks:
        some = f"rank {here[0]}" if len(here) == 1 else f"ranks {here[0]} to {here[-1]}"
        return f"{some} of {table.ranks}"
    return counted(table.ranks, "rank")
