"""Times the calls of running services on rows of known lengths, to calibrate the constants of their devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from rich.table import Table

from controller.config.config import Config
from controller.job import open_run
from controller.mapping.calibrate import Calibration, ProbedCall, calibrate, table_text
from controller.mapping.configured import ConfiguredModels, models_of
from controller.mapping.dataflow import Call
from controller.mapping.devices import DeviceGroup
from controller.mapping.problem import Model
from controller.mapping.record import record_dataflow
from controller.mapping.workload import LengthShares, Workload
from controller.optimizer_steps import as_of_a_long_run
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import results
from controller.role_groups.roles import ActorGroup, CriticGroup
from controller.simulation.run import NOTHING
from controller.training.algorithm import Algorithm
from controller.training.roles import Actor, Critic
from controller.training.run import Run, wants_text
from controller.training.step import Step
from nccl_transfer.refs.batch import lengths_of
from nccl_transfer.refs.columns import Jagged
from reports.units import counted, seconds_text
from rlhf.errors import ConfigError, RlhfError

REPEATS = 5
"""Number of times that each call is timed, after once that does not count. The least counts: other work on
the machine only adds to it."""


@dataclass(frozen=True)
class Probed:
    """Services whose calls were timed.

    Attributes:
        group: Their devices, with the table from before.
        calls: The calls.
        calibration: The constants that are fitted to them.
        source: Where and when they were measured, one line.
    """

    group: DeviceGroup
    calls: Sequence[ProbedCall]
    calibration: Calibration
    source: str

    @property
    def calibrated(self) -> DeviceGroup:
        """The devices with the constants that are fitted."""
        return replace(self.group, table=self.calibration.table)

    @property
    def text(self) -> str:
        """The devices as a table for `rlhf-map --table`."""
        return table_text(self.group.name, self.calibration.table, self.calibration.fitted, self.source)


def probe_services(
    config: Config, algorithm: Algorithm, group: DeviceGroup, *, launch: bool = False
) -> Probed:
    """Times the calls of running services in a session of its own, and calibrates the constants of their devices.

    Args:
        config: Config of the services, and of the rows.
        algorithm: Algorithm whose services they are.
        group: Their devices.
        launch: Whether to start the services, and stop them at the end.

    Raises:
        ConfigError: The config cannot be used, or the costs of one of its models are not known.
        Refused: A run has the services.
        RlhfError: A call failed.
    """
    flow = record_dataflow(algorithm, algorithm.configure(config))
    models = models_of(algorithm.configure(config), flow)
    with open_run(_probe_config(config), algorithm, launch=launch) as run:
        calls = _probe(run, models, flow)
        described = [each.description for each in run.groups.values()]
    if not calls:
        raise ConfigError(f"{algorithm.name} has no actor, critic or reference whose calls could be timed")
    cpus = ", ".join(sorted({each.cpu for each in described if each.cpu}))
    when = time.strftime("%Y-%m-%d", time.gmtime())
    source = (
        f"Measured by rlhf-map probe on {when}, {cpus or 'CPU not known'}, {described[0].version}: {algorithm.name}, "
        f"{counted(calls[0].workload.rows, 'row')}"
    )
    return Probed(group, calls, calibrate(group, calls), source)


def probe_table(probed: Probed) -> Table:
    """Returns a table of the measured times of calls, and of the predicted ones before and after the fit of the
    constants."""
    table = Table("call", "ranks", "measured", "before", "fitted", "ratio", box=None, pad_edge=False)
    for call in probed.calls:
        fitted = call.predicted_s(probed.calibrated)
        times = (call.seconds, call.predicted_s(probed.group), fitted)
        ranks = str(call.model.use.ranks)
        table.add_row(call.name, ranks, *map(seconds_text, times), f"{fitted / call.seconds:.2f}")
    return table


def probe_lines(probed: Probed) -> Iterator[str]:
    """Yields a line for each constant that is fitted, before and after."""
    for name in probed.calibration.fitted:
        before, after = getattr(probed.group.table, name), getattr(probed.calibration.table, name)
        yield f"{name}: {before:.4g} before, {after:.4g} fitted"


def _probe_config(config: Config) -> Config:
    """Returns the config of a run that times calls: as many steps as calls are repeated, one after another, without
    evaluations, samples, files of rows, checkpoints, trackers and a warm-up of critics. Updates train on all rows, also
    on those that were cut off, so that their times are those of the rows that the workload has. Learning rates whose
    schedule follows the length of the run are those at the start of a long one."""
    run = {
        "name": "probe",
        "steps": 1 + REPEATS,
        "epochs": None,
        "ahead": 0,
        "evaluate_every": 0,
        "samples": 0,
        "rollouts_every": 0,
        "verify_every": 0,
    }
    config = config.without_outputs()
    algorithm = config.algorithm.model_copy(update={"critic_warmup_steps": 0, "on_truncated": "train"})
    return config.model_copy(
        update={
            "services": {name: as_of_a_long_run(table) for name, table in config.services.items()},
            "run": config.run.model_copy(update=run),
            "algorithm": algorithm,
            "rollout": config.rollout.model_copy(update={"segments": 1, "chunks": 1}),
        }
    )


def _probe(run: Run, models: ConfiguredModels, algorithm_calls: Sequence[Call]) -> list[ProbedCall]:
    """Times the calls of a run's actor, critics and references, each alone, on the prompts of its data: generation of
    responses and of one token, forward passes, and updates in the mini-batches of the config and in one. Then, also
    where a call has failed, loads the model directories again into what learns.

    Args:
        run: A run of `_probe_config`. Its updates change the weights.
        models: Models of its config.
        algorithm_calls: Calls of a step of its algorithm, for the columns that a call reads of other services.
    """
    reads = {(call.service, call.method): call.reads for call in algorithm_calls}
    notes = _Notes(run.config, {model.name: model for model in models.models}, reads)
    try:
        for number, step in enumerate(run.steps(NOTHING)):
            notes.counts = number > 0
            step.finish(*_timed_step(run, step, notes))
    except BaseException:
        try:
            _load_models(run)
        except RlhfError as error:
            run.recorder.progress.message(str(error))
        raise
    _load_models(run)
    return [min(calls, key=lambda call: call.seconds) for calls in notes.seen.values()]


def _load_models(run: Run) -> None:
    """Loads the model directories into all services that learn. Raises RlhfError with the names of those that could
    not, after the others have."""
    loaded = {
        name: group.begin_session(keep_weights=False).calls
        for name, group in run.groups.items()
        if run.config.services[name].keeps_state
    }
    errors = {}
    for name, calls in loaded.items():
        try:
            results(calls)
        except RlhfError as error:
            errors[name] = error
    if errors:
        raise RlhfError(
            f"the updates of the probe are not undone in {', '.join(errors)} until a run begins there: "
            f"{'; '.join(map(str, errors.values()))}"
        )


@dataclass
class _Notes:
    """Notes the seconds of calls with their rows.

    Attributes:
        config: Config of the run.
        models: Models by name of their service.
        reads: Columns that a call reads of other services, by service and method.
        counts: Whether calls count; the first ones do not.
        seen: Timed calls by name.
    """

    config: Config
    models: Mapping[str, Model]
    reads: Mapping[tuple[str, str], tuple[str, ...]]
    counts: bool = False
    seen: dict[str, list[ProbedCall]] = field(default_factory=dict)

    def timed(self, made: FutureBatch, batch: FutureBatch, variant: str = "", minis: int = 1) -> FutureBatch:
        """Waits for a call and records its time; returns `made`.

        Args:
            made: Columns that the call makes.
            batch: Its rows, whose lengths are noted; a call that generates makes their columns itself.
            variant: What distinguishes it from other calls of the method.
            minis: Number of mini-batches.
        """
        (record,) = made.records()
        name = f"{record.service}.{record.method}{variant}"
        host = self.config.also_served.get(record.service, record.service)
        if self.counts and host in self.models:
            rows, table = batch | made, self.config.algorithm
            lengths = _shares(rows, "prompt_ids"), _shares(rows, "response_ids")
            workload = Workload(batch.rows, *lengths, minis, table.epochs, table.critic_epochs)
            call = Call(
                record.service, record.method, batch.rows, self.reads.get((record.service, record.method), ())
            )
            model = replace(self.models[host], calls=(call,))
            timed = ProbedCall(name, model, workload, record.ended_s - record.started_s)
            self.seen.setdefault(name, []).append(timed)
        return made


def _timed_step(run: Run, step: Step, notes: _Notes) -> Iterator[FutureBatch]:
    """Makes each kind of call, one after another; yields the rows, and then the batches of the updates."""
    config, prompts = run.config, step.prompts
    roles = {name: table.role for name, table in config.services.items()}
    roles |= {role: role for role in config.also_served}
    short = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_response_tokens": 1})}
    )
    batch, minis = prompts | step.groups, config.mini_batches(prompts.rows)
    # With one mini-batch too, so that what a mini-batch takes is known apart from what its rows take.
    schedules = (("", config, minis), (", whole" if minis > 1 else "", _in_one(config, prompts.rows), 1))
    actors, critics = _of_role(roles, "actor"), _of_role(roles, "critic")
    for name in actors:
        batch |= notes.timed(_actor(run, name, config).generate_sequences(prompts), prompts)
        batch |= notes.timed(_actor(run, name, config).log_likelihood(batch), batch)
    for name in _of_role(roles, "reference"):
        batch |= notes.timed(run.reference(name).compute_ref_log_prob(batch), batch)
    made_up = _made_up(run.lengths(batch), config.run.seed)
    batch |= FutureBatch.of(advantages=made_up, returns=made_up)
    yield batch
    for name in critics:
        batch |= notes.timed(run.critic(name).compute_values(batch), batch)
        for variant, chosen, count in schedules:
            group = run.group(name, CriticGroup)
            made = Critic(group, chosen, run.step_of, group).update_critic(batch)
            yield notes.timed(made, batch, variant, count)
    for name in actors:
        for variant, chosen, count in schedules:
            yield notes.timed(_actor(run, name, chosen).update_actor(batch), batch, variant, count)
            # After an update, so that every call that generates has the transition, as in a step.
            if chosen is config:
                notes.timed(_actor(run, name, short).generate_sequences(prompts), prompts, ", one token")


def _of_role(roles: Mapping[str, str], role: str) -> list[str]:
    return [name for name, each in roles.items() if each == role]


def _actor(run: Run, name: str, config: Config) -> Actor:
    """Returns an actor whose own ranks generate, with texts where a reward of the run reads them."""
    return Actor(run.group(name, ActorGroup), config, returns_text=wants_text(run), step_of=run.step_of)


def _in_one(config: Config, rows: int) -> Config:
    """Returns a config whose updates take the rows in one mini-batch."""
    return config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"mini_batch_size": rows})}
    )


def _made_up(lengths: np.ndarray, seed: int) -> Jagged[np.ndarray]:
    """Returns a small random number for each token of responses of these lengths."""
    numbers = np.random.default_rng(seed).normal(0, 0.1, int(lengths.sum()))
    return Jagged(numbers.astype(np.float32), lengths.astype(np.int64))


def _shares(batch: FutureBatch, name: str) -> LengthShares:
    """Returns the distribution of the lengths of a column of tokens."""
    tokens, counts = np.unique(lengths_of(batch.result([name])[name]), return_counts=True)
    return LengthShares.of(*zip(tokens.tolist(), counts.tolist(), strict=True))
