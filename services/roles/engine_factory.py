"""Builds the training engine that a service's table of the configuration names."""

from __future__ import annotations

import math

from services.engines.base import EngineSetup, OptimizerOptions, TrainEngine
from services.engines.implementation import implementation_of
from settings.model import ModelTable, OptimizerTable


def make_engine(table: ModelTable, setup: EngineSetup) -> TrainEngine:
    """Builds the engine named by `table.engine` with the model of directory `table.model`. Collective.

    Args:
        table: Table of the service.
        setup: Loader of the model, mesh, device and optimizer.

    Raises:
        ConfigError: The engine's libraries are not installed, or it cannot be imported.
        FileNotFoundError, ValueError: The model cannot be loaded, or does not fit the mesh.
    """
    spec = table.engine_spec
    reference = spec.adapters if table.has_adapters else spec.implementation
    implementation = implementation_of("engine", table.engine, spec, TrainEngine, reference)
    options = spec.options.model_validate(getattr(table, spec.options_key))
    return implementation.create(table, options, setup)


def optimizer_options(table: OptimizerTable) -> OptimizerOptions:
    """Returns an optimizer's table of the configuration as the options that engines take."""
    return OptimizerOptions(
        lr=table.learning_rate,
        betas=table.betas,
        eps=table.eps,
        weight_decay=table.weight_decay,
        weight_decay_on=table.weight_decay_on,
        max_grad_norm=table.max_grad_norm,
        reject_grad_norm=table.reject_grad_norm or math.inf,
        warmup_steps=table.num_warmup_steps,
        schedule=table.schedule,
        total_steps=table.total_steps,
        min_ratio=table.min_ratio,
    )
