"""Shape of a model, read from its config.json: every weight with its name and size, as transformers builds it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
        "mixtral": {
            "num_key_value_heads": 8,
            "head_dim": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        "qwen2_moe": {
            "num_key_value_heads": 16,
            "head_dim": None,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        "qwen3_moe": {
            "num_key_value_heads": 4,
            "head_dim": None,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    }
)
"""Values of keys that a config.json may leave out, by family: the defaults of transformers' configurations."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
_WITH_BIASES = ("llama", "qwen3", "qwen3_moe")
"""Families whose key `attention_bias` adds biases to all projections of the attention."""


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
class ExpertSizes:
    """Sizes of the sparse layers of a mixture of experts.

    Attributes:
        count: Experts of a layer.
        per_token: Experts that compute a token.
        units: Feed-forward units of an expert.
        shared_units: Feed-forward units of the expert that computes all tokens; 0: there is none.
        dense_layers: Numbers of the layers that have `ModelShape.intermediate` feed-forward units in place of experts.
        weighs_in_float32: Whether the outputs of experts are weighed in float32 in every type of computation (mixtral).
    """

    count: int
    per_token: int
    units: int
    shared_units: int = 0
    dense_layers: tuple[int, ...] = ()
    weighs_in_float32: bool = False

    @classmethod
    def of(cls, family: str, given: Mapping[str, Any]) -> Self:
        """Returns the sizes that a config.json describes.

        Args:
            family: Its `model_type`, of a mixture of experts.
            given: Its content, and defaults.

        Raises:
            ValueError: A size is no integer above 0, or more experts compute a token than there are.
        """
        if family == "mixtral":
            given = {**given, "moe_intermediate_size": given["intermediate_size"]}
        # transformers has both names for it.
        given = {**given, "num_experts": given.get("num_local_experts", given.get("num_experts"))}
        _check_sizes(given, _OF_EXPERTS)
        if given["num_experts_per_tok"] > given["num_experts"]:
            raise ValueError(
                f"num_experts_per_tok is {given['num_experts_per_tok']}, of {given['num_experts']} experts"
            )
        step, dense = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers") or ()
        layers = range(given["num_hidden_layers"])
        return cls(
            count=given["num_experts"],
            per_token=given["num_experts_per_tok"],
            units=given["moe_intermediate_size"],
            shared_units=given.get("shared_expert_intermediate_size", 0) if family == "qwen2_moe" else 0,
            dense_layers=tuple(each for each in layers if each in dense or (each + 1) % step)
            if family != "mixtral"
            else (),
            weighs_in_float32=family == "mixtral",
        )


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Layers of a model that have the same weights.

    Attributes:
        numbers: Their numbers, ascending.
        weights: The weights of each, in the order of the model's modules.
        is_sparse: Whether they have experts.
    """

    numbers: tuple[int, ...]
    weights: tuple[WeightSize, ...]
    is_sparse: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of parameters of each."""
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model of one of the families llama, mistral, qwen2 and qwen3, or of the mixtures of experts mixtral,
    qwen2_moe and qwen3_moe.

    Attributes:
        family: `model_type` of the config.json.
        vocabulary, hidden, intermediate, layers: Number of tokens, hidden size, feed-forward units, and layers.
        heads, kv_heads, head_dim: Attention heads, key-value heads, and numbers per head.
        tied: Whether the output layer is the embedding (tie_word_embeddings).
        attention_bias: Whether query, key and value projections have biases.
        output_bias: Whether the attention's output projection has one.
        mlp_bias: Whether feed-forward layers have biases.
        qk_norm: Whether queries and keys are normalized (qwen3, qwen3_moe).
        experts: Sizes of the sparse layers of a mixture of experts; None for other models.
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
    experts: ExpertSizes | None = None

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
        _check_sizes(given, _REQUIRED)
        heads = given["num_attention_heads"]
        has_bias = bool(given.get("attention_bias", False)) if family in _WITH_BIASES else False
        of_queries = {"qwen2": True, "qwen2_moe": bool(given.get("qkv_bias", True))}
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
            attention_bias=of_queries.get(family, has_bias),
            output_bias=has_bias,
            mlp_bias=family == "llama" and bool(given.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            head=head,
            positions=given.get("max_position_embeddings") or 0,
            experts=ExpertSizes.of(family, given) if family in _MIXTURES else None,
        )

    @property
    def query(self) -> int:
        """Numbers of a token's queries over all heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Numbers of a token's keys over all key-value heads; its values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def units_per_token(self) -> int:
        """Feed-forward units that compute a token, in the layer with most."""
        if self.experts is None:
            return self.intermediate
        sparse = self.experts.per_token * self.experts.units + self.experts.shared_units
        return max(sparse, self.intermediate if self.experts.dense_layers else 0)

    @property
    def shares_embedding(self) -> bool:
        """Whether the model computes logits with its embedding."""
        return self.tied and self.head == "lm"

    @cached_property
    def embedding(self) -> WeightSize:
        """The embedding."""
        return WeightSize("embed_tokens.weight", (self.vocabulary, self.hidden), Cut.TOKENS)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers by their weights: one kind, or in a mixture of experts the dense and the sparse ones."""
        every = range(self.layers)
        if self.experts is None:
            return (LayerKind(tuple(every), self._layer(self._dense(self.intermediate))),)
        dense = self.experts.dense_layers
        sparse = tuple(number for number in every if number not in dense)
        kinds = (
            LayerKind(dense, self._layer(self._dense(self.intermediate))),
            LayerKind(sparse, self._layer(self._sparse(self.experts)), is_sparse=True),
        )
        return tuple(kind for kind in kinds if kind.numbers)

    def _layer(self, feed_forward: Iterable[WeightSize]) -> tuple[WeightSize, ...]:
        """Returns the weights of a layer with given ones in its feed-forward part."""
        h, q, k = self.hidden, self.query, self.key
        attention = [
            *_linear("self_attn.q_proj", q, h, Cut.OUTPUTS, self.attention_bias),
            *_linear("self_attn.k_proj", k, h, Cut.OUTPUTS, self.attention_bias),
            *_linear("self_attn.v_proj", k, h, Cut.OUTPUTS, self.attention_bias),
            *_linear("self_attn.o_proj", h, q, Cut.INPUTS, self.output_bias),
        ]
        if self.qk_norm:
            attention += [WeightSize(f"self_attn.{each}_norm.weight", (self.head_dim,)) for each in "qk"]
        norms = (WeightSize(f"{name}_layernorm.weight", (h,)) for name in ("input", "post_attention"))
        return (*attention, *feed_forward, *norms)

    def _dense(self, units: int, block: str = "mlp") -> list[WeightSize]:
        """Returns the weights of a feed-forward layer."""
        return [
            *_linear(f"{block}.gate_proj", units, self.hidden, Cut.OUTPUTS, self.mlp_bias),
            *_linear(f"{block}.up_proj", units, self.hidden, Cut.OUTPUTS, self.mlp_bias),
            *_linear(f"{block}.down_proj", self.hidden, units, Cut.INPUTS, self.mlp_bias),
        ]

    def _sparse(self, experts: ExpertSizes) -> list[WeightSize]:
        """Returns the weights of the router, of all experts, and of the shared expert."""
        h, count, units = self.hidden, experts.count, experts.units
        weights = [
            WeightSize("mlp.gate.weight", (count, h)),
            WeightSize("mlp.experts.gate_up_proj", (count, 2 * units, h)),
            WeightSize("mlp.experts.down_proj", (count, h, units)),
        ]
        if self.family != "qwen2_moe":
            return weights
        shared = self._dense(experts.shared_units, "mlp.shared_expert")
        return [*weights, *shared, WeightSize("mlp.shared_expert_gate.weight", (1, h))]

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
        for number, kind in enumerate(self.kinds):
            yield from ((f"layer {number}", weight) for weight in kind.weights)
        yield from (("end", weight) for weight in self.end)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order."""
        kinds = {number: kind for kind in self.layer_kinds for number in kind.numbers}
        return tuple(kinds[number] for number in range(self.layers))

    @cached_property
    def layer_numel(self) -> int:
        """Number of parameters of the largest layer."""
        return max(kind.numel for kind in self.layer_kinds)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the model; tied ones count once."""
        ends = sum(weight.numel for weight in (self.embedding, *self.end))
        return ends + sum(len(kind.numbers) * kind.numel for kind in self.layer_kinds)

    def read_by(self, tokens: float) -> float:
        """Returns the number of parameters of all layers that compute at least one of `tokens` tokens, each of which
        chooses its experts independently of others and uniformly; of one token exactly."""
        sparse = sum(len(kind.numbers) for kind in self.layer_kinds if kind.is_sparse)
        every = sum(len(kind.numbers) * kind.numel for kind in self.layer_kinds)
        if self.experts is None or not sparse:
            return every
        unread = (1 - self.experts.per_token / self.experts.count) ** tokens
        return every - sparse * unread * self.experts.count * 3 * self.experts.units * self.hidden


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


def _check_sizes(given: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raises ValueError where one of the keys has no integer of at least 1."""
    for key in keys:
        if not isinstance(given.get(key), int) or given[key] < 1:
            raise ValueError(f"{key} is {given.get(key)!r}; it must be an integer of at least 1")


def _linear(name: str, outputs: int, inputs: int, cut: Cut, has_bias: bool) -> tuple[WeightSize, ...]:
    """Returns the weights of a linear layer. A bias is cut where outputs are: each rank of an inputs cut has it
    whole."""
    weight = WeightSize(f"{name}.weight", (outputs, inputs), cut)
    bias = WeightSize(f"{name}.bias", (outputs,), cut if cut is Cut.OUTPUTS else Cut.WHOLE)
    return (weight, bias) if has_bias else (weight,)
