"""Converts messages of the actor's requests to options of its rollout engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from rlhf.v1 import actor_pb2
from services.models.configs import load_config
from services.rollout.base import SamplingOptions
from services.rollout.stops import StopStrings


def sampling_options(
    sampling: actor_pb2.Sampling, eos_ids: tuple[int, ...], stop: StopStrings | None, vocab_size: int
) -> SamplingOptions:
    """Converts a request's sampling message to options of the rollout engine. A top_p or repetition_penalty of 0, and
    for greedy decoding a temperature of 0, means 1.

    Args:
        sampling: Message of the request.
        eos_ids: End-of-sequence tokens of the model; `eos_ids` of the options also has those of the request.
        stop: Stop strings; None for none.
        vocab_size: Number of embeddings of the model.

    Raises:
        ValueError: A number is out of its range.
    """
    if (largest := max(sampling.stop_token_ids, default=0)) >= vocab_size:
        raise ValueError(f"stop_token_ids: {largest} is beyond the model's {vocab_size} embeddings")
    return SamplingOptions(
        max_new_tokens=sampling.max_new_tokens,
        eos_ids=(*eos_ids, *sampling.stop_token_ids),
        greedy=sampling.greedy,
        temperature=sampling.temperature or 1.0 if sampling.greedy else sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        stop=stop,
    )


def end_of_sequence_ids(directory: Path, tokenizer: int | None) -> tuple[int, ...]:
    """Returns all end-of-sequence token ids of a model, sorted: those of its generation config (or of its config, if
    it has no generation config) and that of its tokenizer; empty if there are none.

    Args:
        directory: Hugging Face directory of the model.
        tokenizer: End-of-sequence token id of the tokenizer; None if it has none.
    """
    try:
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:
        config = load_config(directory)
        generation = GenerationConfig.from_model_config(config)
    configured: Any = generation.eos_token_id
    given = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({token for token in [*given, tokenizer] if token is not None}))
