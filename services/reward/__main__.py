"""Serves the reward role: `torchrun --rdzv-backend rlhf --nproc-per-node RANKS -m services.reward ...`."""

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()

from services.reward.role import worker_class  # noqa: E402 - imports gRPC
from services.runtime.main import run  # noqa: E402 - imports gRPC

if __name__ == "__main__":
    run("reward", worker_class)
