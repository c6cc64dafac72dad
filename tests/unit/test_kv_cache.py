"""A cache with memory from the start holds what one of transformers does, and moves none of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, PreTrainedModel

from services.models.families import load_causal_lm
from services.rollout.kv_cache import ReservedLayer, reserve

POSITIONS = 12
IDS = torch.tensor([[1, 10, 11, 12], [1, 20, 21, 22], [1, 30, 31, 32]])


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> PreTrainedModel:
    return load_causal_lm(tiny_llama_dir)


@torch.inference_mode()
def decode(model: PreTrainedModel, cache: DynamicCache, between: Callable[[DynamicCache], None]) -> Tensor:
    """Logits of a few tokens more, one at a time."""
    model(input_ids=IDS, past_key_values=cache, use_cache=True)
    between(cache)
    num_rows = len(cache.layers[0].keys)  # type: ignore[arg-type]
    steps = [
        model(input_ids=torch.full((num_rows, 1), 40 + n), past_key_values=cache, use_cache=True).logits
        for n in range(POSITIONS - IDS.shape[1])
    ]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1, 1, 0, 2]])
def test_it_gives_the_logits_of_a_cache_of_transformers(model: PreTrainedModel, rows: list[int]):
    def select(cache: DynamicCache) -> None:
        cache.reorder_cache(torch.LongTensor(rows))

    plain = decode(model, DynamicCache(config=model.config), select)
    ours = decode(model, reserve(DynamicCache(config=model.config), POSITIONS), select)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=0)


def test_what_it_holds_stays_where_it_is(model: PreTrainedModel):
    cache = reserve(DynamicCache(config=model.config), POSITIONS)
    places: list[list[int]] = []

    def note(cache: DynamicCache) -> None:
        places.append([x.data_ptr() for layer in cache.layers for x in (layer.keys, layer.values)])  # type: ignore[union-attr]

    decode(model, cache, note)
    note(cache)
    assert places[0] == places[1]
    assert cache.get_seq_length() == POSITIONS


def test_a_selection_copies_what_has_been_read_and_no_more(monkeypatch: pytest.MonkeyPatch):
    layer = ReservedLayer(POSITIONS)
    keys, values = torch.randn(2, 3, 2, 5, 4)
    layer.update(keys, values)
    # What is selected is put into memory of these numbers.
    monkeypatch.setattr(
        layer, "_memory_like", lambda x, num_rows: torch.full((num_rows, 2, POSITIONS, 4), 7.0)
    )
    layer.reorder_cache(torch.tensor([2, 0]))
    assert torch.equal(layer.keys, keys[[2, 0]])
    assert torch.equal(layer.values, values[[2, 0]])
    assert bool((layer._all_keys[:, :, 5:] == 7).all())
    assert bool((layer._all_values[:, :, 5:] == 7).all())


def test_sliding_windows_stay_as_they_are():
    config = MistralConfig(num_hidden_layers=2, sliding_window=4)
    cache = reserve(DynamicCache(config=config), POSITIONS)
    assert not any(isinstance(layer, ReservedLayer) for layer in cache.layers)
