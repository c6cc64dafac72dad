"""Results of plain transformers in one process: the numbers that ranks of every engine are compared with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from integration.three_d_main import ENTROPY_WEIGHT, NUM_STEPS, OPTIONS, TEMPERATURE, VOCABULARY, Rows
from services.models.families import load_value_model
from services.models.value_model import ValueModel

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"sliding_window": 5}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, **WINDOW, max_window_layers=2, use_sliding_window=True)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, **WINDOW)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=2
        )
    ),
}
MODELS |= {
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, **WINDOW, attn_logit_softcapping=3.0, final_logit_softcapping=5.0)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, **WINDOW, num_local_experts=4, num_experts_per_tok=2)
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{key: size for key, size in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
            num_key_value_heads=8,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        )
    ),
}
"""Further ones: capped scores and logits, attention sinks, and values of fewer numbers than keys."""
TOLERANCE = {"float64": 1e-8, "float32": 1e-5}
STEPS_TOLERANCE = {"float64": 1e-8, "float32": 1e-3}
"""After AdamW steps. The first moves every weight by the learning rate times the sign of its gradient, whatever its
size, so float32 noise in gradients near zero becomes as large as a step."""


class References(dict[str, tuple[str, str, str]]):
    """Directory of a model, of its reference, and dtype, by case: computed and written when first asked for.

    A case is a model and how it learns: "llama-float64" as a policy, "llama-value" as a value model in float64 with a
    new head, and "critic-value" as one that has a head.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, case: str) -> tuple[str, str, str]:
        name, dtype = case.split("-")
        directory, reference = self._model(name), self._root / case
        if dtype == "value":
            write_value_reference(directory, reference)
        else:
            write_reference(directory, reference, getattr(torch, dtype))
        self[case] = str(directory), str(reference), dtype
        return self[case]

    def _model(self, name: str) -> Path:
        directory = self._root / name
        if directory.exists():
            return directory
        if name == "critic":
            write_critic(self._model("llama"), directory)
        else:
            torch.manual_seed(7)
            MODELS[name]().double().save_pretrained(directory)
        return directory


def write_critic(policy: Path, directory: Path) -> None:
    torch.manual_seed(8)
    critic = ValueModel(AutoModelForCausalLM.from_pretrained(policy).model)
    nn.init.normal_(critic.value_head.weight)
    critic.backbone.save_pretrained(directory)
    save_file(critic.value_head.state_dict(), directory / "value_head.safetensors")


def row_distributions(model: PreTrainedModel, rows: Rows, row: int) -> Tensor:
    """Log-distributions of the response tokens of a row that is computed alone, without padding."""
    prompt, response = rows.prompts.row(row), rows.responses.row(row)
    logits = model(torch.cat((prompt, response))[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits[: len(response)] / TEMPERATURE).log_softmax(dim=-1)


def plain_loss(model: PreTrainedModel, rows: Rows) -> Tensor:
    total = torch.zeros((), dtype=model.dtype)
    for row in range(rows.prompts.rows):
        log_p = row_distributions(model, rows, row)
        for position, token in enumerate(rows.responses.row(row)):
            entropy = -(log_p[position].exp() * log_p[position]).sum()
            total = total - (
                rows.advantages.row(row)[position] * log_p[position, token] + ENTROPY_WEIGHT * entropy
            )
    return total / rows.num_tokens


def plain_steps(model: nn.Module, loss_of) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of three AdamW steps in one process, and the first gradient."""
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=OPTIONS.weight_decay, foreach=False)
    losses, norms, first = [], [], {}
    for step in range(NUM_STEPS):
        adamw.zero_grad()
        loss = loss_of()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        assert norm > OPTIONS.max_grad_norm, "the gradient must be clipped"
        for gradient in gradients.values():
            gradient *= OPTIONS.max_grad_norm / norm
        adamw.param_groups[0]["lr"] = OPTIONS.lr_at(step)
        adamw.step()
        losses.append(float(loss.detach()))
        norms.append(norm)
    return losses, norms, first


def write_reference(directory: Path, reference: Path, dtype: torch.dtype) -> None:
    reference.mkdir()
    # "sdpa" does not cap scores. For the others it is finer: "eager" computes softmax in float32 at most.
    attention = "eager" if AutoConfig.from_pretrained(directory).model_type == "gemma2" else None
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    rows = Rows()
    with torch.no_grad():
        log_probs = {
            str(row): row_distributions(model, rows, row).gather(1, rows.responses.row(row)[:, None])[:, 0]
            for row in range(rows.prompts.rows)
        }
    save_file(log_probs, reference / "log_probs.safetensors")
    losses, norms, gradients = plain_steps(model, lambda: plain_loss(model, rows))
    (reference / "numbers.json").write_text(json.dumps({"loss": losses, "norm": norms}))
    save_file(gradients, reference / "gradients.safetensors")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_file(weights, reference / "weights.safetensors")


def write_value_reference(directory: Path, reference: Path) -> None:
    reference.mkdir()
    rows, model = Rows(), load_value_model(directory, torch.float64)

    def loss() -> Tensor:
        errors = []
        for row in range(rows.prompts.rows):
            prompt, response = rows.prompts.row(row), rows.responses.row(row)
            values = model(torch.cat((prompt, response))[None])[0, len(prompt) - 1 : -1][: len(response)]
            errors.append(values - rows.advantages.row(row))
        return torch.cat(errors).square().sum() / rows.num_tokens

    plain_steps(model, loss)
    save_file({name: p.detach() for name, p in model.named_parameters()}, reference / "weights.safetensors")
