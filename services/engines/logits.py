"""What a head asks of a model's logits, whether a rank has all of them or only those of some tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


class Logits(ABC):
    """Logits [B, K, V] of K positions over V tokens, in float32 or finer."""

    @abstractmethod
    def divided(self, temperature: float) -> Self:
        """The logits at a temperature."""

    @abstractmethod
    def of_tokens(self, ids_BK: Tensor) -> Tensor:
        """The logit [B, K] of one token per position."""

    @abstractmethod
    def log_normalizer(self) -> Tensor:
        """log sum exp over all tokens, [B, K]."""

    @abstractmethod
    def expected(self, log_normalizer_BK: Tensor) -> Tensor:
        """The mean logit [B, K] under softmax(logits), whose normalizer is given."""


@dataclass(frozen=True, eq=False)
class WholeLogits(Logits):
    """The logits of all tokens."""

    values_BKV: Tensor

    def divided(self, temperature: float) -> Self:
        return replace(self, values_BKV=self.values_BKV / temperature)

    def of_tokens(self, ids_BK: Tensor) -> Tensor:
        return self.values_BKV.gather(-1, ids_BK[..., None])[..., 0]

    def log_normalizer(self) -> Tensor:
        return self.values_BKV.logsumexp(dim=-1)

    def expected(self, log_normalizer_BK: Tensor) -> Tensor:
        return (self.values_BKV.softmax(dim=-1) * self.values_BKV).sum(dim=-1)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
