"""Entry point of rlhf-conformance."""

from settings.program import run


def main() -> None:
    """Runs rlhf-conformance."""
    run("conformance.cli")
