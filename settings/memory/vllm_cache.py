"""Check of the size of vLLM's KV cache."""

from __future__ import annotations

from rlhf.errors import ConfigError
from settings import meshes
from settings.actor import ActorTable
from settings.fit import VLLM, read_shape
from settings.memory.generation import cache_bytes_per_token
from settings.memory.services import GIB, computed_dtype
from settings.memory.shape import read_model_shape
from settings.memory.use import BYTES_OF
from settings.rollout import RolloutServiceTable
from settings.service import ServiceTable


def check_vllm_cache(name: str, table: ServiceTable, row_tokens: int) -> None:
    """Checks that vLLM's KV cache can hold one row of its maximum length, without which vLLM does not start. Passes a
    model whose shape is not known, and a cache of another type than the model's.

    Args:
        name: Name of the service.
        table: Table of any service.
        row_tokens: Most tokens of a prompt and its response together. 0: unknown; vLLM then makes room for as many as
            the model has positions.

    Raises:
        ConfigError: It cannot.
    """
    if not isinstance(table, ActorTable | RolloutServiceTable) or table.rollout_engine != VLLM:
        return
    try:
        shape = read_model_shape(table.model)
    except ConfigError:
        return
    limit = table.vllm.max_model_len or min(filter(None, (row_tokens, shape.positions)), default=0)
    if not limit or "kv_cache_dtype" in table.vllm.engine_args:
        return
    sizes = read_shape(table.model)
    # Layers with a sliding window need no more than the window.
    window = sizes.get("sliding_window", 0) if sizes.get("use_sliding_window", True) else 0
    tokens = min(filter(None, (limit, window)))
    generation_mesh = table.generation_mesh if isinstance(table, ActorTable) else ""
    _, tensor = meshes.generation_sizes(generation_mesh, table.mesh)
    # "auto" is bfloat16 on a GPU, and float32 on a CPU; a service without a key `device` may have either.
    itemsize = BYTES_OF[computed_dtype(table.dtype, on_gpu=table.device != "cpu")]
    needed = tokens * cache_bytes_per_token(shape, tensor, itemsize)
    if needed > table.vllm.kv_cache_gb * GIB:
        why = "max_model_len" if table.vllm.max_model_len else "data.max_prompt_tokens is not set"
        if not table.vllm.max_model_len and row_tokens:
            why = "data.max_prompt_tokens and rollout.max_response_tokens"
        raise ConfigError(
            f"services.{name}.vllm.kv_cache_gb: {table.vllm.kv_cache_gb:g} GiB cannot hold the KV cache of one row of "
            f"{limit} tokens ({why}), {needed / GIB:.3g} GiB; raise it, or lower vllm.max_model_len"
        )
