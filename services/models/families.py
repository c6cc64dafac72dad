"""Models and tokenizers from Hugging Face directories, and back.

Everything is read from local directories; nothing is downloaded and no code that comes with a model is run. Models
are in eval mode: dropout would make the log-probabilities of the policy that sampled differ from those it trains
on. Asked for `on_meta`, they have shapes in place of weights, which are on the meta device; what is computed from the
configuration and heads that are new have values. `services.models.weights` reads the rest, part by part.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import GENERATION_CONFIG_NAME

from services.compute.linear import speed_up
from services.compute.microbatch import cut
from services.compute.norms import speed_up_norms

VALUE_HEAD_FILE = "value_head.safetensors"

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose transformer is an embedding, equal layers and a norm, and nothing between. Others may scale what
comes out of the embedding, which each stage would do again."""


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises FileNotFoundError or ValueError, naming the directory, where there is no tokenizer to load."""
    _require_model_directory(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no tokenizer that can be loaded: {_first_line(error)}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        # Of some families transformers makes one where there is none, with nothing but special tokens.
        raise ValueError(f"{directory} has no files of a tokenizer, such as tokenizer.json")
    return tokenizer


def load_causal_lm(
    directory: Path, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> PreTrainedModel:
    """Any causal language model.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    return _load(AutoModelForCausalLM, directory, dtype, on_meta=on_meta)


class ValueModel(nn.Module):
    """A transformer that gives each position a scalar: what the episode is worth from there on.

    The head begins at zero, so a new critic says 0 everywhere and its first update moves the head alone.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, dtype=backbone.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, *, logits_to_keep: int = 0, **arguments: Any) -> Tensor:
        """Values [B, K] of the last K = `logits_to_keep` positions of `input_ids` [B, T]; 0 means all T. Further
        arguments are those of the backbone."""
        hidden_BTH = self.backbone(input_ids=input_ids, **arguments).last_hidden_state
        return self.value_head(hidden_BTH[:, -logits_to_keep:])[..., 0]


def load_value_model(
    directory: Path, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> ValueModel:
    """A value model from a directory that `write_model` made of one, or a new one on top of a causal LM.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    model = ValueModel(_load(AutoModel, directory, dtype, on_meta=on_meta))
    if (directory / VALUE_HEAD_FILE).exists():
        model.value_head.load_state_dict(load_file(directory / VALUE_HEAD_FILE))
    return model.eval()


def load_classifier(
    directory: Path, dtype: torch.dtype = torch.float32, *, on_meta: bool = False
) -> PreTrainedModel:
    """A sequence-classification model with one label, or a new one on the backbone of a causal language model: its head
    begins at zero, so that it scores everything 0 and its first update moves the head alone.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the directory holds another kind of model, or not all of its weights.
    """
    _require_model_directory(directory)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        return _load(AutoModelForSequenceClassification, directory, dtype, on_meta=on_meta)
    if config.get_text_config().pad_token_id is None:
        config.pad_token_id = config.get_text_config().pad_token_id = load_tokenizer(directory).pad_token_id
    config.num_labels = 1
    model: Any = _load(
        AutoModelForSequenceClassification, directory, dtype, {"score.weight"}, on_meta=on_meta, config=config
    )
    model.score.weight = nn.Parameter(torch.zeros_like(model.score.weight, device="cpu"))
    return model


def stored_as_computed(model: PreTrainedModel | ValueModel) -> bool:
    """Whether files have a model's tensors as they are in memory. Those of others (most mixtures of experts, quantized
    models) transformers converts when it reads and writes."""
    transformer = model.backbone if isinstance(model, ValueModel) else model
    return not (
        get_model_conversion_mapping(transformer, add_legacy=False)
        or transformer._get_dtype_plan(transformer.dtype)
        or getattr(transformer.config, "quantization_config", None)
    )


class SequenceScorer:
    """A reward model: one score for each whole text.

    Args:
        directory: of a sequence classification model with one label, and its tokenizer.
        token_budget: most tokens computed at a time, padding included.
        dtype: of weights and computation; scores are float32.
        device: of the model, which is whole there.
        load: loads the model.

    Attributes:
        max_tokens: of a row: as many as the budget allows, and the model has positions for.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: the model does not give one score per sequence, does not match its tokenizer, or cannot pad.
    """

    def __init__(
        self,
        directory: Path,
        *,
        token_budget: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        load: Callable[[Path, torch.dtype], PreTrainedModel] | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(directory)
        self.model = (
            load(directory, dtype) if load else _load(AutoModelForSequenceClassification, directory, dtype)
        )
        check_tokenizer(self.tokenizer, self.model)
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"{directory} gives {self.model.config.num_labels} labels, a reward model gives one"
            )
        self._pad_id = self.model.config.get_text_config().pad_token_id
        if self._pad_id is None:
            raise ValueError(f"config.json of {directory} has no pad_token_id, so rows cannot share a batch")
        self._token_budget = token_budget
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.max_tokens = token_budget if positions is None else min(token_budget, positions)
        nn.Module.to(self.model, device)

    def stage_weights(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of whole tensors under the names of the checkpoint, for `load_weights`.

        Raises:
            RuntimeError: memory ran out.
            KeyError: the model has no tensor of a name.
        """
        own = self.model.state_dict()
        return {name: torch.empty_like(own[name]).copy_(tensor) for name, tensor in weights}

    @torch.no_grad()
    def load_weights(self, staged: Mapping[str, Tensor]) -> None:
        """Take over what `stage_weights` copied."""
        own = self.model.state_dict()
        for name, tensor in staged.items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def score_tokens(
        self, rows: Sequence[Sequence[int]], scored: Callable[[int], None] = lambda _: None
    ) -> Tensor:
        """Scores [rows], float32, on the device of the model.

        Args:
            scored: called after each micro-batch with the number of rows scored so far; ends the work by raising.

        Raises:
            ValueError: a row longer than the token budget.
        """
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        scores = torch.empty(len(rows), dtype=torch.float32, device=self.model.device)
        done = 0
        for part in cut(lengths, self._token_budget):
            ids_BT = torch.full((len(part), int(lengths[part].max())), self._pad_id)
            for row_T, row in zip(ids_BT, part, strict=True):
                row_T[: lengths[row]] = torch.tensor(rows[row])
            mask_BT = torch.arange(ids_BT.shape[1]) < torch.from_numpy(lengths[part])[:, None]
            output = self.model(
                input_ids=ids_BT.to(self.model.device), attention_mask=mask_BT.long().to(self.model.device)
            )
            scores[torch.from_numpy(part).to(scores.device)] = output.logits[:, 0].float()
            done += len(part)
            scored(done)
        return scores


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | ValueModel) -> None:
    """Raises ValueError where the tokenizer has ids that the model has no embedding for."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    embedding: Any = backbone.get_input_embeddings()
    check_vocabulary(tokenizer, embedding.num_embeddings, backbone.name_or_path)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, model: Path | str | None
) -> None:
    """Raises ValueError where the tokenizer has ids for which the model, named for the message, has no embedding."""
    num_ids = max(tokenizer.get_vocab().values()) + 1
    if num_ids > num_embeddings:
        raise ValueError(
            f"tokenizer and model do not match: the tokenizer {tokenizer.name_or_path} has {num_ids} token ids, "
            f"the model {model} has {num_embeddings} embeddings"
        )


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) of the map from token to id: equal where two services mean the same by a token id."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 (hex) over name, dtype, shape and bytes of tensors, in the order given: sort them by name.

    A hash of the weights themselves: it knows nothing of files, how they were cut or their metadata.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_model(
    model: PreTrainedModel | ValueModel,
    weights: Mapping[str, Tensor],
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write weights as a Hugging Face directory with the configuration of `model`.

    A value model becomes its backbone, which AutoModel loads, and `VALUE_HEAD_FILE` beside it.

    Args:
        model: gives configuration and architecture; its own weights are not read.
        weights: whole tensors under the names of `model.state_dict()`, tied weights once.

    Raises:
        OSError: a file could not be written.
    """
    try:
        if isinstance(model, ValueModel):
            save_file(_under("value_head.", weights), directory / VALUE_HEAD_FILE)
            model.backbone.save_pretrained(directory, state_dict=_under("backbone.", weights))
        else:
            model.save_pretrained(directory, state_dict=dict(weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
    except SafetensorError as error:
        raise OSError(f"model directory {directory} could not be written: {error}") from error


def write_config(
    model: PreTrainedModel | ValueModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write what a Hugging Face directory has beside its weights.

    Args:
        dtype: of the weights; default that of the model.

    Raises:
        OSError: a file could not be written.
    """
    transformer = model.backbone if isinstance(model, ValueModel) else model
    transformer.config.architectures = [type(transformer).__name__]
    save_config(transformer.config, directory, dtype or transformer.dtype)
    if transformer.can_generate() and transformer.generation_config is not None:
        transformer.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def save_config(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> None:
    """Write a model's configuration as one of weights in `dtype`; the given one stays as it is.

    Raises:
        OSError: it could not be written.
    """
    config = copy.deepcopy(config)
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        if each is not None:
            each.dtype = dtype
    config.save_pretrained(directory)


def _under(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): x.contiguous() for name, x in weights.items() if name.startswith(prefix)
    }


def _require_model_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise FileNotFoundError(f"model directory {directory} does not exist")
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is not a model directory: it has no config.json")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _load(
    auto_class: type,
    directory: Path,
    dtype: torch.dtype,
    new: Set[str] = frozenset(),
    *,
    on_meta: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Loads a model whose weights are all there, but those that are `new`."""
    _require_model_directory(directory)
    try:
        if on_meta:
            return _on_meta(auto_class, directory, dtype, **options)
        model, report = auto_class.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = _first_line(error)
        raise ValueError(f"{directory} cannot be loaded with {auto_class.__name__}: {cause}") from error
    missing = sorted(set(report["missing_keys"]) - new)
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} weights of its model, the first is {missing[0]}")
    speed_up(model)
    speed_up_norms(model)
    return model.eval()


def _on_meta(auto_class: Any, directory: Path, dtype: torch.dtype, config: Any = None) -> PreTrainedModel:
    """A model that has shapes in place of weights."""
    config = config or AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model: Any = auto_class.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if model.can_generate() and (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    _compute_buffers(model, model)
    speed_up(model)
    speed_up_norms(model)
    return model.eval()


def _compute_buffers(module: nn.Module, model: Any) -> None:
    """Give values to those buffers of a module, and of what is in it, that are computed from the configuration and not
    in files. The nearest model that a module is in knows how (transformers' `smart_apply`).

    Raises:
        ValueError: it does not; where the buffer is of floats, which begin as nan.
    """
    for child in module.children():
        _compute_buffers(child, child if isinstance(child, PreTrainedModel) else model)
    buffers = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
    computed = {name: _without_values(x) for name, x in buffers.items() if x is not None}
    module._buffers.update(computed)
    if computed:
        model._init_weights(module)
    for name in computed:
        if bool(torch.isnan(module._buffers[name]).any()):  # type: ignore[arg-type]
            raise ValueError(f"{type(model).__name__} does not compute {name} of {type(module).__name__}")


def _without_values(on_meta: Tensor) -> Tensor:
    """In host memory, and nan where there is such a thing."""
    if on_meta.is_floating_point():
        return torch.full_like(on_meta, float("nan"), device="cpu")
    return torch.empty_like(on_meta, device="cpu")
