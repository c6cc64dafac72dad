"""Lines for the terminal at the start of a run: how many rows are too long, of those looked at, and which models do not
end their responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from controller.config.config import Config
from controller.data.draws import Data, Limit, counter, overlong_share, sample
from controller.data.prompt_source import Prompt
from controller.data.prompts import PromptData
from controller.data.response_end import RESPONSE_END
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

RESPONSES = ("response", "chosen", "rejected")
"""Names of the texts of a row that are cut to `rollout.max_response_tokens`."""


def prompts_left_out(data: tuple[PromptData, PromptData], limit: Limit | None) -> str:
    """Returns a line on how many prompts of a sample are too long, or that lengths are not checked; empty where no
    prompt of the sample is too long.

    Args:
        data: Training prompts and held-out prompts.
        limit: Limit on the length of prompts; None: not checked.
    """
    if limit is None:
        return "prompts are not checked for their length: their tokens cannot be counted here (see data.tokenizer)"
    (long, of), (long_heldout, of_heldout) = (
        overlong_share(rows, limit, lambda prompt: prompt.text) for rows in data
    )
    if not long and not long_heldout:
        return ""
    return (
        f"prompts of more than {limit.tokens} tokens are left out ({limit.why}): {long} of {of} training rows looked "
        f"at, {long_heldout} of {of_heldout} held-out ones"
    )


def responses_cut(config: Config, data: tuple[PromptData, PromptData], columns: Sequence[str]) -> str:
    """Returns a line on how many rows of a sample have a response that is cut; empty where none is, or where tokens
    cannot be counted.

    Args:
        config: Configuration of the run.
        data: Training rows and held-out rows.
        columns: Names of the texts that the algorithm reads beside the prompt.
    """
    names = [name for name in RESPONSES if name in columns]
    if not names:
        return ""
    try:
        count = counter(config)
    except ConfigError:
        return ""
    most = config.rollout.max_response_tokens
    # A response has no special tokens but its end: what the chat template puts there, or one EOS token.
    (special,) = count([""])

    def lengths(rows: Data[Prompt]) -> np.ndarray[Any, Any]:
        prompts = [rows[int(i)] for i in sample(rows)]
        ends = [prompt.texts.get(RESPONSE_END, "") for prompt in prompts]
        texts = [
            prompt.texts[name] + end for prompt, end in zip(prompts, ends, strict=True) for name in names
        ]
        counted = np.asarray(count(texts)).reshape(len(prompts), len(names)).max(axis=1)
        return counted - special + np.asarray([not end for end in ends])

    train, heldout = (lengths(rows) for rows in data)
    longest = int(max(train.max(), heldout.max()))
    if longest <= most:
        return ""
    return (
        f"responses are cut to rollout.max_response_tokens, {most}: {np.sum(train > most)} of {len(train)} training "
        f"rows looked at, {np.sum(heldout > most)} of {len(heldout)} held-out ones; the longest has {longest} tokens, "
        "its end included. Raise rollout.max_response_tokens to train on all of them"
    )


def responses_without_end(
    config: Config, columns: Sequence[str], services: Mapping[str, worker_pb2.DescribeResponse]
) -> Iterator[str]:
    """Yields a line for each service that generates with a model without an EOS token; none where stop strings or
    stop_token_ids end responses.

    Args:
        config: Configuration of the run.
        columns: Names of the texts that the algorithm reads beside the prompt; with any, it generates no responses.
        services: Responses of the services to Describe, by name.
    """
    for name, description in services.items():
        rollout = config.rollout
        if description.lacks_eos and not (columns or rollout.stop or rollout.stop_token_ids):
            yield (
                f"services.{name}.model has no EOS token, neither in its tokenizer nor in its generation config, so "
                f"each response has rollout.max_response_tokens, {rollout.max_response_tokens}, tokens"
            )
