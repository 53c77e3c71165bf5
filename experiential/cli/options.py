"""Define the options that several commands take."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from experiential.cli.errors import show_version

AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Version = Annotated[
    bool, Option("--version", callback=show_version, is_eager=True, help="Print the version.")
]
Namespace = Annotated[str, Option(help="Namespace inside the bank.")]
Embedder = Annotated[
    str | None,
    Option(help="For a new bank: a sentence-transformers name or folder, or hashing."),
]
Store = Annotated[
    str | None,
    Option(
        help="Where the index is from now on: chroma, address of a Chroma server, exact, an entry"
        " point or module:attribute; where it was before by default."
    ),
]
Backend = Annotated[
    str | None,
    Option(
        help="Runs the model: local (default), openai, scripted, an entry point of"
        " experiential.llms, or module:attribute."
    ),
]
BackendOption = Annotated[
    list[str] | None,
    Option(metavar="KEY=VALUE", help="Passed to the backend; may be repeated."),
]
