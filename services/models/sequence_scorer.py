"""A reward model that gives each sequence of token ids one score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.compute.splitting import cut
from services.models.families import load_scoring_model
from services.models.positions import longest_row
from services.models.tokenizers import check_tokenizer, load_tokenizer


class SequenceScorer:
    """A sequence-classification model that gives each sequence of token ids one score; whole on this rank.

    Args:
        directory: Hugging Face directory of model and tokenizer.
        token_budget: most tokens of a micro-batch, padding included.
        dtype: type of weights and computation; scores are float32.
        device: device of the model.
        load: loads the model from a directory in a dtype. Default: `load_scoring_model`.

    Attributes:
        tokenizer: tokenizer of the directory, for callers that have texts.
        model: the model.
        max_tokens: most tokens of a row: the token budget, or the positions of the model if those are fewer.
        vocab_size: number of embeddings of the model.

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
        load: Callable[[Path, torch.dtype], PreTrainedModel] = load_scoring_model,
    ) -> None:
        self.tokenizer = load_tokenizer(directory)
        self.model = load(directory, dtype)
        check_tokenizer(self.tokenizer, self.model)
        embedding: Any = self.model.get_input_embeddings()
        self.vocab_size: int = embedding.num_embeddings
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"{directory} gives {self.model.config.num_labels} labels, a reward model gives one"
            )
        self._pad_id = self.model.config.get_text_config().pad_token_id
        if self._pad_id is None:
            raise ValueError(f"config.json of {directory} has no pad_token_id, so rows cannot share a batch")
        self._token_budget = token_budget
        self.max_tokens = longest_row(self.model.config, token_budget)
        nn.Module.to(self.model, device)

    def stage_weights(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies weights, so that `load_weights` can later replace the model's without failing; returns the copies by
        name, in the dtype and on the device of the model, which is not changed.

        Args:
            weights: name in `model.state_dict()` and whole tensor of each weight; weights that are missing stay.

        Raises:
            RuntimeError: memory ran out.
            KeyError: a name is not one of the model's tensors.
        """
        own = self.model.state_dict()
        return {name: torch.empty_like(own[name]).copy_(tensor) for name, tensor in weights}

    @torch.no_grad()
    def load_weights(self, staged: Mapping[str, Tensor]) -> None:
        """Replaces the model's weights by those that `stage_weights` returned; others stay as they are."""
        own = self.model.state_dict()
        for name, tensor in staged.items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def score_tokens(
        self, rows: Sequence[Sequence[int]], scored: Callable[[int], None] = lambda _: None
    ) -> Tensor:
        """Returns the score of each row, [rows] float32, on the device of the model.

        Args:
            rows: token ids of each row.
            scored: called after each micro-batch with the number of rows scored so far. An error that it raises ends
                the computation.

        Raises:
            ValueError: a row is longer than the token budget. Callers check the model's positions (`max_tokens`).
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
