"""Serves the actor role: `torchrun --rdzv-backend rlhf --nproc-per-node RANKS -m services.actor ...`."""

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()

from services.actor.role import worker_class  # noqa: E402 - imports gRPC
from services.runtime.main import run  # noqa: E402 - imports gRPC

if __name__ == "__main__":
    run("actor", worker_class)
