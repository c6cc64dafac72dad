"""Starts the services of a run by the launcher's command `deploy up`: one process, which starts and stops them
all."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from controller.config.config import Config
from controller.role_groups.replacement import LostAgain, is_loss
from rlhf.errors import ConfigError, DeadlineExceeded, RlhfError, ServiceLost
from rlhf.signals import name_of
from settings.service import ENDING_S

STOP_TIMEOUT_S = 40.0
EXPLAIN_TIMEOUT_S = 20.0
"""Longest time, in seconds, to wait until the launcher reports a lost service."""
POLL_S = 0.1
SILENCE_S = 30.0
"""Time, in seconds, after which a line names the services that are not healthy yet, again and again."""
READY = b"ready\n"
LOST = "lost: service "
"""Prefix of the line in which the launcher reports a lost service that it starts again; its name and ": " follow."""


class LaunchedServices:
    """Context manager that starts services with `deploy up CONFIG`, waits until all are healthy, and stops them on
    exit. May be entered and exited on any thread.

    Args:
        config: Configuration of the run.
        config_path: Config file that is passed to the launcher.
        log_dir: Directory of the services' logs; that of the launcher is launcher.log.
        say: Called with a line of text that names the services that are waited for, every `SILENCE_S`.

    Raises:
        RlhfError: On entering, where a service does not start; the text has its name and the cause.
    """

    def __init__(
        self,
        config: Config,
        config_path: Path,
        log_dir: Path,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        # The launcher may first wait for services that are about to end.
        self._timeout_s = max(table.startup_timeout_s for table in config.services.values()) + ENDING_S + 10
        # The launcher ends with this process, even where this one is killed.
        tied = [sys.executable, "-m", "deploy.with_parent", str(os.getpid())]
        command = [sys.executable, "-m", "deploy", "up", str(config_path), "--log-dir", str(log_dir)]
        self._command = tied + command
        self._external = {name for name, table in config.services.items() if table.external}
        self._own = config.services.keys() - self._external
        self._log = log_dir / "launcher.log"
        self._say = say
        self._stopped = threading.Event()
        self._taken: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.touch()
        # Held open: a log that is removed can still be read.
        self._reading = self._log.open("rb")
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._start, args=(started,), name="launcher", daemon=True).start()
        try:
            self._process = started.result()
        except BaseException:
            # Where it was started nevertheless, it ends with its thread.
            self._stopped.set()
            self._reading.close()
            raise
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def log_of(self, service: str) -> Path | None:
        """Returns the path of a service's log, to which all of its ranks write; None for one that is not started here,
        by its name in the config or by any that a server claims."""
        return self._log.with_name(f"{service}.log") if service in self._own else None

    def explain(self, error: RlhfError) -> RlhfError:
        """Returns a ServiceLost with the cause that the launcher process reports in front of the text of `error`;
        `error` itself where it reports none.

        The launcher reports a lost service before it stops the others, so an error that follows from this has its
        cause in the log. A ServiceLost may come before the report: up to `EXPLAIN_TIMEOUT_S` are waited for it, unless
        it is of a call of an external service, of which the launcher knows nothing. A DeadlineExceeded names a
        rank that is stuck, from which a report may follow but not the other way round. A LostAgain has the cause
        already. A service that is started again explains errors of its own calls alone."""
        if isinstance(error, DeadlineExceeded | LostAgain):
            return error
        may_follow = isinstance(error, ServiceLost) and error.called not in self._external
        deadline = time.monotonic() + (EXPLAIN_TIMEOUT_S if may_follow else 0.0)
        while not (cause := self._cause() or self._loss(error)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return ServiceLost(f"{cause}; {error}") if cause else error

    def take_loss(self, service: str) -> str:
        """Returns why a service was lost that the launcher starts again, the oldest report that was not taken before;
        empty where there is none. Takes all reports: the service may have been lost again before it served."""
        losses, taken = self._losses(service), self._taken[service]
        self._taken[service] = len(losses)
        return losses[taken] if taken < len(losses) else ""

    def has_failed(self) -> bool:
        """Whether the launcher has ended, or stops all services."""
        return self._process.poll() is not None or bool(self._cause())

    def _loss(self, error: RlhfError) -> str:
        """Returns the last report of a service that is started again and whose loss the error is, unless it was taken;
        empty where there is none."""
        losses = self._losses(error.called) if is_loss(error) else []
        return f"service {error.called}: {losses[-1]}" if len(losses) > self._taken[error.called] else ""

    def _losses(self, service: str) -> list[str]:
        """Returns why a service was lost each time that the launcher has started it again."""
        prefix = f"{LOST}{service}: "
        return [line.removeprefix(prefix) for line in self._lines() if line.startswith(prefix)]

    def _cause(self) -> str:
        """Returns why the launcher stops or has stopped the services; empty where it does not or has not said why."""
        code = self._process.poll()
        if code is not None and code < 0:
            return f"the launcher of the services (rlhf-deploy, pid {self._process.pid}) was killed by {name_of(-code)}"
        return self._first_error()

    def _start(self, started: Future[subprocess.Popen[bytes]]) -> None:
        """Starts the launcher, and returns when it was stopped: the kernel ends the launcher with the thread that
        started it (see `deploy.with_parent`), which must therefore live as long as this process."""
        try:
            with self._log.open("wb") as log:
                # A process session of its own: Ctrl-C reaches only this process, which stops the services in order.
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            started.set_exception(error)
            return
        started.set_result(process)
        self._stopped.wait()

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        began = told = time.monotonic()
        while time.monotonic() < began + self._timeout_s:
            if time.monotonic() > told + SILENCE_S and (names := self._not_healthy()):
                told = time.monotonic()
                self._say(f"waiting for {', '.join(names)}, {told - began:.0f} s so far")
            if select.select([self._process.stdout], [], [], 0.2)[0]:
                if self._process.stdout.readline() == READY:
                    return
                code = self._process.wait(STOP_TIMEOUT_S)
                error = ConfigError if code == 2 else ServiceLost
                raise error(
                    self._first_error() or f"the launcher ended with exit code {code}; see {self._log}"
                )
        raise DeadlineExceeded(f"the services did not come up within {self._timeout_s:g} s; see {self._log}")

    def _not_healthy(self) -> list[str]:
        """Returns the names of the services that the launcher has not found healthy yet."""
        healthy = {line.partition(": healthy after ")[0] for line in self._lines()}
        return sorted(self._own - healthy)

    def _first_error(self) -> str:
        errors = (line for line in self._lines() if line.startswith("error: "))
        return next(errors, "").removeprefix("error: ")

    def _lines(self) -> list[str]:
        """Returns the complete lines of the launcher's log. Thread-safe."""
        descriptor = self._reading.fileno()
        said = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return said.decode(errors="replace").split("\n")[:-1]

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._reading.close()
        self._stopped.set()
