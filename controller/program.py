"""Entry point of rlhf-controller."""

from settings.program import run


def main() -> None:
    """Runs rlhf-controller."""
    run("controller.cli")
