"""Files that compute on a device take no value from it to the host but where the host needs one.

`float(x)`, `int(x)`, `bool(x)` and masks as indices wait for a device too; a lint cannot tell their arguments, so
test_columns_on_a_device.py counts them on a pretend device.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HOT = (
    "compute",
    "engines",
    "rollout",
    "rollout_service",
    "generation",
    "roles",
    "actor",
    "critic",
    "reference",
)
"""Folders of services."""
READS = ("cpu", "item", "numpy", "tolist")

ALLOWED = {
    "compute/jagged_rows.py first_equal_rows": "token ids, which are in host memory: equal prompts are found there",
    "compute/jagged_rows.py counts": "the mask of sampled tokens, which is in host memory",
    "compute/sampled_tokens.py of": "the mask of sampled tokens, which is in host memory",
    "engines/base.py dealt_to_ranks": "whole weights for other services, which read them from host memory",
    "engines/collectives.py bytes_of_ranks": "bytes that ranks exchange over gloo",
    "engines/data_parallel.py _write": "weights of an export, for transformers to convert",
    "engines/fsdp/lora.py _gather_companions": "adapters of an export",
    "engines/loss_accumulator.py numbers": "metrics of a step, in one copy",
    "rollout/hf.py _decode": "lengths, once per batch; new token ids at each step, only with stop strings",
    "rollout/hf.py _in_order": "token ids, once per generation: rewards and the cutting of micro-batches read them",
    "rollout/vllm.py _copy_slopes": "a number per attention head, before vLLM drops them in its sleep",
    "roles/columns.py sequence_columns": "token ids, which are in host memory: micro-batches are cut there",
    "roles/columns.py response_mask": "the mask of sampled tokens, which is in host memory, as token ids are",
    "roles/weight_check.py _unequal": "a table of checksums, in host memory",
    "roles/weight_check.py _checksum": "weights whose checksum the CPU computes, where VerifyWeights asks for it",
    "actor/parity.py rollout_parity": "three numbers of the response",
    "actor/parity.py drifting_rows": "one bit per token, for the numbers of the rows to keep",
    "generation/episodes.py of": "the mask of sampled tokens, which is in host memory, as token ids are",
    "generation/episodes.py extended": "token ids and their mask, which are in host memory, for the engine's prompts",
    "generation/partial.py of": "token ids, which are in host memory, and versions, read there for the next part",
    "generation/partial.py prompts": "token ids, which are in host memory, for the engine's prompts",
    "generation/partial.py unfinished": "token ids, which are in host memory, to find the responses that have ended",
    "generation/partial.py extended": "lengths, which are in host memory",
    "generation/texts.py response_texts": "token ids, which are in host memory, for the tokenizer",
    "actor/worker.py compute_loss": "log-probabilities of texts, of which the host sums one number per row",
}
"""Functions that read values, as "file function", and why each may."""


def reads(source: str) -> Iterator[str]:
    """Names of the functions in which a method of READS is called, or `to` with "cpu"."""

    def visit(node: ast.AST, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef)
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                name, words = child.func.attr, [x.value for x in child.args if isinstance(x, ast.Constant)]
                if name in READS or (name == "to" and "cpu" in words):
                    yield function
            yield from visit(child, child.name if is_function else function)

    return visit(ast.parse(source), "")


def test_values_leave_the_device_only_where_the_host_needs_them() -> None:
    services = ROOT / "services"
    found = {
        f"{path.relative_to(services)} {function}"
        for folder in HOT
        for path in sorted((services / folder).rglob("*.py"))
        for function in reads(path.read_text())
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "these read nothing any more"


def test_every_kind_of_reading_is_found() -> None:
    calls = ("x.cpu()", "x[0].item()", "f(x).numpy()", "x.y.tolist()", "x.to('cpu', copy=True)")
    for call in calls:
        assert list(reads(f"class A:\n def f(self, x):\n  return [{call} for _ in x]")) == ["f"], call
    assert list(reads("def f(x):\n return x.to(device), x.cpu, item(x)")) == []
