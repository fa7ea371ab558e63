"""Tests of data/tinyworld.py against an independent reading of its texts.

First the Reader, which knows sentences but no story shapes: it reads a text from left to right,
keeps who has what and who is where, and contradicts every claim that is not so. Then the grammar
of the stories, written down a second time as a parser that tries every alternative: it counts the
derivations of a text and adds up its probability. Then the tests. Only word tables are imported.
"""

import hashlib
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from config import UserError
from data import tinyworld
from data.tinyworld import ANIMALS, BOYS, COLOURS, GIRLS, LOOKS, NOUNS, PLACES, WHEN

ROOT = Path(__file__).parents[1]

PEOPLE = GIRLS + BOYS


def held_out(person: str, noun: str) -> bool:
    return (PEOPLE.index(person) + NOUNS.index(noun)) % 16 == 0


# --------------------------------------------------------------------------------------------
# The Reader.

N = "(" + "|".join(PEOPLE + ["He", "She"]) + ")"
T = "(?:(?:[Tt]he|an?) (?:(?:" + "|".join(COLOURS) + ") )?)(" + "|".join(NOUNS) + ")"
X = "(?:[Tt]he|[Aa]n?) (?:(?:" + "|".join(LOOKS) + ") )?(" + "|".join(ANIMALS) + ")"
AT = "((?:in|at|on|by) (?:" + "|".join(row[1] for row in PLACES) + "))"
TO = "(?:to|in|at|on|by) (" + "|".join(row[1] for row in PLACES) + ")"
WHERE = {name: f"{preposition} {name}" for preposition, name, *_ in PLACES}
SPOT = "(?:" + "|".join(sorted({spot for row in PLACES for spot in row[2:]})) + ")"


@dataclass
class World:
    """What a text has said so far. A holder is a name, "the goat", "in the park" or None."""

    people: list[str] = field(default_factory=list)
    colour: dict[str, str] = field(default_factory=dict)  # of each noun, in order
    holder: dict[str, str | None] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    scene: str = ""
    owners: set[str] = field(default_factory=set)
    gifts: list[tuple[str, str, str]] = field(default_factory=list)  # giver, noun, receiver
    asked: str = ""

    def who(self, name: str) -> str:
        """The person meant by a name or a pronoun, which must not be ambiguous."""
        if name in ("He", "She"):
            (name,) = [p for p in self.people if p in (BOYS if name == "He" else GIRLS)]
        if name not in self.people:
            self.people.append(name)
        return name

    def pass_to(self, noun: str, holder: str | None) -> None:
        self.holder[noun] = holder
        if holder in PEOPLE:
            self.owners.add(holder)

    def move(self, name: str, place: str) -> None:
        self.where[self.who(name)] = self.scene = WHERE[place]

    def read(self, sentence: str) -> None:
        for pattern, effect in EFFECTS:
            if found := re.fullmatch(pattern, sentence):
                effect(self, *found.groups())
                return

    # One method for each way in which the world changes.

    def begin(self, name: str, place: str) -> None:
        self.move(name, place)

    def be(self, name: str, at: str) -> None:
        name = self.who(name)
        assert self.where.setdefault(name, at) == at, f"{name} is not {at}"

    def get(self, name: str, colour: str, noun: str) -> None:
        assert noun not in self.colour
        self.colour[noun] = colour
        self.pass_to(noun, self.who(name))

    def come(self, name: str) -> None:
        self.where[self.who(name)] = self.scene

    def met(self, hero: str, name: str) -> None:
        assert self.where[self.who(hero)] == self.scene
        self.come(name)

    def give(self, giver: str, noun: str, receiver: str) -> None:
        giver, receiver = self.who(giver), self.who(receiver)
        assert self.holder[noun] == giver, f"{giver} gives the {noun} but does not have it"
        assert self.where.get(giver, "") in ("", self.where.get(receiver, self.where.get(giver)))
        self.pass_to(noun, receiver)
        self.gifts.append((giver, noun, receiver))

    def give_back(self, giver: str) -> None:
        (noun,) = self.holder
        self.give(giver, noun, self.gifts[-1][0])

    def lose(self, name: str | None, noun: str | None) -> None:
        noun = noun or next(iter(self.holder))
        assert self.holder[noun] in PEOPLE
        assert name is None or self.holder[noun] == self.who(name)
        self.pass_to(noun, None)

    def find(self, name: str, noun: str | None = None) -> None:
        noun = noun or next(iter(self.holder))
        assert self.holder[noun] is None
        self.pass_to(noun, self.who(name))

    def swap(self, a: str | None = None, t: str | None = None) -> None:
        first, second = self.holder
        self.pass_two(first, second)
        assert a is None or self.holder[t] != self.who(a)

    def pass_two(self, t: str, u: str) -> None:
        assert self.holder[t] != self.holder[u]
        t_owner, u_owner = self.holder[t], self.holder[u]
        self.pass_to(t, u_owner)
        self.pass_to(u, t_owner)
        self.gifts.clear()

    def exchange(self, a: str, u: str, b: str, t: str) -> None:
        self.pass_two(t, u)
        assert (self.holder[u], self.holder[t]) == (self.who(a), self.who(b))

    def take(self, animal: str, noun: str) -> None:
        assert self.holder[noun] in PEOPLE
        self.pass_to(noun, f"the {animal}")

    def get_from(self, name: str, noun: str, animal: str) -> None:
        assert self.holder[noun] == f"the {animal}"
        self.pass_to(noun, self.who(name))

    def put(self, name: str, noun: str) -> None:
        assert self.holder[noun] == self.who(name)
        self.pass_to(noun, self.scene)

    def fetch(self, name: str, place: str, noun: str) -> None:
        assert self.holder[noun] == WHERE[place]
        self.move(name, place)
        self.pass_to(noun, self.who(name))

    def go_together(self, place: str) -> None:
        assert len({self.where[name] for name in self.people}) == 1
        for name in self.people:
            self.move(name, place)

    def claim(self, holder: str | None, noun: str) -> None:
        assert self.holder[noun] == holder, f"the {noun}: {self.holder[noun]}, not {holder}"

    def claim_nothing(self, name: str) -> None:
        assert self.who(name) not in self.holder.values()

    def ask(self, question: str) -> None:
        self.asked = question

    def reply(self, answer: str) -> None:
        assert self.answer(self.asked) == answer

    def answer(self, question: str) -> str:
        """The only answer to a question, without the full stop."""
        kinds: list[tuple[str, Callable[..., str | None]]] = [
            (f"Who has {T}\\?", lambda t: self.holder[t] if self.known(t) else "nobody"),
            (f"Where is {T}\\?", lambda t: self.holder[t]),
            (f"Where is {N}\\?", lambda n: self.where[n]),
            (f"What colour is {T}\\?", lambda t: self.colour[t]),
            (f"What does {N} have\\?", self.property),
            (f"Who gave {T} to {N}\\?", self.giver),
            (f"Does {N} have {T}\\?", lambda n, t: "yes" if self.holder[t] == n else "no"),
        ]
        for pattern, reply in kinds:
            if found := re.fullmatch(pattern, question):
                answer = reply(*found.groups())
                return answer[0].upper() + answer[1:]
        raise AssertionError(f"no such question: {question}")

    def sentence(self, question: str) -> str:
        """The same as a chat answers it, with the question's own words for the thing."""
        kinds: list[tuple[str, Callable[[str, re.Match], str]]] = [
            ("Who has (the .*)\\?", lambda answer, m: f"{m[1]} is {self.whereabouts(m[1])}"),
            (f"Does {N} have (the .*)\\?", lambda answer, m: (
                f"{m[2]} is {self.whereabouts(m[2])}, so {answer}")),
            (f"Where is {N}\\?", lambda answer, m: (
                f"as {m[1]} came to {answer.split(' ', 1)[1]}, {m[1]} is {answer}")),
            ("What colour is (.*)\\?", lambda answer, m: f"{m[1]} is {answer}"),
            (f"What does {N} have\\?", lambda answer, m: (
                f"{self.everything()}, so {m[1]} has {self.shortly(answer)}")),
            (f"Who gave (.*) to {N}\\?", lambda answer, m: f"{m[2]} got {m[1]} from {answer}"),
        ]  # fmt: skip
        answer = self.answer(question)
        if answer not in PEOPLE:
            answer = answer[0].lower() + answer[1:]
        (told,) = [tell(answer, m) for way, tell in kinds if (m := re.fullmatch(way, question))]
        return told[0].upper() + told[1:] + "."

    def whereabouts(self, thing: str) -> str:
        holder = self.holder[thing.split()[-1]]
        return "lost" if holder is None else f"with {holder}"

    def everything(self) -> str:
        """Each thing, in the order in which they came, and where it is now."""
        return ", ".join(f"the {noun} is {self.whereabouts(noun)}" for noun in self.colour)

    def shortly(self, thing: str) -> str:
        """The ball, for the red ball."""
        return thing if thing == "nothing" else f"the {thing.split()[-1]}"

    def known(self, noun: str) -> bool:
        return self.holder[noun] is not None and self.holder[noun] not in WHERE.values()

    def property(self, name: str) -> str:
        nouns = [noun for noun, holder in self.holder.items() if holder == name]
        assert len(nouns) == 1 or (not nouns and name in self.owners)
        return f"the {self.colour[nouns[0]]} {nouns[0]}" if nouns else "nothing"

    def giver(self, noun: str, name: str) -> str:
        (giver,) = [g for g, t, receiver in self.gifts if (t, receiver) == (noun, name)]
        return giver


def then(words: str, rest: str) -> str:
    return f"(?:(?:{words}) )?{rest}\\."


EFFECTS: list[tuple[str, Callable[..., None]]] = [
    (f"[^\"]*, (?:a (?:girl|boy) named )?{N} (?:was|went|walked) {TO}\\.", World.begin),
    (f"{N} (?:had|has|was carrying|was playing with|found) an? (\\w+) (\\w+)"
     f"(?: with him| with her| {SPOT})?\\.", World.get),
    (then("But|That day|And", f"{N} (?:is|was) {AT}(?: now)?"), World.be),
    (f"{N} was there too\\.", World.come),
    (f"Then {N} came along\\.", World.come),
    (f"Soon {N} came {TO}\\.", World.begin),
    (f"{N} (?:met|saw) {N} (?:there|{SPOT})\\.", World.met),
    (then("Then", f"{N} (?:went|walked) {TO}"), World.move),
    (then("So|Later", f"{N} gave {T} (?:back )?to {N}"), World.give),
    (f"{N} gave {N} {T}\\.", lambda w, a, b, t: w.give(a, t, b)),
    (f"Soon {N} gave it back to {N}\\.", lambda w, a, b: w.give(a, next(iter(w.holder)), b)),
    (f"After a while, {N} gave {T} back\\.", lambda w, a, t: w.give_back(a)),
    (then("But then|Then", f"{N} (?:lost|could not find) {T}"), World.lose),
    (f"{N} lost it {AT}\\.", lambda w, a, at: w.lose(a, None)),
    (f"Soon {T} was gone\\.", lambda w, t: w.lose(None, t)),
    (f"{N} found {T} {SPOT}\\.", World.find),
    (f"At last {N} found it {SPOT}\\.", World.find),
    (f"Then {N} saw {T} {SPOT} and picked it up\\.", World.find),
    ("So they swapped\\.", World.swap),
    (f"{N} gave {N} {T} for {T}\\.", lambda w, a, b, t, u: w.exchange(a, u, b, t)),
    (f"{N} took {T} and {N} took {T}\\.", World.exchange),
    (f"(?:Then they went|They walked) {TO}(?: together)?\\.", World.go_together),
    (f'"Come with me," said {N}, and they went {TO}\\.', lambda w, n, p: w.go_together(p)),
    (then("Then|But", f"{X} (?:came and |ran up and )?took {T}"), World.take),
    (f"{X} ran {TO} and {N} ran after it\\.", lambda w, x, p, n: w.move(n, p)),
    (f"{N} ran after {X}, all the way {TO}\\.", lambda w, n, x, p: w.move(n, p)),
    (f"{X} dropped {T} and {N} picked it up\\.", lambda w, x, t, n: w.get_from(n, t, x)),
    (f"Then {X} got tired and {N} took {T} back\\.", lambda w, x, n, t: w.get_from(n, t, x)),
    (f"{N} took {T} from {X}\\.", World.get_from),
    (f"{N} gave {X} some bread and got {T}\\.", lambda w, n, x, t: w.get_from(n, t, x)),
    (f"{N} (?:put|left|hid) {T} (?:down )?{SPOT}\\.", World.put),
    (f"Then {N} (?:came|went back) {TO} and (?:took|got) {T}\\.", World.fetch),
    (f"{N} found {T} {TO} and took it\\.", lambda w, n, t, p: w.fetch(n, p, t)),
    (f"{N} ran back {TO} for {T}\\.", World.fetch),
    (then("Now|In the end,|And", f"{N} had {T}"), World.claim),
    (then("Now|In the end,|And", f"(the \\w+) had {T}"), World.claim),
    (then("So", f"{T} was with (the \\w+|{N[1:-1]})"), lambda w, t, h: w.claim(h, t)),
    (f"(?:Now|In the end,) {T} was (?:still )?{AT}\\.", lambda w, t, h: w.claim(h, t)),
    (f"Nobody knew where {T} was\\.", lambda w, t: w.claim(None, t)),
    (f"In the end, nobody had {T}\\.", lambda w, t: w.claim(None, t)),
    (then("But", f"{N} had nothing(?: now)?"), World.claim_nothing),
    ('"(.*)" asked the moon\\.', World.ask),
    ('"(.*)," said the stars\\.', World.reply),
    (f"{N} wanted to see {N}\\.", lambda w, a, b: w.who(b)),
    (f"{N} was looking for {N}\\.", lambda w, a, b: w.who(b)),
    (f'"Where is {N}\\?" asked {N}\\.', lambda w, b, a: w.who(b)),
]  # fmt: skip


def sentences_of(text: str) -> list[str]:
    return re.split(r'(?<=[.!?]) (?=[A-Z"])', text)


def read(text: str) -> World:
    world = World()
    for sentence in sentences_of(text):
        world.read(sentence)
    return world


# --------------------------------------------------------------------------------------------
# The parser. A rule takes a state to every state that it may lead to. In a template, <A> is a
# person (or what holds a thing), <a T>, <the T>, <T>, <red T>, <ball T> the forms of a thing,
# <in P>, <to P> those of a place, <a X>, <the X> those of an animal.

Rule = Callable[["State"], Iterator["State"]]


@dataclass(frozen=True)
class State:
    text: str
    at: int = 0
    log_p: float = 0.0
    roles: dict[str, Any] = field(default_factory=dict)
    people: tuple[str, ...] = ()
    things: tuple[tuple[str, str], ...] = ()  # colour, noun
    recent: frozenset[str] = frozenset()
    said: tuple[str, ...] = ()  # the templates of its sentences

    def times(self, p: float) -> "State":
        return replace(self, log_p=self.log_p + math.log(p))

    def bind(self, **roles: Any) -> "State":
        return replace(self, roles=self.roles | roles)


def seq(*rules: Rule) -> Rule:
    def rule(state: State) -> Iterator[State]:
        if not rules:
            yield state
            return
        for between in rules[0](state):
            yield from seq(*rules[1:])(between)

    return rule


def alt(*weighted: tuple[float, Rule]) -> Rule:
    def rule(state: State) -> Iterator[State]:
        for weight, option in weighted:
            yield from option(state.times(weight / sum(w for w, _ in weighted)))

    return rule


def maybe(p: float, rule: Rule) -> Rule:
    return alt((p, rule), (1 - p, seq()))


def rebind(**names: str) -> Rule:
    """Let roles mean what others meant: rebind(A="B", B="A") exchanges two."""
    return lambda state: iter([state.bind(**{to: state.roles[of] for to, of in names.items()})])


def forget(name: str) -> Rule:
    return lambda state: iter(
        [replace(state, roles={k: v for k, v in state.roles.items() if k != name})]
    )


ALL_WAYS: set[str] = set()  # every template of the grammar


def say(templates: str, **names: str) -> Rule:
    """One of the templates, evenly; names: which role stands in which slot, if not its own."""
    ways = [way.strip() for way in templates.split("|")]
    assert len(set(ways)) == len(ways)
    ALL_WAYS.update(ways)

    def rule(state: State) -> Iterator[State]:
        start = replace(state, at=state.at + 1) if state.at else state
        if state.at and state.text[state.at : start.at] != " ":
            return
        for way in ways:
            parts = re.split("[<>]", way)
            for s in sentence(start.times(1 / len(ways)), parts, names, state.recent):
                yield replace(s, said=(*s.said, way))

    return rule


def sentence(
    state: State, parts: list[str], names: dict[str, str], recent: frozenset[str]
) -> Iterator[State]:
    """Match parts (literal, slot, literal, ...), then settle whether a pronoun was possible."""
    found: list[tuple[State, frozenset[str]]] = [(state, frozenset())]
    for i, part in enumerate(parts):
        following = []
        for s, named in found:
            for words, after, person in (
                slot(s, part, names, pronouns=i == 1 and not parts[0])
                if i % 2
                else [(part, s, None)]
            ):
                if words and s.at == state.at:
                    words = words[0].upper() + words[1:]
                if s.text.startswith(words, s.at):
                    people = named | {person} if person else named
                    following.append((replace(after, at=s.at + len(words)), people))
        found = following
    for s, named in found:
        if parts[0] == "" and parts[1] in ("A", "B"):
            front = s.roles[names.get(parts[1], parts[1])]
            used = re.match("(?:He|She) ", s.text[state.at :]) is not None
            able = front in recent and sum((p in BOYS) == (front in BOYS) for p in s.people) == 1
            if used and not able:
                continue
            s = s.times(0.5) if able else s
        yield replace(s, recent=named)


Option = tuple[str, State, str | None]  # the words, the state after, the person if there is one


def slot(state: State, part: str, names: dict[str, str], pronouns: bool) -> list[Option]:
    """All that may stand in a slot."""
    form, _, role = part.rpartition(" ")
    if role == "when":
        return [(w, state.times(p / sum(WHEN.values())), None) for w, p in WHEN.items()]
    if role == "spot":
        return [(spot, state.times(1 / 2), None) for spot in state.roles["P"][2:]]
    name = names.get(role, role)
    options = []
    for value, after in meanings(state, role, name):
        person = value if value in PEOPLE else None
        words = [form_of(value, form)]
        if pronouns and person:
            words.append("he" if person in BOYS else "she")
        options += [(w, after.bind(**{name: value}), person) for w in words]
    return options


def meanings(state: State, role: str, name: str) -> list[tuple[Any, State]]:
    """What a role means: what it is bound to, or else all that is new and allowed."""
    if name in state.roles:
        return [(state.roles[name], state)]
    if role in "AB":
        able = [p for p in PEOPLE if p not in state.people]
        able = [p for p in able if not any(held_out(p, noun) for _, noun in state.things)]
        return [(p, replace(state.times(1 / len(able)), people=(*state.people, p))) for p in able]
    if role in "TU":
        nouns = [noun for noun in NOUNS if noun not in [n for _, n in state.things]]
        nouns = [noun for noun in nouns if not any(held_out(p, noun) for p in state.people)]
        seen = re.compile(r"an? (\w+) (\w+)").match(state.text, state.at)
        if not seen or seen[1] not in COLOURS or seen[2] not in nouns:
            return []
        after = state.times(1 / len(COLOURS) / len(nouns))
        return [(seen.groups(), replace(after, things=(*state.things, seen.groups())))]
    if role == "X":
        beasts = list(itertools.product(["look"], LOOKS, ANIMALS))
        return [(beast, state.times(1 / len(beasts))) for beast in beasts]
    able = [place for place in PLACES if place != state.roles.get("P")]
    return [(place, state.times(1 / len(able))) for place in able]


def form_of(value: Any, form: str) -> str:
    if isinstance(value, str):
        boy = value in BOYS
        forms = {"": value, "child": "boy" if boy else "girl", "him": "him" if boy else "her"}
        return {**forms, "his": "his" if boy else "her"}[form]
    if value[0] == "look":
        return {"a": article(" ".join(value[1:]))}.get(form, f"the {value[2]}")
    if value[0] in COLOURS:
        full = " ".join(value)
        forms = {"a": article(full), "the": f"the {full}", "red": full, "ball": value[1]}
        return {**forms, "": f"the {value[1]}"}[form]
    return {"in": f"{value[0]} {value[1]}", "to": f"to {value[1]}"}[form]


def article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


OPENS = (
    "<when>, <A> was <in P>. | <when>, <A> went <to P>. | <when>, <A> walked <to P>."
    "| <when>, a <child A> named <A> was <in P>. | <when>, a <child A> named <A> went <to P>."
)
WEATHER = (
    "The sun was shining. | It was a warm day. | A soft wind was blowing. | It was very quiet."
    "| The sky was blue. | Many birds were singing."
)
HAS = (
    "<A> had <a T>. | <A> had <a T> with <him A>. | <A> was carrying <a T>."
    "| <A> was playing with <a T>. | <A> found <a T> <spot>."
)
JOINS = (
    "<A> was there too. | Then <A> came along. | Soon <A> came <to P>. | <B> met <A> there."
    "| <B> saw <A> <spot>."
)
GIVES = (
    "<A> gave <the T> to <B>. | <A> gave <T> to <B>. | <A> gave <B> <the T>. | <A> gave <B> <T>."
    "| So <A> gave <the T> to <B>."
)
FINDS = (
    "<A> found <the T> <spot>. | At last <A> found it <spot>."
    "| Then <A> saw <T> <spot> and picked it up."
)
LOST = "Nobody could find it. | But <T> was never found. | <the T> did not come back."
GOES = "<A> went <to P>. | <A> walked <to P>. | Then <A> went <to P>."
PLAYS = (
    "<A> sang a song. | <A> ran and jumped. | <A> sat down <spot>. | <A> counted the birds."
    "| <A> ate a sweet bun. | <A> told a long story. | <A> looked at the clouds."
    "| <A> danced in a circle."
)
MEET = say(JOINS, A="B", B="A")
GIVE_BACK = say(GIVES, A="B", B="A")
GIFT = seq(
    say(HAS), MEET,
    maybe(0.6, say(
        '"Do you want my <red T>?" asked <A>. | "This <ball T> is for you," said <A>.'
        '| "I have something for you," said <A>. | "What do you have there?" asked <B>.'
        '| "May I have your <red T>?" asked <B>. | "I like your <red T> very much," said <B>.')),
    say(GIVES),
    maybe(0.5, say(
        '"Thank you, <A>!" said <B>. | "Thank you very much," said <B>.'
        '| "You are so kind," said <B>. | <B> was very happy. | <B> jumped for joy.'
        '| <B> smiled at <A>.')),
    alt((3, seq()),
        (1, say("Later <A> gave <the T> back to <B>. | Soon <A> gave it back to <B>."
                "| After a while, <A> gave <T> back.", A="B", B="A")),
        (1, seq(say(JOINS, A="C", B="B"), say(GIVES, A="B", B="C")))),
)  # fmt: skip
LOSS = seq(
    say(HAS),
    say("But then <A> lost <the T>. | <A> lost it <in P>. | Soon <T> was gone."
        "| Then <A> could not find <the T>."),
    maybe(0.5, say(
        "<A> looked everywhere. | <A> looked <spot>, but it was not there."
        '| "Where is my <red T>?" asked <A>. | "Who has my <red T>?" asked <A>.')),
    alt((0.7, seq(
            MEET,
            maybe(0.6, say(
                '"Have you seen my <red T>?" asked <A>. | "Can you help me?" asked <A>.'
                '| "Do you know where my <ball T> is?" asked <A>.'
                '| "Why are you so sad?" asked <B>.')),
            alt((5, seq(say(FINDS, A="B"), alt((0.7, GIVE_BACK), (0.3, say(
                    '<A> kept it. | "Now it is mine," said <A>. | <A> did not give it back.',
                    A="B"))))),
                (2, say(FINDS)), (1, say(LOST))))),
        (0.3, alt((2, say(FINDS)), (1, say(LOST))))),
)  # fmt: skip
SWAP = seq(
    say(HAS), MEET, say(HAS, A="B", T="U"),
    alt((1, seq()), (1, rebind(A="B", B="A", T="U", U="T"))),
    say('"Do you want to swap?" asked <A>. | "Let us swap!" said <A>.'
        '| "I will give you my <red T> for your <red U>," said <A>.'),
    alt((0.25, say('"No, thank you," said <B>. | "No, I like my <ball U> best," said <B>.'
                   "| <B> shook <his B> head.")),
        (0.75, seq(
            say("So they swapped. | <A> gave <B> <the T> for <the U>."
                "| <A> took <the U> and <B> took <the T>."),
            maybe(0.5, say('Both were happy. | They laughed. | "That was a good idea," said <A>.',
                           A="B"))))),
)  # fmt: skip
WALK = seq(
    forget("Q"),
    say('Then they went <to P> together. | They walked <to P>.'
        '| "Come with me," said <A>, and they went <to P>.', A="B", P="Q"),
)  # fmt: skip


def journey(ending: Rule) -> Rule:
    return seq(
        say('<A> wanted to see <B>. | <A> was looking for <B>. | "Where is <B>?" asked <A>.'),
        say("<B> was <in P>. | But <B> was <in P>. | That day <B> was <in P>.", P="Q"),
        maybe(0.3, say("On the way <A> saw <a X>. | <a X> walked along with <A>."
                       '| "Good morning," said <A> to <a X>.')),
        say(GOES, P="Q"), rebind(P="Q"),
        maybe(0.6, say(
            '"Hello, <A>!" said <B>. | "What are you doing here?" asked <B>.'
            '| "I was waiting for you," said <B>. | <B> was happy to see <A>.')),
        ending,
    )  # fmt: skip


VISIT = alt(
    (0.6, seq(say(HAS), journey(alt((3, say(GIVES)), (2, WALK), (1, seq()))))),
    (0.4, journey(alt((2, WALK), (1, seq())))),
)
THEFT = seq(
    say(HAS),
    say("Then <a X> came and took <the T>. | But <a X> ran up and took <T>. | <a X> took <the T>."),
    maybe(0.5, say('"Stop!" cried <A>. | "Come back!" cried <A>. | "That is my <red T>!" cried <A>.'
                   '| "Give me my <ball T>!" cried <A>.')),
    maybe(0.5, seq(say("<the X> ran <to P> and <A> ran after it."
                       "| <A> ran after <the X>, all the way <to P>.", P="Q"), rebind(P="Q"))),
    alt((2, say("<the X> dropped <the T> and <A> picked it up."
                "| Then <the X> got tired and <A> took <T> back.")),
        (1, say("But <the X> was too fast. | <the X> did not give it back."
                "| <the X> liked <T> too much.")),
        (2, seq(MEET, say("<A> took <the T> from <the X>."
                          "| <A> gave <the X> some bread and got <the T>.", A="B"),
                maybe(0.7, GIVE_BACK)))),
)  # fmt: skip
MOVE = seq(forget("Q"), say(GOES, P="Q"), rebind(P="Q"), say(PLAYS))
OUTING = seq(
    alt((0.5, seq(MEET, alt((1, say(PLAYS)), (1, say(PLAYS, A="B"))))), (0.5, say(PLAYS))),
    alt((1, seq()), (3, MOVE), (2, seq(MOVE, MOVE))),
    maybe(0.7, say(HAS)),
)
LEAVING = seq(
    say(HAS),
    say("<A> put <the T> down <spot>. | <A> left <T> <spot>. | <A> hid <the T> <spot>."),
    say(GOES, P="Q"),
    alt((1, seq()),
        (2, say("Then <A> came <to P> and took <the T>. | <A> found <T> <in P> and took it.",
                A="B")),
        (1, say("Then <A> went back <to P> and got <the T>. | <A> ran back <to P> for <T>."))),
)  # fmt: skip
SHAPES = alt((4, GIFT), (3, LOSS), (3, SWAP), (3, VISIT), (3, THEFT), (2, OUTING), (3, LEAVING))

FACTS = {
    "holds": "Now <A> had <the T>. | In the end, <A> had <the T>. | So <the T> was with <A>.",
    "holds too": "And <A> had <the T>. | <the T> was with <A>.",
    "lies": "Now <the T> was <in P>. | In the end, <the T> was still <in P>.",
    "lost": "Nobody knew where <the T> was. | In the end, nobody had <the T>.",
    "at": "<A> was <in P>. | <A> was <in P> now. | And <A> was <in P>.",
    "nothing": "<A> had nothing. | But <A> had nothing now.",
}
PLACE_OF = {where: row for row in PLACES for where in [WHERE[row[1]]]}


def facts(state: State) -> Iterator[State]:
    """One fact, of a thing if there is one, then with 0.6 another one, if there is one."""
    world = read(state.text[: state.at])
    known = []
    for colour, noun in state.things:
        holder = world.holder[noun]
        if holder is None:
            known.append(("lost", {"T": (colour, noun)}))
        elif holder in PLACE_OF:
            known.append(("lies", {"T": (colour, noun), "P": PLACE_OF[holder]}))
        else:
            value = holder if holder in PEOPLE else ("look", "", holder.removeprefix("the "))
            known.append(("holds", {"T": (colour, noun), "A": value}))
    first = known.copy()
    known += [("at", {"A": p, "P": PLACE_OF[world.where[p]]}) for p in state.people]
    idle = [p for p in state.people if p not in world.holder.values()] if state.things else []
    known += [("nothing", {"A": p}) for p in idle]
    first = first or known
    for fact in first:
        one = state.times(1 / len(first)).bind(**fact[1])
        for s in say(FACTS[fact[0]])(one):
            rest = [other for other in known if other is not fact]
            if not rest:
                yield s
                continue
            yield s.times(0.4)
            for kind, roles in rest:
                more = FACTS["holds too" if kind == "holds" else kind]
                yield from say(more)(s.times(0.6 / len(rest)).bind(**roles))


MOON = {"who": 4, "what": 3, "where": 2, "where it": 3, "gave": 2, "colour": 1, "yes": 1, "no": 1}


def moon(state: State) -> Iterator[State]:
    """A question that can be asked, and the answer that the Reader knows."""
    world = read(state.text[: state.at])
    kinds: dict[str, list[list[str]]] = {kind: [] for kind in MOON}
    for colour, noun in state.things:
        both = [f"the {colour} {noun}", f"the {noun}"]
        kinds["who"].append([f"Who has {t}?" for t in both])
        kinds["colour"].append([f"What colour is the {noun}?"])
        if world.holder[noun] in PLACE_OF:
            kinds["where it"].append([f"Where is {t}?" for t in both])
        for p in state.people:
            kinds["yes" if world.holder[noun] == p else "no"].append(
                [f"Does {p} have {t}?" for t in both]
            )
        for p in state.people:
            if [(t, to) for _, t, to in world.gifts].count((noun, p)) == 1:
                kinds["gave"].append([f"Who gave {t} to {p}?" for t in both])
    if not kinds["yes"]:
        kinds["no"] = []
    for p in state.people:
        kinds["where"].append([f"Where is {p}?"])
        if p in world.owners:
            kinds["what"].append([f"What does {p} have?"])
    total = sum(MOON[kind] for kind, subjects in kinds.items() if subjects)
    for kind, subjects in kinds.items():
        for ways in subjects:
            for way in ways:
                told = f' "{way}" asked the moon. "{world.answer(way)}," said the stars.'
                if state.text.startswith(told, state.at):
                    p = MOON[kind] / total / len(subjects) / len(ways)
                    after = replace(state.times(p), at=state.at + len(told), recent=frozenset())
                    yield after


STORY = seq(
    say(OPENS), rebind(HERO="A"), maybe(0.2, say(WEATHER)), SHAPES,
    alt((0.6, facts), (0.4, moon)),
    maybe(0.5, say("What a day! | The end. | It was a long day. | <A> never forgot that day."
                   "| <A> told everyone about it. | Then it was time for bed.", A="HERO")),
)  # fmt: skip


def derivations(text: str) -> list[State]:
    """The end of each derivation of the text."""
    return [state for state in STORY(State(text)) if state.at == len(text)]


# --------------------------------------------------------------------------------------------
# The tests.


@pytest.fixture(scope="module")
def stories() -> list[tinyworld.Story]:
    rng = random.Random(11)
    return [tinyworld.generate_story(rng) for _ in range(20_000)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus") / "tinyworld"
    tinyworld.prepare(directory, seed=3, num_stories=4100, num_chats=12_200, progress=False)
    return directory


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_story_has_one_derivation_with_the_stated_probability(stories):
    seen: set[str] = set()
    for story in stories[:1000]:
        found = derivations(story.text)
        assert len(found) == 1, story.text
        assert abs(found[0].log_p - story.log_prob) < 1e-9, story.text
        seen.update(found[0].said)
    # Each way was met, so that the generator's tables, of the same lengths, are the same: none
    # of them has one sentence twice, which would be two derivations that look like one.
    assert seen == ALL_WAYS


def test_stories_never_contradict_themselves(stories):
    for story in stories:
        read(story.text)


def test_probabilities_of_a_small_world_have_the_right_sum(monkeypatch):
    """All derivations, with few words and one way to say each thing: distinct texts.

    Those of the first of three heroes, so that the total is one third.
    """
    small = {
        "EVERYONE": tinyworld.EVERYONE[:3],
        "EVERYWHERE": [tinyworld.Place(*row[:3]) for row in PLACES[:2]],
        "NOUNS": NOUNS[2:4],
        "COLOURS": COLOURS[:1],
        "LOOKS": LOOKS[:1],
        "ANIMALS": ANIMALS[:1],
        "WHEN": {"One day": 8},
    }
    for name in ("SENTENCES", "QUESTIONS"):  # stories need no ANSWERS
        small[name] = {kind: ways[-1:] for kind, ways in getattr(tinyworld, name).items()}
    for name, table in small.items():
        monkeypatch.setattr(tinyworld, name, table)
    monkeypatch.setattr(tinyworld.Teller.thing, "__defaults__", (small["NOUNS"],))
    monkeypatch.setattr(tinyworld.Teller.get, "__defaults__", ("has", small["NOUNS"]))
    told = list(every_story(monkeypatch))
    assert len(told) > 10_000
    assert abs(math.fsum(math.exp(story.log_prob) for story in told) - 1 / 3) < 1e-9
    assert len({story.text for story in told}) == len(told)


def every_story(monkeypatch) -> Iterator[tinyworld.Story]:
    """All stories of the first hero: choices make a path in a tree; each leaf is a story."""
    path: list[int] = []
    sizes: list[int] = []

    def choose(self, options):
        if len(sizes) == len(path):
            path.append(0)
        sizes.append(len(options))
        option = list(options)[path[len(sizes) - 1]]
        weights = options if isinstance(options, dict) else dict.fromkeys(range(len(options)), 1)
        weight = options[option] if isinstance(options, dict) else 1
        self.log_prob += math.log(weight / sum(weights.values()))
        return option

    monkeypatch.setattr(tinyworld.Teller, "choose", choose)
    while True:
        sizes.clear()
        yield tinyworld.generate_story(None)  # no source of chance but choose()
        while path[-1] + 1 == sizes[len(path) - 1]:
            path.pop()
        path[-1] += 1
        if path[0] > 0:  # the stories of the second hero
            return


def test_choose_draws_by_the_weights_whose_logarithm_it_adds():
    teller = tinyworld.Teller(random.Random(0))
    drawn = Counter(teller.choose({"a": 6, "b": 3, "never": 0, "c": 1}) for _ in range(20_000))
    assert [round(drawn[key] / 20_000, 1) for key in ("a", "b", "never", "c")] == [0.6, 0.3, 0, 0.1]
    wanted = sum(drawn[key] * math.log(p) for key, p in {"a": 0.6, "b": 0.3, "c": 0.1}.items())
    assert math.isclose(teller.log_prob, wanted)


def test_stories_are_varied_and_bounded(stories):
    assert len({story.text for story in stories[:10_000]}) >= 9_900
    counts = {len(sentences_of(story.text)) for story in stories}
    assert (min(counts), max(counts)) == (3, 12)
    assert all(sentences_of(story.text) == story.sentences for story in stories)
    assert max(len(s.split()) for story in stories for s in story.sentences) <= 13
    assert max(len(story.text.split()) for story in stories) <= 120
    words = Counter(w.lower() for s in stories for w in re.findall("[A-Za-z]+", s.text))
    assert 200 <= len(words) <= 500
    assert {"who", "where", "what", "has", "have"} <= set(words)
    one_day = sum(story.text.startswith("One day,") for story in stories) / len(stories)
    assert 0.25 < one_day < 0.4
    assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", " ".join(s.text for s in stories))


def test_no_table_says_a_thing_twice_nor_at_length():
    tables = [PEOPLE, NOUNS, COLOURS, ANIMALS, LOOKS, PLACES, [row[1] for row in PLACES]]
    tables += [*tinyworld.SENTENCES.values(), *tinyworld.QUESTIONS.values()]
    tables += tinyworld.ANSWERS.values()
    tables += [row[2:] for row in PLACES]
    assert all(len(set(table)) == len(table) for table in tables)
    words = {
        "a": 3,
        "the": 3,
        "The": 3,
        "short": 2,
        "name": 2,
        "Short": 2,
        "P": 3,
        "to": 3,
        "X.A": 3,
    }
    words |= {"when": 3, "spot": 3, "question": 7, "answer": 3, "whereabouts": 3}

    def longest_filling(slot: re.Match) -> str:
        return " ".join("x" * words.get(slot[1], words.get(slot[1].split(".")[-1], 1)))

    for way in itertools.chain(*tinyworld.SENTENCES.values()):
        longest = re.sub(r"\{(.*?)\}", longest_filling, way)
        assert len(longest.split()) <= 13, way  # 12 sentences: at most 156 words in a story


def test_splits_follow_the_hash_and_the_floor_is_their_sum(corpus):
    split = {name: [r["text"] for r in rows(corpus / f"stories/{name}.jsonl")]
             for name in ("train", "val")}  # fmt: skip
    assert len(split["train"]) + len(split["val"]) == 4100
    assert not set(split["train"]) & set(split["val"])
    for name, texts in split.items():
        for text in texts:
            number = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
            assert (number % 41 == 0) == (name == "val")
    floor = json.loads((corpus / "stories/floor.json").read_text())
    assert floor["val_stories"] == len(split["val"]) > 60
    total = -math.fsum(derivations(text)[0].log_p for text in split["val"])
    assert math.isclose(floor["val_nats"], total, rel_tol=1e-12)


def test_held_out_pairs_meet_in_validation_chats_only(corpus):
    pairs = [(p, n) for p in PEOPLE for n in NOUNS if held_out(p, n)]
    assert len(pairs) * 16 == len(PEOPLE) * len(NOUNS)
    texts = [row["text"] for row in rows(corpus / "stories/train.jsonl")]
    texts += [row["text"] for row in rows(corpus / "stories/val.jsonl")]
    texts += [spoken(row) for row in rows(corpus / "chats/train.jsonl")]
    for text in texts:
        words = set(re.findall(r"\w+", text))
        assert not [(p, n) for p, n in pairs if p in words and n in words], text
    met = set()
    for row in rows(corpus / "chats/val.jsonl"):
        story, question = split_first(row["messages"])
        first = re.search(f"{N} (?:has|had|was carrying|was playing with|found) {T}\\b", story)
        owner, noun = first.groups()
        owner = read(story).people[0] if owner in ("He", "She") else owner
        assert held_out(owner, noun)
        assert re.search(rf"\b{noun}\?", question) or question == f"What does {owner} have?"
        met.add((owner, noun))
    assert met == set(pairs)


def spoken(row: dict) -> str:
    return " ".join(message["content"] for message in row["messages"])


def split_first(messages: list[dict]) -> tuple[str, str]:
    """The story and the question of the first message."""
    *told, question = sentences_of(messages[0]["content"])
    return " ".join(told), question


def kind_of(question: str) -> str:
    """Its first words: Who has, Who gave, What does, What colour, Where, Does."""
    first = question.split()[0]
    return first if first in ("Does", "Where") else " ".join(question.split()[:2])


@pytest.mark.parametrize("split", ["train", "val"])
def test_chat_answers_follow_from_the_text(corpus, split):
    asked, updates = Counter(), 0
    turns = Counter()
    for row in rows(corpus / f"chats/{split}.jsonl"):
        messages = row["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert "\n" not in messages[0]["content"]
        turns[len(messages) // 2] += 1
        story, question = split_first(messages)
        world = read(story)
        questions = [question] + [m["content"] for m in messages[2::2]]
        assert len(set(questions)) == len(questions)
        for question, answer in zip(questions, messages[1::2], strict=True):
            assert answer["content"] == world.sentence(question), spoken(row)
            asked[kind_of(question)] += 1
            updates += first_answer(story, question) not in (None, world.answer(question))
    assert set(turns) == ({1, 2, 3, 4} if split == "val" else {3, 4, 5, 6})
    assert len(asked) == 6
    assert updates > 0.2 * asked.total()


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_answer_to_a_kind_of_question_is_right_most_of_the_time(split):
    """Of 2,000 chats, as the commonest, "Nothing", is right half of the time."""
    answers: dict[str, Counter] = {}
    rng = random.Random(0)
    for _ in range(2000):
        messages = tinyworld.generate_chat(rng, split)
        story, first = split_first(messages)
        world = read(story)
        for question in [first] + [m["content"] for m in messages[2::2]]:
            answers.setdefault(kind_of(question), Counter())[world.answer(question)] += 1
    assert len(answers) == 6
    for kind, counts in answers.items():
        assert max(counts.values()) <= 0.6 * counts.total(), kind


@pytest.mark.parametrize("split", ["train", "val"])
def test_easy_chats_ask_for_what_is_said_once(corpus, split):
    people, kinds = Counter(), Counter()
    for row in rows(corpus / f"easy/{split}.jsonl"):
        messages = row["messages"]
        story, first = split_first(messages)
        world = read(story)
        assert not any(held_out(p, noun) for p in world.people for noun in world.colour)
        assert len(sentences_of(story)) == 2 * len(world.people) == 2 * len(world.colour)
        questions = [first] + [m["content"] for m in messages[2::2]]
        assert len(set(questions)) == len(questions) == len(world.people) + 2
        for question, answer in zip(questions, messages[1::2], strict=True):
            assert answer["content"] == world.sentence(question)
            kinds[kind_of(question)] += 1
        people[len(world.people)] += 1
    assert set(people) == {2, 3}
    assert people.total() == {"train": 2400, "val": 40}[split]
    assert set(kinds) == {"Who has", "Where", "What colour"}
    assert min(kinds.values()) > 0.1 * kinds.total(), kinds


def first_answer(story: str, question: str) -> str | None:
    """The answer to a question at the first point of the story where it has one."""
    told = sentences_of(story)
    for end in range(1, len(told)):
        try:
            return read(" ".join(told[:end])).answer(question)
        except (KeyError, AssertionError, ValueError):
            continue
    return None


def test_same_seed_same_bytes_and_no_work_twice(corpus, tmp_path, monkeypatch):
    again, other = tmp_path / "again", tmp_path / "other"
    small = {"num_stories": 300, "num_chats": 122, "progress": False}
    tinyworld.prepare(again, seed=5, **small)
    tinyworld.prepare(other, seed=5, **small)
    files = sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    assert [str(f) for f in files] == [
        "chats/train.jsonl", "chats/val.jsonl", "corpus.json",
        "easy/train.jsonl", "easy/val.jsonl",
        "stories/floor.json", "stories/train.jsonl", "stories/val.jsonl",
    ]  # fmt: skip
    before = [(again / f).read_bytes() for f in files]
    assert before == [(other / f).read_bytes() for f in files]
    assert not any(b"\r" in content for content in before)
    tinyworld.prepare(other, seed=6, **small)  # replaces another corpus of ours
    assert before != [(other / f).read_bytes() for f in files]
    monkeypatch.setattr(tinyworld, "generate_story", None)
    tinyworld.prepare(again, seed=5, **small)  # finds it there


def test_the_first_story_of_seed_0_is_fixed():
    """Bytes do not depend on the version of Python or the machine."""
    story = tinyworld.generate_story(random.Random("tinyworld stories 0"))
    assert story.text == (
        "Once, a boy named Sam went to the school. He was playing with an orange coat. "
        "Soon Finn came to the school. Finn found a blue lamp behind the door. "
        '"I will give you my orange coat for your blue lamp," said Sam. So they swapped. '
        "Both were happy. Now Sam had the blue lamp. It was a long day."
    )


def test_a_killed_prepare_leaves_nothing(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tinyworld, "write_chats", killed)
    with pytest.raises(KeyboardInterrupt):
        tinyworld.prepare(tmp_path / "new", num_stories=100, num_chats=61, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".new.lock"]  # which holds nothing


OTHER = """
import sys
from pathlib import Path
from data import tinyworld
tinyworld.write_stories = None  # it must not write any
tinyworld.prepare(Path(sys.argv[1]), num_stories=100, num_chats=61, progress=False)
"""


def test_of_two_processes_one_makes_the_corpus_and_the_other_waits(tmp_path, monkeypatch):
    """Ours writes only when the other one has said that it waits, and replaces another corpus."""
    small = {"num_stories": 100, "num_chats": 61, "progress": False}
    world, write, others = tmp_path / "world", tinyworld.write_stories, []
    tinyworld.prepare(world, seed=1, **small)

    def write_while_another_waits(*arguments):
        command = [sys.executable, "-c", OTHER, str(world)]
        other = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        others.append(other)
        assert other.stderr.readline() == f"another process is making {world}; waiting for it\n"
        write(*arguments)

    monkeypatch.setattr(tinyworld, "write_stories", write_while_another_waits)
    tinyworld.prepare(world, **small)
    (other,) = others
    assert other.communicate(timeout=120)[1] == "" and other.returncode == 0
    assert json.loads((world / "corpus.json").read_text())["seed"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".world.lock", "world"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file/world cannot be written: "):
        tinyworld.prepare(tmp_path / "file" / "world", num_stories=100, num_chats=61)


def test_prepare_leaves_the_files_of_others_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("my only copy")
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(UserError, match="not a tinyworld corpus"):
        tinyworld.prepare(tmp_path, num_stories=100, num_chats=61, progress=False)
    with pytest.raises(UserError, match="not a tinyworld corpus"):
        tinyworld.prepare(tmp_path / "thesis.txt", num_stories=100, num_chats=61, progress=False)
    assert (tmp_path / "thesis.txt").read_text() == "my only copy"


def test_the_command_prints_what_it_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tinyworld", str(tmp_path / "c"), "--seed=1"])
    small = {"num_stories": 100, "num_chats": 122, "progress": False}
    whole = tinyworld.prepare
    monkeypatch.setattr(tinyworld, "prepare", lambda path, seed: whole(path, seed, **small))
    tinyworld.main()
    printed = capsys.readouterr().out
    assert "chats/val.jsonl: 2 lines" in printed and "\nassistant: " in printed
