"""Define the options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from experiential.cli.errors import show_version

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Version = Annotated[
    bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
]
Namespace = Annotated[str, typer.Option(help="Namespace inside the bank.")]
Embedder = Annotated[
    str | None,
    typer.Option(help="For a new bank: a sentence-transformers name or folder, or hashing."),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Where the index is from now on: chroma, address of a Chroma server, exact, an entry"
        " point or module:attribute; where it was before by default."
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        help="Runs the model: local (default), openai, scripted, an entry point of"
        " experiential.llms, or module:attribute."
    ),
]
BackendOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Passed to the backend; may be repeated."),
]
