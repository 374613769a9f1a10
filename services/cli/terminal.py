"""What the operator sees: one console for results, one for errors."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.config.program import EXIT_CONFIG_ERROR
from common.errors import ConfigError

P = ParamSpec("P")
WIDE = 10_000


def out() -> Console:
    """Return the console for results; into a pipe or file it cuts and wraps nothing."""
    width = None if sys.stdout.isatty() else WIDE
    return Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True, width=width)


def grid(*columns: str) -> Table:
    """Return a table without lines; where it is too wide it wraps words and cuts nothing.

    What stands in the first column is a name to copy, and stays whole.
    """
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


def tell_error(message: str) -> None:
    """Print an error with its program's name."""
    console = Console(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)
    console.print(f"[bold red]flowpath:[/] {escape(message)}")


def ends_by_name(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a ConfigError of a command into its message and exit code 2."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ConfigError as error:
            tell_error(str(error))
            raise typer.Exit(EXIT_CONFIG_ERROR) from error

    return run
