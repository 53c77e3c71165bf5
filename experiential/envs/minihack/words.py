"""Put keys of NetHack into words: the actions of an id, and the answers to questions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

COMPASS = {
    "N": "north", "E": "east", "S": "south", "W": "west",
    "NE": "northeast", "SE": "southeast", "SW": "southwest", "NW": "northwest",
}  # fmt: skip
DIRECTIONS = {
    "north": "k", "east": "l", "south": "j", "west": "h",
    "northeast": "u", "southeast": "n", "southwest": "b", "northwest": "y",
}  # fmt: skip
CANCEL = {"cancel": 27}
_ANSWERS = {"y": "yes", "n": "no", "a": "all", "q": "quit"}
_CHOICE = re.compile(r"\[([^\]]+)\]")
_RANGE = re.compile(r"([a-zA-Z])-([a-zA-Z])")
_ENTRY = re.compile(r"(?:^|\s)([a-zA-Z]) [-+] (\S.*?)\s*$")


def action_words(actions: Iterable[Any]) -> dict[str, int]:
    """Return the words of a set of NLE's actions and the keys they press, each once.

    Eight directions are ``north`` … ``northwest``; running is ``far north``; commands have their
    own names in small letters.
    """
    words: dict[str, int] = {}
    for action in actions:
        name = str(getattr(action, "name", action))
        if name in COMPASS:
            far = "far " if "Longer" in type(action).__name__ else ""
            word = f"{far}{COMPASS[name]}"
        else:
            word = name.removeprefix("NUM_").replace("_", " ").lower()
        if int(action) not in words.values():
            words.setdefault(word, int(action))
    return words


def answers(question: str, inventory: Mapping[str, str]) -> dict[str, int]:
    """Return the answers to a one-key question and their keys; ``cancel`` is among them.

    >>> answers("Unlock it? [yn] (n)", {})
    {'yes': 121, 'no': 110, 'cancel': 27}
    >>> answers("What do you want to use or apply? [g or ?*]", {"f": "a sack", "g": "a key"})
    {'g - a key': 103, 'cancel': 27}
    """
    if "direction" in question:
        ways = {word: ord(key) for word, key in DIRECTIONS.items()}
        return ways | {"up": ord("<"), "down": ord(">"), "self": ord(".")} | CANCEL
    found = _CHOICE.findall(question)
    offered, _, items = (found[-1] if found else "yn").partition(" or ")
    if not items and set(offered) <= set(_ANSWERS):
        return {_ANSWERS[key]: ord(key) for key in offered} | CANCEL
    letters = _RANGE.sub(  # "a-d" is "abcd"
        lambda ends: "".join(map(chr, range(ord(ends[1]), ord(ends[2]) + 1))), offered
    )
    held = {
        f"{letter} - {name}": ord(letter) for letter, name in inventory.items() if letter in letters
    }
    return held | ({"nothing": ord("-")} if offered.startswith("-") else {}) | CANCEL


def menu_entries(lines: Iterable[str]) -> dict[str, int]:
    """Return the entries of a menu and their keys; ``cancel`` is among them.

    >>> menu_entries(["Pick up what?", "", "Tools", "a - a key", "(end)"])
    {'a - a key': 97, 'cancel': 27}
    """
    found = (_ENTRY.search(line) for line in lines)
    return {f"{entry[1]} - {entry[2]}": ord(entry[1]) for entry in found if entry} | CANCEL


def spoken(words: Mapping[str, int]) -> dict[str, int]:
    """Return all ways to say ``words``; ``g - a key`` is also ``g`` and ``a key``.

    >>> spoken({"g - a key": 103})
    {'g - a key': 103, 'g': 103, 'a key': 103}
    """
    ways: dict[str, int] = {}
    for word, key in words.items():
        letter, dash, name = word.partition(" - ")
        for way in (word, letter, name) if dash else (word,):
            ways.setdefault(way, key)
    return ways
