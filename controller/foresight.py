"""Estimates and checks before services start: arena memory of a step, and whether models fit their meshes; and what the
controller reads of models on the hub."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controller.config.config import Config
from controller.data.chat import SPECIAL_TOKENS_MAP, TOKENIZER, TOKENIZER_CONFIG
from rlhf.addresses import address_host
from rlhf.errors import ConfigError
from rlhf.roles import find_role
from settings.fit import check_model_fits
from settings.generation import GeneratingTable
from settings.hub import DESCRIPTION, directory_problem, fetch, hub_model
from settings.memory.vllm_cache import check_vllm_cache
from settings.model import LoadedModelTable, ModelTable
from settings.reward import RewardTable


def arena_mb_needed(
    config: Config, prompt_tokens: int, further_responses: tuple[int, int] = (0, 0)
) -> dict[str, int]:
    """Estimates the arena that services need per rank, in MiB by service: it must hold their columns of the largest
    batch, that of a step or of an evaluation, and of `run.ahead` further steps, with all responses of maximum length.
    Services of roles that keep no columns of tokens are left out.

    Args:
        config: Configuration of the run.
        prompt_tokens: Length of the longest prompt, in tokens.
        further_responses: Responses that the algorithm keeps beside one per row, of a step and of a batch of an
            evaluation (`controller.training.algorithm.Algorithm.further`).
    """
    spec = find_role("rollout")
    generated_bytes = spec.prompt_token_bytes * prompt_tokens
    generated_bytes += spec.response_token_bytes * config.rollout.max_response_tokens
    turns_bytes = _turn_bytes(config, prompt_tokens)
    samples = [table.samples for table in config.evaluations.values()]
    needed = {}
    for name, table in config.services.items():
        spec = find_role(table.role)
        row_bytes = spec.prompt_token_bytes * prompt_tokens
        row_bytes += spec.response_token_bytes * config.rollout.max_response_tokens
        if not row_bytes:
            continue
        further_bytes = 0
        if isinstance(table, GeneratingTable) and table.generates:
            row_bytes += turns_bytes
            further_bytes = generated_bytes + turns_bytes
        ranks = table.data_ranks if isinstance(table, ModelTable) else table.ranks
        step, evaluation = (
            math.ceil(rows / ranks) * row_bytes + math.ceil(further / ranks) * further_bytes
            for rows, further in zip(
                (config.rows_per_step, max(config.run.evaluation_rows, *samples)),
                further_responses,
                strict=True,
            )
        )
        # Rows of the steps ahead are there beside the largest batch.
        needed[name] = max(1, math.ceil((config.run.ahead * step + max(step, evaluation)) / 2**20))
    return needed


def _turn_bytes(config: Config, prompt_tokens: int) -> int:
    """Returns the bytes per row of what the turns of episodes but the last leave in the arena: int32 ids, a mask of
    uint8 and float32 log-probabilities of the response so far."""
    environment = config.rollout.environment
    if not environment.factory:
        return 0
    return (environment.turns - 1) * (4 * prompt_tokens + 9 * config.rollout.max_response_tokens)


def arena_warnings(
    config: Config, prompt_tokens: int, further_responses: tuple[int, int] = (0, 0)
) -> list[str]:
    """Returns one warning for each service whose `arena_mb` is below the estimate of `arena_mb_needed`, which takes the
    same arguments."""
    return [
        f"services.{name}.arena_mb: {config.services[name].arena_mb} may be too small: if all responses have "
        f"rollout.max_response_tokens, {config.rollout.max_response_tokens}, each rank needs {needed}"
        for name, needed in arena_mb_needed(config, prompt_tokens, further_responses).items()
        if needed > config.services[name].arena_mb
    ]


def fetch_descriptions(config: Config) -> None:
    """Downloads the config and the tokenizer of models on the hub, which the controller reads, into this host's cache.
    Where that fails, it is logged alone: as model directories, they may be on the hosts of the services only."""
    for name, table in config.services.items():
        model = table.model_directory
        if model is not None and hub_model(model) is not None:
            try:
                fetch(model, f"services.{name}.model", config.run.connect_timeout_s, DESCRIPTION)
            except ConfigError as error:
                logging.warning("%s", error)


def missing_models(config: Config) -> dict[str, str]:
    """Returns a line for each service whose model is not on the hub and is no directory of this host, by service."""
    models = {name: table.model_directory for name, table in config.services.items()}
    return {
        name: f"services.{name}.model: {problem}"
        for name, model in models.items()
        if model is not None and hub_model(model) is None and (problem := directory_problem(model))
    }


def check_models(config: Config) -> None:
    """Checks that the models of all services can be divided over their meshes, accept a prompt with a response of
    maximum length and have the tokenizer of the actor, and that a reward function that returns what environments have
    given has an environment. Models whose files this host cannot read pass.

    Raises:
        ConfigError: The check of a model or a function failed; see `settings.fit.check_model_fits` and
            `settings.memory.vllm_cache.check_vllm_cache`.
    """
    _check_tokenizers(config)
    for name, table in config.services.items():
        check_model_fits(name, table, config.rollout.max_response_tokens)
        check_vllm_cache(name, table, config.row_tokens)
        returns_given = isinstance(table, RewardTable) and (table.kind, table.function) == (
            "function",
            "environment",
        )
        if returns_given and not config.rollout.environment.factory:
            raise ConfigError(
                f"services.{name}.function: environment returns the reward that the environment of an episode has "
                "given, and rollout.environment.factory names none"
            )


def _check_tokenizers(config: Config) -> None:
    """Raises ConfigError where the tokenizer of a model gives a token another id than that of an actor, whose token ids
    the model reads. Services are asked for their vocabularies too when the run connects."""
    models = {n: t.model_directory for n, t in config.services.items() if isinstance(t, LoadedModelTable)}
    read = {path: _token_ids(path) for path in set(models.values()) if len(set(models.values())) > 1}
    for actor in (name for name in models if config.services[name].role == "actor"):
        for name, path in models.items():
            own, expected = read.get(path), read.get(models[actor])
            if not own or not expected or own == expected:
                continue
            ids = {t: (own.get(t, -1), expected.get(t, -1)) for t in own.keys() | expected.keys()}
            differing = [t for t, (a, b) in ids.items() if a != b and None not in (a, b)]
            if differing:
                token = min(differing)
                raise ConfigError(
                    f"services.{name}.model: its tokenizer is not that of services.{actor}: token {token!r} is "
                    f"{own.get(token, 'none')} there, and {expected.get(token, 'none')} in {models[actor]}"
                )


def _token_ids(model: Path) -> dict[str, int | None]:
    """Reads the id of each token from the tokenizer's files in a model directory; None for what they name without an
    id, which may be a special token that gets one when the tokenizer is loaded. Returns an empty dictionary where
    tokenizer.json or tokenizer_config.json cannot be read."""
    try:
        tables: Any = json.loads((model / TOKENIZER).read_text())
        config: Any = json.loads((model / TOKENIZER_CONFIG).read_text())
        known = tables["model"]["vocab"]
        # A Unigram model lists its tokens with scores, in the order of their ids.
        ids = known if isinstance(known, dict) else {token: i for i, (token, _) in enumerate(known)}
        added = {each["content"]: each["id"] for each in tables.get("added_tokens", ())}
        numbered = {each["content"]: int(i) for i, each in config.get("added_tokens_decoder", {}).items()}
        further = [model / name for name in (SPECIAL_TOKENS_MAP, "added_tokens.json")]
        named = _texts([config, *(json.loads(file.read_text()) for file in further if file.is_file())])
        return {**dict.fromkeys(named), **ids, **added, **numbered}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.items() if isinstance(value, dict) else value:
            yield from _texts(list(each) if isinstance(each, tuple) else each)


def check_listening(config: Config) -> None:
    """Checks that no service, but those that are external, would listen for other hosts in plaintext. Reads the files
    of `[security]`.

    Raises:
        ConfigError: A service would, without `allow_plaintext`, or a file cannot be read.
    """
    security = config.security.load()
    for name, table in config.services.items():
        if not table.external:
            host = address_host(table.bind_address)
            security.check_listening(host, f"services.{name}.{table.bind_key}")
