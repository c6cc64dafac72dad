"""Opens a planned run: makes or takes its directory, starts or finds its services, and begins or restores its
state."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from client.session import Session, StepContext
from controller.checkpoints.journal import Journal, remove_journal
from controller.checkpoints.limits import Limits, limits_as_json, row_limits
from controller.checkpoints.saver import Checkpointer
from controller.checkpoints.store import CheckpointStore
from controller.checkpoints.termination import Termination
from controller.config.config import Config
from controller.config.run import RunTable
from controller.data.draws import Limit, longest_prompt
from controller.data.endings import messages_without_end
from controller.data.length_lines import prompts_left_out, responses_cut, responses_without_end
from controller.data.response_end import RESPONSE_END
from controller.epochs import steps_of_epochs
from controller.foresight import arena_warnings
from controller.launch import LaunchedServices
from controller.plan import Plan
from controller.recording import recording
from controller.restoring import Restorer
from controller.role_groups.admission import with_chosen
from controller.role_groups.cluster import Cluster, Restoration, SavedState
from controller.role_groups.platform import platform_of
from controller.tracking.contents import CONFIG_FILE, SUMMARY_FILE
from controller.tracking.marks import cut_files, mark_files, remove_rollouts
from controller.tracking.progress import Progress
from controller.tracking.prometheus import MetricsEndpoint
from controller.tracking.recorder import Recorder
from controller.tracking.run_directory import RunDirectory, make_unique, write_atomically, writing
from controller.training.environment import environment_factory
from controller.training.run import Run
from rlhf.errors import ConfigError, RlhfError
from rlhf.security import adopted

LOGS = "logs"
REJECTED = "rejected"
"""Directory in that of a run in which services keep the rows that they refuse to train on."""


def open_planned(
    plan: Plan,
    progress: Progress,
    *,
    launch: bool,
    keep_weights: bool = False,
    take_over: bool = False,
    termination: Termination | None = None,
) -> Run:
    """Returns a connected run, which closes all that is opened here, in reverse order, when it is closed.

    Args:
        plan: The run.
        progress: Terminal display.
        launch, keep_weights, take_over: As in `controller.job.run`.
        termination: Handlers of SIGTERM of this process. Default: it has none.

    Raises:
        RlhfError: A service does not start or respond, or cannot be used for the run.
    """
    config, opened = plan.config, contextlib.ExitStack()
    with contextlib.ExitStack() as unless_opened:
        unless_opened.push(opened)
        environment_factory(config.rollout.environment)  # refused before anything starts
        opened.enter_context(adopted(config.security.load()))
        endpoint = opened.enter_context(MetricsEndpoint.of(config.tracking))
        directory = opened.enter_context(_directory(plan))
        # A run that is resumed keeps its config until its services have admitted it.
        resolved = None if plan.resumes else directory.write_text(CONFIG_FILE, plan.resolved(config))
        further = plan.algorithm.further_responses(config)
        for line in arena_warnings(config, longest_prompt(config, plan.data), further):
            progress.message(line)
        launched = _launched(plan, directory, resolved, progress) if launch else None
        opened.enter_context(launched or contextlib.nullcontext())
        opened.enter_context(explained(launched))
        cluster = Cluster(config, _session(plan, directory, take_over=take_over), launcher=launched)
        opened.callback(cluster.close)
        plan = _connect(plan, cluster, directory, progress, keep_weights=keep_weights)
        cluster.fill_receivers()
        # With the measured libraries in the file, a later run of it computes the same bits.
        config = with_chosen(config, cluster.descriptions)
        directory.write_text(CONFIG_FILE, plan.resolved(config))
        before = plan.resumes.facts.get("limits") if plan.resumes else None
        limits = row_limits(config, cluster.token_services(), before)
        for line in _data_lines(plan, config, limits[0], cluster):
            progress.message(line)
        progress.message(f"run directory: {directory.path}")
        progress.begin(config.run.steps, plan.resumes.step if plan.resumes else 0)
        known = plan.identity.with_services(cluster.descriptions, cluster.origins)
        record = recording(plan, config, cluster, directory, progress, known, endpoint)
        recorder = opened.enter_context(record)
        cluster.on_replaced = recorder.replaced
        saver = _checkpointer(plan, config, cluster, recorder, known, limits, termination or Termination())
        if saver:
            opened.callback(saver.close)
        parts = plan.config, plan.data, cluster, recorder, plan.pretrain, limits, opened
        resumed, began = plan.resumes and plan.resumes.run, plan.identity.started_unix_ns / 1e9
        run = Run(*parts, checkpointer=saver, resumed=resumed, started_unix_s=began)
        unless_opened.pop_all()
        return run


@contextlib.contextmanager
def _directory(plan: Plan) -> Iterator[RunDirectory]:
    """Context manager that holds the run directory for this process: a new directory, or that of the resumed run, from
    which it removes incomplete files."""
    with contextlib.ExitStack() as opened:
        if plan.resumes:
            directory = RunDirectory(plan.resumes.run_dir)
            opened.enter_context(directory.locked())
            plan.resumes.check_newest()
            CheckpointStore(directory.path).clean()
        else:
            directory = opened.enter_context(_new_directory(plan))
            opened.enter_context(directory.locked())
        yield directory


def _launched(
    plan: Plan, directory: RunDirectory, resolved: Path | None, progress: Progress
) -> LaunchedServices:
    """Returns the services of a run, which start when their context is entered.

    Args:
        plan: The run.
        directory: Its directory.
        resolved: The file of its config there; None for a run that is resumed, which gets one beside the logs.
        progress: Terminal display.
    """
    logs = _logs(plan, directory)
    resolved = resolved or write_atomically(logs / CONFIG_FILE, plan.resolved(plan.config))
    progress.message(f"starting services: {', '.join(_launched_names(plan.config))}; logs: {logs}")
    return LaunchedServices(plan.config, resolved, logs, progress.message)


def _logs(plan: Plan, directory: RunDirectory) -> Path:
    """Returns the directory of the logs of launched services, `logs` in the run directory. For a run that is resumed,
    makes and returns a new directory in it, from-step-N."""
    logs = directory.path / LOGS
    if not plan.resumes:
        return logs
    with writing(directory.path, LOGS):
        logs.mkdir(exist_ok=True)
        return make_unique(logs, f"from-step-{plan.resumes.step}")


def _connect(
    plan: Plan, cluster: Cluster, directory: RunDirectory, progress: Progress, *, keep_weights: bool
) -> Plan:
    """Connects to the services, and returns the plan. For a resumed run, restores the services, truncates the files of
    the run to the resume point, and returns the plan from that point. The services of a new run load `plan.loads`.
    `keep_weights`: as in `Cluster.connect`."""
    stateful, trained = _stateful(plan.config), plan.algorithm.trains
    outputs = {trained: [directory.output(trained)]}
    if plan.config.checkpoint.is_on:
        partial = CheckpointStore(directory.path).partial(0)
        for name in stateful:
            outputs.setdefault(name, []).append(partial / name)
    kept = directory.output(REJECTED)
    if not plan.resumes:
        states = {name: SavedState(path) for name, path in plan.loads.items()}
        restoration = Restoration(states, lambda held: states)
        cluster.connect(
            progress.message,
            keep_weights=keep_weights,
            outputs=outputs,
            restoration=restoration,
            rejected=kept,
        )
        return plan
    restorer = Restorer(plan, stateful, lambda: cluster.descriptions)
    cluster.connect(
        progress.message,
        outputs=outputs,
        admit=restorer.admit,
        restoration=restorer.restoration,
        is_patient=True,
        rejected=kept,
    )
    plan = restorer.plan
    assert plan.resumes is not None, "the run is resumed"
    cluster.session.newest = StepContext(plan.resumes.step)
    if plan.resumes.commit:
        remove_journal(directory.path)
    cut_files(directory.path, plan.resumes.marks)
    remove_rollouts(directory.path, plan.resumes.step)
    (directory.path / SUMMARY_FILE).unlink(missing_ok=True)
    for line in (restorer.line(), *restorer.changes()):
        progress.message(line)
    return plan


def _checkpointer(
    plan: Plan,
    config: Config,
    cluster: Cluster,
    recorder: Recorder,
    identity: Mapping[str, Any],
    limits: Limits,
    termination: Termination,
) -> Checkpointer | None:
    """Makes the writer of the checkpoints of a connected run; None where it writes none.

    Args:
        plan: The run.
        config: Its configuration with the measured libraries.
        cluster: Connected services.
        recorder: Writes the files of the run.
        identity: Identity of the run as JSON values.
        limits: Limits on the length of the rows that it draws.
        termination: Handlers of SIGTERM of this process.
    """
    if not config.checkpoint.is_on:
        return None
    facts = {
        "identity": identity,
        "config": plan.algorithm.resolved(config),
        "contents": plan.contents,
        RESPONSE_END: plan.response_end,
        "platform": platform_of(cluster.descriptions),
        "limits": limits_as_json(limits),
    }
    return Checkpointer(
        config.checkpoint,
        CheckpointStore(recorder.path),
        {name: cluster.groups[name] for name in _stateful(config)},
        facts,
        Journal(recorder.path, facts),
        cluster.state_ids,
        lambda: mark_files(recorder.path),
        recorder.progress.message,
        termination,
    )


def _stateful(config: Config) -> list[str]:
    """Returns the names of the services whose state training changes."""
    return [name for name, table in config.services.items() if table.keeps_state]


@contextlib.contextmanager
def _new_directory(plan: Plan) -> Iterator[RunDirectory]:
    """Context manager that makes the run directory, and removes it again where the run ends with an error before it
    has written anything of use."""
    table = plan.config.run
    directory = RunDirectory.create(table.directory, table.name, plan.algorithm.name)
    try:
        yield directory
    except (RlhfError, KeyboardInterrupt) as error:
        # The error of a refused config needs no logs; that of a lost service does.
        unused = {CONFIG_FILE, LOGS} if isinstance(error, ConfigError) else {CONFIG_FILE}
        directory.remove_if_only(unused)
        raise


def _launched_names(config: Config) -> list[str]:
    return [name for name, table in config.services.items() if not table.external]


@contextlib.contextmanager
def explained(launched: LaunchedServices | None) -> Iterator[None]:
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
    started_unix_ns = time.time_ns() if plan.resumes else plan.identity.started_unix_ns
    return session_of(plan.config.run, directory.path.name, started_unix_ns, take_over=take_over)


def session_of(table: RunTable, name: str, started_unix_ns: int, *, take_over: bool) -> Session:
    """Returns a new session with the settings of `[run]`, whose name begins with `name`."""
    return Session(
        name=f"{name}-{secrets.token_hex(4)}",
        started_unix_ns=started_unix_ns,
        seed=table.seed,
        timeout_s=table.call_timeout_s,
        save_timeout_s=table.save_timeout_s,
        balance=table.balance,
        take_over=take_over,
    )


def _data_lines(plan: Plan, config: Config, limit: Limit | None, cluster: Cluster) -> list[str]:
    """Returns lines for the terminal on the rows of a run: how many steps `run.epochs` are, which rows are too long for
    `limit`, or have longer responses than are trained, and which services generate responses without an end."""
    lines = (
        steps_of_epochs(config, len(plan.data[0])),
        prompts_left_out(plan.data, limit),
        responses_cut(config, plan.data, plan.algorithm.columns),
        *responses_without_end(config, plan.algorithm.columns, cluster.descriptions),
        *messages_without_end(config, plan.data, plan.algorithm.columns),
    )
    return [line for line in lines if line]


def pointing_to_log(error: RlhfError, launched: LaunchedServices | None) -> RlhfError:
    """Returns the error itself, or, for an unforeseen exception in a service, an error that also says which log has
    its traceback.

    Args:
        error: The error that ended the run.
        launched: The services that the run launched; None where they were running.
    """
    if type(error) is not RlhfError or not error.remote_traceback or not error.service:
        return error
    log = launched.log_of(error.service) if launched else None
    return RlhfError(f"{error} (traceback: {log or f'the log of services.{error.service}'})")
