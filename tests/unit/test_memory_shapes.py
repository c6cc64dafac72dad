"""Shapes of models and shards of ranks, as the memory predictor counts them, against transformers' models and the
layouts of engine 3d."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from benchmarks.paper_setup import LLAMA_SHAPES
from rlhf.errors import ConfigError
from services.models.value_model import ValueModel
from services.storage.layout import layouts_of
from settings.memory.shape import HeadKind, ModelShape, read_model_shape
from settings.memory.shards import kept_numel
from settings.memory.use import ModelUse

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama, biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "llama, every head its key": {
        "model_type": "llama",
        **SIZES,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    "mistral": {"model_type": "mistral", **SIZES},
    "qwen2, tied": {"model_type": "qwen2", **SIZES, "head_dim": 6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "qwen3, biases": {"model_type": "qwen3", **SIZES, "attention_bias": True, "tie_word_embeddings": True},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **SIZES,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe, tied": {
        "model_type": "qwen3_moe",
        **SIZES,
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0, 2],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}
MODELS = CONFIGS | MIXTURES
HEADS: tuple[HeadKind, ...] = ("lm", "value", "score")


def transformers_config(config: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**config)


def on_meta(config: dict[str, Any], head: HeadKind = "lm") -> torch.nn.Module:
    full: Any = transformers_config(config)
    with torch.device("meta"):
        match head:
            case "value":
                return ValueModel(AutoModel.from_config(full))
            case "score":
                full.num_labels = 1
                return AutoModelForSequenceClassification.from_config(full)
            case _:
                return AutoModelForCausalLM.from_config(full)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers_model(name: str, head: HeadKind) -> None:
    shape = ModelShape.of(MODELS[name], head)
    real = [tuple(p.shape) for p in on_meta(MODELS[name], head).parameters()]
    assert sorted(weight.shape for _, weight in shape.weights()) == sorted(real)
    assert shape.num_parameters == sum(map(math.prod, real))


@pytest.mark.parametrize("name", MIXTURES)
def test_each_layer_of_a_mixture_has_the_weights_of_transformers_layer(name: str) -> None:
    shape = ModelShape.of(MIXTURES[name])
    model: Any = on_meta(MIXTURES[name])
    for kind, layer in zip(shape.kinds, model.model.layers, strict=True):
        assert {w.name: w.shape for w in kind.weights} == {
            n: tuple(p.shape) for n, p in layer.named_parameters()
        }


@pytest.mark.parametrize("name", MIXTURES)
def test_a_token_is_computed_by_its_experts_alone(name: str) -> None:
    """Parameters that get a gradient from one token, counted in a real model, whose rows of unused experts get none."""
    shape = ModelShape.of(MIXTURES[name])
    model: Any = AutoModelForCausalLM.from_config(transformers_config(MIXTURES[name]))
    model.model(torch.tensor([[3]])).last_hidden_state.sum().backward()
    layers = model.model.layers
    used = sum(
        p[0].numel() * int(p.grad.flatten(1).any(dim=1).sum()) if p.ndim == 3 else p.numel()
        for p in layers.parameters()
    )
    assert shape.read_by(1) == pytest.approx(used)
    every = sum(p.numel() for p in layers.parameters())
    assert shape.read_by(1) < shape.read_by(8) < every
    assert shape.read_by(1e6) == pytest.approx(every)


@pytest.mark.parametrize(("name", "billions"), [("7B", 6.74), ("13B", 13.02), ("34B", 33.74), ("70B", 68.98)])
def test_the_models_of_the_paper_have_the_sizes_of_their_names(name: str, billions: float) -> None:
    shape = LLAMA_SHAPES[name]
    assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=0.005)
    config = {
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 2,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
    }
    # Layers are alike, and many on the meta device take time.
    two_layers = sum(p.numel() for p in on_meta(config).parameters())
    assert ModelShape.of(config).num_parameters == two_layers
    assert shape.num_parameters == two_layers + (shape.layers - 2) * shape.layer_numel


@pytest.mark.parametrize(
    ("config", "billions", "of_a_token"),
    [
        # "Mixtral of Experts" (Jiang et al. 2024), Table 1: 13 B active; 46.7 B and 12.9 B in its announcement.
        (
            {
                "model_type": "mixtral",
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
            },
            46.7,
            12.9,
        ),
        # Qwen3-30B-A3B, of its model card.
        (
            {
                "model_type": "qwen3_moe",
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "head_dim": 128,
            },
            30.5,
            3.3,
        ),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_published_mixtures_have_the_sizes_that_are_published(
    config: dict[str, Any], billions: float, of_a_token: float
) -> None:
    shape = ModelShape.of(config)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=0.05)
    ends = sum(weight.numel for weight in (shape.embedding, *shape.end))
    assert (shape.read_by(1) + ends) / 1e9 == pytest.approx(of_a_token, abs=0.06)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_keys_that_a_config_leaves_out_have_transformers_defaults(family: str) -> None:
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    given = {"model_type": family, "num_attention_heads": 32, **{key: SIZES[key] for key in required}}
    given["hidden_size"] = 64
    real = [tuple(p.shape) for p in on_meta(given).parameters()]
    assert sorted(weight.shape for _, weight in ModelShape.of(given).weights()) == sorted(real)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (2, 1, 2), (4, 2, 1), (2, 2, 3)])
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("name", CONFIGS)
def test_shards_are_those_of_engine_3d(name: str, head: HeadKind, mesh: tuple[int, int, int]) -> None:
    model: Any = on_meta(CONFIGS[name], head)
    backbone = model.backbone if head == "value" else model.base_model
    shape = ModelShape.of(CONFIGS[name], head)
    pipeline, tensor, _ = mesh
    layouts = layouts_of(model, backbone, tied=shape.shares_embedding, pipeline=pipeline, tensor=tensor)
    use = ModelUse(shape, "3d", mesh)
    for stage in range(pipeline):
        kept = [
            math.prod(layout.kept_shape)
            for layout in layouts.values()
            if layout.stage == stage or (layout.tied and stage == pipeline - 1)
        ]
        assert kept_numel(use, stage) == sum(kept)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"model_type": "gpt2"},
            "model_type is 'gpt2'; memory is predicted for llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5, of 4 experts",
        ),
        (
            {"model_type": "qwen2_moe", "moe_intermediate_size": 0},
            "moe_intermediate_size is 0; it must be an integer of at least 1",
        ),
        ({"hidden_size": None}, "hidden_size is None; it must be an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
    ],
)
def test_a_config_without_a_shape_is_refused_in_one_line(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ModelShape.of({**CONFIGS["llama"], **change})


def test_a_config_that_cannot_be_read_is_refused_with_its_path(tmp_path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config\.json: No such file"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config\.json: it is no JSON object"):
        read_model_shape(tmp_path)
