"""`python -m deploy` is `rlhf-deploy`."""

from deploy.cli import main

main(prog_name="rlhf-deploy")
