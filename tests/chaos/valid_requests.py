"""Valid requests of every role, which tests send as they are or spoil."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from integration.harness import POLICY_LOSS, PREPARED_LOSS, SHARDED, TWO_STEPS, VALUE_LOSS, jagged
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.wire import ELEMENT_TYPES
from rlhf.v1 import actor_pb2, reward_pb2, weights_pb2

SAMPLING = actor_pb2.Sampling(temperature=1.0, max_new_tokens=6)

Valid = Mapping[str, tuple[Batch | None, Mapping[str, Any]]]
"""Rows and fields of a valid request, by the method's name in Python."""


TRANSFER = weights_pb2.WeightTransfer(
    id="transfer",
    sources=[{"slices": [{"name": "model.norm.weight", "shape": [16], "dtype": ELEMENT_TYPES["float32"]}]}],
)
"""Weights of a service of one rank that nobody reads; none of a session's endpoints has to be known for it."""

ALL_ROLES: Valid = {
    "offload": (None, {}), "onload": (None, {}), "synchronize": (None, {}), "begin_session": (None, {}),
    "save_checkpoint": (None, {"directory": "checkpoint", "format": SHARDED}),
    "load_checkpoint": (None, {"directory": "../../../etc"}),
    "profile": (None, {"directory": "traces", "calls": 1}),
    "describe_weights": (None, {}), "send_weights": (None, {"transfer": TRANSFER}),
}  # fmt: skip
"""Requests of methods of WorkerService."""


def valid_requests(role: str, words: Sequence[str]) -> Valid:
    """Returns valid requests of the group methods of a role.

    Args:
        role: Name of the role.
        words: Texts that the model's tokenizer knows. Its vocabulary has at least 59 tokens.
    """
    generator = np.random.default_rng(3)
    lengths = [3, 1, 5, 2, 4, 2, 6, 1]

    def floats() -> Any:
        return jagged([generator.normal(-1, 0.1, n) for n in lengths], np.float32)

    def texts(*names: str) -> Batch:
        return Batch.of(
            **{name: [words[(i + k) % len(words)] for i in range(8)] for k, name in enumerate(names)}
        )

    ids = {
        "prompt_ids": jagged([generator.integers(48, 58, 3) for _ in lengths], np.int64),
        "response_ids": jagged([generator.integers(48, 58, n) for n in lengths], np.int64),
    }
    sequences = Batch.of(**ids)
    rows = Batch.of(**ids, log_probs=floats(), advantages=floats())
    valued = Batch.of(**ids, values=floats(), returns=floats())
    pairs = texts("prompt", "chosen", "rejected")
    text_rows = [reward_pb2.TextRow(prompt=words[0], response=word, ground_truth=word) for word in words[:4]]
    own: dict[str, Valid] = {
        "actor": {
            "generate_sequences": (texts("prompt"), {"sampling": SAMPLING}),
            "compute_log_prob": (sequences, {"temperature": 1.0}),
            "compute_loss": (texts("text"), {}),
            "tokenize": (texts("prompt", "response"), {}),
            "update_actor": (rows, {"loss": POLICY_LOSS, "schedule": TWO_STEPS, "temperature": 1.0}),
            "prepare_update": (
                rows,
                {"loss": PREPARED_LOSS, "schedule": TWO_STEPS, "temperature": 1.0, "rows": 16},
            ),
            "update_supervised": (sequences, {"schedule": TWO_STEPS}),
        },
        "critic": {
            "compute_values": (sequences, {}),
            "update_critic": (valued, {"loss": VALUE_LOSS, "schedule": TWO_STEPS}),
        },
        "rollout": {
            "generate_sequences": (texts("prompt"), {"sampling": SAMPLING}),
            "load_weights": (None, {"transfer": TRANSFER, "state_id": "a state"}),
            "commit_weights": (None, {"transfer": TRANSFER.id}),
        },
        "values": {
            "compute_values": (sequences, {}),
            "load_weights": (None, {"transfer": TRANSFER, "state_id": "a state"}),
            "commit_weights": (None, {"transfer": TRANSFER.id}),
        },
        "reference": {"compute_ref_log_prob": (sequences, {"temperature": 1.0})},
        "reward": {
            "compute_reward": (None, {"text_rows": text_rows}),
            "compare_pairs": (pairs, {}),
            "update_reward": (pairs, {"loss": "bradley_terry", "epochs": 1, "mini_batches": 2}),
        },
    }
    return {**own[role], **ALL_ROLES}
