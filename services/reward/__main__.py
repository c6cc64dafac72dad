"""Serves the reward role: `torchrun --nproc-per-node RANKS -m services.reward --config CONFIG`."""

from services.main import run

if __name__ == "__main__":
    run("reward", "services.reward.worker:RewardWorker")
