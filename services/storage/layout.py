"""Layouts of a model's tensors on the ranks of a mesh: which pipeline stage keeps a tensor, and how it is cut over
tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor, nn

from services.storage.checkpoint import WeightShard

VOCABULARY_MULTIPLE = 64
"""Vocabularies are padded to a multiple of this, as in vLLM, so that training shards nest in vLLM's."""

STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")
"""Supported styles of transformers' tensor-parallel plans, by which modules of a layer are cut."""


@dataclass(frozen=True)
class Layout:
    """Layout of a checkpoint's tensor on the ranks of a mesh.

    Each rank of the stage keeps the whole tensor or one of several equal parts, cut along the first dimension of the
    kept tensor, so that gathering the parts is one contiguous copy.

    Args:
        shape: Shape in the checkpoint.
        stage: Pipeline stage that keeps the tensor.
        parts: Number of parts that the tensor is cut into; 0 for a tensor that every rank of the stage keeps whole.
        transposed: Whether ranks keep the transpose.
        padding: Rows at the end of the kept tensor that the checkpoint's tensor does not have.
        partial_gradient: Whether the gradient of the tensor, which is not cut, must be summed over the
            tensor-parallel ranks.
        tied: Whether the last stage has a replica of the tensor as output weights.

    Raises:
        ValueError: The tensor cannot be cut into equal parts.
    """

    shape: tuple[int, ...]
    stage: int
    parts: int = 0
    transposed: bool = False
    padding: int = 0
    partial_gradient: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if self.is_cut and self.gathered_shape[0] % self.parts:
            raise ValueError(
                f"a tensor of {self.gathered_shape[0]} rows cannot be cut into {self.parts} parts"
            )

    @property
    def is_cut(self) -> bool:
        """Whether the tensor is cut into parts, be it one part only. If not, each rank of the stage keeps it whole."""
        return self.parts > 0

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """Shape of the concatenation of all parts, padding included."""
        first, *rest = reversed(self.shape) if self.transposed else self.shape
        return (first + self.padding, *rest)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that one rank keeps."""
        first, *rest = self.gathered_shape
        return (first // max(self.parts, 1), *rest)

    def merged(self, stages: int, parts: int) -> Self:
        """Returns the layout on a mesh in which each stage consists of `stages` of this mesh's stages, and each part
        of `parts` of its parts."""
        return replace(self, stage=self.stage // stages, parts=self.parts // parts)

    def whole(self, gathered: Tensor) -> Tensor:
        """Returns the checkpoint's tensor as a view of `gathered`, the concatenation of all parts."""
        real = gathered[: len(gathered) - self.padding]
        return real.t() if self.transposed else real

    def shard(self, kept: Tensor, part: int, first_row: int = 0) -> WeightShard:
        """Returns a rank's part as a box of the checkpoint's tensor, without padding. The box's tensor is a view of
        `kept`.

        Args:
            kept: The tensor that the rank keeps, or consecutive rows of it.
            part: Number of the rank's part; ignored for a tensor that is not cut.
            first_row: Row of the part with which `kept` begins.
        """
        num_real = self.gathered_shape[0] - self.padding
        begin = min((part * self.kept_shape[0] if self.is_cut else 0) + first_row, num_real)
        real = kept[: num_real - begin]
        offsets = [0] * len(self.shape)
        offsets[-1 if self.transposed else 0] = begin
        return WeightShard(real.t() if self.transposed else real, tuple(offsets), self.shape)


def layouts_of(
    model: nn.Module, backbone: Any, *, tied: bool, pipeline: int, tensor: int
) -> dict[str, Layout]:
    """Returns the layout of every tensor of a model, by its name in `model.state_dict()`; a tied tensor is under its
    first name alone.

    Layers are cut by the model's own `base_model_tp_plan`, embedding and output layer by rows, one per token id.

    Args:
        model: The whole model; its weights may be on the meta device.
        backbone: Its transformer, with `embed_tokens`, `layers` and `norm`.
        tied: Whether the output layer has the same weight as the embedding.
        pipeline: Number of pipeline stages.
        tensor: Number of tensor-parallel ranks.

    Raises:
        ValueError: The model has no plan, or a plan with unknown styles, or its sizes do not divide.
    """
    plan: Mapping[str, str] = backbone.config.base_model_tp_plan or {}
    for path, style in plan.items():
        if path.startswith("layers.") and style not in STYLES:
            raise ValueError(f"the plan of {type(backbone).__name__} cuts {path} {style!r}; known: {STYLES}")
    if not plan:
        raise ValueError(f"{type(backbone).__name__} has no plan for tensor parallelism")
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is backbone)
    num_layers = len(backbone.layers)
    if num_layers % pipeline:
        raise ValueError(f"{num_layers} layers cannot be dealt out to {pipeline} stages")
    layouts = {}
    for name, parameter in model.named_parameters():
        path = name.removeprefix(prefix)
        shape = tuple(parameter.shape)
        match path.split("."):
            case ["layers", number, *rest]:
                stage = int(number) // (num_layers // pipeline)
                style = style_of(backbone, ".".join(rest[:-1]))
                layouts[name] = _layer_layout(style, rest[-1], shape, stage, tensor)
            case ["embed_tokens", _]:
                layouts[name] = replace(_vocabulary_layout(shape, 0, tensor), tied=tied)
            case ["lm_head", "weight"]:
                if not tied:
                    layouts[name] = _vocabulary_layout(shape, pipeline - 1, tensor)
            case ["norm" | "value_head", _]:
                layouts[name] = Layout(shape, pipeline - 1)
            case _:
                raise ValueError(
                    f"{type(backbone).__name__} has a weight {name} that engine 3d does not know"
                )
    return dict(sorted(layouts.items()))


def style_of(backbone: Any, path: str) -> str:
    """Returns the style by which the model's tensor-parallel plan cuts the module at `path` within each layer;
    "replicated" if the plan does not name it."""
    return backbone.config.base_model_tp_plan.get(f"layers.*.{path}", "replicated")


def _layer_layout(style: str, kind: str, shape: tuple[int, ...], stage: int, tensor: int) -> Layout:
    """Returns the layout of a layer's tensor: `style` of its module's plan, `kind` its own name, such as "weight" or
    "bias", `tensor` the number of tensor-parallel ranks."""
    match style, kind:
        case "colwise", _:
            return Layout(shape, stage, parts=tensor)
        case "rowwise", "weight":
            return Layout(shape, stage, parts=tensor, transposed=True)
        case "replicated_with_grad_allreduce", _:
            return Layout(shape, stage, partial_gradient=True)
        case _:
            return Layout(shape, stage)


def _vocabulary_layout(shape: tuple[int, ...], stage: int, tensor: int) -> Layout:
    """Returns the layout of a tensor with a row per token id, cut over `tensor` ranks and padded to
    VOCABULARY_MULTIPLE."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor)
    return Layout(shape, stage, parts=tensor, padding=-shape[0] % multiple)
