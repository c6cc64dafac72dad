"""Entry point of rlhf-map."""

from settings.program import run


def main() -> None:
    """Runs rlhf-map."""
    run("controller.mapping.cli")
