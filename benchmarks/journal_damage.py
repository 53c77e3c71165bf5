"""Damage a bank's journal at random, and count what opens silently wrong and what is lost.

    python -m benchmarks.journal_damage --trials 10000 [--mapped]

Each trial flips a bit, zeroes a range, or cuts the file. A damage is *silent* if the bank opens
without naming it and any row or entry differs, for a reader or a writer. It *loses* an entry if
none of the entry's bytes was touched, and neither the opened bank nor ``experiential bank recover``
has it. With ``--mapped`` the folder also has the file of entries that readers map, and every other
trial damages that file instead; what a reader shows before it has looked at the journal is compared
too. The result is in `benchmarks/results/journal_damage.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import HashingEmbedder
from experiential.bank.recover import recover
from experiential.bank.storage.checksums import TABLES
from experiential.bank.storage.journal import BANK_ID_NAME, JOURNAL_NAME
from experiential.bank.storage.mapped import PATTERN
from experiential.errors import BankError

RESULT = Path(__file__).parent / "results" / "journal_damage.json"
HASHING = HashingEmbedder()
"""An object, since a name is looked for among the installed packages at each opening."""
KINDS = ("flip", "zero", "cut")
_NEAR = 128
"""Bytes of an entry's row before its record and after its vector."""


def make_bank(folder: Path, entries: int) -> None:
    """Write a bank that has rows in every table, removed entries, and a second namespace."""
    with FolderBank(folder, embedder=HASHING, store="exact") as bank:
        for number in range(entries):
            entry = bank.add(f"Lesson {number}: door {number * 7919} needs key {number}.", task="t")
            if number % 6 == 1:
                bank.update(entry.id, f"Lesson {number}, rewritten.")
            if number % 10 == 2:
                bank.remove(entry.id)
            if number % 5 == 0:
                use = xp.Use(experience_id=entry.id, experience_version=1)
                done = xp.Trajectory(
                    id=f"e{number}", task="t", success=True, score=1.0, uses=(use,)
                )
                bank.submit(done)
                made = xp.parse_operations('<answer>[{"op": "add", "text": "Mind it."}]</answer>')
                written = xp.Distillation(parsed=made, generation=xp.Generation(text="Mind it."))
                bank.apply(written, trajectory=done, shown=[], item=done.id if number % 2 else None)
        with bank.receipts.noting("key", "digest"):
            bank.add("The last one.")
    with FolderBank(folder, namespace="second", embedder=HASHING, store="exact") as bank:
        bank.add("Elsewhere.")


def shown(bank: FolderBank) -> list[Any]:
    """Return the entries of a bank, the hits of a search, its episodes and its history."""
    hits = bank.search("which key does door 7919 need?", k=10)
    entries = {entry.id: entry for entry in bank.entries()}
    scores = [(hit.experience.id, round(hit.score, 5)) for hit in hits]
    ledger = bank._ledger  # pyright: ignore[reportPrivateUsage]
    used = [bank.used_in(id) for id in entries]
    episodes = [bank.queue.counts(), list(ledger.episodes()), bank.episodes(), used]
    commits = bank.history()
    few = [0, *(one.id for one in commits[:: max(1, len(commits) // 3)]), bank.head]
    changed = [bank.diff(*pair) for pair in pairwise(few)]
    before = list(bank.at(few[-2]).entries())

    def told(entries: Iterable[xp.Experience]) -> list[Any]:
        asked = [(one.id, one.version) for one in islice(entries, 5)]
        return [[bank.history(id), bank.uplift(id, version)] for id, version in asked]

    try:
        past = told(entries.values())
    except BankError:  # the journal was found to be damaged, and has an entry no more
        past = told(bank.entries())
    return [entries, scores, *episodes, commits, *changed, before, *past]


def state(bank: FolderBank) -> dict[str, Any]:
    """Return all rows of a bank's journal, and its entries as they are found and read."""
    first = shown(bank)  # of the mapped entries, if they are used
    journal = bank._journal  # pyright: ignore[reportPrivateUsage]
    rows = {
        table: journal.rows(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid")
        for table, columns in TABLES.items()
    }
    again = shown(bank)
    return {
        "first": first,
        "rows": rows,
        "again": again,
        "entries": again[0],
        "log": [entry.model_dump() for entry in bank.history()],
    }


def spans(raw: bytes, known: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return where the row of each live entry lies in the file, where it lies in one place."""
    found: dict[str, tuple[int, int]] = {}
    for _, id, version, _, record, vector, _ in known["rows"]["versions"]:
        entry = known["entries"].get(id)
        if entry is not None and entry.version == version:
            start, end = raw.find(record.encode()), raw.find(vector)
            if 0 <= start < end and raw.count(vector) == 1 and raw.count(record.encode()) == 1:
                found[id] = (start - _NEAR, end + len(vector) + _NEAR)
    return found


def damage(raw: bytes, draw: random.Random) -> tuple[str, bytes, int, int]:
    """Return the kind, the damaged bytes, and the range that was touched."""
    kind = draw.choice(KINDS)
    place = draw.randrange(len(raw))
    if kind == "flip":
        flipped = raw[place] ^ 1 << draw.randrange(8)
        return kind, raw[:place] + bytes([flipped]) + raw[place + 1 :], place, place + 1
    if kind == "zero":
        end = min(len(raw), place + 2 ** draw.randrange(1, 14))
        return kind, raw[:place] + bytes(end - place) + raw[end:], place, end
    return kind, raw[:place], place, len(raw)


def opened(
    folder: Path, known: dict[str, Any], *, read_only: bool
) -> tuple[str, dict[str, Any], str]:
    """Return what became of opening a damaged bank, its state, and the error."""
    try:
        with FolderBank(folder, read_only=read_only) as bank:
            found, is_named = state(bank), bool(bank.damage)
    except BankError as error:
        return "refused" if "\n" not in str(error) else "RAW", {}, str(error)
    except Exception as error:  # noqa: BLE001  (what is counted)
        return f"RAW {type(error).__name__}", {}, str(error)
    if is_named:
        return "named, rest served", found, ""
    return "harmless" if found == known else "SILENT", found, ""


def unrestored(
    after: dict[str, Any], before: dict[str, Any], known: dict[str, Any]
) -> dict[str, Any]:
    """Return what a writer shows, without settings set aside that it wrote again as they were."""
    found = {name: part for name, part in after.items() if name != "first"}
    if before and after:
        again = [row for row in known["rows"]["meta"] if row not in before["rows"]["meta"]]
        meta = [row for row in after["rows"]["meta"] if row not in again]
        found["rows"] = after["rows"] | {"meta": meta}
    return found


def is_kept(folder: Path, after: dict[str, Any]) -> bool:
    """Return whether a bank, opened again after a writer, is whole and as that writer had it."""
    result, again, _ = opened(folder, after, read_only=True)
    if again:  # an opening writes again the settings that were set aside
        old = after["rows"]["meta"]
        again["rows"]["meta"] = [row for row in again["rows"]["meta"] if row in old]
    return again == after and result != "named, rest served"


def run(
    trials: int,
    seed: int = 0,
    entries: int = 30,
    keep: Path | None = None,
    progress: Callable[[str], Any] = len,
) -> dict[str, Any]:
    """Return the counts of what became of ``trials`` damages.

    Args:
        trials: each opens the bank read-only, then for writing, and recovers it where entries lack.
        seed: of the damages.
        entries: added to the bank; those that are updated, removed and distilled come on top.
        keep: folder for journals that opened silently wrong, or lost an entry.
        progress: called with a line after each thousandth part.
    """
    draw, counts, cpu = random.Random(seed), Counter[str](), time.process_time()
    with TemporaryDirectory(prefix="experiential-damage-") as scratch:
        home = Path(scratch)
        make_bank(home / "whole", entries)
        raw = (home / "whole" / JOURNAL_NAME).read_bytes()
        mapped = next((home / "whole").glob(PATTERN), None)
        mapped_raw = b"" if mapped is None else mapped.read_bytes()
        with FolderBank(home / "whole", read_only=True) as bank:
            known = state(bank)
        where = spans(raw, known)
        folder, new = home / "damaged", home / "new"

        def lay(data: bytes, of_map: bytes) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            shutil.copyfile(home / "whole" / BANK_ID_NAME, folder / BANK_ID_NAME)
            (folder / JOURNAL_NAME).write_bytes(data)
            if mapped is not None:
                (folder / mapped.name).write_bytes(of_map)
            os.utime(folder / JOURNAL_NAME, (0, 0))  # a reader waits beside a file of right now

        for trial in range(trials):
            is_map = mapped is not None and trial % 2 == 1
            kind, data, start, end = damage(mapped_raw if is_map else raw, draw)
            if is_map:
                laid, kind, start, end = (raw, data), f"mapped {kind}", 0, 0
            else:
                laid = data, mapped_raw
            lay(*laid)
            result, found, error = opened(folder, known, read_only=True)
            if result == "refused" and "recover" not in error:
                counts["refused without naming recover"] += 1
            served = found.get("entries", {})
            if result == "named, rest served" and any(
                known["entries"].get(id, entry) != entry for id, entry in served.items()
            ):
                counts["an entry or its counters shown otherwise, named"] += 1
            intact = {id for id, (a, b) in where.items() if end <= a or start >= b}
            texts = {id: known["entries"][id].text for id in intact}
            lacking = {id for id in intact if id not in served or served[id].text != texts[id]}
            if lacking or result == "refused":
                shutil.rmtree(new, ignore_errors=True)
                try:
                    recover(folder, new)
                    with FolderBank(new, embedder=HASHING, read_only=True) as bank:
                        got = {entry.id: entry.text for entry in bank.entries()}
                except Exception as failed:  # noqa: BLE001  (what is counted)
                    counts[f"recover failed: {type(failed).__name__} {failed}"[:80]] += 1
                    got = {}
                lacking = {id for id in intact if got.get(id, "") != texts[id]}
            written, after, _ = opened(folder, known, read_only=False)
            first = found.pop("first", [])
            after_all = unrestored(after, found, known)
            is_other = (written, after_all) != (result, found)
            # Before the journal was checked: as it was, or as what is named leaves it.
            both = zip(first, known["first"], found.get("again", []), strict=False)
            is_wrong_first = any(part not in parts for part, *parts in both)
            counts["SILENT: shown otherwise before the journal was checked"] += is_wrong_first
            counts["SILENT: a writer found another state than a reader"] += is_other
            is_new = bool(after) and not is_kept(folder, after)
            counts["SILENT: after a writer set rows aside, another state"] += is_new
            counts[f"{kind}: {result}"] += 1
            counts["undamaged entries"] += len(intact)
            counts["undamaged entries lost"] += len(lacking)
            is_wrong = result.startswith(("RAW", "SILENT")) or is_other or is_new or is_wrong_first
            if keep is not None and (is_wrong or lacking):
                lay(*laid)
                shutil.copytree(folder, keep / str(trial), dirs_exist_ok=True)
            if (trial + 1) % max(1, trials // 1000) == 0:
                progress(f"{trial + 1} of {trials}: {json.dumps(+counts, sort_keys=True)}")
    lost = {"undamaged entries lost": counts["undamaged entries lost"]}
    made = {"trials": trials, "seed": seed, "entries": entries, "bytes": len(raw)}
    figures = made | dict(sorted((+counts).items()))
    return figures | lost | {"cpu_seconds": round(time.process_time() - cpu, 1)}


def main() -> None:
    """Run the trials that the command line asks for; print and keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--entries", type=int, default=30, help="added to the bank")
    parser.add_argument("--keep", type=Path, help="folder for journals that opened silently wrong")
    parser.add_argument("--mapped", action="store_true", help="damage the mapped file too")
    parser.add_argument("--results", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.mapped:
        FolderBank.MAPPED_FROM = 1
    logging.getLogger("experiential").setLevel(logging.ERROR)
    chosen = (options.trials, options.seed, options.entries, options.keep)
    found = run(*chosen, partial(print, flush=True))
    print(json.dumps(found, indent=1))
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
