"""Keep the open banks of one server."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from experiential.bank.folder import FolderBank
from experiential.bank.http.served import ServedBank
from experiential.bank.index.embed import Embedder
from experiential.bank.index.site import checked_store
from experiential.bank.storage.journal import Journal
from experiential.bank.storage.lock import WriterLock
from experiential.bank.storage.tables import History
from experiential.errors import BankError

_SERVER = "\0server"
"""Name under which the server holds the folder's lock; no namespace of a user has it."""


class Namespaces:
    """Open the namespaces of one folder when first asked for, or serve banks opened by the caller.

    Args:
        source: a folder, whose writer's lock is taken at once, or open banks of different
            namespaces, which stay open.
        namespaces: those that may be asked for; empty allows all.
        embedder: for namespaces that were never written.
        store: where the index of a folder's namespaces is, see ``FolderBank``.
        limit: number of namespaces from which on no further one is made.

    Raises:
        BankLockedError: another process writes the folder.
        BankError: the folder cannot be used, or its journal cannot be read.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | FolderBank | Sequence[FolderBank],
        *,
        namespaces: Sequence[str] = (),
        embedder: Embedder | str | None = None,
        store: str | None = None,
        limit: int = 100,
    ) -> None:
        self._limit = limit
        self._lock = threading.RLock()
        self._open: dict[str, ServedBank] = {}
        self._allowed = tuple(dict.fromkeys(namespaces))
        self._embedder = embedder
        self._store = checked_store(store)
        self._folder: Path | None = None
        self._claim: WriterLock | None = None
        self._journal: Journal | None = None
        self._closed = False
        if not isinstance(source, (str, os.PathLike)):
            banks = [source] if isinstance(source, FolderBank) else list(source)
            self._open = {bank.namespace: ServedBank(bank) for bank in banks}
            if len(self._open) < max(1, len(banks)):
                raise ValueError(f"Expected open banks of different namespaces, got {banks!r}")
            return
        folder = Path(source).expanduser()
        if folder.exists() and not folder.is_dir():
            raise BankError(f"Expected a folder, got the file {str(folder)!r}; choose another path")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._claim = folder, WriterLock(folder, _SERVER)
        with contextlib.ExitStack() as undo:  # what was opened is closed if a later part fails
            undo.callback(self.close)
            self._journal = Journal.open(folder)
            for name in self._allowed:
                self.get(name)
            undo.pop_all()

    def get(self, namespace: str) -> ServedBank:
        """Return the bank of a namespace, opened at the first call.

        Raises:
            BankError: it is not served here.
        """
        if (known := self._open.get(namespace)) is not None:
            return known
        with self._lock:
            if self._closed:
                raise BankError(
                    "Expected a running bank server, got one that is shutting down; ask again when"
                    " it is back"
                )
            if (known := self._open.get(namespace)) is not None:
                return known
            refused = bool(self._allowed) and namespace not in self._allowed
            if self._folder is None or self._journal is None or refused:
                served = ", ".join(map(repr, self.names()))
                raise BankError(
                    f"Expected a namespace served here ({served}), got {namespace!r}; start the"
                    " server with --namespace for it"
                )
            known_names = self.names()
            if namespace not in known_names and len(known_names) >= self._limit:
                raise BankError(
                    f"Expected one of the {len(known_names)} namespaces of this bank, got"
                    f" {namespace!r}, and no further one may be made; start the server with"
                    " --max-namespaces, or name one that is there"
                )
            is_new = History(self._journal, namespace).is_empty()
            bank = FolderBank(
                self._folder,
                namespace=namespace,
                embedder=self._embedder if is_new else None,  # a written one keeps its own
                store=self._store,
            )
            return self._open.setdefault(namespace, ServedBank(bank))

    def names(self) -> list[str]:
        """Return the names of the served namespaces: those allowed, else those ever opened."""
        if self._allowed or self._journal is None:
            return list(self._allowed or self._open)
        statement = "SELECT DISTINCT namespace FROM meta WHERE namespace <> '' ORDER BY namespace"
        return [row[0] for row in self._journal.rows(statement)]

    def backup(self, folder: Path) -> None:
        """Write the journal into a folder; writers go on meanwhile.

        Raises:
            BankError: only some of its namespaces are served here.
        """
        if self._journal is None or self._allowed:
            raise BankError(
                "Expected a server of a whole folder to back up, got one of some namespaces; back"
                " the folder up where it is: experiential bank backup FOLDER DIR"
            )
        self._journal.backup(folder)

    def close(self) -> None:
        """Close the banks opened here and release the folder; safe to call twice."""
        with self._lock:
            self._closed = True
            opened, self._open = self._open, {}
            for served in opened.values() if self._folder is not None else ():
                served.bank.close()
            if self._journal is not None:
                self._journal.close()
            if self._claim is not None:
                self._claim.release()
