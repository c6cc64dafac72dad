"""Serves the values role: `python -m services.values ...` is `python -m services values ...`."""

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()

from services.runtime.main import run  # noqa: E402 - imports gRPC

if __name__ == "__main__":
    run("values")
