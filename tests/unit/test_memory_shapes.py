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
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_transformers_model(name: str, head: HeadKind) -> None:
    shape = ModelShape.of(CONFIGS[name], head)
    real = [tuple(p.shape) for p in on_meta(CONFIGS[name], head).parameters()]
    assert sorted(weight.shape for _, weight in shape.weights()) == sorted(real)
    assert shape.num_parameters == sum(map(math.prod, real))


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


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
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
            "model_type is 'gpt2'; memory is predicted for llama, mistral, qwen2, qwen3",
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
