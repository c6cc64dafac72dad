"""GenerateSequences on the ranks of any service: text in, rows of tokens and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nccl_transfer.refs.columns import Jagged
from rlhf.v1 import actor_pb2
from services.generation.requests import end_of_sequence_ids, sampling_options
from services.generation.texts import TextCodec
from services.roles.columns import jagged_ids
from services.roles.language_worker import LanguageWorker
from services.rollout.base import Generation, RolloutEngine, SamplingOptions
from services.rollout.sampling import row_seeds
from services.runtime.worker import CallContext, CallResult, CallRows, require

ID_DTYPE = torch.int32
"""Type of token ids in columns that leave the service; wide enough for any vocabulary."""


class SequenceGenerator:
    """Implements GenerateSequences with a rollout engine.

    Args:
        worker: Worker of the service, which has the tokenizer and the ranks.
        engine: Rollout engine of this rank.
        directory: Hugging Face directory of the model, for its end-of-sequence tokens.

    Attributes:
        texts: Converts texts to token ids and back.
    """

    def __init__(self, worker: LanguageWorker, engine: RolloutEngine, directory: Path) -> None:
        self._ranks, self._engine, self._tokenized = worker.ranks, engine, worker.tokenized
        self._eos_ids = end_of_sequence_ids(directory, worker.eos_id)
        self.texts = TextCodec(worker.tokenizer, worker.tokenized, worker.eos_id)

    def generate_sequences(
        self,
        rows: CallRows,
        request: actor_pb2.GenerateSequencesRequest,
        call: CallContext,
        refresh: Callable[[], None],
    ) -> CallResult:
        """Tokenizes column "prompt" and generates one response per row. Collective.

        Args:
            rows, request, call: As those of the worker's method.
            refresh: Called on every rank when all rows are tokenized; it makes the weights of the rollout engine those
                to generate with, or raises on every rank. May be collective.
        """
        require(request, "sampling")
        with self._ranks.together(call.peers_deadline):
            self._engine.check_awake()
            stop = self.texts.stop_strings(tuple(request.sampling.stop))
            options = sampling_options(request.sampling, self._eos_ids, stop)
            prompts = self._tokenized(rows.texts("prompt"), call)
        refresh()
        seeds = row_seeds(call.call.seed, call.call.step, f"generate/{call.call.ordinal}", rows.numbers)
        with self._ranks.together(call.peers_deadline):
            generation = self._generate(prompts, options, seeds, call) if prompts else None
        if generation is None:
            return CallResult()
        columns: dict[str, Any] = {
            "prompt_ids": jagged_ids(prompts, ID_DTYPE),
            "response_ids": Jagged(generation.responses.values.int(), generation.responses.lengths),
            "rollout_log_probs": generation.log_probs,
        }
        if request.return_text:
            columns["response"] = self.texts.response_texts(generation.responses, options.stop)
        finished = sum(reason == "stop" for reason in generation.finish_reasons)
        return CallResult(columns, {"finished": (finished, rows.count)})

    def _generate(
        self, prompts: list[list[int]], options: SamplingOptions, seeds: np.ndarray, call: CallContext
    ) -> Generation:
        """Generates a response to each prompt, given as token ids; stops when the call should, and reports progress
        to it."""
        return self._engine.generate(
            prompts,
            options,
            seeds,
            should_stop=lambda: call.stopping,
            progress=lambda finished, tokens: call.progress(finished, len(prompts)),
        )
