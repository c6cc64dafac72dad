"""The configuration of a run: one TOML file for the controller, the services and the launcher.

Every table is strict and typed. Impossible combinations are refused here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from controller.config import checks, placements
from controller.config.algorithm import AlgorithmTable
from controller.config.checkpoint import CheckpointTable
from controller.config.data import DataTable
from controller.config.placements import Placement
from controller.config.rollout import EvaluationTable, RolloutTable
from controller.config.run import RunTable
from controller.config.tracking import TrackingTable
from settings.rollout import RolloutServiceTable
from settings.security import SecurityTable
from settings.services import Service
from settings.strict import Strict, override, read_toml, validate
from settings.values import ValuesTable

EXCLUSIVE = (("run.steps", "run.epochs"), ("data.heldout", "data.heldout_rows"))
"""Pairs of keys of which a config has one."""


class Config(Strict):
    """Configuration of a run: all tables of the config file, and the keys above them."""

    run: RunTable = RunTable()
    """Steps, evaluation, seed, timeouts and directory of the run."""
    data: DataTable
    """Sources of the rows that the run trains and evaluates on."""
    rollout: RolloutTable = RolloutTable()
    """Settings of generation."""
    algorithm: AlgorithmTable = AlgorithmTable()
    """Hyper-parameters of the algorithm."""
    checkpoint: CheckpointTable = CheckpointTable()
    """Checkpoints of the run."""
    tracking: TrackingTable = TrackingTable()
    """Where the metrics of the run go, beside its files."""
    placement: Placement | None = None
    """Places all services on `devices`, in place of pools by hand; see docs/placement.md. colocate: all on the same;
    standalone: each on its own; split: actor, rollout and reference on some, the others on others; interleaved: what
    learns or generates on all, the others each on a part of them; disaggregated: what learns on some, and rollout,
    values, reference and rewards on others. Default: pools, or each service on devices of its own."""
    devices: list[str] = []
    """Names of the devices of `placement`, taken in this order; as in `pools`. Default: as many as it needs, named
    gpu:0 and so on, or cpu:0 where all services compute on the CPU."""
    device_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of each device, in 10^9 bytes, in which services that share it take turns: before a call that is predicted
    not to fit beside the others, these are offloaded to host memory, and onloaded before their next call; see
    docs/memory.md. Default: all stay on their devices."""
    pools: dict[str, list[str]] = {}
    """Resource pools: names of devices by name of the pool. Rank r of a service on a pool takes device number r of it.
    A device may be in several pools. gpu:N is GPU N of the host, which the launcher gives to the rank; HOST/gpu:N, or
    HOST/cpu:N, where pools are on several hosts, each of which starts its own ranks. Any other name only tells which
    services share the device."""
    rewards: dict[str, dict[str, float]] = {}
    """Rewards and costs that are weighted sums of several services: by the name that an algorithm or a source uses,
    the weight of each service."""
    security: SecurityTable = SecurityTable()
    """Certificates and tokens of the controller and the services."""
    services: dict[str, Service]
    """Tables of the services by name. Algorithms use the service named like its role by default."""

    @property
    def tokenizer(self) -> Path | None:
        """Directory of the tokenizer that the controller reads: `data.tokenizer`, or the model of the actor, or of
        the first service with one; None where there is none."""
        return self._tokenizer[1]

    @property
    def tokenizer_key(self) -> str:
        """Config key that names `tokenizer`, for messages."""
        return self._tokenizer[0]

    @property
    def _tokenizer(self) -> tuple[str, Path | None]:
        if self.data.tokenizer:
            return "data.tokenizer", self.data.tokenizer
        names = sorted(self.services, key=lambda name: self.services[name].role != "actor")
        models = ((f"services.{name}.model", self.services[name].model_directory) for name in names)
        return next(((key, model) for key, model in models if model), ("data.tokenizer", None))

    @property
    def also_served(self) -> dict[str, str]:
        """Roles that no service is configured for and that the ranks of another service serve too: service by role.
        Where there is no service reference and exactly one actor has adapters, it serves as reference without
        them."""
        adapted = [name for name, table in self.services.items() if table.has_adapters]
        return {"reference": adapted[0]} if len(adapted) == 1 and "reference" not in self.services else {}

    @property
    def generators(self) -> dict[str, str]:
        """Services that generate the responses of actors with their weights: service by actor. The service `rollout`
        of role rollout generates those of the service `actor`; an actor that is not named generates its own."""
        is_placed = isinstance(self.services.get("rollout"), RolloutServiceTable) and "actor" in self.services
        return {"actor": "rollout"} if is_placed else {}

    @property
    def valuers(self) -> dict[str, str]:
        """Services of role values by the critic whose values they compute (`weights_of`)."""
        return {
            table.weights_of: name for name, table in self.services.items() if isinstance(table, ValuesTable)
        }

    @property
    def receivers(self) -> dict[str, str]:
        """Services that compute with weights of another, by that service: `generators` and `valuers`."""
        return self.generators | self.valuers

    def weights_of(self, reward: str) -> dict[str, float]:
        """Returns the weight of each service, by name, in a reward or cost: its table in `[rewards]`, or 1 for the
        service of this name."""
        return self.rewards.get(reward, {reward: 1.0})

    def recipes(self, reward: str) -> dict[str, dict[str, float]]:
        """Returns, by label of the source, the weight of each service by name in the algorithm's reward or cost
        `reward`. For "reward", each source has its own (`SourceTable.reward`); costs are the same for all sources."""
        return {
            source.label: self.weights_of(source.reward if reward == "reward" else reward)
            for source in self.data.all_sources
        }

    @property
    def evaluations(self) -> dict[str, EvaluationTable]:
        """Sampling of the responses to held-out prompts, by label of the source: `[rollout.evaluation]` with the values
        of the source's own `evaluation`."""
        table = self.rollout.evaluation
        return {source.label: table.with_values(source.evaluation) for source in self.data.all_sources}

    def without_outputs(self) -> Config:
        """Returns the configuration without checkpoints, `run.patience`, which needs them, and trackers, for what is no
        training of its own."""
        run = self.run.model_copy(update={"patience": 0})
        return self.model_copy(
            update={"run": run, "checkpoint": CheckpointTable(), "tracking": TrackingTable()}
        )

    def has_reward(self, reward: str) -> bool:
        """Returns whether there is a service of the algorithm's reward or cost `reward`; see `recipes`."""
        return any(part in self.services for recipe in self.recipes(reward).values() for part in recipe)

    def other_rewards(self, services: Iterable[str]) -> list[str]:
        """Returns the names of the rewards and costs that score all rows beside the reward of their source: those of
        `services` that are part of no composition, and compositions of `rewards` of which the config has all parts.

        Args:
            services: Names of the services that are rewards or costs.
        """
        composed = {
            name: weights for name, weights in self.rewards.items() if weights.keys() <= self.services.keys()
        }
        recipes = (*self.recipes("reward").values(), *composed.values())
        parts = {part for weights in recipes for part in weights}
        alone = [name for name in services if name not in parts]
        own = {source.reward for source in self.data.all_sources} | {"reward"}
        return [name for name in (*alone, *composed) if name not in own]

    @property
    def rows_per_step(self) -> int:
        """Number of responses in the batch of one step."""
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def row_tokens(self) -> int:
        """Most tokens of a prompt and its response together; 0 where `data.max_prompt_tokens` is not set."""
        prompt = self.data.max_prompt_tokens
        return prompt + self.rollout.max_response_tokens if prompt else 0

    def without_critic_warmup(self) -> Config:
        """Returns the configuration with `algorithm.critic_warmup_steps` 0, so that every step is like those after."""
        table = self.algorithm.model_copy(update={"critic_warmup_steps": 0})
        return self.model_copy(update={"algorithm": table})

    def mini_batches(self, rows: int) -> int:
        """Returns the number of mini-batches in one pass over a batch of `rows` rows: rows //
        algorithm.mini_batch_size, at least 1. The remaining rows are spread over the mini-batches."""
        return max(1, rows // self.algorithm.mini_batch_size)

    def devices_of(self, service: str) -> frozenset[str]:
        """Returns the names of the devices that a service runs on; see `device_order`."""
        return frozenset(self.device_order(service))

    def rank_devices(self, service: str) -> frozenset[str]:
        """Returns the names of the devices that the ranks of a service use, one per rank. A pool may have more
        devices."""
        return frozenset(self.device_order(service)[: self.services[service].ranks])

    def device_order(self, service: str) -> tuple[str, ...]:
        """Returns the names of the devices of a service in rank order: rank r uses device r. They are the devices of
        its pool, or "SERVICE/RANK" for each rank if it has no pool, or the devices that `placement` assigns."""
        table = self.services[service]
        if self.placement and not table.external:
            return placements.devices_of(self.placement, self.devices, self.services)[service]
        if table.pool:
            return tuple(self.pools[table.pool])
        return tuple(f"{service}/{rank}" for rank in range(table.ranks))

    def is_placed(self, service: str) -> bool:
        """Returns whether the configuration names the devices of a service, by a pool or `placement`."""
        table = self.services[service]
        return bool(table.pool or (self.placement and not table.external))

    @model_validator(mode="after")
    def _check(self) -> Config:
        checks.check_service_names(self.services)
        placements.check(self.placement, self.devices, self.pools, self.services)
        checks.check_pools(self.services, self.pools)
        if self.device_memory_gb:
            checks.check_turns({name: self.devices_of(name) for name in self.services}, self.services)
        checks.check_rewards(self.services, self.rewards)
        checks.check_addresses(self.services)
        checks.check_values(self.services)
        checks.check_batch(self.data, self.rollout, self.algorithm, self.services)
        checks.check_kl(self.algorithm, self.rows_per_step)
        checks.check_correction(self.algorithm, self.rollout)
        checks.check_drift(self.algorithm, self.rollout)
        checks.check_generation(self.services, self.generators)
        checks.check_evaluations(self.data, self.rollout)
        checks.check_sampling(self.data, self.rollout, self.services)
        checks.check_truncation(self.algorithm, self.rollout)
        if self.run.epochs is None:
            checks.check_best(self.checkpoint, self.run)
        checks.check_patience(self.checkpoint, self.run)
        checks.check_ahead(self.run, self.algorithm, self.rollout)
        checks.check_segments(self.run, self.rollout)
        checks.check_chunks(self.data, self.rollout)
        checks.check_environment(self.rollout)
        return self


AnyConfig = Config | Mapping[str, Any] | Path | str
"""A configuration as a user gives it: a `Config`, the tables of one by name, or the path of a TOML file."""


def load(path: Path | str, settings: tuple[str, ...] = ()) -> Config:
    """Reads and validates a config file.

    Args:
        path: The TOML file.
        settings: Overrides "key.path=value" of the file's values.

    Raises:
        ConfigError: The file cannot be read or is invalid, or a setting has no "=", or a key before its last one is not
            a table; the text is one line that says what is wrong, and where.
    """
    return validate(Config, with_settings(read_toml(Path(path)), settings), str(path))


def with_settings(tables: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """Sets values in the tables of a config as `override` does, in place, and returns them. A setting of one of two
    keys that exclude each other (`EXCLUSIVE`) removes the other of the file, unless that is set too, and so does a
    constant schedule of an optimizer its `total_steps`."""
    tables = override(tables, settings)
    given = {setting.partition("=")[0].strip() for setting in settings}
    for pair in EXCLUSIVE:
        for key, other in (pair, pair[::-1]):
            name, _, leaf = other.partition(".")
            table = tables.get(name)
            if isinstance(table, dict) and key in given and other not in given:
                table.pop(leaf, None)
    services = tables.get("services")
    for name, service in services.items() if isinstance(services, dict) else ():
        _without_unread_steps(service, f"services.{name}.optimizer", given)
    return tables


def _without_unread_steps(service: Any, key: str, given: Set[str]) -> None:
    """Removes `total_steps` of the file, where a run has written the computed ones, from an optimizer whose schedule is
    set to constant."""
    optimizer = service.get("optimizer") if isinstance(service, dict) else None
    if not isinstance(optimizer, dict) or f"{key}.total_steps" in given or optimizer.get("warmup_ratio"):
        return
    if f"{key}.schedule" in given and optimizer.get("schedule") == "constant":
        optimizer.pop("total_steps", None)


def as_config(given: AnyConfig) -> Config:
    """Returns the configuration that is given as a `Config`, as tables, or as the path of a TOML file. Raises
    ConfigError where it is invalid or the file cannot be read."""
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return validate(Config, {**given}, "given as tables")
    return load(Path(given))
