"""What ``search_and_ask`` gives: a refined text and everything needed to credit it."""

from __future__ import annotations

from experiential.types import Generation, Hit, Record, Use


class Answer(Record):
    """The answer to one question to the bank.

    Attributes:
        text: the refined entry; the entry's own text when nothing could refine it; None when nothing relevant was found.
        hit: the entry that the answer rests on.
        generation: the refinement, or None when the entry is shown as it is.
        use: what to add to the trajectory, so that entry and refinement receive its outcome.
    """

    text: str | None = None
    hit: Hit | None = None
    generation: Generation | None = None
    use: Use | None = None
