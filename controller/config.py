"""The configuration of a run: one TOML file for the controller, the services and the launcher.

Every table is strict and typed. Impossible combinations are refused here, before anything starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf.config import ActorTable, CriticTable, Positive, Service, Strict, override, read_toml, validate

MAX_KL_ERROR = 0.2
"""An adaptive KL coefficient changes by at most this share per horizon (Ziegler et al. 2019)."""

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class RunTable(Strict):
    """What is run, and where its files go."""

    name: str = "run"
    """Name of the run; part of the name of its directory."""
    directory: Path = Path("runs")
    """Directory in which the run makes a directory of its own."""
    seed: int = Field(default=0, ge=0)
    """Seed of all randomness."""
    steps: Positive = 100
    """Training steps: one batch of prompts each."""
    evaluate_every: int = Field(default=10, ge=0)
    """Evaluate on the held-out prompts every so many steps, and before the first and after the last; 0: only
    before and after."""
    samples: int = Field(default=8, ge=0)
    """Sample responses written at each evaluation."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time one call may take, waiting for its turn included."""
    connect_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time to wait for running services to answer."""


class DataTable(Strict):
    """Where prompts come from: JSONL rows with `prompt`, `ground_truth` and any further fields."""

    train: Path
    """Prompts to train on."""
    heldout: Path
    """Prompts to evaluate on, never trained on."""
    prompts_per_step: Positive = 128
    """Prompts in the batch of one step."""


class RolloutTable(Strict):
    """How responses are generated."""

    samples_per_prompt: Positive = 1
    """Responses to each prompt."""
    max_response_tokens: Positive = 128
    """Most tokens of a response."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits in sampling, and in every log-probability computed from them."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most probable tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""


class AlgorithmTable(Strict):
    """Hyper-parameters that algorithms share; each algorithm reads the ones it has a use for."""

    epochs: Positive = 1
    """Passes of the actor over a step's rows."""
    critic_epochs: Positive = 1
    """Passes of the critic over a step's rows."""
    mini_batch_size: Positive = 128
    """Rows, over all ranks, of one optimizer step."""
    gamma: Fraction = 1.0
    """Discount of later rewards (GAE, Schulman et al. 2016)."""
    lam: Fraction = 1.0
    """Weight of longer returns (lambda in GAE)."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a batch to mean 0 and variance 1."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped at 1 minus this."""
    clip_high: NotNegative = 0.2
    """The probability ratio is clipped at 1 plus this."""
    dual_clip: NotNegative = 3.0
    """Bound of the loss where the advantage is negative (Ye et al. 2020), above 1; 0: off."""
    value_clip: NotNegative = 0.5
    """New values are clipped to within this range of the old; 0: off."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus in the actor's loss."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How the losses of tokens become one number."""
    kl_reward_coefficient: NotNegative = 0.001
    """Weight of the KL penalty in the reward."""
    kl_reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty in the reward."""
    kl_target: NotNegative = 0.0
    """KL per response that an adaptive coefficient steers to (Ziegler et al. 2019); 0: the coefficient is fixed."""
    kl_horizon: Positive = 10_000
    """Responses over which the adaptive coefficient moves."""
    kl_loss_coefficient: NotNegative = 0.0
    """Weight of the KL term in the actor's loss."""
    kl_loss_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of the KL term in the actor's loss; + takes the gradient of k2."""
    recompute_log_probs: bool = True
    """Recompute the log-probabilities of the responses with the training engine, instead of taking the
    rollout engine's."""


class Config(Strict):
    """A whole run."""

    run: RunTable = RunTable()
    """What is run."""
    data: DataTable
    """Prompts."""
    rollout: RolloutTable = RolloutTable()
    """Generation."""
    algorithm: AlgorithmTable = AlgorithmTable()
    """Hyper-parameters."""
    pools: dict[str, list[str]] = {}
    """Resource pools: devices by name of the pool. A device may be in several pools."""
    services: dict[str, Service]
    """The services by name; one named like its role is the one algorithms use by default."""

    @property
    def rows_per_step(self) -> int:
        """Responses in the batch of one step."""
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """Optimizer steps in one pass over a step's rows."""
        return self.rows_per_step // self.algorithm.mini_batch_size

    def devices(self, service: str) -> frozenset[str]:
        """Devices of the service's pool, or one name of its own per rank where it has no pool."""
        table = self.services[service]
        if table.pool:
            return frozenset(self.pools[table.pool])
        return frozenset(f"{service}/{rank}" for rank in range(table.ranks))

    @model_validator(mode="after")
    def _check(self) -> Config:
        self._check_pools()
        self._check_addresses()
        self._check_batch()
        self._check_kl()
        truncates = self.rollout.top_k or self.rollout.top_p < 1
        if truncates and not self.algorithm.recompute_log_probs:
            raise ValueError(
                "algorithm.recompute_log_probs: must be true with rollout.top_k or rollout.top_p: the rollout's "
                "log-probabilities are those of the truncated distribution, the update's are not"
            )
        if self.algorithm.dual_clip and self.algorithm.dual_clip <= 1:
            raise ValueError(
                f"algorithm.dual_clip must be above 1, or 0 for off (given: {self.algorithm.dual_clip})"
            )
        return self

    def _check_pools(self) -> None:
        for name, table in self.services.items():
            if table.pool and table.pool not in self.pools:
                known = ", ".join(sorted(self.pools)) or "none"
                raise ValueError(f"services.{name}.pool: no pool {table.pool!r}; known: {known}")
            if table.pool and len(self.pools[table.pool]) < table.ranks:
                raise ValueError(
                    f"services.{name}.pool: {table.pool!r} has {len(self.pools[table.pool])} devices for "
                    f"{table.ranks} ranks"
                )

    def _check_kl(self) -> None:
        algorithm = self.algorithm
        if not algorithm.kl_target:
            return
        if not algorithm.kl_reward_coefficient:
            raise ValueError(
                "algorithm.kl_reward_coefficient: an adaptive one (kl_target) has to start above 0"
            )
        if algorithm.kl_horizon <= self.rows_per_step * MAX_KL_ERROR:
            raise ValueError(
                f"algorithm.kl_horizon: {algorithm.kl_horizon} is too short for {self.rows_per_step} rows a step; "
                f"more than {MAX_KL_ERROR:g} times as many are needed"
            )

    def _check_addresses(self) -> None:
        seen: dict[str, str] = {}
        for name, table in self.services.items():
            if table.address in seen:
                raise ValueError(
                    f"services.{name}.address: {table.address} is taken by services.{seen[table.address]}"
                )
            seen[table.address] = name

    def _check_batch(self) -> None:
        rows, size = self.rows_per_step, self.algorithm.mini_batch_size
        if rows % size:
            raise ValueError(
                f"algorithm.mini_batch_size: {size} does not divide the {rows} rows of a step (data.prompts_per_step "
                f"{self.data.prompts_per_step} x rollout.samples_per_prompt {self.rollout.samples_per_prompt})"
            )
        for name, table in self.services.items():
            if isinstance(table, ActorTable | CriticTable) and size % table.ranks:
                raise ValueError(
                    f"algorithm.mini_batch_size: {size} rows do not divide over the {table.ranks} ranks "
                    f"of services.{name}"
                )


def load(path: Path, settings: tuple[str, ...] = ()) -> Config:
    """The configuration in a file, with `key.path=value` settings put in.

    Raises:
        ConfigError: One line that says file, key, what is wrong and what is allowed.
    """
    return validate(Config, override(read_toml(path), settings), str(path))
