"""Serves the actor role: `torchrun --nproc-per-node RANKS -m services.actor --config CONFIG`."""

from services.main import run

if __name__ == "__main__":
    run("actor", "services.actor.worker:ActorWorker")
