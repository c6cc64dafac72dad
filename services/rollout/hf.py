"""The rollout engine `hf`: a transformers model in the rank's process, with this project's KV cache and decoding
loop.

transformers' own `generate` draws the tokens of all rows from one random generator, so a row's text would depend on
the other rows; here each row has its own stream of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from nccl_transfer.refs.columns import Jagged
from services.compute.copies import copy_together
from services.compute.splitting import cut
from services.engines.base import HeldTensor
from services.engines.implementation import compute_dtype
from services.models.families import load_causal_lm
from services.rollout.base import (
    Generation,
    Meter,
    RolloutEngine,
    RolloutSetup,
    SamplingOptions,
)
from services.rollout.decoder import Decoder, WholeDecoder
from services.rollout.kv_cache import reserve
from services.rollout.sampling import padded_context, uniforms
from services.rollout.sharded import ShardedDecoder
from settings.generation import GeneratingTable

# Finished rows are dropped from the batch once they are this share of it. Dropping copies the cache of the other rows,
# which costs less than a decoding step.
_FINISHED_SHARE_TO_DROP = 0.125


class HFRollout(RolloutEngine):
    """Rollout engine on a causal language model, on the model's device and in its dtype.

    Args:
        model: a model that is whole on this rank, or a decoder, such as that of a sharded model.
        token_budget: most tokens of the KV cache, that is most of rows * (longest prompt + max_new_tokens) in one
            batch. Rows that do not fit are generated in later batches.
    """

    def __init__(self, model: PreTrainedModel | Decoder, *, token_budget: int) -> None:
        self._decoder = model if isinstance(model, Decoder) else WholeDecoder(model)
        self._device = self._decoder.device
        self._token_budget = token_budget
        self.ranks_together = self._decoder.ranks_together
        self.keeps_weights, self.max_positions = self._decoder.keeps_weights, self._decoder.max_positions
        if self._device.type == "cpu" and self.keeps_weights:
            self.limits = (
                "rollout engine hf: Offload frees nothing, its weights are in host memory already",
            )

    @classmethod
    def create(cls, table: GeneratingTable, options: Any, setup: RolloutSetup) -> Self:
        """Builds the engine on a `ShardedDecoder` if weights come in shards, otherwise on a whole model from
        `table.model`. Collective in the former case."""
        dtype = compute_dtype(table)
        if setup.shards is not None or setup.mesh.replica_size > 1:
            decoder = ShardedDecoder(table.model, setup.mesh, setup.shards, dtype=dtype, device=setup.device)
            return cls(decoder, token_budget=table.rollout_tokens)
        model: Any = load_causal_lm(table.model, dtype)
        return cls(model.to(setup.device), token_budget=table.rollout_tokens)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._decoder.load_weights(weights)

    def weight_memory(self) -> Mapping[str, Tensor]:
        return self._decoder.weight_memory()

    def held(self) -> Iterator[HeldTensor]:
        return self._decoder.held()

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, row_seeds: np.ndarray, meter: Meter
    ) -> Generation:
        lengths = np.array([len(prompt) + sampling.max_new_tokens for prompt in prompts], dtype=np.int64)
        parts = list(self._parts(lengths))
        responses = [
            self._decode([prompts[row] for row in part], sampling, row_seeds[part], meter) for part in parts
        ]
        return _in_order(parts, responses)

    def _parts(self, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the rows of each batch, given the tokens of each row when it is full."""
        for number in np.unique(lengths) if not self._decoder.pads else [None]:
            rows = np.arange(len(lengths)) if number is None else np.flatnonzero(lengths == number)
            yield from (rows[part] for part in cut(lengths[rows], self._token_budget))

    def _check_request(self, lengths: np.ndarray, sampling: SamplingOptions) -> None:
        if lengths.max() + sampling.max_new_tokens > self._token_budget:
            row = lengths.argmax()
            raise ValueError(
                f"row {row} has {lengths[row]} prompt tokens, with {sampling.max_new_tokens} new ones more than the "
                f"{self._token_budget} tokens of the KV cache (rollout_tokens)"
            )

    def _agreed(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        return self._decoder.agreed(should_stop)

    def _free_memory(self) -> int:
        return self._decoder.sleep()

    def _drop_memory(self) -> int:
        return self._decoder.sleep(keep_weights=False)

    def _take_memory(self) -> int:
        return self._decoder.wake()

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingOptions,
        row_seeds: np.ndarray,
        meter: Meter,
    ) -> _Responses:
        """Generates the responses of R rows in one batch; see `generate` for the arguments. Finished rows are removed
        from the batch from time to time, so it holds B <= R rows: all unfinished ones and a few finished ones."""
        num_rows, num_steps = len(prompts), sampling.max_new_tokens
        eos_ids = torch.tensor(sampling.eos_ids, dtype=torch.int64)
        on_host = [torch.from_numpy(uniforms(row_seeds, num_steps)), eos_ids, *_distinct(prompts)]
        uniforms_RN, eos_ids, *distinct = copy_together(on_host, self._device)
        tokens_RN = torch.zeros((num_rows, num_steps), dtype=torch.int64, device=self._device)
        log_probs_RN = torch.zeros((num_rows, num_steps), dtype=torch.float32, device=self._device)
        lengths_R = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        stopped_R = torch.zeros(num_rows, dtype=torch.bool, device=self._device)
        watch = sampling.stop.watch(num_rows) if sampling.stop else None
        prompts_RP = padded_context(prompts).to(self._device) if sampling.repetition_penalty != 1 else None

        rows_B = torch.arange(num_rows, device=self._device)
        runs_B = torch.ones(num_rows, dtype=torch.bool, device=self._device)
        num_running = num_rows
        context, logits_BV = self._prefill(_Distinct(*distinct), num_steps)
        for n in range(num_steps):
            context_BT = None
            if prompts_RP is not None:
                context_BT = torch.cat((prompts_RP, tokens_RN[:, :n]), dim=1)[rows_B]
            tokens_B, log_probs_B = self._decoder.choose(
                logits_BV, sampling, uniforms_RN[rows_B, n], context_BT
            )
            tokens_RN[rows_B, n], log_probs_RN[rows_B, n] = tokens_B, log_probs_B
            lengths_R[rows_B] += runs_B
            ends_B = torch.isin(tokens_B, eos_ids)
            if watch:
                ends_B |= torch.tensor(watch.ended(rows_B.tolist(), tokens_B.tolist()), device=self._device)
            stopped_R[rows_B] |= ends_B & runs_B
            runs_B &= ~ends_B
            num_ran, num_running = num_running, int(runs_B.sum()) if n + 1 < num_steps else 0
            meter.advance(rows=num_ran - num_running, tokens=num_ran)
            if not num_running:
                break
            if len(rows_B) - num_running >= _FINISHED_SHARE_TO_DROP * len(rows_B):
                kept = runs_B.nonzero()[:, 0]
                context.select(kept)
                rows_B, runs_B, tokens_B = rows_B[kept], runs_B[kept], tokens_B[kept]
            logits_BV = self._forward(tokens_B[:, None], context)
        lengths, stopped = torch.stack((lengths_R, stopped_R)).cpu().numpy()
        return _Responses(tokens_RN, log_probs_RN, lengths, stopped.astype(bool))

    def _prefill(self, prompts: _Distinct, num_steps: int) -> tuple[_Context, Tensor]:
        """Runs the model on each distinct prompt once.

        Returns:
            The context of the R rows, with room for `num_steps` more tokens each, and the logits [R, V] of each row's
            next token.
        """
        cache = reserve(self._decoder.new_cache(), prompts.ids_UT.shape[1] + num_steps)
        context = _Context(cache, prompts.num_pads_U if len(prompts.num_pads_U) else None)
        logits_UV = self._forward(prompts.ids_UT, context)
        if len(prompts.ids_UT) == len(prompts.prompt_R):
            return context, logits_UV
        context.select(prompts.prompt_R)
        return context, logits_UV[prompts.prompt_R]

    def _forward(self, ids_BT: Tensor, context: _Context) -> Tensor:
        """Runs the model on `ids_BT` and appends their keys and values to the context, in place; returns the logits
        of `Decoder.forward`."""
        positions = context.position_arguments(ids_BT.shape[1], ids_BT.device)
        logits_BV = self._decoder.forward(ids_BT, context.cache, positions)
        context.num_read += ids_BT.shape[1]
        return logits_BV


class _Distinct(NamedTuple):
    """The U distinct prompts of R rows, padded on the left.

    Attributes:
        ids_UT: token ids, 0 in the padding.
        num_pads_U: padding tokens of each prompt; empty if no prompt has any.
        prompt_R: index of each row's prompt.
    """

    ids_UT: Tensor
    num_pads_U: Tensor
    prompt_R: Tensor


def _distinct(prompts: Sequence[Sequence[int]]) -> _Distinct:
    """Returns the distinct ones of the prompts of all rows, in host memory."""
    index: dict[tuple[int, ...], int] = {}
    prompt_of_row = [index.setdefault(tuple(prompt), len(index)) for prompt in prompts]
    longest = max(map(len, index))
    num_pads = [longest - len(prompt) for prompt in index]
    return _Distinct(
        torch.tensor([(0,) * pads + prompt for pads, prompt in zip(num_pads, index, strict=True)]),
        torch.tensor(num_pads if any(num_pads) else [], dtype=torch.int64),
        torch.tensor(prompt_of_row),
    )


@dataclass(eq=False)
class _Context:
    """KV cache of B rows whose prompts are padded on the left.

    Attributes:
        cache: keys and values of the tokens so far, or states of layers without attention.
        num_pads_B: padding tokens of each row; None if no row has any.
        num_read: tokens of each row so far, padding included.
    """

    cache: DynamicCache
    num_pads_B: Tensor | None
    num_read: int = 0

    def select(self, rows: Tensor) -> None:
        """Replaces the rows of the context, in place, by copies of those of the given indices [B], which may repeat."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type] - any tensor of int64
        self.num_pads_B = self.num_pads_B[rows] if self.num_pads_B is not None else None

    def position_arguments(self, num_new: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the model's argument `position_ids` for `num_new` further tokens per row, and with padding also
        `attention_mask`. Some models do not compute the positions of new tokens by themselves (Bamba)."""
        position_T = torch.arange(self.num_read + num_new, device=device)
        if self.num_pads_B is None:
            return {"position_ids": position_T[None, self.num_read :]}
        distance_BT = position_T - self.num_pads_B[:, None]
        return {
            "attention_mask": distance_BT >= 0,
            "position_ids": distance_BT[:, self.num_read :].clamp(min=0),
        }


@dataclass(frozen=True, eq=False)
class _Responses:
    """Responses of R rows, padded on the right to N = max_new_tokens.

    Attributes:
        tokens_RN: token ids.
        log_probs_RN: log-probabilities of the tokens.
        lengths_R: tokens of each response, without padding.
        stopped_R: whether each response ended with an end-of-sequence token or a stop string.
    """

    tokens_RN: Tensor
    log_probs_RN: Tensor
    lengths_R: np.ndarray
    stopped_R: np.ndarray


def _in_order(parts: Sequence[np.ndarray], responses: Sequence[_Responses]) -> Generation:
    """Joins the responses of several batches, without their padding, to one generation in the order of the prompts.

    Args:
        parts: row numbers of each batch.
        responses: responses of each batch.
    """
    lengths = np.empty(sum(map(len, parts)), dtype=np.int64)
    stopped = np.empty(len(lengths), dtype=bool)
    for part, decoded in zip(parts, responses, strict=True):
        lengths[part], stopped[part] = decoded.lengths_R, decoded.stopped_R
    tokens_RN = torch.cat([decoded.tokens_RN for decoded in responses])
    line_of_row = np.argsort(np.concatenate(parts))
    # The cells of all response tokens, row after row.
    gaps = line_of_row * tokens_RN.shape[1] - (np.cumsum(lengths) - lengths)
    cells = torch.from_numpy(np.repeat(gaps, lengths) + np.arange(lengths.sum())).to(tokens_RN.device)
    flat_log_probs = torch.cat([decoded.log_probs_RN for decoded in responses]).flatten()
    log_probs = Jagged(flat_log_probs.index_select(0, cells), lengths)
    return Generation(
        responses=Jagged(tokens_RN.flatten().index_select(0, cells).cpu(), lengths),
        log_probs=log_probs,
        finish_reasons=["stop" if ended else "length" for ended in stopped],
    )
