"""Training engine for low-rank adapters (LoRA, Hu et al. 2021; by peft) on a frozen model, both sharded with
FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engines.agreement import all_or_none
from services.engines.base import EngineSetup, OptimizerOptions, dealt_to_ranks
from services.engines.fsdp.engine import FSDPEngine
from services.engines.fully_shard import whole
from services.engines.implementation import compute_dtype
from services.models.loading import load_on_meta, repeated_names, tied_names
from services.models.weights import cast
from services.storage.checkpoint import NO_SCALARS, Scalars, WeightShard, read_manifest
from services.storage.publish import readable_path
from services.storage.written import WrittenFile
from settings.actor import ActorTable
from settings.model import ModelTable

ADAPTER_DIRECTORY = "adapter"
"""Name of the subdirectory of an export that contains the adapters in peft's format, beside the merged model."""
ALPHA = "lora.alpha"
"""Name of the scalar in a checkpoint that is the alpha of its adapters."""
_NAME = "default"
"""Name that peft gives to the only adapter of a model."""


@dataclass(frozen=True)
class AdapterOptions:
    """Options of adapters: the weight W [out, in] of a target becomes W + alpha / rank * B A, with B [out, rank] and
    A [rank, in].

    Args:
        rank: inner dimension.
        alpha: scale, above 0.
        target_modules: names of linear layers, or suffixes of them; "all-linear" for all but the output layer.
        seed: random seed of the initial A. B is initially zero, so a new adapter changes nothing.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | Sequence[str] = "all-linear"
    seed: int = 0


class LoRAEngine(FSDPEngine):
    """Training engine for a causal language model with frozen weights and trained LoRA adapters.

    Adapters, their gradients and moments are in float32 or the model's type, whichever is finer, so the frozen
    weights may be in the type of computation. Snapshots and checkpoints contain adapters and moments alone. Exports
    and `full_tensors` give the merged model, by default in its own type, and the sha256 of an export is over the
    merged weights.

    Args:
        model: as in `FSDPEngine`; adapters are added to it.
        adapters: options of the adapters, the same on every rank.
        device, optimizer, compute_dtype, reshard_after_forward, activation_checkpointing, directory,
            sequence_parallel: as in `FSDPEngine`.

    Raises:
        ValueError: a target is missing, is not linear, or is tied to another weight.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        adapters: AdapterOptions,
        optimizer: OptimizerOptions,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        directory: Path | None = None,
        sequence_parallel: int = 1,
    ) -> None:
        self._adapters = adapters
        self._layers = add_adapters(model, adapters)
        self._base = model.name_or_path
        super().__init__(
            model,
            device,
            optimizer=optimizer,
            compute_dtype=compute_dtype,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            directory=directory,
            sequence_parallel=sequence_parallel,
        )

    @classmethod
    def create(cls, table: ModelTable, options: Any, setup: EngineSetup) -> Self:
        assert isinstance(table, ActorTable), "only actors have adapters"
        assert table.lora is not None, "the table has adapters"
        assert setup.optimizer is not None, "an actor learns"
        # Frozen weights are kept in the type they are computed in.
        model: Any = load_on_meta(setup.load, table.model, compute_dtype(table))
        adapters = AdapterOptions(
            rank=table.lora.rank,
            alpha=table.lora.alpha,
            target_modules=table.lora.target_modules,
            seed=table.lora.seed,
        )
        return cls(
            model,
            setup.device,
            adapters=adapters,
            optimizer=setup.optimizer,
            compute_dtype=compute_dtype(table),
            activation_checkpointing=table.activation_checkpointing,
            directory=table.model,
            sequence_parallel=table.sequence_parallel,
        )

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Context manager in which the engine computes without the adapters, bit for bit as the original model."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> None:
        """Writes a checkpoint as `TrainEngine.save`, with adapters and moments alone, and alpha as a further scalar."""
        super().save(directory, {**scalars, ALPHA: self._adapters.alpha})

    def begin_save(self, directory: Path, scalars: Scalars = NO_SCALARS) -> Callable[[], list[WrittenFile]]:
        """Begins a checkpoint as `TrainEngine.begin_save`, with the content of that of `save`."""
        return super().begin_save(directory, {**scalars, ALPHA: self._adapters.alpha})

    def load(self, directory: Path) -> Scalars:
        """Loads a checkpoint as `TrainEngine.load`. Also raises ValueError if it has no adapters, or their alpha is
        another."""
        with all_or_none(f"reading {directory}"):
            alpha = read_manifest(readable_path(directory))[1].get(ALPHA)
            if alpha != self._adapters.alpha:
                held = "no adapters" if alpha is None else f"adapters with alpha {alpha:g}"
                raise ValueError(
                    f"checkpoint {directory} has {held}, expected alpha {self._adapters.alpha:g}"
                )
        return {name: value for name, value in super().load(directory).items() if name != ALPHA}

    @torch.no_grad()
    def _fill(self, empty: Mapping[str, WeightShard]) -> None:
        weights = dict(empty)
        for name, first in _first_values(self._layers, self._adapters):
            part = weights.pop(name)
            part.tensor.copy_(first[part.box])
        super()._fill({_plain_name(name): part for name, part in weights.items()})

    @torch.no_grad()
    def _read_first_values(self, weights: Mapping[str, WeightShard]) -> None:
        for name, first in _first_values(self._layers, self._adapters):
            weights[name].tensor.copy_(first[weights[name].box])

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the model's tensors without the adapters, under their names in the checkpoint."""
        learned = set(self._trained_names)
        return dict(
            sorted((_plain_name(name), x) for name, x in super()._tensors().items() if name not in learned)
        )

    def weight_shards(self) -> Iterator[tuple[str, WeightShard]]:
        """Yields merged weights, whole, each on one rank. Collective."""
        # Rows of B A have other bits than the same rows of a product of them alone.
        return dealt_to_ranks(self.full_tensors())

    def _gather(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super()._gather(tensors):
            layer = self._layers.get(name.removesuffix(".weight"))
            yield name, cast(weight, dtype) if layer is None else _merged(weight, layer, dtype)

    def _state(self) -> dict[str, Tensor]:
        """Returns this rank's shards of adapters and moments, by name as in `ShardedEngine`, without those of frozen
        weights."""
        frozen = {f"weight.{name}" for name in self._kept.keys() - set(self._trained_names)}
        return {name: x for name, x in super()._state().items() if name not in frozen}

    def _resident(self) -> list[Tensor]:
        """Returns the tensors that `offload` moves, which include the shards of frozen weights."""
        return [*super()._resident(), *(x.detach() for x in self._kept.values())]

    def _gather_companions(self) -> Callable[[Path], None]:
        adapters = ((name, whole(self._parameters[name])) for name in self._trained_names)
        gathered = {name: x.cpu() for name, x in adapters if dist.get_rank() == 0}
        config = _config(self._adapters)
        config.inference_mode, config.base_model_name_or_path = True, self._base
        # peft's constructor would turn them into a set, whose order in the file is arbitrary.
        config.target_modules = sorted(self._layers)
        return lambda directory: _write_adapter(directory / ADAPTER_DIRECTORY, gathered, config)


def add_adapters(model: PreTrainedModel, options: AdapterOptions) -> dict[str, Linear]:
    """Adds adapters to a model in place, on the meta device, freezes the model's own weights, and puts it into eval
    mode; returns the layers that have an adapter, by name.

    Raises:
        ValueError: a target is missing, is not linear, or is tied to another weight.
    """
    tied = tied_names(model).keys() | repeated_names(model)
    config = _config(options)
    config.target_modules = _targets(model, options.target_modules)
    # Given a mixture of experts itself, peft would also adapt experts and router, which are no linear layers.
    inject_adapter_in_model(config, nn.ModuleDict({"model": model}), _NAME, low_cpu_mem_usage=True)
    layers = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not isinstance(layer, Linear) or not isinstance(layer.base_layer, nn.Linear):
            raise ValueError(f"lora.target_modules: {name} is not a linear layer")
        if f"{name}.weight" in tied:
            raise ValueError(f"lora.target_modules: {name} shares its weight, which merging would take apart")
        layers[name] = layer
    for layer in layers.values():
        for adapter in (layer.lora_A[_NAME], layer.lora_B[_NAME]):
            adapter.to(torch.promote_types(layer.weight.dtype, torch.float32))
    model.eval()
    return layers


def _targets(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Returns the names, or ends of names, of the layers that get an adapter. Raises ValueError for one that no layer
    has, and if there are none."""
    names = dict(model.named_modules())
    if targets == "all-linear":
        output = model.get_output_embeddings()
        linear = [name for name, x in names.items() if isinstance(x, nn.Linear) and x is not output]
        # Routers are linear layers that return more than their product.
        found = [name for name in linear if "Router" not in type(names[name]).__name__]
        if not found:
            raise ValueError(
                f"lora.target_modules: models of type {model.config.model_type} have no linear layers"
            )
        return found
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ValueError(f"lora.target_modules: the model has no linear layer {target}")
    return list(targets)


@torch.no_grad()
def _first_values(layers: Mapping[str, Linear], options: AdapterOptions) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the initial values, on the CPU, of both tensors of each adapter; the same numbers as peft
    draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        for name, layer in layers.items():
            assert isinstance(layer.base_layer, nn.Linear), "other layers are refused"
            # Both constructors draw random numbers, which peft discards too.
            a = nn.Linear(layer.base_layer.in_features, options.rank, bias=False)
            b = nn.Linear(options.rank, layer.base_layer.out_features, bias=False)
            nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
            yield f"{name}.lora_A.{_NAME}.weight", a.weight.to(layer.weight.dtype)
            yield f"{name}.lora_B.{_NAME}.weight", torch.zeros_like(b.weight)


def _config(options: AdapterOptions) -> LoraConfig:
    """Converts options of adapters to peft's configuration."""
    targets = options.target_modules
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=options.rank,
        lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType] - peft takes any number
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


def _merged(weight: Tensor, layer: Linear, dtype: torch.dtype | None) -> Tensor:
    """Returns W + alpha / rank * B A, rounded once to `dtype`. Default: the type of W [out, in]. Collective."""
    a, b = (whole(each.get_parameter(f"{_NAME}.weight")) for each in (layer.lora_A, layer.lora_B))
    return torch.addmm(weight.to(a.dtype), b, a, alpha=layer.scaling[_NAME]).to(dtype or weight.dtype)


def _plain_name(name: str) -> str:
    """Returns the name in the checkpoint of a weight, without the part that peft adds to names of adapted layers."""
    return name.replace(".base_layer.", ".")


def _write_adapter(directory: Path, weights: Mapping[str, Tensor], config: LoraConfig) -> None:
    """Writes adapters to a new directory in the format of `PeftModel.from_pretrained`.

    Args:
        directory: path of the directory, which must not exist.
        weights: tensors of the adapters, by their names in the model.
        config: peft's configuration of the adapters.

    Raises:
        OSError: a file could not be written.
    """
    directory.mkdir()
    named = {f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": x for name, x in weights.items()}
    try:
        save_file(named, directory / SAFETENSORS_WEIGHTS_NAME)
    except SafetensorError as error:
        raise OSError(f"adapter in {directory} could not be written: {error}") from error
    config.save_pretrained(str(directory))
