"""Entry point `python -m services ROLE`, which runs one rank of a service: it checks the configuration, joins the
other ranks, loads the model, and serves gRPC until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import uvloop

from nccl_transfer.refs.mesh import Mesh
from rlhf import addresses, security, stacks
from rlhf.errors import ConfigError, RlhfError, one_line
from rlhf.file_limit import raise_file_limit
from rlhf.parent import ends_with
from rlhf.plugins import PluginError, load_object
from rlhf.rendezvous import VARIABLE
from rlhf.roles import RoleSpec, find_role
from services.runtime import gpus
from services.runtime.hosts import host_addresses, network_interfaces
from services.runtime.huge_pages import use_huge_pages
from services.runtime.ranks import Ranks
from services.runtime.server import RankServer
from services.runtime.worker import Worker
from settings import meshes
from settings.actor import ActorTable
from settings.commands import set_option
from settings.fit import check_model_fits, sized_for_rows
from settings.hub import fetch, hub_model
from settings.model import ModelTable, optimizer_without_end
from settings.rollout import RolloutServiceTable
from settings.security import security_of
from settings.service import ServiceTable
from settings.services import named_losses, output_roots, row_tokens, service_of, shares_devices
from settings.strict import read_tables

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
"""Parameter numbers of glibc's `mallopt`."""

LEAVE_WITHIN_S = 10.0
"""Seconds that a process has to exit once its rank has drained."""

KEPT_BYTES = 512 << 20
"""Most freed memory that a rank on a CPU keeps for its next call."""


def command(spec: RoleSpec) -> click.Command:
    """Returns the click command that serves one rank of a role until SIGTERM or SIGINT. It never returns: the process
    exits with status 0, or with 2 on a fatal error.

    Args:
        spec: Role that the service must have. Its worker is imported after the configuration has been checked, because
            importing torch takes seconds.
    """

    @click.command(
        help=f"Serve one rank of a service of role {spec.name}.\n\nrlhf-deploy starts all ranks of a service, and so "
        "does torchrun --rdzv-backend rlhf --nproc-per-node RANKS -m services."
    )
    @click.version_option(package_name="rlhf-cluster", prog_name=f"services {spec.name}")
    @click.option(
        "--config",
        required=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="TOML file with its tables.",
    )
    @click.option(
        "--name", default=spec.name, show_default=True, metavar="NAME", help="Table [services.NAME] to serve."
    )
    @set_option
    def main(config: Path, name: str, settings: tuple[str, ...]) -> None:
        _begin_log(f"{name}/{os.environ.get('RANK', '0')}")
        stacks.dump_on_signal()
        try:
            if not ends_with(os.getppid()):  # rlhf-deploy or torchrun
                os._exit(1)
            raise_file_limit()
            use_huge_pages()
            _remove_torchrun_directories()
            _warn_of_open_store()
            tables = read_tables(config, settings)
            table = service_of(tables, name, config)
            security.adopt(security_of(tables, config))
            local = sized_for_rows(_with_local_model(table, name), row_tokens(tables))
            _check(local, spec.name, name)
            roots, losses = output_roots(tables, table), named_losses(tables)
            shares = shares_devices(tables, table)
            _serve(local, name, spec.worker, roots, losses, table, shares=shares)
        except (RlhfError, OSError) as error:
            print(f"fatal: {name}: {error}".replace("\n", " "), file=sys.stderr, flush=True)
            os._exit(2)
        except Exception as error:
            # Without this line, what libraries print at exit is the last one of the log.
            logging.exception("the service does not start, or its server has failed")
            cause = one_line(f"{type(error).__name__}: {error}")
            print(f"fatal: {name}: {cause}", file=sys.stderr, flush=True)
            os._exit(1)

    return main


class _LogFormatter(logging.Formatter):
    """Indents all lines of a record but the first, as of a traceback: what a peer has said of an error, with line
    feeds in it, does not pass for a record, nor for the line in which a rank says why it ends."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\n").replace("\n", "\n  ")


def _begin_log(where: str) -> None:
    """Makes records of this process lines on stderr, with the time and `where`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter(f"%(asctime)s {where} %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _remove_torchrun_directories() -> None:
    """Removes the empty directories that torchrun creates for logs and leaves behind; ranks write nothing there."""
    for top in Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents:
        if top.name.startswith("torchelastic_"):
            # A peer may remove them at the same time, also while this rank lists them.
            with contextlib.suppress(FileNotFoundError):
                for directory in (*sorted(top.rglob("*"), reverse=True), top):
                    with contextlib.suppress(OSError):
                        directory.rmdir()


def _warn_of_open_store() -> None:
    """Logs a warning, on local rank 0, if torchrun started the ranks without rendezvous backend rlhf: its store then
    listens on every interface."""
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
        and not os.environ.get(VARIABLE)
        and os.environ["LOCAL_RANK"] == "0"
    ):
        logging.warning(
            "warning: the store of this torchrun listens on every interface, and with --standalone or c10d any "
            "client of it runs code here; start ranks with --rdzv-backend rlhf, or with rlhf-deploy (docs/transfer.md)"
        )


def _with_local_model(table: ServiceTable, name: str) -> ServiceTable:
    """Returns the table with a directory as `model` where it names a model on the hub, which is downloaded if this host
    does not have it yet. Raises ConfigError where that fails, or takes longer than `startup_timeout_s`."""
    model: Path | None = getattr(table, "model", None)
    if model is None or table.model_directory is None or hub_model(model) is None:
        return table
    directory = fetch(model, f"services.{name}.model", table.startup_timeout_s)
    logging.info("model %s is %s", model, directory)
    return table.model_copy(update={"model": directory})


def _check(table: ServiceTable, role: str, name: str) -> None:
    """Checks role, number of ranks, model directory, schedule, size of the model, port, and whether it may be open to
    other hosts, before torch is imported.

    Raises:
        ConfigError: One of these checks fails.
    """
    if find_role(table.role).name != role:
        raise ConfigError(f"services.{name}.role is {table.role}, but this is services.{role}")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != table.ranks:
        raise ConfigError(f"services.{name}.ranks is {table.ranks}, but {started} were started")
    model = getattr(table, "model", None)
    if model is not None and not (model / "config.json").is_file():
        defect = "has no config.json" if model.is_dir() else "does not exist"
        raise ConfigError(f"services.{name}.model: directory {model} {defect}")
    if optimizer_without_end(table):
        raise ConfigError(
            f"services.{name}.optimizer.total_steps: has to be given to a service that rlhf-controller --launch does "
            "not start; rlhf-controller --dry-run shows the number for a run"
        )
    check_model_fits(name, table)
    if int(os.environ.get("RANK", "0")) == 0:
        try:
            addresses.probe(table.bind_address)
        except OSError as error:
            raise ConfigError(
                f"services.{name}.{table.bind_key}: {table.bind_address}: {error.strerror}"
            ) from None
    security.current().check_listening(host_addresses(table).listen, f"services.{name}.{table.bind_key}")


def _serve(
    table: ServiceTable,
    name: str,
    worker: str,
    roots: tuple[Path, ...],
    losses: frozenset[str],
    given: ServiceTable,
    *,
    shares: bool,
) -> None:
    """Builds the worker, serves its rank until SIGTERM or SIGINT, and ends the process with status 0.

    Args:
        table, name: The service's table and its name in the configuration.
        given: The table as the configuration has it, which the controller compares with its own.
        worker: As `RoleSpec.worker`.
        roots, losses, shares: `Worker.output_roots`, `Worker.losses` and `Worker.shares_device`.

    Raises:
        ConfigError: An engine cannot be imported, the worker cannot be built, or ranks cannot have the device that the
            table names.
    """
    # People and the launcher read the logs, so progress bars are off.
    os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
    # cuBLAS may choose different kernels for the same product without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(table.threads)
    os.environ.update(network_interfaces(host_addresses(table), os.environ))
    gpus.prepare(name, table, os.environ)
    with _without_collection():
        chosen = _worker_class(worker, table)
    if chosen.uses_torch(table):
        gpus.check_ranks(name, table.device, os.environ)
    elif table.device == "cuda":
        raise ConfigError(f"services.{name}.device is cuda, and this service has no model to compute there")
    ranks = Ranks.join(
        needs_torch=chosen.uses_torch(table),
        model_mesh=_model_mesh(table),
        table=given.model_dump_json(),
        timeout_s=table.startup_timeout_s,
    )
    serving = chosen(table, ranks)
    serving.service, serving.output_roots, serving.losses = name, roots, losses
    serving.config_table, serving.shares_device = given, shares
    torch = sys.modules.get("torch")
    if torch and not torch.cuda.is_available():
        keep_freed_memory()
    uvloop.run(RankServer(serving).serve(drained=leave_in_time))
    ranks.leave()
    logging.info("left")
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gRPC and torch may still wind down; the rank has nothing left to do.
    os._exit(0)


def _worker_class(worker: str, table: ServiceTable) -> type[Worker]:
    """Imports and returns the worker class for a table, and imports the engines that it uses.

    Args:
        worker: As `RoleSpec.worker`.

    Raises:
        ConfigError: A package is missing, or `worker` names no worker class.
    """
    try:
        found = load_object(worker, Callable)  # type: ignore[type-abstract]
        chosen = found if isinstance(found, type) else found(table)
        if not (isinstance(chosen, type) and issubclass(chosen, Worker)):
            raise PluginError(f"{worker!r} is no subclass of Worker, and no function that returns one")
        chosen.import_engines(table)
    except (ImportError, PluginError) as error:
        missing = error if isinstance(error, ImportError) else error.__cause__
        if not isinstance(missing, ImportError):
            raise
        is_ours = worker.startswith("services.")
        hint = (
            "; install an engine: pip install 'rlhf-cluster[cpu]'" if is_ours else f", which {worker!r} needs"
        )
        raise ConfigError(f"{missing}{hint}") from error
    return chosen


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Context manager that disables garbage collection in its block, here imports, and then exempts all objects that
    exist from it (`gc.freeze`)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_freed_memory() -> None:
    """Makes malloc keep up to KEPT_BYTES of freed memory in this process. By default, glibc returns the memory of
    freed tensors to the kernel, which has to clear it again for the next call (docs/engines.md has the cost). Tensors
    on GPUs are not affected, since torch has an allocator of its own for them.

    Has no effect if the environment has MALLOC_ variables, or with a C library other than glibc.
    """
    libc = ctypes.CDLL(None)
    if any(name.startswith("MALLOC_") for name in os.environ) or not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
    libc.mallopt(M_TOP_PAD, KEPT_BYTES // 8)
    # Arenas of threads consist of heaps that are smaller than some tensors.
    libc.mallopt(M_ARENA_MAX, 1)


def _model_mesh(table: ServiceTable) -> Mesh | None:
    """Returns the training and generation mesh of a table, in which sequence-parallel ranks are tensor ranks; None for
    a role without a model and where each rank has rows of its own."""
    if isinstance(table, RolloutServiceTable):
        return Mesh(*meshes.parse(table.mesh)) if table.mesh else None
    if not isinstance(table, ModelTable):
        return None
    training, is_divided = table.training_sizes, bool(table.mesh) or table.sequence_parallel > 1
    if isinstance(table, ActorTable) and (is_divided or table.generation_mesh):
        generation = meshes.generation_sizes(table.generation_mesh, table.mesh)
        return Mesh(*training, *generation, usual_order=not table.mesh or table.transition != "hybridflow")
    return Mesh(*training) if is_divided else None


def leave_in_time() -> None:
    """Starts a timer and returns immediately: if this process still runs after `LEAVE_WITHIN_S`, the stacks of its
    threads are printed and the process exits with status 1."""
    faulthandler.dump_traceback_later(LEAVE_WITHIN_S, exit=True)
