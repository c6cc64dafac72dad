"""Numbers of mixtures of experts, by engine fsdp and by transformers, on any device: tests for a subclass with a
fixture `device`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from services.engines.deterministic import deterministic_kernels
from services.testing.engine_task import Task
from services.testing.engines import EngineNumbers

NUM_EXPERTS, PER_TOKEN, TOKENS = 8, 2, 67
USED = (0, 2, 5)
"""Experts that tokens are routed to; no token is routed to the others."""
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "initializer_range": 0.2,
}


def make(sizes: dict[str, Any]) -> Any:
    """Returns a random model in float32, as the product makes it."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, max_position_embeddings=128))


def outputs_and_gradients(experts: Any, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Returns the output of a layer's experts for random tokens, and the gradients of its inputs and weights, for the
    same numbers in every type that holds those of bfloat16."""
    experts = experts.bfloat16().to(device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    hidden_TH, slope_TH = (
        torch.randn(TOKENS, SIZES["hidden_size"], generator=generator).bfloat16().to(device, dtype)
        for _ in range(2)
    )
    routed_TK = torch.tensor(USED)[
        torch.rand(TOKENS, len(USED), generator=generator).argsort(1)[:, :PER_TOKEN]
    ]
    weights_TK = torch.rand(TOKENS, PER_TOKEN, generator=generator).bfloat16().to(device, dtype)
    leaves = hidden_TH.requires_grad_(), weights_TK.requires_grad_(), *experts.parameters()
    with deterministic_kernels(device):
        y_TH = experts(hidden_TH, routed_TK.to(device), weights_TK)
        found = [y_TH.detach(), *torch.autograd.grad((y_TH * slope_TH).sum(), leaves)]
    return [x.cpu() for x in found]


class Experts:
    """The experts of a layer in bfloat16, by the kernel that the product uses."""

    def test_they_compute_what_they_compute_one_by_one_in_float32(self, device: torch.device) -> None:
        plain, model = make(SIZES), make(SIZES)
        plain.set_experts_implementation("eager")
        assert model.config._experts_implementation == "grouped_mm"
        exact = outputs_and_gradients(plain.model.layers[0].mlp.experts, torch.device("cpu"), torch.float32)
        found = outputs_and_gradients(model.model.layers[0].mlp.experts, device, torch.bfloat16)
        for x, y in zip(found, exact, strict=True):
            assert x.dtype == torch.bfloat16
            assert torch.linalg.vector_norm(x.float() - y) < 0.02 * torch.linalg.vector_norm(y)

    def test_an_expert_without_tokens_has_a_gradient_of_zero(self, device: torch.device) -> None:
        experts = make(SIZES).model.layers[0].mlp.experts
        *_, of_gate_up, of_down = outputs_and_gradients(experts, device, torch.bfloat16)
        for gradient in (of_gate_up, of_down):
            used = [expert for expert in range(NUM_EXPERTS) if gradient[expert].any()]
            assert used == list(USED)
            assert gradient.isfinite().all()

    def test_they_have_the_same_bits_each_time(self, device: torch.device) -> None:
        experts = make(SIZES).model.layers[0].mlp.experts
        first, second = (outputs_and_gradients(experts, device, torch.bfloat16) for _ in range(2))
        assert all(map(torch.equal, first, second))


class MixtureNumbers(EngineNumbers):
    """The suite of the engines, with a mixture all of whose experts see every token: rounding may choose others."""

    keys = {"engine": "fsdp"}

    @pytest.fixture(scope="class")
    @classmethod
    def sizes(cls) -> dict[str, Any]:
        return SIZES | {"num_experts_per_tok": NUM_EXPERTS}

    @pytest.fixture(scope="class")
    @classmethod
    def task(cls, sizes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Task:
        directory = tmp_path_factory.mktemp("mixture")
        model = make(sizes)
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.save_pretrained(directory)
        return Task(directory, int(sizes["vocab_size"]))
