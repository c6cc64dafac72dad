"""Converts sampling options to vLLM's, and vLLM's completions to a `Generation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nccl_transfer.refs.columns import Jagged
from services.rollout.base import FinishReason, Generation, SamplingOptions, check_finite
from services.rollout.vllm_engine import RequestOutputKind, SamplingParams  # pyright: ignore[reportAttributeAccessIssue] - without vLLM
from settings.engines import VLLM_TEMPERATURES


def check_temperature(sampling: SamplingOptions) -> None:
    """Raises ValueError if `sampling` is not greedy and its temperature is outside `VLLM_TEMPERATURES`, where vLLM
    would silently use a different one."""
    lowest, highest = VLLM_TEMPERATURES
    if not (sampling.greedy or lowest <= sampling.temperature <= highest):
        raise ValueError(
            f"vLLM samples at temperatures from {lowest} to {highest}, got {sampling.temperature}"
        )


def parameters(sampling: SamplingOptions, seed: int) -> SamplingParams:
    """Returns vLLM's sampling parameters for one row with the given seed; greedy rows take no seed. Stop strings are
    not passed on: if there are any, vLLM returns all tokens so far of the row at every step, and the caller matches
    them; otherwise it returns the row once, at its end."""
    greedy: dict[str, Any] = {"temperature": 0.0}
    drawn: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": seed,
    }
    return SamplingParams(
        **(greedy if sampling.greedy else drawn),
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_new_tokens,
        ignore_eos=True,
        stop_token_ids=list(sampling.eos_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # Stop strings are matched in this process, token by token: vLLM would need a tokenizer, and might match
        # elsewhere than the engine hf.
        output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def generation_of(completions: Sequence[Any]) -> Generation:
    """Converts vLLM's completions, one per row, to a generation in the same order, with tensors on the CPU.

    Raises:
        FloatingPointError: a log-probability is not finite.
    """
    lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int64)
    values = torch.tensor([x for completion in completions for x in completion.logprobs.logprobs])
    log_probs = Jagged(values, lengths)
    check_finite(log_probs)
    tokens = torch.tensor([token for completion in completions for token in completion.token_ids])
    reasons: list[FinishReason] = [completion.finish_reason for completion in completions]
    return Generation(Jagged(tokens, lengths), log_probs, reasons)
