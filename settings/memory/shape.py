"""Shape of a model, read from its config.json: every weight with its name and size, as transformers builds it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from rlhf.errors import ConfigError

HeadKind = Literal["lm", "value", "score"]
"""Head of a model: lm, an output layer over the vocabulary; value, a value head (critic); score, one score per row
(reward model)."""

VOCABULARY_MULTIPLE = 64
"""Engine 3d and vLLM pad vocabularies to a multiple of this (`services.storage.layout`)."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"num_key_value_heads": None, "head_dim": None},
        "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
        "qwen2": {"num_key_value_heads": 32, "head_dim": None},
        "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    }
)
"""Values of keys that a config.json may leave out, by family: the defaults of transformers' configurations."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class Cut(Enum):
    """Dimension by which engine 3d cuts a weight over its tensor-parallel ranks."""

    WHOLE = "every rank has all of it"
    OUTPUTS = "rows: the outputs of a linear layer"
    INPUTS = "columns: the inputs of a linear layer"
    TOKENS = "rows, one per token, padded to VOCABULARY_MULTIPLE"


@dataclass(frozen=True)
class WeightSize:
    """One weight of a model.

    Attributes:
        name: Name in the checkpoint; for a weight of a layer, its name within the layer.
        shape: Shape in the checkpoint.
        cut: How engine 3d cuts it.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut = Cut.WHOLE

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole weight."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model of one of the families llama, mistral, qwen2 and qwen3.

    Attributes:
        family: `model_type` of the config.json.
        vocabulary, hidden, intermediate, layers: Number of tokens, hidden size, feed-forward units, and layers.
        heads, kv_heads, head_dim: Attention heads, key-value heads, and numbers per head.
        tied: Whether the output layer is the embedding (tie_word_embeddings).
        attention_bias: Whether query, key and value projections have biases.
        output_bias: Whether the attention's output projection has one.
        mlp_bias: Whether feed-forward layers have biases.
        qk_norm: Whether queries and keys are normalized (qwen3).
        head: Head of the model.
        positions: Most tokens of a sequence (max_position_embeddings); 0: no limit.
    """

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head: HeadKind = "lm"
    positions: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], head: HeadKind = "lm") -> Self:
        """Returns the shape that a config.json describes.

        Args:
            config: Content of the file.
            head: Head of the model.

        Raises:
            ValueError: The model is of another family, or the file lacks a size or has one that is no integer above 0.
        """
        family = str(config.get("model_type", ""))
        if family not in _DEFAULTS:
            raise ValueError(f"model_type is {family!r}; memory is predicted for {', '.join(_DEFAULTS)}")
        given = {**_DEFAULTS[family], **config}
        for key in _REQUIRED:
            if not isinstance(given.get(key), int) or given[key] < 1:
                raise ValueError(f"{key} is {given.get(key)!r}; it must be an integer of at least 1")
        heads = given["num_attention_heads"]
        has_bias = bool(given.get("attention_bias", False)) if family != "mistral" else False
        return cls(
            family=family,
            vocabulary=given["vocab_size"],
            hidden=given["hidden_size"],
            intermediate=given["intermediate_size"],
            layers=given["num_hidden_layers"],
            heads=heads,
            kv_heads=given["num_key_value_heads"] or heads,
            head_dim=given["head_dim"] or given["hidden_size"] // heads,
            tied=bool(given.get("tie_word_embeddings", False)),
            attention_bias=True if family == "qwen2" else has_bias,
            output_bias=False if family == "qwen2" else has_bias,
            mlp_bias=family == "llama" and bool(given.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            head=head,
            positions=given.get("max_position_embeddings") or 0,
        )

    def with_head(self, head: HeadKind) -> Self:
        """Returns the shape of the same transformer with another head."""
        return replace(self, head=head)

    @property
    def query(self) -> int:
        """Numbers of a token's queries over all heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Numbers of a token's keys over all key-value heads; its values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def shares_embedding(self) -> bool:
        """Whether the model computes logits with its embedding."""
        return self.tied and self.head == "lm"

    @cached_property
    def embedding(self) -> WeightSize:
        """The embedding."""
        return WeightSize("embed_tokens.weight", (self.vocabulary, self.hidden), Cut.TOKENS)

    @cached_property
    def layer(self) -> tuple[WeightSize, ...]:
        """The weights of one layer, in the order of the model's modules."""
        h, f, q, k = self.hidden, self.intermediate, self.query, self.key
        attention = [
            *_linear("self_attn.q_proj", q, h, Cut.OUTPUTS, self.attention_bias),
            *_linear("self_attn.k_proj", k, h, Cut.OUTPUTS, self.attention_bias),
            *_linear("self_attn.v_proj", k, h, Cut.OUTPUTS, self.attention_bias),
            *_linear("self_attn.o_proj", h, q, Cut.INPUTS, self.output_bias),
        ]
        if self.qk_norm:
            attention += [WeightSize(f"self_attn.{each}_norm.weight", (self.head_dim,)) for each in "qk"]
        return (
            *attention,
            *_linear("mlp.gate_proj", f, h, Cut.OUTPUTS, self.mlp_bias),
            *_linear("mlp.up_proj", f, h, Cut.OUTPUTS, self.mlp_bias),
            *_linear("mlp.down_proj", h, f, Cut.INPUTS, self.mlp_bias),
            WeightSize("input_layernorm.weight", (h,)),
            WeightSize("post_attention_layernorm.weight", (h,)),
        )

    @cached_property
    def end(self) -> tuple[WeightSize, ...]:
        """The weights after the last layer: norm and head. A tied output layer is not among them."""
        norm = WeightSize("norm.weight", (self.hidden,))
        match self.head:
            case "value":
                return norm, *_linear("value_head", 1, self.hidden, Cut.WHOLE, True)
            case "score":
                return norm, WeightSize("score.weight", (1, self.hidden))
            case _:
                output = WeightSize("lm_head.weight", (self.vocabulary, self.hidden), Cut.TOKENS)
                return (norm,) if self.tied else (norm, output)

    def weights(self) -> Iterator[tuple[str, WeightSize]]:
        """Yields every weight of the model, with the name of its group: "embedding", "layer 0" and so on, "end"."""
        yield "embedding", self.embedding
        for number in range(self.layers):
            yield from ((f"layer {number}", weight) for weight in self.layer)
        yield from (("end", weight) for weight in self.end)

    @cached_property
    def layer_numel(self) -> int:
        """Number of parameters of one layer."""
        return sum(weight.numel for weight in self.layer)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the model; tied ones count once."""
        ends = sum(weight.numel for weight in (self.embedding, *self.end))
        return ends + self.layers * self.layer_numel


def read_model_shape(model: Path, head: HeadKind = "lm") -> ModelShape:
    """Reads the shape of a model from the config.json of its directory.

    Raises:
        ConfigError: The file cannot be read, or memory is not predicted for such a model; the text says why.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        return ModelShape.of(config, head)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _linear(name: str, outputs: int, inputs: int, cut: Cut, has_bias: bool) -> tuple[WeightSize, ...]:
    """Returns the weights of a linear layer. A bias is cut where outputs are: each rank of an inputs cut has it
    whole."""
    weight = WeightSize(f"{name}.weight", (outputs, inputs), cut)
    bias = WeightSize(f"{name}.bias", (outputs,), cut if cut is Cut.OUTPUTS else Cut.WHOLE)
    return (weight, bias) if has_bias else (weight,)
