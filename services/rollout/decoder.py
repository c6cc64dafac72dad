"""The interface of a decoding loop's model, which runs one step at a time; and a model that is whole on this rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from services.engines.offload import OffloadedStorage, bring_back, copy_to_host, free, num_bytes
from services.rollout.base import SamplingOptions, check_names
from services.rollout.sampling import choose


class Decoder(ABC):
    """A causal language model with a KV cache. Ranks that share one model call its methods together.

    Attributes:
        device: device of the model.
        max_positions: most tokens of a sequence; None for no limit.
        keeps_weights, ranks_together: as in `RolloutEngine`.
    """

    device: torch.device
    max_positions: int | None
    keeps_weights: bool = True
    ranks_together: int = 1

    @abstractmethod
    def new_cache(self) -> DynamicCache:
        """An empty KV cache for this rank's layers."""

    @abstractmethod
    def forward(self, ids_BT: Tensor, cache: DynamicCache, padding: Mapping[str, Tensor]) -> Tensor:
        """Append `ids_BT` to the cache; returns the logits [B, V] of the token after.

        Args:
            padding: attention mask and position ids of padded rows.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As `RolloutEngine.load_weights`."""

    @abstractmethod
    def sleep(self) -> int:
        """As `RolloutEngine.sleep`."""

    @abstractmethod
    def wake(self) -> int:
        """As `RolloutEngine.wake`."""

    def choose(
        self, logits_BV: Tensor, sampling: SamplingOptions, uniforms_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `sampling.choose`, the same on all ranks."""
        return choose(logits_BV, sampling, uniforms_B)

    def agreed(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """`should_stop` agreed over the ranks of the model, which step together."""
        return should_stop


class WholeDecoder(Decoder):
    """A transformers model that is whole on this rank."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval().requires_grad_(False)
        self.device = model.device
        self._offloaded: list[OffloadedStorage] = []
        self.max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def forward(self, ids_BT: Tensor, cache: DynamicCache, padding: Mapping[str, Tensor]) -> Tensor:
        output = self._model(
            input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1, **padding
        )
        return output.logits[:, -1]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self._model.state_dict()
        names = set()
        for name, tensor in weights:
            names.add(name)
            if name in own:
                own[name].copy_(tensor)
        check_names(names, own.keys())

    def sleep(self) -> int:
        return 0 if self.device.type == "cpu" else self._leave_device()

    def wake(self) -> int:
        bring_back(self._offloaded)
        taken, self._offloaded = num_bytes(self._offloaded), []
        return taken

    def _leave_device(self) -> int:
        """Sleeps, also where the device is the CPU."""
        offloaded = copy_to_host([*self._model.parameters(), *self._model.buffers()])
        free(offloaded)
        self._offloaded = offloaded
        torch.cuda.empty_cache()
        return num_bytes(offloaded)
