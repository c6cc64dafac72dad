"""Estimates and checks before services start: arena memory of a step, and whether models fit their meshes."""

from __future__ import annotations

import math

from controller.config.config import Config
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.fit import check_model_fits
from settings.model import ModelTable
from settings.reference import ReferenceTable

ID_BYTES, FLOAT_BYTES = 4, 4
PROMPT_BYTES: dict[type[ModelTable], int] = {ActorTable: ID_BYTES}
"""Bytes that a service keeps in its arena for each prompt token (column prompt_ids), by type of its table."""
RESPONSE_BYTES: dict[type[ModelTable], int] = {
    # response_ids, rollout_log_probs, log_probs and advantages; values and returns; ref_log_probs.
    ActorTable: ID_BYTES + 3 * FLOAT_BYTES,
    CriticTable: 2 * FLOAT_BYTES,
    ReferenceTable: FLOAT_BYTES,
}
"""Bytes that a service keeps in its arena for each response token, by type of its table."""


def arena_mb_needed(config: Config, prompt_tokens: int) -> dict[str, int]:
    """Estimates the arena that each actor, critic and reference needs per rank, in MiB by service: it must hold their
    columns of the largest batch, that of a step or of an evaluation, with all responses of maximum length.

    Args:
        config: Configuration of the run.
        prompt_tokens: Length of the longest prompt, in tokens.
    """
    batch_rows = max(config.rows_per_step, config.run.evaluation_rows)
    needed = {}
    for name, table in config.services.items():
        if type(table) not in RESPONSE_BYTES or not isinstance(table, ModelTable):
            continue
        rows = math.ceil(batch_rows / table.data_ranks)
        row_bytes = PROMPT_BYTES.get(type(table), 0) * prompt_tokens
        row_bytes += RESPONSE_BYTES[type(table)] * config.rollout.max_response_tokens
        needed[name] = max(1, math.ceil(rows * row_bytes / 2**20))
    return needed


def arena_warnings(config: Config, prompt_tokens: int) -> list[str]:
    """Returns one warning for each service whose `arena_mb` is below the estimate of `arena_mb_needed`."""
    return [
        f"services.{name}.arena_mb: {config.services[name].arena_mb} may be too small: if all responses have "
        f"rollout.max_response_tokens, {config.rollout.max_response_tokens}, each rank needs {needed}"
        for name, needed in arena_mb_needed(config, prompt_tokens).items()
        if needed > config.services[name].arena_mb
    ]


def check_models(config: Config) -> None:
    """Checks that the models of all services can be divided over their meshes. Models whose config.json this host
    cannot read pass.

    Raises:
        ConfigError: A model cannot be divided over its mesh; see `settings.fit.check_model_fits`.
    """
    for name, table in config.services.items():
        check_model_fits(name, table)
