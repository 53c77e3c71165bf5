"""Read the log of a suite or a stream as episodes with ids, as those of a run are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from experiential.bank.records import EpisodeSummary
from experiential.evaluation.episode_log import PlayedTranscript, Question
from experiential.evaluation.play_log import PlayedEpisode, PlayedTurn, read_log
from experiential.types import Condition, Trajectory, Turn, Use

_ID_DIGITS = 16


class SuiteLog:
    """Read the episodes of a `PlayLog`, also while it is written.

    An episode is known by what it played, so that one played again keeps its id.

    Raises:
        ConfigError: from all methods, where the file is no such log, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def summaries(self) -> list[EpisodeSummary]:
        """Return all episodes that have ended, in the order in which they were first played."""
        return [
            EpisodeSummary(
                id=id,
                arm=", ".join([one.arm, *(f"{k} {v}" for k, v in sorted(one.place.items()))]),
                visit=one.visit + 1,
                task=" ".join(filter(None, (one.task, one.task_id))),
                success=None if one.error is not None else one.success,
                reward=one.reward,
                condition=_condition(one),
                turns=one.turns,
                uses=one.shown,
                error=one.error,
            )
            for id, one in {id: one.summary() for id, one in self._played()}.items()
        ]

    def transcript(self, id: str) -> PlayedTranscript | None:
        """Return one episode, or None; the last attempt at it counts."""
        found = [one for known, one in self._played() if known == id]
        return _transcript(id, found[-1]) if found else None

    def _played(self) -> Iterator[tuple[str, PlayedEpisode]]:
        for line in read_log(self.path):
            if isinstance(line, PlayedEpisode) and not line.stopped:
                key = json.dumps(line.key).encode()
                yield sha256(key).hexdigest()[:_ID_DIGITS], line


def _condition(played: PlayedEpisode) -> Condition:
    return Condition.GUIDED if played.shown else Condition.FREE


def _transcript(id: str, played: PlayedEpisode) -> PlayedTranscript:
    said, ends = played.transcript, [one.observation for one in played.transcript[1:]]
    ends.append(played.end)
    turns, replies, questions = list[Turn](), dict[int, str](), list[Question]()
    place: list[int] = []  # the turn that each reply belongs to
    for one, end in zip(said, ends, strict=False):
        place.append(len(turns))
        if _asks(one):
            questions.append(Question(turn=len(turns), text=one.reply or one.action))
            continue
        if one.reply.strip() not in ("", one.action.strip()):
            replies[len(turns)] = one.reply
        reward = one.reward or 0.0
        turns.append(
            Turn(observation=one.observation, action=one.action, reward=reward, feedback=end)
        )
    uses, texts = list[Use](), dict[str, str]()
    for rank, entry in enumerate(played.retrieved):
        asked = 0 < entry.turn <= len(said) and _asks(said[entry.turn - 1])
        begins = "episode_start" if entry.turn == 0 else "turn"
        use = Use(
            experience_id=entry.id,
            experience_version=entry.version,
            rank=rank,
            score=entry.score,
            episode=id,
            turn=place[entry.turn] if entry.turn < len(place) else len(turns),
            how="search_and_ask" if asked else begins,
        )
        uses.append(use)
        texts[use.id] = entry.text
    trajectory = Trajectory(
        id=id,
        task=played.task,
        task_id=played.task_id,
        turns=tuple(turns),
        uses=tuple(uses),
        reward=played.reward,
        success=None if played.error is not None else played.success,
        condition=_condition(played),
        seed=played.seed,
        error=played.error,
    )
    return PlayedTranscript(
        trajectory=trajectory, replies=replies, questions=tuple(questions), texts=texts
    )


def _asks(turn: PlayedTurn) -> bool:
    return turn.reward is None
