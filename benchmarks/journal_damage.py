"""Damage a bank's journal at random, and count what opens silently wrong and what is lost.

    python -m benchmarks.journal_damage --trials 10000

Each trial flips a bit, zeroes a range, or cuts the file. A damage is *silent* if the bank opens
without naming it and any row or entry differs. It *loses* an entry if none of the entry's bytes was
touched, and neither the opened bank nor ``experiential bank recover`` has it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.recover import recover
from experiential.bank.storage.checksums import TABLES
from experiential.bank.storage.journal import BANK_ID_NAME, JOURNAL_NAME
from experiential.errors import BankError

KINDS = ("flip", "zero", "cut")
_NEAR = 128
"""Bytes of an entry's row before its record and after its vector."""


def make_bank(folder: Path, entries: int = 60) -> None:
    """Write a bank that has rows in every table, removed entries, and a second namespace."""
    with FolderBank(folder, embedder="hashing", store="exact") as bank:
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
    with FolderBank(folder, namespace="second", embedder="hashing", store="exact") as bank:
        bank.add("Elsewhere.")


def state(bank: FolderBank) -> dict[str, Any]:
    """Return all rows of a bank's journal, and its entries as they are found and read."""
    journal = bank._journal  # pyright: ignore[reportPrivateUsage]
    rows = {
        table: journal.rows(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid")
        for table, columns in TABLES.items()
    }
    hits = bank.search("which key does door 7919 need?", k=10)
    return {
        "rows": rows,
        "entries": {entry.id: entry for entry in bank.entries()},
        "hits": [(hit.experience.id, hit.score) for hit in hits],
        "log": [entry.model_dump() for entry in bank.history()],
        "queue": bank.queue.counts(),
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


def run(trials: int, seed: int = 0, on_silent: Path | None = None) -> dict[str, Any]:
    """Return the counts of what became of ``trials`` damages."""
    draw, counts, cpu = random.Random(seed), Counter[str](), time.process_time()
    with TemporaryDirectory(prefix="experiential-damage-") as scratch:
        home = Path(scratch)
        make_bank(home / "whole")
        raw = (home / "whole" / JOURNAL_NAME).read_bytes()
        with FolderBank(home / "whole", read_only=True) as bank:
            known = state(bank)
        where = spans(raw, known)
        folder, new = home / "damaged", home / "new"
        for trial in range(trials):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            shutil.copyfile(home / "whole" / BANK_ID_NAME, folder / BANK_ID_NAME)
            kind, data, start, end = damage(raw, draw)
            (folder / JOURNAL_NAME).write_bytes(data)
            shown: dict[str, Any] = {}
            try:
                with FolderBank(folder, read_only=True) as bank:
                    found, is_named = state(bank), bool(bank.damage)
                shown = found["entries"]
                result = "named, rest served" if is_named else "harmless"
                if not is_named and found != known:
                    result = "SILENT"
                wrong = [id for id, entry in shown.items() if known["entries"].get(id) != entry]
                if any(id in known["entries"] for id in wrong) and result != "SILENT":
                    counts["an entry or its counters shown otherwise, named"] += 1
            except BankError as error:
                result = "refused" if "\n" not in str(error) else "RAW"
                if "recover" not in str(error):
                    counts["refused without naming recover"] += 1
            except Exception as error:  # noqa: BLE001  (what is counted)
                result = f"RAW {type(error).__name__}"
            if (result == "SILENT" or result.startswith("RAW")) and on_silent is not None:
                shutil.copytree(folder, on_silent / str(trial), dirs_exist_ok=True)
            intact = {id for id, (a, b) in where.items() if end <= a or start >= b}
            texts = {id: known["entries"][id].text for id in intact}
            lacking = {id for id in intact if id not in shown or shown[id].text != texts[id]}
            if lacking or result == "refused":
                shutil.rmtree(new, ignore_errors=True)
                try:
                    recover(folder, new)
                    with FolderBank(new, embedder="hashing", read_only=True) as bank:
                        got = {entry.id: entry.text for entry in bank.entries()}
                except BankError as error:
                    counts[f"recover failed: {str(error)[:60]}"] += 1
                    got = {}
                lacking = {id for id in intact if got.get(id, "") != texts[id]}
            counts[f"{kind}: {result}"] += 1
            counts["undamaged entries"] += len(intact)
            counts["undamaged entries lost"] += len(lacking)
            if lacking and on_silent is not None:
                shutil.copytree(folder, on_silent / f"lost-{trial}", dirs_exist_ok=True)
    found = dict(sorted(counts.items()))
    return {"trials": trials, "bytes": len(raw), **found, "cpu": time.process_time() - cpu}


def main() -> None:
    """Run the trials that the command line asks for, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for journals that opened silently wrong")
    args = parser.parse_args()
    logging.getLogger("experiential").setLevel(logging.ERROR)
    print(json.dumps(run(args.trials, args.seed, args.keep), indent=1))


if __name__ == "__main__":
    main()
