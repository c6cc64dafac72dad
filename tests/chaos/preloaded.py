"""Imported by the server that ranks are forked from: most of what a rank does when it starts is to import."""

import atexit
import os

from integration.ranks import import_uncollected

import_uncollected(
    "transformers.models.llama.modeling_llama",
    "chaos.failing_workers",
    "services.engines.fsdp.engine",
    "services.engines.three_d.engine",
    "services.rollout.hf",
    "services.engines.zero.engine",
)

atexit.register(os._exit, 0)
