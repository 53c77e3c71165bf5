"""Generate households: games on ALFWorld's own domain, each with a plan that wins it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import numpy as np

from experiential.envs.alfworld.games import (
    TASK_TYPES,
    Entry,
    Game,
    House,
    TaskType,
    with_goal,
)
from experiential.envs.names import FIRST, SECOND, NamedSplit, digest_of, world_names
from experiential.envs.split import Split, split_of
from experiential.errors import MissingExtraError

STATES = {
    "pick_clean_then_place_in_recep": ("clean", "Sink", "cleanable", "isClean"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave", "heatable", "isHot"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge", "coolable", "isCool"),
}
"""Task type to verb, where it is done, what can be so treated, and what it then is."""
_WORDS = {
    "pick_and_place_simple": "put a {o} in {r}. / put some {o} on {r}.",
    "look_at_obj_in_light": "look at {o} under the desklamp. / examine the {o} with the desklamp.",
    "pick_clean_then_place_in_recep": "put a clean {o} in {r}. / clean some {o} and put it in {r}.",
    "pick_heat_then_place_in_recep": "put a hot {o} in {r}. / heat some {o} and put it in {r}.",
    "pick_cool_then_place_in_recep": "put a cool {o} in {r}. / cool some {o} and put it in {r}.",
    "pick_two_obj_and_place": "put two {o} in {r}. / find two {o} and put them in {r}.",
}
KINDS = 10
"""Kinds of objects in a household, so many that some of a kitchen's can be heated."""
Law = Literal["first", "street"]
"""By what households are alike: the first word of their names, which may be that of a street."""
_OPENABLE = frozenset({"Fridge", "Microwave", "Cabinet", "Drawer", "Safe"})


@dataclass(frozen=True)
class Room:
    """Describe a kind of room: most receptacles of each kind, and its objects with their uses."""

    places: dict[str, int]
    things: dict[str, str]
    narrow: frozenset[str] = frozenset()
    """Receptacles that take only what can be cooled."""


# fmt: off
KITCHEN = Room(
    {
        "Fridge": 1, "Microwave": 1, "Sink": 1, "CounterTop": 2, "DiningTable": 1, "Cabinet": 4,
        "Drawer": 3, "GarbageCan": 1,
    },
    {
        **dict.fromkeys(
            "Mug Plate Bowl Cup Apple Tomato Potato Egg".split(), "cleanable heatable coolable"
        ),
        **dict.fromkeys(("Lettuce", "Pan", "Pot"), "cleanable coolable"),
        **dict.fromkeys(("Fork", "Spoon", "Knife", "Spatula"), "cleanable"),
        **dict.fromkeys(("SaltShaker", "PepperShaker"), ""),
    },
    frozenset({"Fridge", "Microwave"}),
)
BEDROOM = Room(
    {
        "Bed": 1, "Desk": 1, "SideTable": 2, "Dresser": 1, "Shelf": 3, "Drawer": 4, "Safe": 1,
        "GarbageCan": 1,
    },
    dict.fromkeys(
        "Book Pen Pencil CD KeyChain CreditCard AlarmClock CellPhone Laptop Watch Vase".split(), ""
    ),
)
# fmt: on


class Item(NamedTuple):
    """Name a receptacle or an object: by its kind, in the problem, and in the game."""

    kind: str
    id: str
    name: str
    type: str


def item(kind: str, number: int) -> Item:
    """Return the item of a kind with this number, from 1; ALFWorld counts down in the problem."""
    name = f"{kind}_bar_{99 - number:02d}"
    if kind == "Sink":
        return Item(kind, f"{name}_bar_SinkBasin", f"sinkbasin {number}", "SinkBasinType")
    return Item(kind, name, f"{kind.lower()} {number}", f"{kind}Type")


@dataclass
class Household:
    """Hold a room, the place of every object, and the task."""

    task_type: TaskType
    room: Room
    places: list[Item]
    where: dict[Item, Item]
    target: str
    goal_place: str
    lamp: Item | None = None
    words: str = ""

    def plan(self) -> list[str]:
        """Return commands that win: fetch the object, treat it, bring it."""
        steps: list[tuple[Item, bool, str]] = []  # where, whether it must be open, command there
        targets = [thing for thing in self.where if thing.kind == self.target]
        wanted = targets[: 2 if self.task_type == "pick_two_obj_and_place" else 1]
        for thing in wanted:
            place = self.where[thing]
            steps.append((place, True, f"take {thing.name} from {place.name}"))
            if self.lamp is not None:
                steps.append((self.where[self.lamp], False, f"use {self.lamp.name}"))
                break
            if self.task_type in STATES:
                verb, kind, _, _ = STATES[self.task_type]
                station = item(kind, 1)
                steps.append((station, False, f"{verb} {thing.name} with {station.name}"))
            to = next(place for place in self.places if place.kind == self.goal_place)
            steps.append((to, True, f"move {thing.name} to {to.name}"))
        commands: list[str] = []
        opened: set[Item] = set()
        at: Item | None = None
        for place, reach, command in steps:
            if at != place:
                commands.append(f"go to {place.name}")
            at = place
            if reach and place.kind in _OPENABLE and place not in opened:
                commands.append(f"open {place.name}")
                opened.add(place)
            commands.append(command)
        return commands

    def problem(self) -> str:
        """Return the problem in PDDL."""
        at = {place: f"loc_bar_{n}" for n, place in enumerate(self.places, 1)}
        types = {place.type: place.kind for place in self.places}
        held = {thing.type: thing.kind for thing in self.where if thing != self.lamp}
        objects = ["agent1 - agent", "loc_bar_0 - location"]
        objects += [f"{thing.id} - object" for thing in self.where]
        objects += [f"{kind} - otype" for kind in dict.fromkeys(one.type for one in self.where)]
        facts = ["(atLocation agent1 loc_bar_0)"]
        for place, location in at.items():
            objects += [f"{place.id} - receptacle", f"{location} - location"]
            facts.append(f"(receptacleType {place.id} {place.type})")
            facts.append(f"(receptacleAtLocation {place.id} {location})")
            if place.kind in _OPENABLE:
                facts.append(f"(openable {place.id})")
        objects += [f"{kind} - rtype" for kind in types]
        for thing, place in self.where.items():
            facts.append(f"(objectType {thing.id} {thing.type})")
            facts.append(f"(inReceptacle {thing.id} {place.id})")
            facts.append(f"(objectAtLocation {thing.id} {at[place]})")
            lit = thing == self.lamp
            uses = "toggleable" if lit else f"pickupable {self.room.things[thing.kind]}"
            facts += [f"({use} {thing.id})" for use in uses.split()]
        for place_type, place_kind in types.items():
            facts += [
                f"(canContain {place_type} {thing_type})"
                for thing_type, thing_kind in held.items()
                if fits(self.room, place_kind, thing_kind)
            ]
        head = ["(define (problem household)", "(:domain alfred)", "(:objects"]
        tail = [")", "(:init", *facts, ")", f"(:goal {self._goal()})", ")"]
        return "\n".join([*head, *objects, *tail])

    def game(self, name: str) -> Game:
        """Return the game of this household, with its plan as the walkthrough."""
        domain, grammar = bundled()
        texts = {
            "grammar": with_goal(grammar, self.words),
            "pddl_domain": domain,
            "pddl_problem": self.problem(),
        }
        return Game(name, self.task_type, self.words, tuple(self.plan()), texts)

    def _goal(self) -> str:
        kind = f"{self.target}Type"
        if self.lamp is not None:
            return (
                "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and"
                " (objectType ?ot DeskLampType) (toggleable ?ot) (isToggled ?ot)"
                " (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r))) (exists"
                f" (?o - object ?a - agent) (and (objectType ?o {kind}) (holds ?a ?o))))"
            )
        place = f"(receptacleType ?r {item(self.goal_place, 1).type})"
        if self.task_type == "pick_two_obj_and_place":
            return (
                "(and (exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1"
                f" {kind}) {place} (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1"
                f" ?o2)) (objectType ?o2 {kind}) {place} (inReceptacle ?o2 ?r)))))))"
            )
        words = STATES[self.task_type][2:] if self.task_type in STATES else ()
        state = "".join(f"({word} ?o) " for word in words)
        inside = f"{state}(inReceptacle ?o ?r) (objectType ?o {kind}) {place}"
        return f"(and (exists (?r - receptacle) (exists (?o - object) (and {inside}))))"


def fits(room: Room, place: str, thing: str) -> bool:
    """Return whether a kind of receptacle accepts a kind of object."""
    return place not in room.narrow or "coolable" in room.things[thing]


def draw(random: Random, task_type: TaskType) -> Household:
    """Draw a household in which the task is not done yet and can be."""
    lit = task_type == "look_at_obj_in_light"
    kitchen = task_type in STATES or (not lit and random.random() < 0.5)
    room = KITCHEN if kitchen else BEDROOM
    places = [
        item(kind, n)
        for kind, most in room.places.items()
        for n in range(1, random.randint(1, most) + 1)
    ]
    _, station, able, _ = STATES.get(task_type, ("", "", "", ""))
    target = random.choice([kind for kind, uses in room.things.items() if able in uses])
    ends = [kind for kind in room.places if kind != station and fits(room, kind, target)]
    end = random.choice(ends)
    others = random.sample([kind for kind in room.things if kind != target], random.randint(4, 7))
    least = 2 if task_type == "pick_two_obj_and_place" else 1
    amounts = {target: random.randint(least, 3), **{kind: random.randint(1, 2) for kind in others}}
    where: dict[Item, Item] = {}
    for kind, amount in amounts.items():
        free = [place for place in places if fits(room, place.kind, kind)]
        if kind == target:  # a wanted object is never where it must go
            free = [place for place in free if place.kind != end]
        where |= {item(kind, n): random.choice(free) for n in range(1, amount + 1)}
    house = Household(task_type, room, places, where, target, end)
    if lit:
        house.lamp = item("DeskLamp", 1)
        tables = [place for place in places if place.kind in ("Desk", "SideTable")]
        where[house.lamp] = random.choice(tables)
    house.words = _said(random, house)
    return house


def _said(random: Random, house: Household) -> str:
    shown = item(house.goal_place, 1).name.rsplit(" ", 1)[0]
    words = random.choice(_WORDS[house.task_type].split(" / "))
    return words.format(o=house.target.lower(), r=shown)


@dataclass(frozen=True)
class Home:
    """Hold what lasts in a household: its receptacles, and where each kind of object is kept."""

    room: Room
    places: tuple[Item, ...]
    kept: dict[str, Item]
    """Kind of object to receptacle; in a bedroom also that of the desk lamp."""

    def wanted(self, task_type: TaskType) -> list[str]:
        """Return the kinds of objects that a task of a type can ask for here."""
        _, _, able, _ = STATES.get(task_type, ("", "", "", ""))
        things = self.room.things
        return [kind for kind in self.kept if kind in things and able in things[kind]]

    @property
    def task_types(self) -> list[TaskType]:
        """Return the types of task that can be done here."""
        return [kind for kind in task_types(self.room) if self.wanted(kind)]


def task_types(room: Room) -> list[TaskType]:
    """Return the types of task that a kind of room has what is needed for."""
    absent = ["look_at_obj_in_light"] if room is KITCHEN else STATES
    return [kind for kind in TASK_TYPES if kind not in absent]


def draw_home(random: Random, room: Room, objects: int = KINDS) -> Home:
    """Draw a household with some kinds of objects, each kept in one place."""
    places = [
        item(kind, n)
        for kind, most in room.places.items()
        for n in range(1, random.randint(1, most) + 1)
    ]
    kept = {
        kind: random.choice([place for place in places if fits(room, place.kind, kind)])
        for kind in random.sample(list(room.things), objects)
    }
    if room is BEDROOM:
        tables = [place for place in places if place.kind in ("Desk", "SideTable")]
        kept["DeskLamp"] = random.choice(tables)
    return Home(room, tuple(places), kept)


def draw_visit(random: Random, home: Home, task_type: TaskType) -> Household:
    """Draw a game of a type that the household admits: the goal, and which objects are there."""
    station = STATES[task_type][1] if task_type in STATES else ""
    kinds = [kind for kind in home.kept if kind in home.room.things]
    target = random.choice(home.wanted(task_type))
    taken = (station, home.kept[target].kind)
    ends = [k for k in home.room.places if k not in taken and fits(home.room, k, target)]
    end = random.choice(ends)
    others = [kind for kind in kinds if kind != target]
    others = random.sample(others, min(random.randint(4, 7), len(others)))
    least = 2 if task_type == "pick_two_obj_and_place" else 1
    amounts = {target: random.randint(least, 3), **{kind: random.randint(1, 2) for kind in others}}
    where = {
        item(kind, n): home.kept[kind]
        for kind, amount in amounts.items()
        for n in range(1, amount + 1)
    }
    house = Household(task_type, home.room, list(home.places), where, target, end)
    if task_type == "look_at_obj_in_light":
        house.lamp = item("DeskLamp", 1)
        where[house.lamp] = home.kept["DeskLamp"]
    house.words = _said(random, house)
    return house


def made_houses(
    split: NamedSplit,
    number: int,
    kinds: Collection[str] = (),
    generation: int = 0,
    law: Law | None = None,
    objects: int = KINDS,
) -> tuple[House, ...]:
    """Return households of a split by name, kitchens and bedrooms in turn where both have tasks.

    A game is drawn by its number below 10,000; ``kinds`` are the types of task, all if empty. Under
    a law names that begin alike keep their objects alike, in every split; ``law="street"`` makes
    that word a street, and the other a number, which says nothing. A household has ``objects``
    kinds of objects, and can do a task of ``kinds`` with one of them.
    """
    asked = set(kinds or TASK_TYPES)
    rooms = [room for room in (KITCHEN, BEDROOM) if asked & set(task_types(room))]

    def house(index: int, name: str) -> House:
        drawn, called = f"{split} {generation} {name}", f"the house of {name}"
        first, second = name.split()
        if law:
            drawn, index = f"law {generation} {first}", FIRST.index(first)
        if law == "street":
            called = f"the house of {first} {_number(first, second)}"
        random, room = Random(f"home {drawn}"), rooms[index % len(rooms)]
        homes = (draw_home(random, room, objects) for _ in count())
        home = next(one for one in homes if asked & set(one.task_types))
        types: list[TaskType] = [one for one in home.task_types if one in asked]

        def draw(rng: np.random.Generator) -> Game:
            chosen = int(rng.integers(10_000))
            random = Random(f"visit {split} {generation} {name} {chosen}")
            visit = draw_visit(random, home, random.choice(types))
            return visit.game(f"{visit.task_type}-made-{generation}-{chosen}")

        return House(called, repr((generation, types, home.kept)), draw)

    return tuple(house(i, name) for i, name in enumerate(world_names(split)[:number]))


def _number(first: str, second: str) -> int:
    """Return a number that no other house of a street has, and hardly one of another street."""
    return 100 + 28 * SECOND.index(second) + digest_of(first) % 28


def made_games(split: Split, number: int, generation: int = 0) -> tuple[Entry, ...]:
    """Return ``number`` generated games of alternating task types; splits share no game."""
    entries: list[Entry] = []
    for i in range(number):
        kind = TASK_TYPES[i % len(TASK_TYPES)]
        load = partial(make_game, split, i, kind, generation)
        entries.append(Entry(f"{kind}-made-{generation}-{i}", kind, load))
    return tuple(entries)


def make_game(split: Split, index: int, task_type: TaskType, generation: int = 0) -> Game:
    """Generate a game, the same for the same arguments."""
    drawn = (
        draw(Random(f"household {split} {generation} {index} {attempt}"), task_type)
        for attempt in count()
    )
    house = next(one for one in drawn if split_of(one.problem()) == split)
    return house.game(f"{task_type}-made-{generation}-{index}")


@lru_cache
def bundled() -> tuple[str, str]:
    """Return the domain and grammar that come with alfworld; MissingExtraError without it."""
    spec = find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise MissingExtraError("alfworld", "alfworld")
    folder = Path(spec.origin).parent / "data"
    return (folder / "alfred.pddl").read_text("utf-8"), (folder / "alfred.twl2").read_text("utf-8")
