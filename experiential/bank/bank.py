"""Open a bank by its folder or by the address of its server."""

from __future__ import annotations

import os
from typing import Any, overload

from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import Embedder
from experiential.bank.protocol import Bank


@overload
def ExperienceBank(
    path: os.PathLike[str],
    *,
    namespace: str = "default",
    embedder: Embedder | str | None = None,
    read_only: bool = False,
    store: str | None = None,
) -> FolderBank: ...


@overload
def ExperienceBank(
    path: str,
    *,
    namespace: str = "default",
    embedder: Embedder | str | None = None,
    read_only: bool = False,
    **options: Any,
) -> Bank: ...


def ExperienceBank(
    path: str | os.PathLike[str],
    *,
    namespace: str = "default",
    embedder: Embedder | str | None = None,
    read_only: bool = False,
    **options: Any,
) -> Bank:
    """Open the bank in a folder, or the bank behind ``http://host:port``.

    >>> import tempfile
    >>> with ExperienceBank(tempfile.mkdtemp(), embedder="hashing") as bank:
    ...     entry = bank.add("The red door needs the brass key.", task="leave the house")
    ...     bank.search("which key opens the red door?")[0].experience.id == entry.id
    True

    Args:
        path: a folder, made on first use, or the address of ``experiential serve``.
        namespace: entries of different namespaces never meet; each has its own history.
        embedder: a callable, the name of one ("hashing", an entry point, ``module:attribute``), a
            sentence-transformers name or folder, or None: the recorded embedder, or the default
            model for a new bank.
        read_only: open the bank as it is now; writes raise ``ReadOnlyBankError``.
        options: ``store`` of a folder, see `FolderBank`; ``token``, ``timeout`` and ``patience``
            of a server, see `RemoteBank`.

    Raises:
        BankLockedError: another writer has the folder.
        BankError: the bank cannot be used, or has another embedder.
    """
    options |= {"namespace": namespace, "embedder": embedder, "read_only": read_only}
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        from experiential.bank.http.client import RemoteBank

        return RemoteBank(path, **options)
    return FolderBank(path, **options)
