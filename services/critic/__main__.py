"""Serves the critic role: `torchrun --nproc-per-node RANKS -m services.critic --config CONFIG`."""

from services.main import run

if __name__ == "__main__":
    run("critic", "services.critic.worker:CriticWorker")
