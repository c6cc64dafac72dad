"""`Decoder`, the interface of a model that decodes one step at a time, and `WholeDecoder` for an unsharded model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from services.engines.base import HeldTensor
from services.engines.offload import (
    DroppedStorage,
    OffloadedStorage,
    allocate_again,
    bring_back,
    copy_to_host,
    drop,
    free,
    num_bytes,
)
from services.models.positions import max_positions
from services.rollout.base import SamplingOptions, check_names
from services.rollout.sampling import choose

_KEEP_STATES = ("recurrent_gemma",)
"""Values of `model_type` whose modules keep the states of the last rows themselves, not in the cache."""
_LEAVE_PADDING_OUT = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
)
"""Values of `model_type` with layers of a recurrent state, or convolutions, into which padding does not enter."""


class Decoder(ABC):
    """Interface of a causal language model with a KV cache, whole on this rank or sharded over several. Ranks that
    share a sharded model must make the same calls in the same order.

    Attributes:
        device: device of the model on this rank.
        max_positions: most tokens of a sequence; None for no limit.
        pads: whether rows may be padded; if not, all rows of a batch have prompts of one length.
        keeps_weights, ranks_together: as in `RolloutEngine`.
    """

    device: torch.device
    max_positions: int | None
    pads: bool = True
    keeps_weights: bool = True
    ranks_together: int = 1
    _offloaded: Sequence[OffloadedStorage] = ()
    _dropped: Sequence[DroppedStorage] = ()

    @abstractmethod
    def new_cache(self) -> DynamicCache:
        """Returns an empty KV cache for the layers that are on this rank."""

    @abstractmethod
    def forward(self, ids_BT: Tensor, cache: DynamicCache, positions: Mapping[str, Tensor]) -> Tensor:
        """Runs the model on further tokens and appends their keys and values to the cache.

        Args:
            ids_BT: T further token ids of each row.
            cache: KV cache, which is changed.
            positions: keyword arguments `position_ids`, [B, T] or [1, T], and `attention_mask` if rows are padded.

        Returns:
            Logits [B, V] of the next token of each row.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights of the model on this rank; see `RolloutEngine.load_weights`."""

    @abstractmethod
    def weight_memory(self) -> Mapping[str, Tensor]:
        """Returns the weights on this rank by name; see `RolloutEngine.weight_memory`."""

    @abstractmethod
    def held(self) -> Iterator[HeldTensor]:
        """Yields the weights on this rank; see `RolloutEngine.held`."""

    @abstractmethod
    def sleep(self, *, keep_weights: bool = True) -> int:
        """Frees the device memory of the weights until `wake`, on a decoder that is awake; returns the bytes freed, 0
        if there are none to free. Argument as that of `RolloutEngine.sleep`; weights that are kept on a CPU stay where
        they are."""

    @abstractmethod
    def wake(self) -> int:
        """Allocates the memory that `sleep` freed; returns the bytes allocated, 0 if `load_weights` brings the memory
        or `sleep` freed none. The weights are as before if `sleep` kept them."""

    def choose(
        self,
        logits_BV: Tensor,
        sampling: SamplingOptions,
        uniforms_B: Tensor,
        context_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses the next token of each row, the same one on all ranks of the model; see `sampling.choose`."""
        return choose(logits_BV, sampling, uniforms_B, context_BT)

    def agreed(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Returns a function that returns True on all ranks of the model if `should_stop` returns True on any of
        them. Default: `should_stop` itself, for a model on one rank."""
        return should_stop

    def _leave_device(self, tensors: Iterable[Tensor]) -> int:
        """Moves tensors from the device to host memory, even if the device is the CPU; returns the bytes moved."""
        offloaded = copy_to_host(tensors)
        free(offloaded)
        self._offloaded = offloaded
        torch.cuda.empty_cache()
        return num_bytes(offloaded)

    def _return_to_device(self) -> int:
        """Moves what `_leave_device` has moved back to the device; returns the bytes moved, 0 if there are none."""
        bring_back(self._offloaded)
        taken, self._offloaded = num_bytes(self._offloaded), ()
        return taken

    def _drop(self, tensors: Iterable[Tensor]) -> int:
        """Frees the memory of tensors, whose values are lost; returns its bytes."""
        self._dropped = drop(tensors)
        torch.cuda.empty_cache()
        return sum(item.num_bytes for item in self._dropped)

    def _allocate_dropped(self) -> int:
        """Allocates what `_drop` has freed, without values; returns the bytes allocated, 0 if there are none."""
        taken, self._dropped = allocate_again(self._dropped), ()
        return taken


class WholeDecoder(Decoder):
    """Decoder on a transformers model that is whole on this rank. Puts the model into eval mode and disables its
    gradients."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval().requires_grad_(False)
        self.device = model.device
        self.max_positions = max_positions(model.config)
        self._cache_argument = _cache_argument(model)
        kind = model.config.get_text_config().model_type
        self.pads = kind in _LEAVE_PADDING_OUT or not any(self.new_cache().is_linear)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def forward(self, ids_BT: Tensor, cache: DynamicCache, positions: Mapping[str, Tensor]) -> Tensor:
        arguments = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1, **positions}
        return self._model(input_ids=ids_BT, **arguments).logits[:, -1]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self._model.state_dict()
        names = set()
        for name, tensor in weights:
            names.add(name)
            if name in own:
                own[name].copy_(tensor)
        check_names(names, own.keys())

    def weight_memory(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    def held(self) -> Iterator[HeldTensor]:
        for name, tensor in self._model.state_dict().items():
            yield HeldTensor(f"generation.{name}", "whole", tensor, learns=True)

    def sleep(self, *, keep_weights: bool = True) -> int:
        """Moves the weights to host memory until `wake`, or drops them; returns the bytes moved or dropped, 0 if they
        are kept and on a CPU. Buffers that `load_weights` does not load are never dropped."""
        if not keep_weights:
            return self._drop(self._own_weights())
        if self.device.type == "cpu":
            return 0
        return self._leave_device([*self._model.parameters(), *self._model.buffers()])

    def wake(self) -> int:
        return self._return_to_device() + self._allocate_dropped()

    def _own_weights(self) -> list[Tensor]:
        """Returns the tensors that `load_weights` loads. On a CPU transformers maps them from files: such a tensor gets
        memory of its own, without values, since mapped memory cannot be freed and allocated again."""
        names = self._model.state_dict().keys()
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        weights = [x for name, x in tensors if name in names]
        for x in weights:
            if not x.untyped_storage().resizable():
                x.data = torch.empty_like(x)
        return weights


def _cache_argument(model: PreTrainedModel) -> str:
    """Returns the name of the argument by which a model takes a cache.

    Raises:
        ValueError: it takes none that has all of its state, so new tokens would not depend on those before as they
            should.
    """
    names = signature(model.forward).parameters
    found = [name for name in ("past_key_values", "cache_params") if name in names]
    if not found or model.config.model_type in _KEEP_STATES:
        raise ValueError(
            f"rollout engine hf cannot generate with models of type {model.config.model_type}, which do not keep the "
            "states of earlier tokens in a cache; rollout engine vllm may"
        )
    return found[0]
