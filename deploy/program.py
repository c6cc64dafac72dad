"""Entry point of rlhf-deploy."""

from settings.program import run


def main() -> None:
    """Runs rlhf-deploy."""
    run("deploy.cli")
