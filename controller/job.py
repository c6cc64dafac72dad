"""One run from its configuration to its summary: makes the plan and the run directory, starts or finds the services,
opens the session and executes the algorithm. For the command line, for scripts and for notebooks alike."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from client.session import Session
from controller.algorithms import AnyAlgorithm, as_algorithm, reference_of
from controller.config.config import AnyConfig, Config, as_config
from controller.data.draws import Limit, longest_prompt, overlong_share, prompt_limit, text_limit
from controller.data.prompts import PromptData, TextData, load_data
from controller.foresight import arena_warnings, check_models
from controller.identity import Identity
from controller.launch import LaunchedServices
from controller.role_groups.admission import with_measured
from controller.role_groups.cluster import Cluster, spare_garbage_collector
from controller.tracking.metrics import read_metrics
from controller.tracking.progress import Progress
from controller.tracking.recorder import Recorder
from controller.tracking.run_directory import RunDirectory
from controller.training.algorithm import Algorithm
from controller.training.run import Run
from rlhf.errors import ConfigError, RlhfError
from rlhf.security import adopted

CONFIG_FILE = "config.toml"
LOGS = "logs"


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended well.

    Attributes:
        directory: Path of the run directory; docs/runs.md lists its files.
        summary: Figures of the run by name, those of `summary.json` without the run's identity.
    """

    directory: Path
    summary: Mapping[str, Any]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each step by name, read from `metrics.jsonl`; the first are those of the evaluation before
        training, step 0."""
        return read_metrics(self.directory)


def run(
    config: AnyConfig,
    algorithm: AnyAlgorithm,
    *,
    launch: bool = False,
    keep_weights: bool = False,
    take_over: bool = False,
    owns_process: bool = False,
) -> FinishedRun:
    """Executes a run and returns it when it has ended. Services that it launched are stopped in any case.

    Args:
        config: Configuration of the run: a `Config`, the tables of one by name, or the path of a TOML file.
        algorithm: Name of the algorithm, an `Algorithm`, or a function that takes a `Run`.
        launch: Whether to start the services, and stop them at the end. False: they must be running.
        keep_weights: Whether to continue from the weights that the services have; see `Cluster.connect`.
        take_over: Whether to end another run that holds the services.
        owns_process: Whether the process exists for this run alone, so that its garbage collector may be changed;
            see `spare_garbage_collector`.

    Raises:
        RlhfError: The run failed; the text is one line that names service, rank and cause.
    """
    plan = Plan.of(as_algorithm(algorithm), as_config(config))
    with _open(plan, Progress(), launch=launch, keep_weights=keep_weights, take_over=take_over) as opened:
        if owns_process:
            spare_garbage_collector()
        plan.algorithm(opened)
        return FinishedRun(opened.directory, opened.finish(plan.algorithm.trains))


def by_hand(run: Run) -> None:
    """Stands for the algorithm of a run whose calls are made one by one, as in a notebook. Does nothing, and has all
    services of the configuration."""


def open_run(
    config: AnyConfig,
    algorithm: AnyAlgorithm = by_hand,
    *,
    launch: bool = False,
    keep_weights: bool = False,
    take_over: bool = False,
) -> Run:
    """Opens a run whose calls are made by hand, for example cell by cell in a notebook, and returns it connected to
    its services. `Run.close`, or the end of a `with` block, ends the session and stops services that were launched.

    Args:
        config, launch, keep_weights, take_over: The same as the arguments of `run` of these names.
        algorithm: Algorithm whose services, defaults and options the run gets; it is not executed. Default: none; all
            services of the configuration.

    Raises:
        RlhfError: The configuration cannot be used, or a service does not start or respond.
    """
    plan = Plan.of(as_algorithm(algorithm), as_config(config))
    progress = Progress(is_live=False)
    return _open(plan, progress, launch=launch, keep_weights=keep_weights, take_over=take_over)


@dataclass(frozen=True)
class Plan:
    """A run whose configuration and data were checked, and that is not connected to services yet.

    Attributes:
        algorithm: The algorithm.
        config: Configuration with the algorithm's defaults; see `Algorithm.configure`.
        data: Training prompts and held-out prompts.
        pretrain: Texts of data.pretrain; None where it is not set.
        identity: Identity of the run.
    """

    algorithm: Algorithm
    config: Config
    data: tuple[PromptData, PromptData]
    pretrain: TextData | None
    identity: Identity

    @staticmethod
    def of(algorithm: Algorithm, config: Config) -> Plan:
        """Makes the plan of a run that starts now: checks configuration and models, and reads the data. Raises
        ConfigError where one of them cannot be used."""
        started_unix_ns = time.time_ns()
        config = algorithm.configure(config)
        check_models(config)
        data = load_data(config, algorithm.columns, started_unix_ns / 1e9)
        texts = config.data.pretrain
        pretrain = TextData.load(texts, "data.pretrain") if texts else None
        identity = Identity.of(reference_of(algorithm), config.run.seed, started_unix_ns)
        return Plan(algorithm, config, data, pretrain, identity)

    def resolved(self, config: Config) -> str:
        """Returns `config` with all defaults as TOML, below a comment with the identity of the run."""
        return self.identity.as_comment() + tomli_w.dumps(self.algorithm.resolved(config))


def _open(plan: Plan, progress: Progress, *, launch: bool, keep_weights: bool, take_over: bool) -> Run:
    """Returns a connected run, which closes all that is opened here, in reverse order, when it is closed."""
    config, opened = plan.config, contextlib.ExitStack()
    with contextlib.ExitStack() as unless_opened:
        unless_opened.push(opened)
        opened.enter_context(adopted(config.security.load()))
        directory = opened.enter_context(_new_directory(plan))
        resolved = directory.write_text(CONFIG_FILE, plan.resolved(config))
        for line in arena_warnings(config, longest_prompt(config, plan.data)):
            progress.message(line)
        launched = None
        if launch:
            progress.message(
                f"starting services: {', '.join(config.services)}; logs: {directory.path / LOGS}"
            )
            launched = opened.enter_context(LaunchedServices(config, resolved, directory.path / LOGS))
        opened.enter_context(_explained(launched))
        cluster = Cluster(config, _session(plan, directory, take_over=take_over))
        opened.callback(cluster.close)
        outputs = {plan.algorithm.trains: directory.output(plan.algorithm.trains)}
        cluster.connect(progress.message, keep_weights=keep_weights, outputs=outputs)
        # With the measured libraries in the file, a later run of it computes the same bits.
        directory.write_text(CONFIG_FILE, plan.resolved(with_measured(config, cluster.descriptions)))
        services = cluster.token_services()
        limits = prompt_limit(config, services), text_limit(config, services)
        if line := _limit_line(plan.data, limits[0]):
            progress.message(line)
        progress.message(f"run directory: {directory.path}")
        progress.begin(config.run.steps)
        known = plan.identity.with_services(cluster.descriptions, cluster.origins)
        recorder = opened.enter_context(Recorder(directory, progress, known))
        opened.enter_context(recorder.following(cluster.running, cluster.memory))
        run = Run(config, plan.data, cluster, recorder, plan.pretrain, limits, opened)
        unless_opened.pop_all()
        return run


@contextlib.contextmanager
def _new_directory(plan: Plan) -> Iterator[RunDirectory]:
    """Context manager that makes the run directory, and removes it again where the run ends with an error before it
    has written anything of use."""
    table = plan.config.run
    directory = RunDirectory.create(table.directory, table.name, algorithm=plan.algorithm.name)
    try:
        yield directory
    except (RlhfError, KeyboardInterrupt) as error:
        # The error of a refused config needs no logs; that of a lost service does.
        unused = {CONFIG_FILE, LOGS} if isinstance(error, ConfigError) else {CONFIG_FILE}
        directory.remove_if_only(unused)
        raise


@contextlib.contextmanager
def _explained(launched: LaunchedServices | None) -> Iterator[None]:
    """Context manager that adds the launcher's explanation to a ServiceLost of its body, and the path of the service's
    log to an error with a remote traceback."""
    try:
        yield
    except RlhfError as error:
        explained = pointing_to_log(launched.explain(error) if launched else error, launched)
        if explained is error:
            raise
        raise explained from error


def _session(plan: Plan, directory: RunDirectory, *, take_over: bool) -> Session:
    table = plan.config.run
    return Session(
        name=f"{directory.path.name}-{secrets.token_hex(4)}",
        started_unix_ns=plan.identity.started_unix_ns,
        seed=table.seed,
        timeout_s=table.call_timeout_s,
        save_timeout_s=table.save_timeout_s,
        balance=table.balance,
        take_over=take_over,
    )


def _limit_line(data: tuple[PromptData, PromptData], limit: Limit | None) -> str:
    """Returns a line for the terminal on how many prompts of a sample are too long, or that lengths are not checked;
    empty where no prompt of the sample is too long.

    Args:
        data: Training prompts and held-out prompts.
        limit: Limit on the length of prompts; None: not checked.
    """
    if limit is None:
        return "prompts are not checked for their length: their tokens cannot be counted here (see data.tokenizer)"
    (long, of), (long_heldout, of_heldout) = (
        overlong_share(rows, limit, lambda prompt: prompt.text) for rows in data
    )
    if not long and not long_heldout:
        return ""
    return (
        f"prompts of more than {limit.tokens} tokens are left out ({limit.why}): {long} of {of} training rows looked "
        f"at, {long_heldout} of {of_heldout} held-out ones"
    )


def pointing_to_log(error: RlhfError, launched: LaunchedServices | None) -> RlhfError:
    """Returns the error itself, or, for an unforeseen exception in a service, an error that also says which log has
    its traceback.

    Args:
        error: The error that ended the run.
        launched: The services that the run launched; None where they were running.
    """
    if type(error) is not RlhfError or not error.remote_traceback or not error.service:
        return error
    log = launched.log_of(error.service) if launched else f"the log of services.{error.service}"
    return RlhfError(f"{error} (traceback: {log})")
