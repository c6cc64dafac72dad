"""Serves the services of a config, as `rlhf-deploy up` does: `forked_services.py CONFIG LOG_DIR [KEY.PATH=VALUE...]`.

The ranks are forked from this process, which has imported what ranks import; that is most of the time that a start of a
rank takes. It prints `ready` when all are healthy. With SIGTERM it ends them and itself; when it is killed, the kernel
kills them. Tests of rlhf-deploy itself start it.
"""

from __future__ import annotations

from rlhf.polling import serve_from_one_thread

# As in services/__main__.py: before all that imports gRPC.
serve_from_one_thread()

import contextlib  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from deploy.health import Probe  # noqa: E402
from deploy.launch import environment  # noqa: E402
from integration.ranks import import_uncollected  # noqa: E402
from rlhf.rendezvous import LocalRendezvous, rank_environment  # noqa: E402
from rlhf.roles import find_role  # noqa: E402
from rlhf.security import adopt  # noqa: E402
from services.runtime import main  # noqa: E402
from settings.security import load_security  # noqa: E402
from settings.service import ServiceTable  # noqa: E402
from settings.services import service_of  # noqa: E402
from settings.strict import read_tables  # noqa: E402

MODULES = (
    "transformers.models.llama.modeling_llama",
    "services.actor.worker",
    "services.critic.worker",
    "services.reference.worker",
    "services.reward.model",
    "services.engines.fsdp.engine",
    "services.rollout.hf",
)
VLLM = "services.rollout.vllm_engine"
DEPLOYMENT = "tests"


def serve(path: Path, log_dir: Path, settings: Sequence[str]) -> None:
    tables = read_tables(path, tuple(settings))
    services = {name: service_of(tables, name, path) for name in tables["services"]}
    log_dir.mkdir(parents=True, exist_ok=True)
    generates_with_vllm = any(getattr(table, "rollout_engine", "") == "vllm" for table in services.values())
    import_uncollected(*MODULES, *([VLLM] if generates_with_vllm else []))
    rendezvous = {name: LocalRendezvous() for name in services}
    ranks: list[int] = []
    try:
        for name, table in services.items():
            for rank in range(table.ranks):
                variables = rank_environment(rank, table.ranks, rendezvous[name].path)
                arguments = ["--config", str(path), "--name", name]
                arguments += [part for setting in settings for part in ("--set", setting)]
                ranks.append(fork_rank(table, variables, arguments, log_dir / f"{name}.log"))
        adopt(load_security(path, tuple(settings)))
        wait_until_healthy(services)
        print("ready", flush=True)
        pid, status = os.wait()
        ranks.remove(pid)
        sys.exit(f"process {pid} ended: {os.waitstatus_to_exitcode(status)}; logs: {log_dir}")
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
        for rank in ranks:
            os.waitpid(rank, 0)


def fork_rank(table: ServiceTable, variables: dict[str, str], arguments: list[str], log: Path) -> int:
    """Returns the process id of a new rank, which has these variables and arguments and writes to the log."""
    if pid := os.fork():
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.environ.update({**environment(table, DEPLOYMENT), **variables})
    if getattr(table, "kind", "model") != "model":
        # Served without torch, by an interpreter that has not imported it.
        os.execv(sys.executable, [sys.executable, "-m", "services", table.role, *arguments])
    sys.argv = ["services", *arguments]
    main.command(find_role(table.role))()
    raise AssertionError("a rank ends its process itself")


def wait_until_healthy(tables: dict[str, ServiceTable]) -> None:
    """Raises SystemExit if a rank ends, or a service is not healthy within its `startup_timeout_s`."""
    began = time.monotonic()
    for name, table in tables.items():
        with contextlib.closing(Probe(table.address)) as probe:
            while not probe.serving():
                # WNOWAIT: `serve` signals and reaps this rank too.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended or time.monotonic() - began > table.startup_timeout_s:
                    pid = ended.si_pid if ended else "none"
                    sys.exit(f"service {name} is not healthy; a rank that ended: {pid}")
                time.sleep(0.05)


if __name__ == "__main__":
    # As Ctrl-C: raises, so that the ranks end too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
