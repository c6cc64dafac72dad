"""Imported by the server that ranks are forked from: what they need, and need not import again."""

import atexit
import os

from integration.ranks import import_uncollected

import_uncollected(
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "services.engines.fsdp.engine",
    "services.engines.fsdp.lora",
    "services.engines.three_d.engine",
    "services.rollout.hf",
    "services.rollout.sharded",
    # Not installed everywhere; an import that fails here is forgiven.
    "services.engines.zero.engine",
)

# At the end of the server there is nothing to take down with care, which takes a second.
atexit.register(os._exit, 0)
