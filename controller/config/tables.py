"""The configuration of a run: one TOML file for the controller, the services and the launcher.

Every table is strict and typed. Impossible combinations are refused here, before anything starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf.config import (
    VLLM_TEMPERATURES,
    ActorTable,
    CriticTable,
    ModelTable,
    Positive,
    Service,
    Strict,
    override,
    read_toml,
    validate,
)

MAX_KL_ERROR = 0.2
"""An adaptive KL coefficient changes by at most this share per horizon (Ziegler et al. 2019)."""

Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class RunTable(Strict):
    """The run: its steps, limits and directory."""

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
    evaluation_rows: Positive = 1024
    """Most held-out rows evaluated at the same time; the rows of one such batch are freed before the next."""
    samples: int = Field(default=8, ge=0)
    """Sample responses written at each evaluation."""
    balance: bool = True
    """Deals sequences out to data ranks by what they cost to compute, and not by how many they are."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time one call may take, waiting for its turn included; then the run ends, see docs/runs.md."""
    save_timeout_s: float = Field(default=3600.0, gt=0)
    """The same for calls that save, export or load a model, the begin of a run among them."""
    connect_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time to wait for running services to answer."""


NOWHERE = Path()
"""A path that is not given."""


class SourceTable(Strict):
    """One of several sources of a run's rows; see docs/data.md."""

    path: Path
    """Rows to train on: a JSONL or parquet file, a directory with a dataset, or the name of one on the Hugging Face
    hub."""
    heldout: Path | None = None
    """Rows to evaluate on. None: the split `heldout_split` of `path`, which has to be a dataset."""
    name: str = ""
    """Its name in the rows' column `source`; empty: the path."""
    weight: float = Field(default=1.0, gt=0)
    """Share of its rows in every step, relative to the other sources'."""
    reward: str = "reward"
    """The reward of its rows: a service, or one of `[rewards]`."""
    columns: dict[str, str] = {}
    """Names of its fields, where they differ: `columns.prompt = "question"`."""
    split: str = "train"
    """Of a dataset: the split to train on."""
    heldout_split: str = "test"
    """Of a dataset: the split to evaluate on."""
    subset: str = ""
    """Of a dataset: its configuration, such as main."""

    @property
    def label(self) -> str:
        """Its name, or else its path."""
        return self.name or str(self.path)

    @model_validator(mode="after")
    def _check(self) -> SourceTable:
        if self.heldout is None and self.path.suffix:
            raise ValueError(f"heldout: {self.path} is a file, which has no splits; give the held-out rows")
        return self


class DataTable(Strict):
    """Where rows come from: `prompt`, `ground_truth` and any further fields; see docs/data.md."""

    train: Path = NOWHERE
    """Rows to train on: a JSONL or parquet file, a directory with a dataset, or the name of one on the Hugging Face
    hub. Required, or else `sources`."""
    heldout: Path = NOWHERE
    """Rows to evaluate on, never trained on."""
    sources: tuple[SourceTable, ...] = ()
    """Instead of train and heldout: several sources with weights, each with a reward of its own."""
    prompts_per_step: Positive = 128
    """Prompts in the batch of one step."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Most tokens of a prompt; 0: what the services take beside `rollout.max_response_tokens`."""
    overlong: Literal["skip", "error"] = "skip"
    """Treatment of a row whose prompt, or whose text in `pretrain`, is longer: skip leaves it out and counts it,
    error ends the run."""
    tokenizer: Path | None = None
    """Model directory whose chat template renders prompts that are lists of messages, and whose tokenizer counts
    tokens. None: that of the actor, or of the first service with a model."""
    chat: bool = False
    """Prompts that are plain texts are what a user says, and are put into the chat template too."""
    pretrain: Path | None = None
    """Texts to go on learning as they are beside the rewards: JSONL rows with `text`. For algorithms that have a use
    for them."""

    @property
    def all_sources(self) -> tuple[SourceTable, ...]:
        """The sources; train and heldout are one."""
        return self.sources or (SourceTable(path=self.train, heldout=self.heldout),)

    @model_validator(mode="after")
    def _check(self) -> DataTable:
        if self.sources:
            if self.train != NOWHERE or self.heldout != NOWHERE:
                raise ValueError("give train and heldout, or sources, not both")
            labels = [source.label for source in self.sources]
            twice = sorted({label for label in labels if labels.count(label) > 1})
            if twice:
                raise ValueError(f"sources: {twice[0]!r} is there twice; give each a name of its own")
        elif NOWHERE in (self.train, self.heldout):
            missing = "train" if self.train == NOWHERE else "heldout"
            raise ValueError(f"{missing}: required, and not given")
        return self


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
    """Keep the smallest set of tokens whose probability reaches this. With top_k or top_p, estimates of KL are biased:
    they average over the truncated distribution what is meant over the policy's whole one."""
    stop: tuple[str, ...] = ()
    """Texts that end a response too, as `["\\n\\n"]`: with the token that completes one, which stays; the response's
    text ends before it."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the policy's whole distribution."""
        return bool(self.top_k) or self.top_p < 1

    @model_validator(mode="after")
    def _check(self) -> RolloutTable:
        if not all(self.stop):
            raise ValueError(f"stop: a text is empty in {list(self.stop)}")
        return self


class AlgorithmTable(Strict):
    """Hyper-parameters that algorithms share; each reads those it has a use for, some with defaults of its own."""

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
    surrogate: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Use of the probability ratio in the actor's loss: ppo clips that of each token, gspo that of the whole
    response, and cispo weighs each token's log-probability by it, clipped."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped at 1 minus this."""
    clip_high: NotNegative = 0.2
    """The probability ratio is clipped at 1 plus this."""
    dual_clip: NotNegative = 3.0
    """Bound of the loss where the advantage is negative (Ye et al. 2020), above 1; 0: off. For surrogate ppo of every
    algorithm, in whose papers it is not."""
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
    rollout_correction: Literal["none", "truncate", "mask"] = "none"
    """Correction where the training engine finds another probability than the rollout engine sampled with: the loss
    is weighed by their ratio, which truncate bounds from above; mask drops what has a ratio out of bounds. Not with
    rollout.top_k or rollout.top_p."""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """Whether that is the ratio of each token or of the whole response."""
    rollout_correction_low: NotNegative = 0.5
    """Smallest ratio that mask keeps."""
    rollout_correction_high: float = Field(default=2.0, gt=0)
    """Largest ratio that mask keeps, and what truncate bounds it to."""
    max_log_prob_drift: NotNegative = 0.0
    """The run ends where the training engine finds another log-probability of a token than the rollout engine sampled
    it with, by more than this; 0: however far they are apart."""
    pretrain_coefficient: NotNegative = 0.0
    """Weight of the loss of the texts of data.pretrain in the actor's."""
    on_failed_reward: Literal["stop", "retry", "drop_group"] = "stop"
    """Policy for rows that could not be scored: stop ends the run with the cause; retry sends those rows again, and
    stops where that does not help; drop_group trains without them and the other responses to their prompts. They
    never count as zero."""
    reward_retries: Positive = 2
    """How often retry sends a row again."""
    options: dict[str, Any] = {}
    """Options of one algorithm; see the tables of the algorithms below."""


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
        """Model directory whose tokenizer the controller reads; None where there is none."""
        tables = sorted(self.services.values(), key=lambda table: table.role != "actor")
        models = (getattr(table, "model", None) for table in tables)
        return self.data.tokenizer or next((model for model in models if model), None)

    @property
    def also_served(self) -> dict[str, str]:
        """By name, what the ranks of another service serve too: the reference is the actor without its adapters, where
        one actor has adapters and no service is the reference."""
        adapted = [
            name for name, table in self.services.items() if isinstance(table, ActorTable) and table.lora
        ]
        return {"reference": adapted[0]} if len(adapted) == 1 and "reference" not in self.services else {}

    def weights_of(self, reward: str) -> dict[str, float]:
        """Weight of each service in a reward or cost; a service by itself weighs 1."""
        return self.rewards.get(reward, {reward: 1.0})

    def recipes(self, reward: str) -> dict[str, dict[str, float]]:
        """By source, the weight of each service in what an algorithm asks for as `reward`: sources have a reward of
        their own, but a cost in common."""
        return {
            source.label: self.weights_of(source.reward if reward == "reward" else reward)
            for source in self.data.all_sources
        }

    @property
    def rows_per_step(self) -> int:
        """Responses in the batch of one step."""
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    def mini_batches(self, rows: int) -> int:
        """Optimizer steps in one pass over a batch: it is dealt out whole to as many mini-batches of
        `algorithm.mini_batch_size` rows as it fills, so that each has at least that many, or to one."""
        return max(1, rows // self.algorithm.mini_batch_size)

    def devices(self, service: str) -> frozenset[str]:
        """Devices of the service's pool, or one name of its own per rank where it has no pool."""
        table = self.services[service]
        if table.pool:
            return frozenset(self.pools[table.pool])
        return frozenset(f"{service}/{rank}" for rank in range(table.ranks))

    @model_validator(mode="after")
    def _check(self) -> Config:
        self._check_pools()
        self._check_rewards()
        self._check_addresses()
        self._check_batch()
        self._check_kl()
        self._check_correction()
        self._check_drift()
        self._check_sampling()
        if self.rollout.truncates and not self.algorithm.recompute_log_probs:
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

    def _check_rewards(self) -> None:
        for name, weights in self.rewards.items():
            if not weights or name in self.services:
                what = "has no services" if not weights else "is the name of a service already"
                raise ValueError(f"rewards.{name} {what}")

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

    def _check_correction(self) -> None:
        algorithm = self.algorithm
        if algorithm.rollout_correction == "none":
            return
        if not algorithm.recompute_log_probs:
            raise ValueError(
                "algorithm.rollout_correction: needs recompute_log_probs: it corrects the rollout's by the training "
                "engine's"
            )
        if self.rollout.truncates:
            raise ValueError(
                "algorithm.rollout_correction: does not go with rollout.top_k or rollout.top_p: the rollout's "
                "log-probabilities are those of the truncated distribution, so that the ratio to the training engine's "
                "would be the probability that truncation kept, at every token"
            )
        if algorithm.rollout_correction_low >= algorithm.rollout_correction_high:
            raise ValueError(
                f"algorithm.rollout_correction_low: {algorithm.rollout_correction_low:g} is not below "
                f"rollout_correction_high, {algorithm.rollout_correction_high:g}"
            )

    def _check_drift(self) -> None:
        if not self.algorithm.max_log_prob_drift:
            return
        if not self.algorithm.recompute_log_probs:
            raise ValueError(
                "algorithm.max_log_prob_drift: needs recompute_log_probs: there is nothing to compare else"
            )
        if self.rollout.truncates:
            raise ValueError(
                "algorithm.max_log_prob_drift: does not go with rollout.top_k or rollout.top_p: the rollout's "
                "log-probabilities are those of the truncated distribution, the training engine's are not"
            )

    def _check_sampling(self) -> None:
        rollout, (lowest, highest) = self.rollout, VLLM_TEMPERATURES
        for name, table in self.services.items():
            uses_vllm = isinstance(table, ActorTable) and table.rollout_engine == "vllm"
            if uses_vllm and not lowest <= rollout.temperature <= highest:
                raise ValueError(
                    f"rollout.temperature: vLLM, which generates in services.{name}, samples at temperatures from "
                    f"{lowest:g} to {highest:g} (given: {rollout.temperature:g})"
                )
            for key, most in longest_rows(table).items():
                if most <= rollout.max_response_tokens:
                    raise ValueError(
                        f"services.{name}.{key}: {most} leaves no room for a prompt beside "
                        f"rollout.max_response_tokens, {rollout.max_response_tokens}"
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
            if isinstance(table, ActorTable | CriticTable) and size % table.data_ranks:
                raise ValueError(
                    f"algorithm.mini_batch_size: {size} rows do not divide over the {table.data_ranks} data ranks "
                    f"of services.{name}"
                )


def longest_rows(table: Service) -> dict[str, int]:
    """The keys of a service that bound the tokens of a prompt and its response together."""
    if not isinstance(table, ModelTable):
        return {}
    limits = {"micro_batch_tokens": table.micro_batch_tokens}
    if isinstance(table, ActorTable) and table.rollout_engine == "hf":
        limits["rollout_tokens"] = table.rollout_tokens
    elif isinstance(table, ActorTable) and table.vllm.max_model_len:
        limits["vllm.max_model_len"] = table.vllm.max_model_len
    return limits


def load(path: Path, settings: tuple[str, ...] = ()) -> Config:
    """The configuration in a file, with `key.path=value` settings put in.

    Raises:
        ConfigError: One line that says file, key, what is wrong and what is allowed.
    """
    return validate(Config, override(read_toml(path), settings), str(path))
