"""The interface of a rollout engine, which generates responses with the actor's weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.engines.base import EngineOffloaded, HeldTensor
from services.engines.generation_shards import GenerationShards
from services.rollout.stops import StopStrings
from services.runtime.ranks import FailedAlone
from settings.engines import LOWEST_TEMPERATURE, REPETITION_PENALTIES
from settings.generation import GeneratingTable

FinishReason = Literal["stop", "length"]
"""Why a response ended: "stop" at an end-of-sequence token or a stop string, "length" at `max_new_tokens`."""


class GenerationStopped(RuntimeError):
    """Raised by `generate` after `should_stop` has returned True; all responses of the call are lost."""


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling.

    Args:
        max_new_tokens: most tokens of a response, its end-of-sequence token included.
        eos_ids: end-of-sequence tokens, each of which ends a response; without any, every response has
            `max_new_tokens`.
        greedy: take the most probable token; temperature, top_k, top_p and min_p do not apply.
        temperature: divisor of the logits.
        top_k: keep the k most probable tokens, and those as probable as the k-th; 0 keeps all.
        top_p: of the tokens that top_k keeps, keep the smallest set of most probable ones whose probability reaches
            top_p; 1 keeps all.
        min_p: before top_k, keep the tokens whose probability is at least min_p times that of the most probable one; 0
            keeps all.
        repetition_penalty: before the temperature, and also if greedy, divides positive logits and multiplies negative
            ones of the tokens that the prompt or the response so far contains; 1 changes nothing.
        stop: strings that also end a response; None for none.

    Raises:
        ValueError: a number is out of its range.
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: StopStrings | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        lowest, highest = REPETITION_PENALTIES
        if not lowest <= self.repetition_penalty <= highest:
            raise ValueError(
                f"repetition_penalty must be from {lowest:g} to {highest:g}, got {self.repetition_penalty}"
            )
        if self.greedy:
            return
        if not LOWEST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be finite and at least {LOWEST_TEMPERATURE:g}; got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")


@dataclass(frozen=True)
class RolloutSetup:
    """Arguments of `RolloutEngine.create` that are not in the table of the service.

    Args:
        shards: the shards of the training engine that `load_weights` will be given. None: whole weights, or, in a
            rollout service whose mesh has several ranks per replica (`mesh.replica_size`), shards by the layouts of
            `services.engines.three_d.stage.layouts_of_directory`.
        mesh: training and generation mesh of the service.
        device: device of this rank.
    """

    shards: GenerationShards | None
    mesh: Mesh
    device: torch.device


@dataclass(frozen=True, eq=False)
class Generation:
    """Generated responses in the order of the prompts.

    Args:
        responses: all token ids that were sampled, int64, in host memory. A response with finish reason "stop" ends
            with its end-of-sequence token, or with the token that completed a stop string.
        log_probs: log-probability of each token under the distribution it was drawn from, after repetition penalty,
            temperature, min-p, top-k and top-p, in nats, float32. For greedy tokens, under softmax of the penalized
            logits. On the engine's device; those of vLLM in host memory.
        finish_reasons: why each response ended.
    """

    responses: Jagged[Tensor]
    log_probs: Jagged[Tensor]
    finish_reasons: list[FinishReason]


class RolloutEngine(ABC):
    """Base class of engines that generate responses, with weights of a training engine.

    Attributes:
        limits: what the engine cannot do on this host, one sentence each, for Describe.
        keeps_weights: whether `sleep` can keep the weights. If not, they must be loaded again before generation.
        ranks_together: number of ranks that generate the same rows together, each with a part of the model.
        max_positions: most tokens of a prompt and its response together; None for no limit.
        positions_key: key of the configuration that sets `max_positions`, for messages; empty: the model does.
    """

    limits: Sequence[str] = ()
    keeps_weights: bool = True
    ranks_together: int = 1
    max_positions: int | None = None
    positions_key: str = ""
    _is_asleep: bool = False

    @classmethod
    @abstractmethod
    def create(cls, table: GeneratingTable, options: Any, setup: RolloutSetup) -> Self:
        """Builds the rollout engine of an actor, or of a rollout service, which has no training engine. Its weights
        must be loaded (`load_weights`) before it generates. Collective.

        Args:
            table: table of the service: `table.model` is the model's directory, and
                `services.engines.implementation.compute_dtype` gives its type.
            options: the engine's own options, of the type that its spec (`settings.engines.RolloutSpec`) names.
            setup: shards, mesh and device.

        Raises:
            ValueError: the engine cannot run the model.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights that this rank generates with.

        Args:
            weights: name in the checkpoint and tensor of each weight, from `TrainEngine.rollout_weights` or received
                by a rollout service: whole, or this rank's generation shard, which the engine may keep as its own. The
                iterable may be collective, so it is run to its end; engines of several ranks should do so even if
                loading fails.

        Raises:
            ValueError: a name is not one of the model's, or a weight of the model is missing.
        """

    def weight_memory(self) -> Mapping[str, Tensor]:
        """Returns the tensors that this rank generates with, by name, each in the form in which `load_weights` takes
        it, so that a rollout service without a second buffer receives new values in place. Default: none, for an
        engine that keeps another form; it is then given tensors by `load_weights`."""
        return {}

    def held(self) -> Iterator[HeldTensor]:
        """Yields the tensors with weights that this rank generates with, so that VerifyWeights can compare them with
        those that `load_weights` loads. Not collective. Default: none, and nothing is compared."""
        yield from ()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingOptions,
        row_seeds: np.ndarray,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda num_finished_rows, num_new_tokens: None,
    ) -> Generation:
        """Generates one response per prompt.

        The random numbers of a row depend on its seed alone. (Its logits are computed in batches, so their last bits
        may depend on the other rows.)

        Args:
            prompts: token ids of each row, at least one; at least one row.
            sampling: options of sampling, for all rows.
            row_seeds: seed of each row, from `services.rollout.sampling.row_seeds`, [rows] int64. Rows with the same
                seed draw the same numbers.
            should_stop: called at every decoding step; generation ends if it returns True.
            progress: called at every decoding step with the numbers of finished rows and of new tokens so far. An
                engine may count the tokens of a row only when the row is finished.

        Raises:
            GenerationStopped: `should_stop` returned True.
            ValueError: there are no prompts; a prompt is empty, or too long for the model or the memory together with
                its response; or the engine does not support one of the options.
            FloatingPointError: the model's output is not finite.
            EngineOffloaded: the engine is asleep.
            FailedAlone: this rank failed in a way not listed above, while other ranks with the same rows wait for it.
                The errors above are raised on all of these ranks alike.
        """
        self.check_awake()
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        check_lengths(lengths, sampling.max_new_tokens, self.max_positions, self.positions_key)
        self._check_request(lengths, sampling)
        try:
            made = self._generate(prompts, sampling, row_seeds, Meter(self._agreed(should_stop), progress))
            check_generation(made, len(prompts), sampling.max_new_tokens)
            return made
        except (GenerationStopped, FloatingPointError):
            raise
        except Exception as error:
            if self.ranks_together == 1:
                raise
            raise FailedAlone(f"{type(error).__name__}: {error}") from error

    def _check_request(self, lengths: np.ndarray, sampling: SamplingOptions) -> None:  # noqa: B027 - no engine must
        """Raises ValueError if the engine cannot respond to prompts of these lengths, [rows] int64, or does not support
        one of the options; on all ranks that generate the same rows alike. Default: the engine can."""

    @property
    def is_asleep(self) -> bool:
        """Whether the engine is asleep."""
        return self._is_asleep

    def check_awake(self) -> None:
        """Raises EngineOffloaded if the engine is asleep, and so can neither generate nor load weights. `generate`
        calls it; callers of `load_weights` must."""
        if self._is_asleep:
            raise EngineOffloaded("the rollout engine is asleep; wake it first")

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, row_seeds: np.ndarray, meter: Meter
    ) -> Generation:
        """Implements `generate`, for prompts and options that have been checked.

        Args:
            prompts, sampling, row_seeds: as for `generate`.
            meter: must be advanced at every decoding step.
        """

    def _agreed(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Returns a function that returns True on all ranks that generate the same rows if `should_stop` returns True
        on any of them. Its calls are collective over these ranks. Default: `should_stop` itself, for an engine whose
        ranks generate alone."""
        return should_stop

    def sleep(self, *, keep_weights: bool = True) -> int:
        """Frees the engine's device memory until `wake`; returns the bytes freed, 0 if it is asleep already or has
        none to free. It is asleep afterwards unless this raises.

        Args:
            keep_weights: whether the weights are needed after `wake`, as far as the attribute `keeps_weights` allows,
                so that they are moved to host memory. False: they are loaded again, and may be dropped.
        """
        if self._is_asleep:
            return 0
        freed = self._free_memory() if keep_weights else self._drop_memory()
        self._is_asleep = True
        return freed

    def wake(self) -> int:
        """Allocates the memory that `sleep` freed; returns the bytes allocated, 0 if the engine is awake. The weights
        are as before if `sleep` was to keep them and `keeps_weights` is True, otherwise undefined until they are
        loaded. The engine is awake afterwards unless this raises."""
        if not self._is_asleep:
            return 0
        taken = self._take_memory()
        self._is_asleep = False
        return taken

    @abstractmethod
    def _free_memory(self) -> int:
        """Implements `sleep`, on an engine that is awake; returns the bytes freed."""

    def _drop_memory(self) -> int:
        """Implements `sleep(keep_weights=False)`, on an engine that is awake; returns the bytes freed. Default: as
        `_free_memory`."""
        return self._free_memory()

    @abstractmethod
    def _take_memory(self) -> int:
        """Implements `wake`, on an engine that is asleep; returns the bytes allocated."""


class Meter:
    """Counts the finished rows and new tokens of a `generate` call, reports progress, and checks whether to stop.

    Args:
        should_stop: returns whether to stop, the same on all ranks that generate the same rows.
        progress: called with the numbers of finished rows and of new tokens so far.
    """

    def __init__(self, should_stop: Callable[[], bool], progress: Callable[[int, int], None]) -> None:
        self._should_stop = should_stop
        self._progress = progress
        self._rows = 0
        self._tokens = 0

    def advance(self, rows: int, tokens: int) -> None:
        """Adds `rows` finished rows and `tokens` new tokens to the counts, and calls `progress` with the sums.

        Raises:
            GenerationStopped: `should_stop` returned True; `progress` is not called.
        """
        self._rows += rows
        self._tokens += tokens
        if self._should_stop():
            raise GenerationStopped(
                f"stopped after {self._tokens} new tokens, {self._rows} rows were complete"
            )
        self._progress(self._rows, self._tokens)


def check_lengths(lengths: np.ndarray, max_new_tokens: int, limit: int | None, key: str = "") -> None:
    """Checks that prompts and their responses fit into the model's positions.

    Args:
        lengths: tokens of each prompt, [rows] int64.
        max_new_tokens: most tokens of a response.
        limit: most tokens of a prompt and its response; None for no limit.
        key: key of the configuration that sets the limit. Default: the model does.

    Raises:
        ValueError: there are no prompts, one is empty, or one is too long together with its response.
    """
    if not len(lengths):
        raise ValueError("there are no prompts to respond to")
    if not lengths.all():
        raise ValueError(f"row {lengths.argmin()} has an empty prompt")
    if limit is not None and lengths.max() + max_new_tokens > limit:
        row = lengths.argmax()
        raise ValueError(
            f"row {row} has {lengths[row]} prompt tokens, with {max_new_tokens} new ones more than the "
            f"{limit} positions of the model" + (f" ({key})" if key else "")
        )


def check_names(came: Set[str], own: Set[str]) -> None:
    """Raises ValueError if the names of the weights that were loaded (`came`) are not those of the rollout model
    (`own`)."""
    if came != own:
        raise ValueError(
            f"weights do not match the rollout model: {sorted(own - came)[:3]} did not come, "
            f"{sorted(came - own)[:3]} came and have no place"
        )


def check_generation(made: Generation, num_prompts: int, max_new_tokens: int) -> None:
    """Checks what an engine has generated.

    Args:
        made: the responses.
        num_prompts: number of prompts.
        max_new_tokens: most tokens of a response.

    Raises:
        FloatingPointError: a log-probability is not finite.
        RuntimeError: there is not one response, of 1 to `max_new_tokens` tokens, and one `FinishReason` per prompt, or
            not one log-probability per token.
    """
    lengths, reasons = made.responses.lengths, made.finish_reasons
    if not len(lengths) == len(reasons) == num_prompts:
        raise RuntimeError(
            f"the rollout engine returned {len(lengths)} responses and {len(reasons)} finish reasons for {num_prompts} "
            "prompts"
        )
    if unknown := set(reasons) - set(get_args(FinishReason)):
        raise RuntimeError(
            f"the rollout engine returned finish reasons other than stop and length: {unknown}"
        )
    if lengths.min() < 1 or lengths.max() > max_new_tokens:
        row = int(np.flatnonzero((lengths < 1) | (lengths > max_new_tokens))[0])
        raise RuntimeError(
            f"the rollout engine returned {lengths[row]} tokens for row {row}, which has to have 1 to {max_new_tokens}"
        )
    if not np.array_equal(made.log_probs.lengths, lengths):
        raise RuntimeError("the rollout engine returned other numbers of log-probabilities than of tokens")
    check_finite(made.log_probs)


def check_finite(log_probs: Jagged[Tensor]) -> None:
    """Raises FloatingPointError, which names the first row, if a log-probability is not finite."""
    is_finite = log_probs.values.isfinite()
    if not is_finite.all():
        position = int((~is_finite).nonzero()[0])
        row = int(np.searchsorted(np.cumsum(log_probs.lengths), position, side="right"))
        raise FloatingPointError(f"the output of the rollout model is not finite, first seen in row {row}")
