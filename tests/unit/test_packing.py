"""Sequences end to end in one row: the numbers of each alone, in every family, and nothing seen of a neighbour."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_rows import FEW, HEAD, VOCABULARY, RowShapes, jagged, loss, packed_distance, row_shapes
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from services.compute.heads import PolicyHead, value_head
from services.compute.jagged_rows import assemble
from services.compute.microbatch import MicroBatch, pack
from services.compute.packing import MAX_LENGTH_RATIO, TILE, Packing, Places, attend
from services.compute.sequence_parallel import SequenceRanks
from services.compute.splitting import split
from services.engines.fsdp.engine import FSDPEngine
from services.engines.three_d.engine import ThreeDParallelEngine
from services.models.value_model import ValueModel
from services.roles.columns import Sequences
from services.roles.update_loss import LossTerm, LossTermBatch, UpdateLoss

CPU = torch.device("cpu")
WINDOW = 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.25,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2),
}
"""Mixtures of experts, the last one in every second layer."""

pytestmark = pytest.mark.usefixtures("process_group")


def make_model(family: str) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config({**FAMILIES, **MIXTURES}[family], dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # that of torch computes in float32 at most
    return model


def make_rows(alike: bool = False) -> tuple[Jagged[Tensor], Jagged[Tensor]]:
    """Twelve rows, on demand with prompts that several have: rows 0, 5 and 7, rows 1 and 2, and rows 3 and 11."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, VOCABULARY, length) for length in generator.integers(1, 9, 12)]
    if alike:
        for row, same in {5: 0, 7: 0, 2: 1, 11: 3}.items():
            prompts[row] = prompts[same]
    responses = [generator.integers(0, VOCABULARY, length) for length in generator.integers(0, 12, 12)]
    return jagged(prompts), jagged(responses)


def alone(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Log-probabilities of a row's response tokens, in a plain forward of its own."""
    plain_logits = model(torch.cat((prompt, response))[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_p = (plain_logits / HEAD.temperature).log_softmax(dim=-1)
    return log_p.gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "engine_name"),
    [
        *((name, engine) for name in FAMILIES for engine in ("fsdp", "3d")),
        *((name, "fsdp") for name in MIXTURES),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_packed_rows_have_the_log_probs_and_gradients_of_rows_alone(
    family: str, engine_name: str, alike: bool, tmp_path: Path
):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    engine = (
        FSDPEngine(make_model(family), CPU)
        if engine_name == "fsdp"
        else ThreeDParallelEngine(tmp_path, Mesh(), CPU, dtype=torch.float64)
    )
    prompts, responses = make_rows(alike)
    micro_batches = split(prompts, responses, token_budget=70, pad_id=0, packed=True)
    assert len(micro_batches) > 1
    num_read, num_computed = _num_read(prompts, responses), _num_tokens(micro_batches)
    assert num_computed < num_read if alike else num_computed == num_read
    outputs = engine.infer(micro_batches, HEAD)
    collected = [m.collect(out.log_probs_BR) for m, out in zip(micro_batches, outputs, strict=True)]
    found = assemble([m.rows for m in micro_batches], collected, responses.lengths)
    expected = [alone(model, prompts.row(row), responses.row(row)) for row in range(prompts.rows)]
    torch.testing.assert_close(found.values, torch.cat(expected), rtol=0, atol=1e-10)

    torch.cat(expected).square().sum().backward()
    engine._accumulate_gradients(micro_batches, HEAD, loss)
    for name, parameter in model.named_parameters():
        gradient = engine._kept[name].grad
        assert gradient is not None
        if isinstance(engine, ThreeDParallelEngine):
            gradient = engine._stage.layouts[name].whole(gradient)
        assert parameter.grad is not None
        # The norms of transformers compute in float32 whatever they are given, here once for all who share a prompt.
        difference = torch.linalg.vector_norm(gradient - parameter.grad)
        assert difference <= (1e-6 if alike else 1e-10) * torch.linalg.vector_norm(parameter.grad)


@pytest.fixture(scope="module", params=["fsdp", "3d"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a model with a sliding window in its second layer."""
    if request.param == "fsdp":
        return FSDPEngine(make_model("qwen2"), CPU)
    directory = tmp_path_factory.mktemp("qwen2")
    make_model("qwen2").save_pretrained(directory)
    return ThreeDParallelEngine(directory, Mesh(), CPU, dtype=torch.float64)


@pytest.mark.parametrize("shapes", FEW, ids=str)
def test_rows_whose_tokens_are_all_in_common_are_packed(engine: Any, shapes: RowShapes):
    assert packed_distance(engine, shapes) < 1e-5


@given(shapes=row_shapes())
def test_packed_rows_of_any_shape_have_the_numbers_of_padded_ones(engine: Any, shapes: RowShapes):
    assert packed_distance(engine, shapes) < 1e-5


def _num_read(prompts: Jagged[Tensor], responses: Jagged[Tensor]) -> int:
    """Tokens of which the next one is asked for, or that stand before such."""
    return int((prompts.lengths + np.maximum(responses.lengths - 1, 0)).sum())


def _num_tokens(micro_batches: list[MicroBatch]) -> int:
    return sum(each.input_ids_BT.numel() for each in micro_batches)


def test_packed_values_are_those_of_padded_rows():
    torch.manual_seed(3)
    model = ValueModel(make_model("llama").base_model).eval()
    torch.nn.init.normal_(model.value_head.weight)
    engine, columns = FSDPEngine(model, CPU), make_rows()
    values = []
    for packed in (False, True):
        micro_batches = split(*columns, token_budget=70, pad_id=0, packed=packed)
        outputs = engine.infer(micro_batches, value_head)
        collected = [m.collect(out) for m, out in zip(micro_batches, outputs, strict=True)]
        values.append(assemble([m.rows for m in micro_batches], collected, columns[1].lengths).values)
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-10)


class Group:
    """Stands for a process group where a micro-batch is divided, which sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


@given(shapes=row_shapes(), size=st.integers(1, 7))
def test_parts_have_each_token_of_a_row_and_each_response_token_once(shapes: RowShapes, size: int):
    prompts, responses = shapes.columns()
    whole = pack(prompts, responses, np.arange(prompts.rows))
    assert whole.packing is not None
    assert whole.read_N is not None
    parts = []
    for rank in range(size):
        group: Any = Group(rank, size)
        divided = pack(prompts, responses, np.arange(prompts.rows), ranks=SequenceRanks(group))
        assert divided.packing is None
        assert divided.part is not None
        parts.append(divided.part)
    num_tokens = whole.input_ids_BT.shape[1]
    for name, row in (
        ("input_ids_BT", whole.input_ids_BT),
        ("position_ids_1T", whole.packing.position_ids_1T),
    ):
        found = [getattr(part if name == "input_ids_BT" else part.packing, name) for part in parts]
        assert len({x.shape for x in found}) == 1
        assert torch.equal(torch.stack(found, dim=2).flatten(1)[:, :num_tokens], row)
    owned = torch.stack([part.response_mask_BR for part in parts])
    assert torch.equal(owned.sum(dim=0), whole.response_mask_BR.long())
    # Of each response, the tokens after its first one are predicted at consecutive positions, shared out in turn.
    per_rank = owned.flatten(1).sum(dim=1)
    assert per_rank.max() - per_rank.min() <= 2 * prompts.rows
    predicting = torch.full(whole.response_mask_BR.shape, -1)
    for rank, part in enumerate(parts):
        assert part.read_N is not None
        share = part.input_ids_BT.shape[1]
        assert len(part.read_N) == part.num_scored <= max(1, share)
        own_BR = part.read_N[part.predicting_BR] * size + rank
        predicting = predicting.where(~part.response_mask_BR, own_BR)
        assert torch.equal(part.collect(whole.grid(whole.response_ids_N)), part.response_ids_N)
    assert torch.equal(
        predicting[whole.response_mask_BR], whole.read_N[whole.predicting_BR][whole.response_mask_BR]
    )


def test_a_part_of_a_loss_term_is_computed_by_the_head_of_the_term():
    engine, (prompts, responses) = FSDPEngine(make_model("llama"), CPU), make_rows()
    group: Any = torch.distributed.group.WORLD
    ranks = SequenceRanks(group)
    rows = np.flatnonzero(responses.lengths)
    divided = LossTermBatch.of(pack(prompts, responses, rows, ranks=ranks))
    term = LossTerm(Sequences(prompts, responses), PolicyHead(temperature=2.0), lambda tokens: loss, ())
    head, _ = UpdateLoss(HEAD, lambda tokens, rows: loss, (), term).for_mini_batch(1, 1, 1)
    (found,), (expected,) = (
        engine.infer([micro_batch], each)
        for micro_batch, each in ((divided, head), (pack(prompts, responses, rows), term.head))
    )
    assert torch.equal(found.log_probs_BR, expected.log_probs_BR)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_groups_hold_every_token_once_in_order_and_only_sequences_of_like_length(lengths: list[int]):
    packing = Packing.of(Places.of(np.array(lengths)))
    row = torch.arange(sum(lengths), dtype=torch.float64)
    parts, sizes = [], []
    for group in packing.groups:
        unpacked = group.unpack(row[None, :, None])
        assert unpacked.shape == (len(group.positions_ST), 1, group.positions_ST.shape[1], 1)
        parts.append(group.pack(unpacked.transpose(1, 2)).flatten())
        own = lengths[len(sizes) : len(sizes) + len(group.positions_ST)]
        sizes += own
        assert max(own) <= MAX_LENGTH_RATIO * min(own)
        left_over = max(own) % TILE
        added = TILE - left_over if left_over > TILE // 2 else 0
        assert group.positions_ST.shape[1] == max(own) + added
    assert torch.equal(torch.cat(parts), row)
    assert sizes == lengths


def test_one_new_token_attends_as_float64_does_to_what_its_mask_shows():
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 8, 1, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 16)
    mask = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False
    attended, _ = attend(nn.Module(), query, keys, values, mask, scaling=0.3)
    assert attended.shape == (3, 1, 8, 16)
    for row, head in itertools.product(range(3), range(8)):
        seen = mask[row, 0, 0]
        own_keys, own_values = (x[row, head // 4, seen].double() for x in (keys, values))
        weights = (0.3 * own_keys @ query[row, head, 0].double()).softmax(0)
        torch.testing.assert_close(attended[row, 0, head].double(), weights @ own_values, atol=1e-6, rtol=0)


def test_after_the_last_attention_only_what_is_read_is_computed():
    model: Any = make_model("qwen3")
    engine, (prompts, responses) = FSDPEngine(model, CPU), make_rows()
    computed: list[list[int]] = [[] for _ in model.model.layers]
    for layer, sizes in zip(model.model.layers, computed, strict=True):
        for module in (layer.self_attn.o_proj, layer.mlp):
            module.register_forward_hook(
                lambda module, args, output, sizes=sizes: sizes.append(output.numel())
            )
    micro_batches = split(prompts, responses, token_budget=70, pad_id=0, packed=True)
    engine.infer(micro_batches, HEAD)
    hidden = model.config.hidden_size
    assert computed[0] == [hidden * each.input_ids_BT.numel() for each in micro_batches for _ in range(2)]
    assert computed[-1] == [hidden * len(each.response_ids_N) for each in micro_batches for _ in range(2)]
    assert sum(computed[-1]) < sum(computed[0])


@given(
    own=st.lists(st.integers(0, 20), min_size=1, max_size=20),
    common=st.lists(st.integers(1, 20), min_size=20, max_size=20),
    prompts=st.lists(st.integers(0, 4), min_size=20, max_size=20),
)
def test_what_sequences_have_in_common_lies_in_the_row_once(
    own: list[int], common: list[int], prompts: list[int]
):
    numbers = prompts[: len(own)]
    owners = np.array([numbers.index(number) for number in numbers])
    beginnings = np.array([common[number] for number in numbers])
    packing = Packing.of(Places.of(beginnings + np.array(own), owners, beginnings))
    row: list[tuple[int, int]] = []
    for sequence, number in enumerate(numbers):
        if owners[sequence] == sequence:
            row += [(100 + number, token) for token in range(common[number])]
        row += [(sequence, common[number] + token) for token in range(own[sequence])]
    assert packing.position_ids_1T.tolist() == [[token for _, token in row]]
    cells = torch.arange(len(row))
    assert torch.equal(
        torch.cat([g.pack(g.unpack(cells[None, :, None]).transpose(1, 2)) for g in packing.groups]).flatten(),
        cells,
    )
    laid = [cells_T.tolist() for group in packing.groups for cells_T in group.positions_ST]
    for sequence, (number, cells_T) in enumerate(zip(numbers, laid, strict=True)):
        length = common[number] + own[sequence]
        assert [row[cell] for cell in cells_T[:length]] == [
            (100 + number if token < common[number] else sequence, token) for token in range(length)
        ]
