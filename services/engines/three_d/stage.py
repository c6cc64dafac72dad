"""The part of a transformer on one rank of a mesh: the layers of its pipeline stage, with a tensor-parallel shard of
their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import GENERATION_CONFIG_NAME

from services.compute.heads import Head
from services.compute.layers import speed_up_layers
from services.compute.microbatch import MicroBatch
from services.compute.packing import ATTENTION, skip_unread_positions_in_last_layer
from services.compute.recompute import recompute_in_backward
from services.engines.three_d.groups import MeshGroups
from services.engines.three_d.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    fan_out_input,
)
from services.models.configs import load_config
from services.models.export import save_config, save_generation_config
from services.models.value_model import ValueModel
from services.models.weights import WeightsReader, write_weights
from services.storage.checkpoint import WeightShard
from services.storage.layout import Layout, layouts_of, style_of
from settings import meshes
from settings.families import FAMILIES
from settings.fit import read_shape

_BACKBONE = "backbone."

Output = TypeVar("Output")
Memory = Callable[[str], Tensor]
"""Returns the memory for a weight of this rank, given its name: a tensor of its layout's `kept_shape`."""


class ModelStage:
    """One rank's part of a causal language model or value model. Parameters have no memory before `allocate` and no
    values before `load`, which reads this rank's shards alone.

    Computation is that of the model's transformers classes, with linear layers replaced by parallel ones and without
    the layers of other stages.

    Args:
        directory: Hugging Face directory of a model of one of the `FAMILIES`.
        groups: Position and process groups of the rank.
        device: Device of this rank.
        dtype: Type of weights and activations.
        with_value_head: Whether the model has a value head instead of an output layer.
        layouts: Layout of every tensor on the mesh of `groups`, by name. Default: `layouts_of` the model and the
            mesh.
        activation_checkpointing: Whether a layer saves only its input, and is recomputed in the backward pass.

    Attributes:
        device: Device of this rank.
        dtype: Type of weights and activations.
        config: Configuration of the whole model.
        layouts: Layout of every tensor of the model, by its name in the checkpoint; tied tensors under the first name.
        aliases: For each further name of a tied tensor, its first name.
        parameters: This rank's weights, by name. The last stage has a replica of a tied embedding.
        module: The stage as one module.
        layers: The model's layers in this stage.

    Raises:
        ValueError: The model is of another kind, does not divide over the mesh, or is not in the directory.
    """

    def __init__(
        self,
        directory: Path,
        groups: MeshGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        with_value_head: bool = False,
        layouts: Mapping[str, Layout] | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        self._directory, self._groups = directory, groups
        self.device, self.dtype = device, dtype
        self.config: PreTrainedConfig = load_config(directory)
        if self.config.model_type not in FAMILIES:
            raise ValueError(
                f"{directory} is a {self.config.model_type}, engine 3d knows {', '.join(FAMILIES)}"
            )
        mesh = groups.mesh
        meshes.check(f"{mesh.pipeline}-{mesh.tensor}-{mesh.data}", mesh.size, read_shape(directory))
        whole, backbone = _on_meta(directory, dtype, with_value_head)
        speed_up_layers(backbone)
        self.config.architectures = [type(backbone if with_value_head else whole).__name__]
        self.config.dtype = dtype
        self._generation_config = _generation_config(directory) if not with_value_head else None
        tied = bool(self.config.tie_word_embeddings) and not with_value_head
        self.layouts = layouts or layouts_of(
            whole, backbone, tied=tied, pipeline=mesh.pipeline, tensor=mesh.tensor
        )
        prefix = _BACKBONE if with_value_head else f"{whole.base_model_prefix}."
        self._embedding_name = f"{prefix}embed_tokens.weight"
        self.aliases = {"lm_head.weight": self._embedding_name} if tied else {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._keep_own_layers(backbone, prefix)
        self._embedding, self._head = self._keep_ends(whole, backbone, prefix, with_value_head)
        self._backbone, self.layers = backbone.eval(), list(backbone.layers)
        self.module = _StageModule(self._embedding, backbone, self._head)
        if activation_checkpointing:
            recompute_in_backward(backbone.layers)

    def allocate(self, memory: Memory | None = None) -> None:
        """Allocates the parameters, without values.

        Args:
            memory: Returns the memory of each parameter, given its name. Default: new memory on the stage's device.
        """
        names = {parameter: name for name, parameter in self.parameters.items()}
        self.parameters = {name: nn.Parameter((memory or self._own_memory)(name)) for name in self.parameters}
        for path, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            owner, _, attribute = path.rpartition(".")
            replacement = self.parameters[names[parameter]]
            self.module.get_submodule(owner).register_parameter(attribute, replacement)

    @torch.no_grad()
    def load(self, shards: Mapping[str, WeightShard]) -> None:
        """Overwrites the tensors of `shards`, given by name, with values from the model directory. A value head that
        the directory lacks is filled with zeros.

        Raises:
            ValueError: The directory lacks some weights, or has them in different shapes.
        """
        with WeightsReader(self._directory) as reader:
            for name, shard in shards.items():
                reader.fill(name, shard)

    def forward(
        self, incoming_BTH: Tensor | None, micro_batch: MicroBatch, head: Head[Output]
    ) -> Tensor | Output:
        """Runs this stage's layers on a micro-batch; returns hidden states [B, T, H], or on the last stage the output
        of the head.

        Args:
            incoming_BTH: Hidden states from the previous stage; None on the first stage.
            micro_batch: The micro-batch.
            head: Computes the output on the last stage.
        """
        return self.module(incoming_BTH, micro_batch, head)

    def new_cache(self) -> DynamicCache:
        """Returns an empty KV cache for this stage's layers."""
        return DynamicCache(config=self._backbone.config)

    def decode(self, incoming: Tensor, cache: DynamicCache, positions: Mapping[str, Tensor]) -> Tensor:
        """Runs this stage's layers on T further tokens of each row and appends their keys and values to the KV cache;
        returns hidden states [B, T, H].

        Args:
            cache: KV cache of this stage's layers, which is changed.
            incoming: Token ids [B, T] on the first stage, hidden states of the previous stage on others.
            positions: Keyword arguments `position_ids`, [B, T] or [1, T], and `attention_mask` if rows are padded.
        """
        hidden_BTH = incoming if self._embedding is None else self._embedding(incoming)
        output = self._backbone(inputs_embeds=hidden_BTH, past_key_values=cache, use_cache=True, **positions)
        return output.last_hidden_state

    def next_logits(self, hidden_BTH: Tensor) -> Tensor:
        """Returns the logits [B, V] of the next token over the whole vocabulary, from the hidden states of the last
        position. On the last stage only; collective over the tensor group."""
        assert isinstance(self._head, VocabularyParallelHead), "a value model does not generate"
        return self._head.logits(hidden_BTH[:, -1])

    def shard(self, name: str, kept: Tensor, first_row: int = 0) -> WeightShard:
        """Returns a `WeightShard` of `kept`, with its offset in the checkpoint's tensor, without padding and in the
        orientation of the checkpoint; its tensor is a view of `kept`.

        Args:
            name: Name of the weight whose layout `kept` has.
            kept: This rank's tensor-parallel shard of the weight, or consecutive rows of it.
            first_row: Row of that shard with which `kept` begins.
        """
        return self.layouts[name].shard(kept, self._groups.tensor_index, first_row)

    def write(self, directory: Path, gathered: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str:
        """Writes the whole model, in type `dtype`, to an existing directory, while name and whole tensor of each weight
        are gathered; returns one sha256 (hex) over all weights.

        Raises:
            OSError: A file could not be written.
        """
        sizes = {name: torch.Size(each.shape).numel() * dtype.itemsize for name, each in self.layouts.items()}
        sha256 = write_weights(directory, sizes, ((name, x.to(dtype)) for name, x in gathered))
        save_config(self.config, directory, dtype)
        if self._generation_config is not None:
            save_generation_config(self._generation_config, directory)
        return sha256

    def is_replica(self, name: str) -> bool:
        """Returns whether this rank's shard of a weight is a replica, to be counted on a different rank with the same
        data index. On the weight's own stage, True only for a weight that is not cut, on all tensor ranks but one."""
        layout, groups = self.layouts[name], self._groups
        return layout.stage != groups.stage or (not layout.is_cut and groups.tensor_index > 0)

    def _keep_own_layers(self, backbone: Any, prefix: str) -> None:
        """Reduces `backbone`, in place, to this stage's layers, cuts these, and adds their weights to `parameters`."""
        num_layers = len(backbone.layers) // self._groups.mesh.pipeline
        first = self._groups.stage * num_layers
        backbone.layers = backbone.layers[first : first + num_layers]
        for number, layer in enumerate(backbone.layers, first):
            # The layer's index into a KV cache, which has the layers of this stage only.
            layer.self_attn.layer_idx -= first
            self._cut(layer, backbone)
            self._keep(layer, f"{prefix}layers.{number}.")
        # The transformer runs as many layers as its configuration says, and looks up the type of each.
        backbone.config.num_hidden_layers = num_layers
        if getattr(backbone.config, "layer_types", None):
            backbone.config.layer_types = backbone.config.layer_types[first : first + num_layers]
        # Rotary frequencies are computed, and not in the checkpoint.
        backbone.rotary_emb = type(backbone.rotary_emb)(config=self.config).to(self.device)

    def _cut(self, layer: nn.Module, backbone: Any) -> None:
        """Replaces each linear layer in `layer` that the model's tensor-parallel plan cuts by its parallel form, and
        passes the input of column-parallel ones through `fan_out`."""
        group, fanned_out = self._groups.tensor, set()
        for path, module in list(layer.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            match style_of(backbone, path):
                case "colwise":
                    layer.set_submodule(path, ColumnParallelLinear(module, group))
                    fanned_out.add(path.rpartition(".")[0])
                case "rowwise":
                    layer.set_submodule(path, RowParallelLinear(module, group))
        for path in fanned_out:
            fan_out_input(layer.get_submodule(path), group)

    def _keep(self, module: nn.Module, prefix: str) -> None:
        """Adds a module's weights to `parameters`, under their names in the checkpoint, which begin with `prefix`."""
        self.parameters |= {f"{prefix}{path}": parameter for path, parameter in module.named_parameters()}

    def _own_memory(self, name: str) -> Tensor:
        return torch.empty(self.layouts[name].kept_shape, dtype=self.dtype, device=self.device)

    def _keep_ends(
        self, whole: Any, backbone: Any, prefix: str, with_value_head: bool
    ) -> tuple[nn.Module | None, nn.Module | None]:
        """Keeps the embedding if this is the first stage, and norm and head if it is the last; removes them
        otherwise.

        Returns:
            (embedding, head), each None if this stage does not have it.
        """
        groups, embedding, head = self._groups, None, None
        if groups.is_first_stage:
            num_rows = self.layouts[self._embedding_name].kept_shape[0]
            embedding = VocabularyParallelEmbedding(backbone.embed_tokens, num_rows, groups.tensor)
            self._keep(embedding, f"{prefix}embed_tokens.")
        backbone.embed_tokens = None
        if groups.is_last_stage:
            skip_unread_positions_in_last_layer(backbone.layers[-1])
            self._keep(backbone.norm, f"{prefix}norm.")
            head = self._keep_head(whole, with_value_head)
        else:
            backbone.norm = nn.Identity()
        return embedding, head

    def _keep_head(self, whole: Any, with_value_head: bool) -> nn.Module:
        """Returns the value head, or this rank's shard of the output layer, and adds its weights to `parameters`."""
        if with_value_head:
            self._keep(whole.value_head, "value_head.")
            return whole.value_head
        name = self.aliases.get("lm_head.weight", "lm_head.weight")
        if name not in self.parameters:
            shape = self.layouts[name].kept_shape
            self.parameters[name] = nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta"))
        return VocabularyParallelHead(self.parameters[name], self.config.vocab_size, self._groups.tensor)


class _StageModule(nn.Module):
    """A stage as one module. Its forward pass on the last stage includes the head's computation, so that FSDP keeps
    the output layer's weight gathered for it.

    Args:
        embedding: Embedding on the first stage; None on others.
        backbone: Transformer with the layers of this stage.
        head: Output layer or value head on the last stage; None on others.
    """

    def __init__(self, embedding: nn.Module | None, backbone: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.embedding, self.backbone, self.head = embedding, backbone, head

    def forward(
        self, incoming_BTH: Tensor | None, micro_batch: MicroBatch, read: Head[Output]
    ) -> Tensor | Output:
        if self.embedding is not None:
            incoming_BTH = self.embedding(micro_batch.input_ids_BT)
        output = self.backbone(inputs_embeds=incoming_BTH, use_cache=False, **micro_batch.arguments())
        if self.head is None:
            return output.last_hidden_state
        raw = self.head(output.last_hidden_state[:, -micro_batch.num_scored :])
        return read(raw[..., 0] if isinstance(raw, Tensor) else raw, micro_batch)


def layouts_of_directory(directory: Path, *, pipeline: int, tensor: int) -> dict[str, Layout]:
    """Returns the layouts of the causal language model in a directory, by name in the checkpoint, as `layouts_of`.
    Reads its config.json alone.

    Args:
        directory: Hugging Face directory of the model.
        pipeline, tensor: Numbers of pipeline stages and of tensor-parallel ranks.

    Raises:
        ValueError: The model does not divide.
    """
    whole, backbone = _on_meta(directory, torch.float32, with_value_head=False)
    tied = bool(whole.config.tie_word_embeddings)
    return layouts_of(whole, backbone, tied=tied, pipeline=pipeline, tensor=tensor)


def _generation_config(directory: Path) -> GenerationConfig | None:
    """Reads the generation configuration of a model directory; None if it has none."""
    if not (directory / GENERATION_CONFIG_NAME).is_file():
        return None
    return GenerationConfig.from_pretrained(directory, local_files_only=True)


def _on_meta(directory: Path, dtype: torch.dtype, with_value_head: bool) -> tuple[Any, Any]:
    """Returns the whole model on the meta device, and the transformer in it."""
    config = load_config(directory)
    with torch.device("meta"):
        if with_value_head:
            backbone = AutoModel.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
            )
            return ValueModel(backbone), backbone
        whole = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
        )
        return whole, whole.base_model
