"""The ``hf-laer`` command: one module per subcommand, imported only when it is called for.

A command is a module of this package with ``HELP``, ``add_arguments(parser)`` and ``run(args, console)``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rich.console import Console

COMMANDS = ("simulate", "bench", "tune", "merge", "soak")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 if it went well, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="hf-laer", description="Plan and simulate expert parallelism; measure, tune; merge checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"hf_laer.cli.{name}")
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        return int(args.run(args, console))
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"hf-laer: error: {error}", markup=False)
        return 2
