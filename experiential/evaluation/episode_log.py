"""Write and read the episodes of a run: `episodes.jsonl`, one line per step of training.

Those of evaluations are in a file of the same form, `evaluation/episodes.jsonl`, one line per arm.
A row holds what was seen and done in one episode. An observation is written once: that of a turn is
left out where it repeats the feedback of the turn before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiential.bank.protocol import Bank
from experiential.bank.records import EpisodeSummary
from experiential.errors import ConfigError
from experiential.rollout import Episode
from experiential.types import Condition, Record, Trajectory, Use

EPISODES_FILE = "episodes.jsonl"


def episode_row(episode: Episode) -> dict[str, Any]:
    """Return the row of one episode, from which `EpisodeLog` makes it again."""
    t, acts = episode.trajectory, episode.acts()
    # a reply is more than its action where the model reasons before it
    replies = [one.text for one in acts] if len(acts) == len(t.turns) else [""] * len(t.turns)
    before, said = None, list[dict[str, Any]]()
    for turn, reply in zip(t.turns, replies, strict=True):
        one = turn.model_dump(mode="json", exclude_defaults=True)
        if turn.observation == before:
            del one["observation"]
        if reply.strip() not in ("", turn.action.strip()):
            one["reply"] = reply
        before = turn.feedback
        said.append(one)
    questions = [
        {"turn": sum(not asks for asks in episode.asked[:place]), "text": generation.text}
        for place, generation in enumerate(episode.generations)
        if place < len(episode.asked) and episode.asked[place]
    ]
    row: dict[str, Any] = {
        "id": t.id,
        "task": t.task,
        "task_id": t.task_id,
        "instance": t.instance,
        "group": t.group,
        "condition": t.condition.value,
        "seed": t.seed,
        "attempt": episode.attempt,
        "success": bool(t.success),
        "score": t.score,
        "reward": t.reward,
        "turns": len(t.turns),
        "uses": len(t.uses),
        "policy_version": t.policy_version,
        "error": t.error,
        "transcript": said,
        "shown": [
            use.model_dump(mode="json", exclude_defaults=True, exclude={"episode"})
            for use in t.uses
        ],
    }
    if questions:
        row["questions"] = questions
    if episode.job is not None and episode.job.advice is not None:
        row["advice"] = episode.job.advice
    return row


def arm_event(
    arm: str, step: int, visits: Sequence[Sequence[Episode]], bank: Bank | None
) -> dict[str, Any]:
    """Return the line of an arm of an evaluation.

    Its bank is gone afterwards, so that the rows hold the text of what was shown.
    """
    rows: list[dict[str, Any]] = []
    for number, episodes in enumerate(visits, 1):
        for episode in episodes:
            row: dict[str, Any] = {**episode_row(episode), "arm": arm, "visit": number}
            for use, shown in zip(episode.trajectory.uses, row["shown"], strict=True):
                if bank is not None and (text := shown_text(bank, use)) is not None:
                    shown["text"] = text
            rows.append(row)
    return {"event": "episodes", "step": step, "arm": arm, "rows": rows}


def shown_text(bank: Bank, use: Use) -> str | None:
    """Return what an agent read of an entry; None if the bank does not know it."""
    if use.refinement and (refined := bank.generation(use.refinement)) is not None:
        return refined.text
    entry = bank.version(use.experience_id, use.experience_version)
    return None if entry is None else entry.text


class Question(Record):
    """Hold a reply by which the actor asked the bank, before the action of a turn (from 0)."""

    turn: int
    text: str


class PlayedTranscript(Record):
    """Hold one episode, with what only the run that played it knows.

    Attributes:
        trajectory: turns, outcome and uses.
        step: of training; None where only a bank knows the episode.
        replies: all that the model wrote, by turn, where that is more than the action.
        questions: replies that asked the bank.
        advice: a block that a method showed in place of what the bank would give.
        texts: what was shown, by the id of the use, where no bank can tell it.
    """

    trajectory: Trajectory
    step: int | None = None
    replies: dict[int, str] = {}
    questions: tuple[Question, ...] = ()
    advice: str = ""
    texts: dict[str, str] = {}


class EpisodeLog:
    """Read the episodes of a run or of its evaluations, also while it goes on.

    It keeps summaries in memory; the text of an episode is read from the file when asked for.

    Raises:
        ConfigError: from all methods, where a line is damaged, or of an older version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self._read = 0
        self._last = 0, b""  # the place of the last line that was read, and how it begins
        self._known: dict[str, tuple[EpisodeSummary, int]] = {}  # with the place of its line

    def summaries(self) -> list[EpisodeSummary]:
        """Return all episodes written so far, oldest first."""
        with self.path.open("rb") as file:
            place, head = self._last
            file.seek(place)
            if file.read(len(head)) != head:  # a resumed run dropped it; lines begin with the time
                self._begin()
            file.seek(self._read)
            while (line := file.readline()).endswith(b"\n"):  # the last one may be half written
                event = self._parsed(line)
                for row in event["rows"]:
                    if "transcript" not in row:
                        raise ConfigError(
                            f"Expected episodes with their text in {self.path}, got those of an"
                            " older version of experiential; train again"
                        )
                    self._known[row["id"]] = _summary(row, event["step"]), self._read
                self._last = self._read, line[:64]
                self._read += len(line)
        return [summary for summary, _ in self._known.values()]

    def transcript(self, id: str) -> PlayedTranscript | None:
        """Return one episode of those that ``summaries`` returned last, or None."""
        if id not in self._known:
            return None
        with self.path.open("rb") as file:
            file.seek(self._known[id][1])
            event = self._parsed(file.readline())
        row = next((row for row in event["rows"] if row["id"] == id), None)
        return None if row is None else _transcript(row, event["step"])

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            return json.loads(line)
        except ValueError as error:
            raise ConfigError(f"Expected JSON in every line of {self.path}, got {error}") from error


def _summary(row: dict[str, Any], step: int) -> EpisodeSummary:
    fields = {name: row[name] for name in EpisodeSummary.model_fields if name in row}
    if row["error"] is not None:
        fields["success"] = None
    return EpisodeSummary(step=step, **fields)


def _transcript(row: dict[str, Any], step: int) -> PlayedTranscript:
    turns, replies, before = list[dict[str, Any]](), dict[int, str](), ""
    for number, turn in enumerate(row["transcript"]):
        if "reply" in turn:
            replies[number] = turn.pop("reply")
        turns.append({"observation": before} | turn)
        before = turn.get("feedback", "")
    texts = {use["id"]: use.pop("text") for use in row["shown"] if "text" in use}
    same = ("id task task_id instance group seed score reward policy_version error").split()
    trajectory = Trajectory.model_validate(
        {
            **{name: row[name] for name in same},
            "success": None if row["error"] is not None else row["success"],
            "condition": Condition(row["condition"]),
            "turns": turns,
            "uses": [{**use, "episode": row["id"]} for use in row["shown"]],
        }
    )
    return PlayedTranscript(
        trajectory=trajectory,
        step=step,
        replies=replies,
        questions=row.get("questions", ()),
        advice=row.get("advice", ""),
        texts=texts,
    )
