"""Serves the reference role: `python -m services.reference ...` is `python -m services reference ...`."""

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()

from services.runtime.main import run  # noqa: E402 - imports gRPC

if __name__ == "__main__":
    run("reference")
