"""Entry point of rlhf-loadtest."""

from settings.program import run


def main() -> None:
    """Runs rlhf-loadtest."""
    run("loadtest.cli")
