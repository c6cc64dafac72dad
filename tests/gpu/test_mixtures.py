"""Mixtures of experts on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.mixtures import NUM_EXPERTS, Experts, MixtureNumbers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


class OnGPU:
    @pytest.fixture(scope="class")
    @classmethod
    def device(cls, gpu: torch.device) -> torch.device:
        return gpu


class TestExperts(OnGPU, Experts):
    def test_an_expert_without_tokens_has_a_gradient_of_zero(self, device: torch.device) -> None:
        # Memory that a kernel does not write is then that of a tensor of nan.
        for numel in (1 << 8, 1 << 14, 1 << 20, 1 << 24):
            poison = [torch.full((numel,), torch.nan, device=device) for _ in range(8)]
            del poison
        super().test_an_expert_without_tokens_has_a_gradient_of_zero(device)


class TestMixture(OnGPU, MixtureNumbers):
    @pytest.fixture(scope="class")
    @classmethod
    def sizes(cls) -> dict[str, Any]:
        return {
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": NUM_EXPERTS,
            "initializer_range": 0.035,
        }
