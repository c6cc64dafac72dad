"""Imported by the server that ranks are forked from: what they need, and need not import again."""

import atexit
import os
import threading

from rlhf.polling import serve_from_one_thread

# As in services/__main__.py: before all that imports gRPC.
serve_from_one_thread()

from tqdm import tqdm  # noqa: E402

from integration.ranks import import_uncollected  # noqa: E402

# By default tqdm makes a semaphore in each process, which stays in /dev/shm where the process is killed.
tqdm.set_lock(threading.RLock())

import_uncollected(
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "chaos.failing_workers",
    "chaos.forked_program",
    "controller.cli",
    "deploy.cli",
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
