"""The configuration of a run: one TOML file for the controller, the services and the launcher.

Every table is strict and typed. Impossible combinations are refused here, before anything starts.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from controller.config import checks
from controller.config.algorithm import AlgorithmTable
from controller.config.data import DataTable
from controller.config.rollout import RolloutTable
from controller.config.run import RunTable
from settings.services import ROLES, Service
from settings.strict import Strict, override, read_toml, validate


class Config(Strict):
    """A whole run."""

    run: RunTable = RunTable()
    """The run."""
    data: DataTable
    """Prompts."""
    rollout: RolloutTable = RolloutTable()
    """Generation."""
    algorithm: AlgorithmTable = AlgorithmTable()
    """Hyper-parameters."""
    pools: dict[str, list[str]] = {}
    """Resource pools: devices by name of the pool. A device may be in several pools."""
    rewards: dict[str, dict[str, float]] = {}
    """Rewards and costs made of several: by the name an algorithm or a source asks for, the weight of each service."""
    services: dict[str, Service]
    """The services by name; one named like its role is the one algorithms use by default."""

    @property
    def tokenizer(self) -> Path | None:
        """Model directory whose tokenizer the controller reads; None without one."""
        tables = sorted(self.services.values(), key=lambda table: table.role != "actor")
        models = (table.model_directory for table in tables)
        return self.data.tokenizer or next((model for model in models if model), None)

    @property
    def also_served(self) -> dict[str, str]:
        """By name of a missing service, the service whose ranks serve it too: an actor without its adapters is the
        reference, where exactly one actor has adapters."""
        adapted = [name for name, table in self.services.items() if table.has_adapters]
        return {"reference": adapted[0]} if len(adapted) == 1 and "reference" not in self.services else {}

    def weights_of(self, reward: str) -> dict[str, float]:
        """Weight of each service in a reward or cost; a service by itself weighs 1."""
        return self.rewards.get(reward, {reward: 1.0})

    def recipes(self, reward: str) -> dict[str, dict[str, float]]:
        """By source, the weight of each service in an algorithm's `reward`. Sources have a reward of their own, and all
        costs in common."""
        return {
            source.label: self.weights_of(source.reward if reward == "reward" else reward)
            for source in self.data.all_sources
        }

    @property
    def rows_per_step(self) -> int:
        """Responses in the batch of one step."""
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    def mini_batches(self, rows: int) -> int:
        """Number of mini-batches in one pass over a batch of `rows`: as many of `algorithm.mini_batch_size` rows as the
        batch fills, at least one; further rows are spread over them."""
        return max(1, rows // self.algorithm.mini_batch_size)

    def devices(self, service: str) -> frozenset[str]:
        """Devices of the service's pool; without a pool, one name per rank."""
        table = self.services[service]
        if table.pool:
            return frozenset(self.pools[table.pool])
        return frozenset(f"{service}/{rank}" for rank in range(table.ranks))

    @model_validator(mode="after")
    def _check(self) -> Config:
        checks.check_pools(self.services, self.pools)
        checks.check_rewards(self.services, self.rewards)
        checks.check_addresses(self.services)
        checks.check_batch(self.data, self.rollout, self.algorithm, self.services)
        checks.check_kl(self.algorithm, self.rows_per_step)
        checks.check_correction(self.algorithm, self.rollout)
        checks.check_drift(self.algorithm, self.rollout)
        checks.check_sampling(self.rollout, self.services)
        checks.check_truncation(self.algorithm, self.rollout)
        return self


def load(path: Path, settings: tuple[str, ...] = ()) -> Config:
    """The configuration in a file, with values overridden by `key.path=value` settings.

    Raises:
        ConfigError: One line that says file, key, what is wrong and what is allowed.
    """
    return validate(Config, override(read_toml(path), settings), str(path), ROLES)
