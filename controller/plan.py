"""The plan of a run: its algorithm, checked configuration and data, before it is connected to services."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from controller.algorithms import AnyAlgorithm, as_algorithm, reference_of
from controller.checkpoints.facts import (
    changed_learning_rates,
    check_config,
    check_contents,
    check_response_end,
    contents_of,
)
from controller.checkpoints.resume_point import ResumePoint
from controller.config.config import Config, with_settings
from controller.data.prompts import PromptData, TextData, load_data
from controller.data.response_end import response_end
from controller.epochs import with_steps
from controller.foresight import check_models, fetch_descriptions
from controller.identity import Identity
from controller.optimizer_steps import with_total_steps
from controller.tracking.contents import CONFIG_FILE, RUN_FILE, SUMMARY_FILE
from controller.tracking.run_directory import read_json
from controller.tracking.traces import check_traces
from controller.tracking.trackers import find_trackers
from controller.training.algorithm import Algorithm
from controller.training.evaluation import has_stalled
from reports.units import counted
from rlhf.errors import ConfigError
from settings.strict import read_toml, validate


@dataclass(frozen=True)
class Plan:
    """A run whose configuration and data were checked, and that is not connected to services yet.

    Attributes:
        algorithm: The algorithm.
        config: Configuration with the algorithm's defaults; see `Algorithm.configure`.
        data: Training prompts and held-out prompts.
        pretrain: Texts of data.pretrain; None where it is not set.
        identity: Identity of the run.
        resumes: Point that the run is resumed from; None for a run that begins.
        elsewhere: Whether it may be resumed on services that compute in another way.
        loads: Directory of a sharded checkpoint that a service begins with in place of its model directory, by name;
            of a run that is not resumed.
    """

    algorithm: Algorithm
    config: Config
    data: tuple[PromptData, PromptData]
    pretrain: TextData | None
    identity: Identity
    resumes: ResumePoint | None = None
    elsewhere: bool = False
    loads: Mapping[str, Path] = field(default_factory=dict)

    @staticmethod
    def of(algorithm: Algorithm, config: Config) -> Plan:
        """Makes the plan of a run that starts now: checks configuration and models, and reads the data. Raises
        ConfigError where one of them cannot be used."""
        started_unix_ns = time.time_ns()
        config = algorithm.configure(config)
        data, pretrain = _read(algorithm, config, started_unix_ns)
        config = with_total_steps(with_steps(config, len(data[0])))
        identity = Identity.of(reference_of(algorithm), config.run.seed, started_unix_ns)
        return Plan(algorithm, config, data, pretrain, identity)

    @staticmethod
    def resuming(
        run_dir: Path,
        algorithm: AnyAlgorithm | None,
        settings: tuple[str, ...],
        *,
        elsewhere: bool,
        is_warm: bool = False,
    ) -> Plan:
        """Makes the plan of a run that goes on.

        Args:
            run_dir: The run directory.
            algorithm: The algorithm. Default: the one whose name the run has recorded.
            settings: Overrides "key.path=value" of the run's config.
            elsewhere: Whether it may go on on other meshes and engines, and on services that compute in another way.
            is_warm: Whether its services run, so that they may still hold the state after its last step: it then goes
                on from its journal, if there is one. False: from its newest checkpoint.

        Raises:
            ConfigError: There is no checkpoint, the run has ended, or its config, data, tokenizer or models are not
                those of the checkpoint.
            RlhfError: A file of the checkpoint is damaged; the text names it.
        """
        point = (ResumePoint.journaled(run_dir) if is_warm else None) or ResumePoint.find(run_dir)
        stored = point.facts["identity"]
        found = as_algorithm(stored["algorithm"] if algorithm is None else algorithm)
        if reference_of(found) != stored["algorithm"]:
            raise ConfigError(f"{run_dir} is a run of {stored['algorithm']}, not of {reference_of(found)}")
        config = found.configure(_config_of(run_dir, settings))
        check_config(with_new_keys(found, point.facts["config"]), found.resolved(config), elsewhere=elsewhere)
        if config.run.epochs is None:
            _check_unfinished(point, config)
        data, pretrain = _read(found, config, point.started_unix_ns)
        config = with_total_steps(with_steps(config, len(data[0])))
        identity = Identity.of(stored["algorithm"], config.run.seed, point.started_unix_ns)
        return Plan(found, config, data, pretrain, identity, elsewhere=elsewhere).at(point)

    def at(self, point: ResumePoint) -> Plan:
        """Returns the plan of the same run that goes on from another point. Raises ConfigError where its config, data,
        tokenizer or models are not those of that point, or the run has ended there."""
        resolved = self.algorithm.resolved(self.config)
        before = with_new_keys(self.algorithm, point.facts["config"])
        check_config(before, resolved, elsewhere=self.elsewhere)
        _check_unfinished(point, self.config)
        check_contents(point.facts["contents"], self.contents)
        check_response_end(point.facts, self.response_end)
        stored, now = point.facts["identity"], time.time_ns()
        this = Identity.of(stored["algorithm"], self.config.run.seed, now)
        changed = changed_learning_rates(before, resolved)
        identity = this.resuming(stored, read_json(point.run_dir / RUN_FILE), point.step, changed)
        plan = replace(self, resumes=point, identity=identity)
        vars(plan)["contents"] = self.contents  # the files are read once
        return plan

    @cached_property
    def contents(self) -> dict[str, str]:
        """Fingerprints of data, tokenizer and models, by config key; the first use reads the files."""
        return contents_of(self.config, self.data, self.pretrain)

    @cached_property
    def response_end(self) -> str | None:
        """Text with which responses to conversations that the algorithm learns end, see `response_end`; None where it
        learns none. The first use reads the files of the tokenizer."""
        is_learned = self.algorithm.columns and any(each.has_conversations for each in self.data)
        return response_end(self.config) if is_learned else None

    def resolved(self, config: Config) -> str:
        """Returns `config` with all defaults as TOML, below a comment with the identity of the run."""
        return self.identity.as_comment() + tomli_w.dumps(self.algorithm.resolved(config))


def with_new_keys(algorithm: Algorithm, tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tables of a checkpoint's config with the defaults of keys that they lack: those of a later version
    than wrote it. Returns them as they are where this version cannot read them.

    Args:
        algorithm: Algorithm of the run.
        tables: Tables of the config, as `Algorithm.resolved` returned them.
    """
    try:
        return algorithm.resolved(algorithm.configure(validate(Config, dict(tables), "of the checkpoint")))
    except ConfigError:
        return tables


def _read(
    algorithm: Algorithm, config: Config, started_unix_ns: int
) -> tuple[tuple[PromptData, PromptData], TextData | None]:
    """Checks the trackers and traces of a configuration, fetches what the controller reads of models on the hub, checks
    the models, and opens and checks the data. Returns the prompts, and the texts of data.pretrain. Raises ConfigError
    where one of them cannot be used."""
    find_trackers(config.tracking.trackers)
    check_traces(config.tracking)
    fetch_descriptions(config)
    check_models(config)
    # Which rewards an algorithm without a declaration trains by is not known.
    data = load_data(config, algorithm.columns, started_unix_ns / 1e9, algorithm.services or ())
    texts = config.data.pretrain
    return data, TextData.load(texts, "data.pretrain") if texts else None


def _config_of(run_dir: Path, settings: tuple[str, ...]) -> Config:
    """Reads the config of a run with `settings` put into it. Where the run directory was moved, `run.directory` is its
    parent now."""
    path = run_dir / CONFIG_FILE
    config = validate(Config, with_settings(read_toml(path), settings), str(path))
    parent = run_dir.resolve().parent
    if Path(os.path.realpath(config.run.directory)) == parent:  # Path.resolve raises in a loop of links
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"directory": parent})})


def _check_unfinished(point: ResumePoint, config: Config) -> None:
    """Raises ConfigError where a run has ended after the step of a point, of a config whose steps are known."""
    if not (point.run_dir / SUMMARY_FILE).exists():
        return
    if point.run["is_ended"]:
        raise ConfigError(f"{point.run_dir}: the algorithm has ended the run after step {point.step}")
    if has_stalled(config, point.run["evaluations"]):
        raise ConfigError(
            f"{point.run_dir}: run.patience, {config.run.patience}, has ended the run after step {point.step}; --set "
            "run.patience=NUMBER, with a larger number or 0, goes on"
        )
    if point.step >= config.run.steps:
        key = "steps" if config.run.epochs is None else "epochs"
        raise ConfigError(
            f"{point.run_dir}: the run has ended after its {counted(point.step, 'step')}; --set run.{key}=NUMBER, "
            "with a larger number, goes on"
        )
