"""Checks across the tables of a configuration. Each raises ValueError where it fails; the text has the key, the
values and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from pydantic import ValidationError

from controller.config.algorithm import MAX_KL_ERROR, AlgorithmTable
from controller.config.checkpoint import CheckpointTable
from controller.config.data import DataTable
from controller.config.devices import check_names
from controller.config.rollout import EvaluationTable, RolloutTable
from controller.config.run import RunTable, check_name
from reports.units import counted
from rlhf.addresses import spelled_out
from settings.actor import ActorTable
from settings.critic import CriticTable
from settings.explain import explain
from settings.rollout import RolloutServiceTable
from settings.service import ServiceTable
from settings.values import ValuesTable

Services = Mapping[str, ServiceTable]
"""Tables of the services of a run, by name."""
_TRUNCATING = "rollout.top_k, rollout.top_p or rollout.min_p"


def check_pools(services: Services, pools: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError if device names of a pool are invalid (`check_names`), or if a service names a pool that does
    not exist or has fewer devices than the service has ranks. A service need not name a pool."""
    for pool, devices in pools.items():
        check_names(f"pools.{pool}", devices)
    for name, table in services.items():
        if table.pool and table.pool not in pools:
            known = ", ".join(sorted(pools)) or "none"
            raise ValueError(f"services.{name}.pool: no pool {table.pool!r}; known: {known}")
        if table.pool and len(pools[table.pool]) < table.ranks:
            raise ValueError(
                f"services.{name}.pool: {table.pool!r} has {counted(len(pools[table.pool]), 'device')} for "
                f"{counted(table.ranks, 'rank')}"
            )


def check_service_names(services: Services) -> None:
    """Raises ValueError if the name of a service cannot be the name of a file, as that of its log."""
    for name in services:
        try:
            check_name(name)
        except ValueError as error:
            raise ValueError(f"services: {error}") from None


def check_turns(devices: Mapping[str, Set[str]], services: Services) -> None:
    """Raises ValueError where memory takes turns (`device_memory_gb`) and a service of role rollout or values shares a
    device: its weights may be lost when it is offloaded, and a transfer to it needs both services on the device.

    Args:
        devices: Names of the devices of each service, by name.
        services: Tables of the services.
    """
    for name, table in services.items():
        others = [other for other in services if other != name and devices[other] & devices[name]]
        if isinstance(table, RolloutServiceTable | ValuesTable) and others:
            raise ValueError(
                f"device_memory_gb: services.{name} computes with weights of another service and cannot be offloaded, "
                f"so it needs devices of its own; it shares {min(devices[name] & devices[others[0]])} with "
                f"services.{others[0]}"
            )


def check_rewards(services: Services, rewards: Mapping[str, Mapping[str, float]]) -> None:
    """Raises ValueError if a table of `[rewards]` lists no service, or has the name of a service."""
    for name, weights in rewards.items():
        if not weights:
            raise ValueError(f"rewards.{name} has no services")
        if name in services:
            raise ValueError(f"rewards.{name} is the name of a service already")


def check_values(services: Services) -> None:
    """Raises ValueError if `weights_of` of a service of role values does not name a critic, or names the critic of
    another service of role values."""
    critics = [name for name, table in services.items() if isinstance(table, CriticTable)]
    seen: dict[str, str] = {}
    for name, table in services.items():
        if not isinstance(table, ValuesTable):
            continue
        if table.weights_of not in critics:
            known = ", ".join(sorted(critics)) or "none"
            raise ValueError(
                f"services.{name}.weights_of: no service {table.weights_of!r} of role critic; known: {known}"
            )
        other = seen.setdefault(table.weights_of, name)
        if other != name:
            raise ValueError(
                f"services.{name}.weights_of: services.{other} computes the values of services.{table.weights_of}"
            )


def check_addresses(services: Services) -> None:
    """Raises ValueError where two services have the same address, also in two spellings."""
    seen: dict[tuple[str, int], str] = {}
    for name, table in services.items():
        for place in spelled_out(table.address):
            if (other := seen.setdefault(place, name)) != name:
                raise ValueError(
                    f"services.{name}.address: {table.address} is taken by services.{other}, whose address is "
                    f"{services[other].address}"
                )


def check_batch(
    data: DataTable, rollout: RolloutTable, algorithm: AlgorithmTable, services: Services
) -> None:
    """Raises ValueError unless the rows of a step are a multiple of `mini_batch_size`, and this is a multiple of each
    service's `mini_batch_parts`: the number of data-parallel ranks of actors and critics, 1 of other services."""
    rows = data.prompts_per_step * rollout.samples_per_prompt
    size = algorithm.mini_batch_size
    if rows % size:
        raise ValueError(
            f"algorithm.mini_batch_size: {size} does not divide the {counted(rows, 'row')} of a step "
            f"(data.prompts_per_step {data.prompts_per_step} x rollout.samples_per_prompt {rollout.samples_per_prompt})"
        )
    for name, table in services.items():
        if size % table.mini_batch_parts:
            raise ValueError(
                f"algorithm.mini_batch_size: {size} rows do not divide over the {table.mini_batch_parts} data ranks "
                f"of services.{name}"
            )


def check_kl(algorithm: AlgorithmTable, rows_per_step: int) -> None:
    """Raises ValueError unless an adaptive KL coefficient (`kl_target` above 0) starts above 0, and `kl_horizon` is
    above `MAX_KL_ERROR` times the rows of a step."""
    if not algorithm.kl_target:
        return
    if not algorithm.kl_reward_coefficient:
        raise ValueError("algorithm.kl_reward_coefficient: an adaptive one (kl_target) has to start above 0")
    if algorithm.kl_horizon <= rows_per_step * MAX_KL_ERROR:
        raise ValueError(
            f"algorithm.kl_horizon: {algorithm.kl_horizon} is too short for {rows_per_step} rows a step; "
            f"more than {MAX_KL_ERROR:g} times as many are needed"
        )


def check_correction(algorithm: AlgorithmTable, rollout: RolloutTable) -> None:
    """Raises ValueError where `rollout_correction` is on, but the training engine does not recompute log-probabilities
    or top_k, top_p or min_p truncate sampling."""
    if algorithm.rollout_correction == "none":
        return
    if not algorithm.recompute_log_probs:
        raise ValueError(
            "algorithm.rollout_correction: needs recompute_log_probs: it corrects the rollout's by the training "
            "engine's"
        )
    if rollout.truncates:
        raise ValueError(
            f"algorithm.rollout_correction: does not go with {_TRUNCATING}: the rollout's "
            "log-probabilities are those of the truncated distribution, so that the ratio to the training engine's "
            "would be the probability that truncation kept, at every token"
        )


def check_drift(algorithm: AlgorithmTable, rollout: RolloutTable) -> None:
    """Raises ValueError where `max_log_prob_drift` is not 0 and either `recompute_log_probs` is false, or top_k,
    top_p or min_p truncate sampling."""
    if not algorithm.max_log_prob_drift:
        return
    if not algorithm.recompute_log_probs:
        raise ValueError(
            "algorithm.max_log_prob_drift: needs recompute_log_probs: there is nothing to compare else"
        )
    if rollout.truncates:
        raise ValueError(
            f"algorithm.max_log_prob_drift: does not go with {_TRUNCATING}: the rollout's "
            "log-probabilities are those of the truncated distribution, the training engine's are not"
        )


def check_generation(services: Services, generators: Mapping[str, str]) -> None:
    """Raises ValueError if an actor has no rollout engine and no service generates its responses.

    Args:
        services: Tables of the services, by name.
        generators: Name of the service that generates an actor's responses, by name of the actor.
    """
    for name, table in services.items():
        if isinstance(table, ActorTable) and not table.generates and name not in generators:
            raise ValueError(
                f"services.{name}.rollout_engine: none requires a service named rollout, of role rollout, which "
                "generates the actor's responses; the config has no such service"
            )


def check_evaluations(data: DataTable, rollout: RolloutTable) -> None:
    """Raises ValueError where `[rollout.evaluation]` with the keys of a source's `evaluation` is not valid."""
    for number, source in enumerate(data.sources):
        try:
            rollout.evaluation.with_values(source.evaluation)
        except ValidationError as error:
            found = explain(error, source.evaluation, EvaluationTable)
            raise ValueError(f"data.sources.{number}.evaluation.{found}") from None


def check_sampling(data: DataTable, rollout: RolloutTable, services: Services) -> None:
    """Raises ValueError if a service cannot sample at the temperatures of `rollout` and of the sources' evaluations, or
    if one of its limits on the length of a row is too low for a prompt and a response of maximum length."""
    evaluations = {"rollout.evaluation": rollout.evaluation}
    for number, source in enumerate(data.sources):
        if source.evaluation:
            evaluations[f"data.sources.{number}.evaluation"] = rollout.evaluation.with_values(
                source.evaluation
            )
    sampled = {
        f"{key}.temperature": table.temperature for key, table in evaluations.items() if not table.is_greedy
    }
    for name, table in services.items():
        lowest, highest = table.temperatures
        for key, temperature in {"rollout.temperature": rollout.temperature, **sampled}.items():
            if not lowest <= temperature <= highest:
                raise ValueError(
                    f"{key}: the engine that generates in services.{name} samples at temperatures from "
                    f"{lowest:g} to {highest:g} (given: {temperature:g})"
                )
        for key, most in table.row_limits.items():
            if most <= rollout.max_response_tokens:
                raise ValueError(
                    f"services.{name}.{key}: {most} leaves no room for a prompt beside "
                    f"rollout.max_response_tokens, {rollout.max_response_tokens}"
                )


def check_truncation(algorithm: AlgorithmTable, rollout: RolloutTable) -> None:
    """Raises ValueError where top_k, top_p or min_p truncate sampling and `recompute_log_probs` is false."""
    if rollout.truncates and not algorithm.recompute_log_probs:
        raise ValueError(
            f"algorithm.recompute_log_probs: must be true with {_TRUNCATING}: the rollout's "
            "log-probabilities are those of the truncated distribution, the update's are not"
        )


def check_best(checkpoint: CheckpointTable, run: RunTable) -> None:
    """Raises ValueError where the best checkpoint is chosen by a metric of evaluations, and no step has both an
    evaluation and a checkpoint. The last step has an evaluation in any case. For `run.epochs`, `run.steps` has to be
    known."""
    if not checkpoint.best.startswith("evaluation/"):
        return
    if checkpoint.at_end or run.steps % checkpoint.every == 0:
        return
    if not run.evaluate_every or math.lcm(run.evaluate_every, checkpoint.every) > run.steps:
        raise ValueError(
            f"checkpoint.best: no step up to run.steps, {run.steps}, has both an evaluation (run.evaluate_every "
            f"{run.evaluate_every}, and the last step) and a checkpoint (checkpoint.every {checkpoint.every}); "
            "checkpoint.at_end = true writes one after the last step"
        )


def check_patience(checkpoint: CheckpointTable, run: RunTable) -> None:
    """Raises ValueError where `run.patience` is set and `checkpoint.best` is no metric of evaluations, or there are no
    evaluations between the steps."""
    if not run.patience:
        return
    if not checkpoint.best.startswith("evaluation/"):
        raise ValueError(
            "run.patience: needs checkpoint.best, a metric of evaluations such as evaluation/accuracy (given: "
            f"{checkpoint.best!r})"
        )
    if not run.evaluate_every:
        raise ValueError("run.patience: needs evaluations between the steps, and run.evaluate_every is 0")


def check_segments(run: RunTable, rollout: RolloutTable) -> None:
    """Raises ValueError where responses have more segments than steps are open, or stop strings, which a segment could
    cut."""
    if rollout.segments > run.ahead + 1:
        raise ValueError(
            f"rollout.segments: {rollout.segments} is more than run.ahead + 1, {run.ahead + 1}: each segment of a "
            "response is generated one step after the one before, and its step trains run.ahead steps after the first"
        )
    if rollout.segments > 1 and rollout.stop:
        raise ValueError(
            f"rollout.stop: does not go with rollout.segments {rollout.segments}: the end of a segment could cut a "
            "stop string"
        )


def check_chunks(data: DataTable, rollout: RolloutTable) -> None:
    """Raises ValueError where there are more chunks of rows than prompts, whose responses stay together."""
    if rollout.chunks > data.prompts_per_step:
        raise ValueError(
            f"rollout.chunks: {rollout.chunks} is more than data.prompts_per_step, {data.prompts_per_step}: the "
            "responses to a prompt are in one chunk"
        )


def check_environment(rollout: RolloutTable) -> None:
    """Raises ValueError where responses have an environment, and the length of a turn is not given or is above that of
    a response, or responses are in segments or chunks."""
    environment, most = rollout.environment, rollout.max_response_tokens
    if not environment.factory:
        return
    if not 1 <= environment.turn_tokens <= most:
        raise ValueError(
            f"rollout.environment.turn_tokens: must be from 1 to rollout.max_response_tokens, {most} (given: "
            f"{environment.turn_tokens})"
        )
    for key, value in (("segments", rollout.segments), ("chunks", rollout.chunks)):
        if value > 1:
            raise ValueError(f"rollout.{key}: {value} does not go with rollout.environment; it must be 1")


def check_ahead(run: RunTable, algorithm: AlgorithmTable, rollout: RolloutTable) -> None:
    """Raises ValueError where steps overlap (`run.ahead`), and the update would not know the policy that it clips
    around or the one that generated the rows: log-probabilities are not recomputed, or top_k, top_p or min_p
    truncate sampling; or where `max_log_prob_drift` would compare two versions of the policy."""
    if not run.ahead:
        return
    if not algorithm.recompute_log_probs:
        raise ValueError(
            f"algorithm.recompute_log_probs: must be true with run.ahead {run.ahead}: the rollout's log-probabilities "
            "are those of older weights than the update begins with"
        )
    if rollout.truncates:
        raise ValueError(
            f"run.ahead: {run.ahead} does not go with {_TRUNCATING}: the rollout's log-probabilities "
            "are those of the truncated distribution, so that the update could not be corrected for older weights"
        )
    if algorithm.max_log_prob_drift:
        raise ValueError(
            f"algorithm.max_log_prob_drift: must be 0 with run.ahead {run.ahead}: the log-probabilities of rollout and "
            "training are those of different weights"
        )
