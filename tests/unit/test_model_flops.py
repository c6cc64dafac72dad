"""The operations that the benchmark counts, against torch's own counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.model_flops import known_peak_tflops, training_flops
from settings.memory.shape import ModelShape

ROWS, PROMPT, NEW = 3, 5, 7
MODEL = ModelShape("llama", 61, hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=16)


EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def counted(*, is_critic: bool) -> float:
    """Of a forward and backward pass, without those of attention itself, whose masked half torch counts too."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=MODEL.vocabulary,
            hidden_size=MODEL.hidden,
            intermediate_size=MODEL.intermediate,
            num_hidden_layers=MODEL.layers,
            num_attention_heads=MODEL.heads,
            num_key_value_heads=MODEL.kv_heads,
            head_dim=MODEL.head_dim,
            **EAGER,
        )
    )
    embedded = torch.zeros(ROWS, PROMPT + NEW, MODEL.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(inputs_embeds=embedded).last_hidden_state
        (hidden if is_critic else model.lm_head(hidden[:, PROMPT:])).sum().backward()
    by_operation = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in by_operation.items() if "bmm" not in str(operation))


@pytest.mark.parametrize("is_critic", [False, True])
def test_products_with_weights_are_those_that_torch_counts(is_critic: bool):
    attention = 6.0 * MODEL.layers * ROWS * 2 * MODEL.heads * MODEL.head_dim * sum(range(1, PROMPT + NEW + 1))
    found = training_flops(MODEL, ROWS, PROMPT, NEW, is_critic=is_critic)
    assert found - attention == counted(is_critic=is_critic)


def test_a_gpu_is_found_by_a_part_of_its_name():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA GeForce RTX 3060")
    assert [known_peak_tflops(name) for name in names] == [989.0, 756.0, 989.0, None]
