"""The interface for scripts and notebooks: `run` executes an algorithm, `resume` goes on with a run from its last
checkpoint, `open_run` opens a run whose calls are made by hand, and resource pools, services and further tables make
its configuration. docs/python.md is its guide.

Importing it needs no torch. Runs leave the process as it is: signal handlers, `sys.path`, the garbage collector.
"""

from __future__ import annotations

from controller.advantage import Advantage
from controller.config.algorithm import AlgorithmTable
from controller.config.checkpoint import CheckpointTable
from controller.config.config import Config, load
from controller.config.data import DataTable, SourceTable
from controller.config.pools import ResourcePool, make_config
from controller.config.rollout import EnvironmentTable, RolloutTable
from controller.config.run import RunTable
from controller.job import FinishedRun, open_run, resume, run
from controller.quickstart import build_quickstart, load_quickstart
from controller.role_groups.dataflow import FutureBatch
from controller.training.algorithm import Algorithm, algorithm
from controller.training.run import Run
from controller.training.step import Step
from rlhf.errors import ConfigError, RlhfError
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.model import OptimizerTable
from settings.reference import ReferenceTable
from settings.reward import RewardTable
from settings.strict import Strict

__all__ = [
    "ActorTable",
    "Advantage",
    "Algorithm",
    "AlgorithmTable",
    "CheckpointTable",
    "Config",
    "ConfigError",
    "CriticTable",
    "DataTable",
    "EnvironmentTable",
    "FinishedRun",
    "FutureBatch",
    "OptimizerTable",
    "ReferenceTable",
    "ResourcePool",
    "RewardTable",
    "RlhfError",
    "RolloutTable",
    "Run",
    "RunTable",
    "SourceTable",
    "Step",
    "Strict",
    "algorithm",
    "build_quickstart",
    "load",
    "load_quickstart",
    "make_config",
    "open_run",
    "resume",
    "run",
]
