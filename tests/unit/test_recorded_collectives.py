"""The memory that torch keeps of collectives does not grow with the steps of a run."""

import os
import subprocess
import sys

from services.runtime.ranks import KEPT_COLLECTIVES

PROGRAM = """
import json
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from services.runtime.ranks import Ranks

Ranks.join(needs_torch=True)
for _ in range(300):
    dist.all_reduce(torch.ones(1))
print(len(json.loads(_dump_fr_trace_json(True, False))["entries"]))
"""


def test_a_rank_keeps_a_record_of_its_last_collectives_alone() -> None:
    unset = ("RANK", "WORLD_SIZE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == str(KEPT_COLLECTIVES)
