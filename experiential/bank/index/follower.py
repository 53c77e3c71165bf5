"""Keep an index store behind the journal: written in the background, replayed, rebuilt."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Generator, Sequence

from experiential.bank.index.seal import Seal
from experiential.bank.index.site import CHROMA, Site
from experiential.bank.index.store import IndexLostError, IndexStore
from experiential.bank.storage.tables import History, Stored
from experiential.errors import ExperientialError

BATCH = 256
"""Changes after which the follower is woken, and those of one write."""
PAUSES = (1.0, 60.0)
"""Seconds after which the follower tries again what failed: at first, and at most."""
_MOST_FAILURES = 2
_log = logging.getLogger(__name__)


class Replica:
    """Hold an open index store, whose files in a folder are sealed after each write.

    Attributes:
        store: the open store, to be asked inside ``answering``.
        head: position of the last journal change in the store; 0 when it is empty.
        stamp: tells that change from one at the same position of another journal.

    Raises:
        IndexLostError: the store cannot be opened, or its files are not those that were sealed.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._seal = Seal(site.folder)
        if self._seal.is_broken():
            raise IndexLostError("its files are not those that were sealed")
        try:
            with self.answering(), self._seal.changing():
                self.store: IndexStore = site.open()
                head, _, self.stamp = self.store.mark().partition(" ")
                self.head = int(head or 0)
        except IndexLostError:
            self._seal.leave()
            raise

    @contextlib.contextmanager
    def answering(self) -> Generator[None]:
        """Turn whatever the store raises into ``IndexLostError``."""
        try:
            yield
        # A store may raise anything when its files or server are gone; Chroma's Rust part panics
        # over a damaged database, which is not an Exception.
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise IndexLostError(
                f"Expected the index {self._site} to answer, got {type(error).__name__}: {error}"
            ) from error

    def __len__(self) -> int:
        with self.answering():
            return len(self.store)

    def clear(self) -> None:
        """Remove everything."""
        with self.answering(), self._seal.changing():
            self.store.clear()
            self.head, self.stamp = 0, ""

    def apply(self, changes: Sequence[tuple[int, str, Stored | None]], stamp: str) -> None:
        """Write a run of journal changes; ``stamp`` is that of the last."""
        last = {id: stored for _, id, stored in changes}
        put = [stored for stored in last.values() if stored is not None]
        removed = [id for id, stored in last.items() if stored is None]
        head = changes[-1][0]
        with self.answering(), self._seal.changing():
            self.store.write(put, removed, f"{head} {stamp}")
        self.head, self.stamp = head, stamp

    def close(self) -> None:
        """Release the store and its folder."""
        try:
            with self.answering(), self._seal.changing():
                self.store.close()
        finally:
            self._seal.leave()


class IndexFollower:
    """Keep an index store behind the journal on a thread of its own; no writer waits for it.

    A failed write is tried again after a pause, which doubles from failure to failure. A store in a
    folder is set aside and made again if it cannot be opened, or opens and then fails twice.

    Attributes:
        failure: of the last attempt, until one succeeds.
        on_advance: called with each position of the journal that the store has reached.
        patience: seconds for which writing should still wait.
        pays_from: entries from which searches should ask the store.
        pending: changes since it was last woken; it need not be before there are ``BATCH``.
    """

    def __init__(self, history: History, site: Site) -> None:
        self.failure: Exception | None = None
        self.on_advance: Callable[[int], None] | None = None
        self.patience: Callable[[], float] = lambda: 0.0
        self.pays_from = site.pays_from()
        self._history = history
        self._site = site
        self._replica: Replica | None = None
        self._work = threading.RLock()
        self._wake = threading.Event()
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self.pending = 0
        self._pause = PAUSES[0]
        self._is_lost = False
        self._failures = 0  # of a store that was open, since it was last written
        # The journal notes under this key how far the index is.
        self._mark = "indexed" if site.store == CHROMA else f"indexed {site.name} {site.store}"
        self._held = int(history.meta(self._mark) or 0)  # position that the store was said to hold

    def is_behind(self) -> bool:
        """Return whether the journal holds more, as far as is known without opening the store."""
        last = self._history.last_seq()
        is_gone = self._site.folder is not None and not self._site.folder.is_dir()
        return last > 0 and (self._held != last or is_gone)

    def wake(self, *, reopen: bool = False) -> None:
        """Catch up in the background; open the store anew first if it did not answer."""
        if reopen:
            self._is_lost = True
            self._failures += self._replica is not None
        self.pending = 0
        if self._thread is None:
            name = "experiential-index"
            self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
            self._thread.start()
        self._wake.set()

    def flush(self, batches: int | None = None) -> bool:
        """Catch up now, by so many batches or wholly; return whether there is more to write.

        Raises:
            IndexLostError: the store does not answer.
        """
        with self._work:
            if self._is_lost:
                self._is_lost = False
                self._drop()
            replica = self.opened()
            written = 0
            while True:
                changes = self._history.changes_after(replica.head, BATCH)
                if changes and written == batches:
                    return True
                if changes:
                    replica.apply(changes, self._history.stamp(changes[-1][0]))
                    self._failures = 0
                self._held = replica.head
                if self.on_advance is not None:
                    self.on_advance(replica.head)
                if not changes:
                    break
                written += 1
            self._history.set_meta(self._mark, str(replica.head))
            if self.failure is not None:
                _log.warning("The index has caught up with the journal again")
                self.failure = None
            return False

    def rebuild(self) -> int:
        """Write the store again from the journal; return the number of entries in it."""
        with self._work:
            try:
                return self._rebuilt()
            except IndexLostError as error:  # damaged where only writing looks
                self._drop()
                if not self._set_aside(error):
                    raise
                return self._rebuilt()

    def _rebuilt(self) -> int:
        self.opened().clear()
        self.flush()
        return len(self.opened())

    def opened(self) -> Replica:
        """Return the store, opened on first use and cleared if it belongs to another journal."""
        if (replica := self._replica) is not None:
            return replica
        with self._work:
            if self._replica is None:
                if self._failures >= _MOST_FAILURES:
                    self._set_aside(self.failure or IndexLostError("searches get no answer"))
                    self._failures = 0
                try:
                    self._replica = self._open()
                except IndexLostError as error:
                    if not self._set_aside(error):
                        raise
                    self._replica = self._open()
            return self._replica

    def _open(self) -> Replica:
        replica = Replica(self._site)
        try:
            last, head = self._history.last_seq(), replica.head
            if head == 0:
                is_ours = len(replica) == 0
            else:  # at the journal's end the number of entries is known, and loss shows
                is_ours = (
                    head <= last
                    and replica.stamp == self._history.stamp(head)
                    and (head < last or len(replica) == self._history.live_count())
                )
            if not is_ours:
                replica.clear()
        except IndexLostError:
            with contextlib.suppress(IndexLostError):
                replica.close()
            raise
        return replica

    def searchable(self) -> Replica:
        """Return the store if it holds all that it was said to hold, else raise IndexLostError."""
        replica = self.opened()
        if replica.head < self._held:
            raise IndexLostError(
                f"Expected the index {self._site} at position {self._held} of the journal, got it"
                f" at {replica.head}"
            )
        return replica

    def stop(self, *, catch_up: bool = True) -> None:
        """End the thread and close the store, after catching up if it is behind."""
        self._halt.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._work:
            # A damaged store in a folder is made again now: no later process may stay so long.
            for _ in range(1 if self._site.folder is None else _MOST_FAILURES + 1):
                if catch_up and self.is_behind():
                    self._try_catch_up()
            self._drop()

    def _set_aside(self, error: Exception) -> bool:
        """Move the folder of the store away, in place of the one that was moved before.

        Returns False where its files are not to blame: a folder without any is that of a store
        elsewhere, which is away; a package may be missing; and a store may say itself, by an error
        of this library, why it cannot run here.
        """
        folder, cause = self._site.folder, error.__cause__
        if isinstance(cause, ImportError | ExperientialError):
            return False
        if folder is None or not folder.is_dir() or not any(folder.iterdir()):
            return False
        aside = folder.with_name(f"{folder.name}.damaged-{time.time_ns()}")
        folder.rename(aside)
        for earlier in folder.parent.glob(f"{folder.name}.damaged-*"):
            if earlier != aside:
                shutil.rmtree(earlier, ignore_errors=True)
        reason = " ".join(str(cause or error).split())
        message = "The index in %s is damaged (%s); set aside as %s, rebuilt from the journal"
        _log.warning(message, folder.name, reason, aside.name)
        return True

    def _drop(self) -> None:
        """Close the store, even one that fails at that."""
        with self._work:
            replica, self._replica = self._replica, None
        if replica is not None:
            with contextlib.suppress(IndexLostError):
                replica.close()

    def _follow(self) -> None:
        while not self._halt.is_set():
            self._wake.wait(None if self.failure is None else self._pause)
            self._wake.clear()
            has_more = True
            while has_more:
                # An embedded store stops the whole process while it writes (Chroma 30 to 100 ms),
                # so it waits while the bank is busy and has no need of it.
                while not self._halt.is_set() and (left := self.patience()) > 0:
                    self._halt.wait(left)
                has_more = not self._halt.is_set() and self._try_catch_up(1)

    def _try_catch_up(self, batches: int | None = None) -> bool:
        """Catch up by so many batches, or wholly; return whether there is more to write."""
        try:
            return self.flush(batches)
        except Exception as error:  # noqa: BLE001  (kept in ``failure``, and tried again)
            self._failures += self._replica is not None
            self._pause = PAUSES[0] if self.failure is None else min(2 * self._pause, PAUSES[1])
            if self.failure is None:
                _log.warning(
                    "The index could not be written (%s); the journal is complete, the index is"
                    " replayed when it can be",
                    error,
                )
            self.failure = error
            self._drop()
            return False
