"""A rollout engine that runs the whole model on the whole sequence for every token: slow, and short enough to copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf_example.engines import PlainOptions
from services.engines.implementation import compute_dtype
from services.models.families import load_causal_lm
from services.rollout.base import (
    FinishReason,
    Generation,
    Meter,
    RolloutEngine,
    RolloutSetup,
    SamplingOptions,
    check_names,
)
from services.rollout.sampling import choose, padded_context, uniforms
from settings.generation import GeneratingTable


class PlainRollout(RolloutEngine):
    """Rollout engine without a KV cache, on a model that is whole on this rank."""

    def __init__(self, model: Any, rows_at_once: int) -> None:
        self._model = model.eval().requires_grad_(False)
        self._device, self._rows_at_once = model.device, rows_at_once
        self.max_positions = model.config.max_position_embeddings
        if self._device.type == "cpu":
            self.limits = (
                "rollout engine plain: Offload frees nothing, its weights are in host memory already",
            )

    @classmethod
    def create(cls, table: GeneratingTable, options: PlainOptions, setup: RolloutSetup) -> Self:
        model: Any = load_causal_lm(table.model, compute_dtype(table))
        return cls(model.to(setup.device), options.rows_at_once)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own, came = self._model.state_dict(), set()
        for name, tensor in weights:  # to the end: the other ranks gather each weight too
            came.add(name)
            if name in own:
                own[name].copy_(tensor)
        check_names(came, own.keys())

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, row_seeds: np.ndarray, meter: Meter
    ) -> Generation:
        rows = [list(prompt) for prompt in prompts]
        log_probs: list[list[float]] = [[] for _ in rows]
        reasons: list[FinishReason] = ["length"] * len(prompts)
        uniforms_RN = torch.from_numpy(uniforms(row_seeds, sampling.max_new_tokens)).to(self._device)
        watch = sampling.stop.watch(len(prompts)) if sampling.stop else None
        running = list(range(len(prompts)))
        for n in range(sampling.max_new_tokens):
            logits_BV = self._next_logits([rows[row] for row in running])
            context_BT = padded_context([rows[row] for row in running]).to(self._device)
            tokens_B, log_probs_B = choose(logits_BV, sampling, uniforms_RN[running, n], context_BT)
            tokens = tokens_B.tolist()
            stops = watch.ended(running, tokens) if watch else [False] * len(tokens)
            ends = [stop or token in sampling.eos_ids for stop, token in zip(stops, tokens, strict=True)]
            for row, token, log_prob, ended in zip(running, tokens, log_probs_B.tolist(), ends, strict=True):
                rows[row].append(token)
                log_probs[row].append(log_prob)
                if ended:
                    reasons[row] = "stop"
            running = [row for row, ended in zip(running, ends, strict=True) if not ended]
            if n + 1 == sampling.max_new_tokens:
                running = []
            meter.advance(rows=len(tokens) - len(running), tokens=len(tokens))
            if not running:
                break
        responses = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        return Generation(_jagged(responses, torch.int64), _jagged(log_probs, torch.float32), reasons)

    def _next_logits(self, rows: list[list[int]]) -> Tensor:
        """Returns the logits [B, V] of each row's next token. Rows are padded on the right, where causal attention
        does not look."""
        logits = []
        for first in range(0, len(rows), self._rows_at_once):
            part = rows[first : first + self._rows_at_once]
            longest = max(map(len, part))
            ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in part], device=self._device)
            logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
            logits += [logits_TV[len(row) - 1] for row, logits_TV in zip(part, logits_BTV, strict=True)]
        return torch.stack(logits)

    def _free_memory(self) -> int:
        return self._move("cpu")

    def _take_memory(self) -> int:
        return self._move(self._device)

    def _move(self, device: torch.device | str) -> int:
        """Moves the weights; returns their bytes, or 0 on a CPU, where they stay where they are."""
        self._model.to(device)
        return 0 if self._device.type == "cpu" else sum(x.nbytes for x in self._model.parameters())


def _jagged(rows: list[list[Any]], dtype: torch.dtype) -> Jagged[Tensor]:
    values = torch.tensor([x for row in rows for x in row], dtype=dtype)
    return Jagged(values, np.array([len(row) for row in rows], dtype=np.int64))
