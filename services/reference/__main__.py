"""Serves the reference role: `torchrun --nproc-per-node RANKS -m services.reference --config CONFIG`."""

from services.main import run

if __name__ == "__main__":
    run("reference", "services.reference.worker:ReferenceWorker")
