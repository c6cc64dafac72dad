"""GenerateSequences on the ranks of any service: text in, rows of tokens and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2
from services.generation.episodes import COLUMNS as EPISODE_COLUMNS
from services.generation.episodes import Episodes
from services.generation.partial import COLUMNS, PartialResponses
from services.generation.requests import end_of_sequence_ids, sampling_options
from services.generation.texts import TextCodec
from services.roles.columns import jagged_ids
from services.roles.language_worker import LanguageWorker
from services.rollout.base import Generation, RolloutEngine, SamplingOptions
from services.rollout.sampling import row_seeds
from services.runtime.worker import CallContext, CallResult, CallRows, require

ID_DTYPE = torch.int32
"""Type of token ids in columns that leave the service; wide enough for any vocabulary."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Part of responses that one call generates.

    Attributes:
        partial: The responses so far.
        rows: Indices of those that go on.
        options: How their tokens are drawn; `max_new_tokens` is the most that are added to a response.
    """

    partial: PartialResponses
    rows: list[int]
    options: SamplingOptions


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
        self._ranks, self._engine, self._prompt_ids = worker.ranks, engine, worker.prompt_ids
        self._version = lambda: worker.policy_version
        self._eos_ids = end_of_sequence_ids(directory, worker.eos_id)
        self._vocab_size = worker.vocab_size
        self.texts = TextCodec(worker)

    @property
    def lacks_eos(self) -> bool:
        """Whether the model has no end-of-sequence token."""
        return not self._eos_ids

    def generate_sequences(
        self,
        rows: CallRows,
        request: actor_pb2.GenerateSequencesRequest,
        call: CallContext,
        refresh: Callable[[], None],
    ) -> CallResult:
        """Tokenizes column "prompt" and generates one response per row, or one segment or turn of it. Collective.

        Args:
            rows, request, call: As those of the worker's method.
            refresh: Called on every rank when all rows are tokenized; it makes the weights of the rollout engine those
                to generate with, or raises on every rank. May be collective.
        """
        require(request, "sampling")
        with self._ranks.together(call.peers_deadline):
            self._engine.check_awake()
            stop = self.texts.stop_strings(tuple(request.sampling.stop))
            options = sampling_options(request.sampling, self._eos_ids, stop, self._vocab_size)
            prompts = self._prompt_ids(rows.texts("prompt"), call)
            episodes = self._episodes(rows, request, options, call) if request.episode else None
            segment = None if episodes else self._segment(rows, request, options)
        refresh()
        seeds = row_seeds(call.call.seed, call.call.step, f"generate/{call.call.ordinal}", rows.numbers)
        if episodes:
            return self._take_turn(prompts, episodes, options, seeds, request, call)
        if segment:
            return self._go_on(prompts, segment, seeds, request, call)
        with self._ranks.together(call.peers_deadline):
            generation = self._generate(prompts, options, seeds, call) if prompts else None
        if generation is None:
            return CallResult()
        columns: dict[str, Any] = {
            "prompt_ids": jagged_ids(prompts, ID_DTYPE),
            "response_ids": Jagged(generation.responses.values.int(), generation.responses.lengths),
            "rollout_log_probs": generation.log_probs,
        }
        if request.return_ends:
            columns["turn_end"] = list(generation.finish_reasons)
        if request.return_text:
            columns["response"] = self.texts.response_texts(generation.responses, options.stop)
        finished = sum(reason == "stop" for reason in generation.finish_reasons)
        return CallResult(columns, {"finished": (finished, rows.count)})

    def _segment(
        self, rows: CallRows, request: actor_pb2.GenerateSequencesRequest, options: SamplingOptions
    ) -> Segment | None:
        """Returns what a call has to add to responses; None for one that generates whole responses. Raises
        InvalidRequest where that is not possible."""
        if given := [name for name in ("partial_mask", "observation") if name in rows]:
            raise InvalidRequest(f"columns {given} need episode")
        if not (request.segment_tokens or any(name in rows for name in COLUMNS)):
            return None
        if options.stop:
            raise InvalidRequest("segment_tokens and partial responses do not go with sampling.stop")
        partial = PartialResponses.of(rows)
        unfinished = partial.unfinished(frozenset(options.eos_ids), options.max_new_tokens)
        left = options.max_new_tokens - int(partial.ids.lengths[unfinished[0]]) if unfinished else 0
        most = min(request.segment_tokens or left, left)
        return Segment(partial, unfinished, replace(options, max_new_tokens=max(most, 1)))

    def _go_on(
        self,
        prompts: list[list[int]],
        segment: Segment,
        seeds: np.ndarray,
        request: actor_pb2.GenerateSequencesRequest,
        call: CallContext,
    ) -> CallResult:
        """Generates one segment of the responses to prompts. Collective."""
        partial, rows = segment.partial, segment.rows
        with self._ranks.together(call.peers_deadline):
            if rows:
                begun = partial.prompts(prompts, rows)
                generation = self._generate(begun, segment.options, seeds[rows], call)
                partial = partial.extended(rows, generation, self._version())
        if not prompts:
            return CallResult()
        columns: dict[str, Any] = {
            "prompt_ids": jagged_ids(prompts, ID_DTYPE),
            "response_ids": Jagged(partial.ids.values.int(), partial.ids.lengths),
            "rollout_log_probs": partial.log_probs,
            "response_versions": partial.versions,
        }
        if request.return_text:
            columns["response"] = self.texts.response_texts(partial.ids, None)
        if request.segment_tokens:
            return CallResult(columns)
        left = partial.unfinished(frozenset(segment.options.eos_ids), request.sampling.max_new_tokens + 1)
        if request.return_ends:
            columns["turn_end"] = ["length" if row in left else "stop" for row in range(len(prompts))]
        return CallResult(columns, {"finished": (len(prompts) - len(left), len(prompts))})

    def _episodes(
        self,
        rows: CallRows,
        request: actor_pb2.GenerateSequencesRequest,
        options: SamplingOptions,
        call: CallContext,
    ) -> Episodes:
        """Returns the responses so far of the episodes of a call. Raises InvalidRequest where columns or limits are
        wrong."""
        most, new = request.max_response_tokens, options.max_new_tokens
        if request.segment_tokens:
            raise InvalidRequest("segment_tokens does not go with episode")
        if most < new:
            raise InvalidRequest(
                f"max_response_tokens: must be at least sampling.max_new_tokens, {new} (given: {most})"
            )
        if not any(name in rows for name in EPISODE_COLUMNS):
            return Episodes.first(rows.count)
        observations, faults = self.texts.observation_ids(rows.texts("observation"), call)
        eos_ids = frozenset(options.eos_ids)
        return Episodes.of(rows, observations, faults, eos_ids, max_new_tokens=new, max_response_tokens=most)

    def _take_turn(
        self,
        prompts: list[list[int]],
        episodes: Episodes,
        options: SamplingOptions,
        seeds: np.ndarray,
        request: actor_pb2.GenerateSequencesRequest,
        call: CallContext,
    ) -> CallResult:
        """Generates one turn of episodes. Collective."""
        turns = [""] * len(prompts)
        with self._ranks.together(call.peers_deadline):
            if episodes.going:
                going = episodes.going
                generation = self._generate(episodes.prompts(prompts), options, seeds[going], call)
                episodes = episodes.extended(generation)
                texts = self.texts.response_texts(generation.responses, options.stop)
                for row, text in zip(going, texts, strict=True):
                    turns[row] = text
        if not prompts:
            return CallResult()
        columns: dict[str, Any] = {
            "prompt_ids": jagged_ids(prompts, ID_DTYPE),
            "response_ids": jagged_ids(episodes.ids, ID_DTYPE),
            "response_mask": episodes.mask_column(),
            "rollout_log_probs": episodes.log_probs,
            "turn": turns,
            "turn_end": episodes.ends,
        }
        if request.return_text:
            columns["response"] = self.texts.episode_texts(episodes.ids, episodes.begun, options.stop)
        return CallResult(columns)

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
