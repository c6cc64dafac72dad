"""Serves any role: `python -m services ROLE --config CONFIG`, or for several ranks
`torchrun --rdzv-backend rlhf --nproc-per-node RANKS -m services ROLE --config CONFIG`."""

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()

import click  # noqa: E402

from rlhf.errors import ConfigError  # noqa: E402 - imports gRPC
from rlhf.roles import find_role, role_names  # noqa: E402 - imports gRPC
from services.runtime.main import command  # noqa: E402 - imports gRPC


class Roles(click.Group):
    """Command line with a command for each role. It lists those that are known by name; a role can also be named as
    module:object."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return role_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        try:
            return command(find_role(cmd_name))
        except ConfigError as error:
            ctx.fail(f"role: {error}")


if __name__ == "__main__":
    Roles(help="Serve one rank of a service of role COMMAND.")(prog_name="python -m services")
