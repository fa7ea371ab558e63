"""A corpus with a known floor: stories, and questions about them, from a small made-up world.

In reading order: the words and the sentences (tables to edit), the people and things, the Teller
that makes every choice and adds up its -log p, the seven story shapes and the ending, the chats
(and easy ones, in which each thing is said once), and prepare(), which writes it all. The
probability of a text is exact, because a text has one derivation only and nothing is ever drawn and
then thrown away.
"""

import argparse
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from config import UserError
from files import read_json
from locks import waiting_lock

# --------------------------------------------------------------------------------------------
# The words. From a list one is drawn evenly, from a dict by weight.

GIRLS = "Mia Anna Lily Ruth Zoe Ella Nora Rosa".split()
BOYS = "Tom Ben Sam Max Leo Jack Finn Otto".split()
NOUNS = """ball kite book hat drum doll cup bell coat scarf lamp box key bag flute car train puppet
    whistle basket blanket ring shell spoon map rope brush clock umbrella balloon pencil
    mask""".split()
COLOURS = "red blue green yellow white black pink brown orange purple golden silver".split()
ANIMALS = "dog cat goat monkey crow fox donkey duck squirrel parrot".split()
LOOKS = "little big old hungry funny cheeky".split()
PLACES = [  # preposition, place, two spots that one finds there
    ("in", "the park", "under a tree", "on a bench"),
    ("in", "the garden", "behind a bush", "between the flowers"),
    ("in", "the kitchen", "under the table", "behind the door"),
    ("in", "the barn", "in the hay", "behind a cart"),
    ("in", "the forest", "under an oak", "behind a rock"),
    ("in", "the library", "beside a shelf", "under a desk"),
    ("in", "the bakery", "on the counter", "beside the oven"),
    ("at", "the market", "beside a stall", "behind a barrel"),
    ("at", "the beach", "in the sand", "under a palm"),
    ("at", "the school", "on the stairs", "behind the door"),
    ("at", "the station", "on a bench", "beside the rails"),
    ("on", "the farm", "behind a fence", "in the hay"),
    ("on", "the hill", "in the grass", "behind a rock"),
    ("on", "the bridge", "beside a post", "on the planks"),
    ("by", "the river", "in the reeds", "under a tree"),
    ("by", "the lake", "in the grass", "on a log"),
]
WHEN = {"One day": 8, "Once": 4} | dict.fromkeys(
    "In the morning|One morning|One afternoon|After breakfast|After lunch|After school|On Monday|"
    "On Friday|On Sunday|Last week|Last summer|Long ago|Yesterday|In spring".split("|"),
    1,
)


# --------------------------------------------------------------------------------------------
# The sentences. A, B: people; T, U: things; P: a place; X: an animal; {when} and {spot} are drawn
# from their tables. No two sentences that can stand at the same point of a story may ever read
# the same, nor may a sentence leave out what was drawn for it: a text has one derivation.


def read_table(text: str) -> dict[str, list[str]]:
    """{"kind": ["one way to say it", ...]} from lines "kind: one way | another"."""
    lines = text.replace("\n    ", " ").strip().splitlines()  # an indented line goes on
    return {
        kind: [way.strip() for way in ways.split("|")]
        for kind, ways in (line.split(": ", 1) for line in lines)
    }


SENTENCES = read_table("""
opens: {when}, {A} was {P}. | {when}, {A} went {P.to}. | {when}, {A} walked {P.to}.
    | {when}, a {A.child} named {A} was {P}. | {when}, a {A.child} named {A} went {P.to}.
weather: The sun was shining. | It was a warm day. | A soft wind was blowing.
    | It was very quiet. | The sky was blue. | Many birds were singing.
has: {A} had {T.a}. | {A} had {T.a} with {A.him}. | {A} was carrying {T.a}.
    | {A} was playing with {T.a}. | {A} found {T.a} {spot}.
joins: {A} was there too. | Then {A} came along. | Soon {A} came {P.to}. | {B} met {A} there.
    | {B} saw {A} {spot}.
talks: "Do you want my {T.name}?" asked {A}. | "This {T.noun} is for you," said {A}.
    | "I have something for you," said {A}. | "What do you have there?" asked {B}.
    | "May I have your {T.name}?" asked {B}. | "I like your {T.name} very much," said {B}.
gives: {A} gave {T.the} to {B}. | {A} gave {T.short} to {B}. | {A} gave {B} {T.the}.
    | {A} gave {B} {T.short}. | So {A} gave {T.the} to {B}.
thanks: "Thank you, {A}!" said {B}. | "Thank you very much," said {B}.
    | "You are so kind," said {B}. | {B} was very happy. | {B} jumped for joy. | {B} smiled at {A}.
returns: Later {A} gave {T.the} back to {B}. | Soon {A} gave it back to {B}.
    | After a while, {A} gave {T.short} back.
loses: But then {A} lost {T.the}. | {A} lost it {P}. | Soon {T.short} was gone.
    | Then {A} could not find {T.the}.
looks: {A} looked everywhere. | {A} looked {spot}, but it was not there.
    | "Where is my {T.name}?" asked {A}. | "Who has my {T.name}?" asked {A}.
asks: "Have you seen my {T.name}?" asked {A}. | "Do you know where my {T.noun} is?" asked {A}.
    | "Can you help me?" asked {A}. | "Why are you so sad?" asked {B}.
finds: {A} found {T.the} {spot}. | At last {A} found it {spot}.
    | Then {A} saw {T.short} {spot} and picked it up.
keeps: {A} kept it. | "Now it is mine," said {A}. | {A} did not give it back.
stays lost: Nobody could find it. | But {T.short} was never found. | {T.The} did not come back.
proposes: "Do you want to swap?" asked {A}. | "Let us swap!" said {A}.
    | "I will give you my {T.name} for your {U.name}," said {A}.
swaps: So they swapped. | {A} gave {B} {T.the} for {U.the}.
    | {A} took {U.the} and {B} took {T.the}.
refuses: "No, thank you," said {B}. | "No, I like my {U.noun} best," said {B}.
    | {B} shook {B.his} head.
likes: Both were happy. | They laughed. | "That was a good idea," said {A}.
wishes: {A} wanted to see {B}. | {A} was looking for {B}. | "Where is {B}?" asked {A}.
is away: {B} was {P}. | But {B} was {P}. | That day {B} was {P}.
passes: On the way {A} saw {X.a}. | {X.A} walked along with {A}.
    | "Good morning," said {A} to {X.a}.
goes: {A} went {P.to}. | {A} walked {P.to}. | Then {A} went {P.to}.
greets: "Hello, {A}!" said {B}. | "What are you doing here?" asked {B}.
    | "I was waiting for you," said {B}. | {B} was happy to see {A}.
they go: Then they went {P.to} together. | They walked {P.to}.
    | "Come with me," said {A}, and they went {P.to}.
takes: Then {X.a} came and took {T.the}. | But {X.a} ran up and took {T.short}.
    | {X.A} took {T.the}.
cries: "Stop!" cried {A}. | "Come back!" cried {A}. | "That is my {T.name}!" cried {A}.
    | "Give me my {T.noun}!" cried {A}.
flees: {X.The} ran {P.to} and {A} ran after it. | {A} ran after {X.the}, all the way {P.to}.
drops: {X.The} dropped {T.the} and {A} picked it up.
    | Then {X.the} got tired and {A} took {T.short} back.
will not: But {X.the} was too fast. | {X.The} did not give it back.
    | {X.The} liked {T.short} too much.
rescues: {A} took {T.the} from {X.the}. | {A} gave {X.the} some bread and got {T.the}.
plays: {A} sang a song. | {A} ran and jumped. | {A} sat down {spot}. | {A} counted the birds.
    | {A} ate a sweet bun. | {A} told a long story. | {A} looked at the clouds.
    | {A} danced in a circle.
puts: {A} put {T.the} down {spot}. | {A} left {T.short} {spot}. | {A} hid {T.the} {spot}.
takes away: Then {A} came {P.to} and took {T.the}. | {A} found {T.short} {P} and took it.
goes back: Then {A} went back {P.to} and got {T.the}. | {A} ran back {P.to} for {T.short}.
holds: Now {A} had {T.the}. | In the end, {A} had {T.the}. | So {T.the} was with {A}.
holds too: And {A} had {T.the}. | {T.The} was with {A}.
lies: Now {T.the} was {P}. | In the end, {T.the} was still {P}.
is lost: Nobody knew where {T.the} was. | In the end, nobody had {T.the}.
is at: {A} was {P}. | {A} was {P} now. | And {A} was {P}.
has nothing: {A} had nothing. | But {A} had nothing now.
moon asks: "{question}" asked the moon.
stars answer: "{answer}," said the stars.
moral: What a day! | The end. | It was a long day. | {A} never forgot that day.
    | {A} told everyone about it. | Then it was time for bed.
has, plainly: {A} has {T.a}. | {A} had {T.a}.
is, plainly: {A} is {P}. | {A} was {P}.
loses, plainly: {A} lost {T.the}. | Then {A} lost {T.short}.
""")
QUESTIONS = read_table("""
who: Who has {T.the}? | Who has {T.short}?
what: What does {A} have?
where: Where is {A}?
where it: Where is {T.the}? | Where is {T.short}?
gave: Who gave {T.the} to {A}? | Who gave {T.short} to {A}?
colour: What colour is {T.short}?
yes: Does {A} have {T.the}? | Does {A} have {T.short}?
no: Does {A} have {T.the}? | Does {A} have {T.short}?
""")
ANSWERS = read_table("""
who: {T.The} is {whereabouts}. | {T.Short} is {whereabouts}.
what: {everything}, so {A} has {held}.
where: As {A} came {P.to}, {A} is {answer}.
gave: {A} got {T.the} from {answer}. | {A} got {T.short} from {answer}.
colour: {T.Short} is {answer}.
yes: {T.The} is {whereabouts}, so yes. | {T.Short} is {whereabouts}, so yes.
no: {T.The} is {whereabouts}, so no. | {T.Short} is {whereabouts}, so no.
""")  # of a chat, each to the question at its place above; the stars say {answer} alone
# No thing of a chat lies about, so "where it" is not asked there. "As Tom came to the park" is said
# where Tom just was there, too: it names the place, and then with its preposition.

# How likely each kind of question is in an easy chat, and at the end of a story.
EASY = {"who": 2, "where": 2, "colour": 1}
MOON = {"who": 4, "what": 3, "where": 2, "where it": 3, "gave": 2, "colour": 1, "yes": 1, "no": 1}


# --------------------------------------------------------------------------------------------
# What the world is made of. The sentences use the attributes: {T.a} is "an orange ball".


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


@dataclass(frozen=True)
class Person:
    """Someone with a name; prints as the name."""

    name: str
    child: str  # girl or boy
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name


class Thing:
    """A coloured thing. No two things of a text share a noun, so `short` is never ambiguous."""

    def __init__(self, colour: str, noun: str):
        self.colour, self.noun, self.name = colour, noun, f"{colour} {noun}"
        self.a, self.the, self.short = with_article(self.name), f"the {self.name}", f"the {noun}"
        self.The, self.Short = capital(self.the), capital(self.short)


class Animal:
    """An animal: "a hungry goat" when it comes, "the goat" ever after; prints as the latter."""

    def __init__(self, look: str, kind: str):
        self.a, self.the = with_article(f"{look} {kind}"), f"the {kind}"
        self.A, self.The = capital(self.a), capital(self.the)

    def __str__(self) -> str:
        return self.the


class Place:
    """A place; prints as where one is ("in the park")."""

    def __init__(self, preposition: str, name: str, *spots: str):
        self.where, self.to, self.spots = f"{preposition} {name}", f"to {name}", spots

    def __str__(self) -> str:
        return self.where


EVERYONE = [Person(name, "girl", "she", "her", "her") for name in GIRLS]
EVERYONE += [Person(name, "boy", "he", "him", "his") for name in BOYS]
EVERYWHERE = [Place(*row) for row in PLACES]
Holder = Person | Animal | Place | None  # who has a thing, or where it lies; None: it is lost
Chat = list[dict[str, str]]  # messages: {"role": "user" or "assistant", "content": text}
Questions = dict[str, list[tuple[dict[str, Any], str]]]  # for each kind: roles and answer

# The pairs of person and noun that only validation chats bring together, one in sixteen: number
# people (girls, then boys) and nouns from 0; a pair is held out if its numbers add up to a
# multiple of 16. So each person misses two of the 32 nouns.
HELD_OUT = {
    person: [noun for j, noun in enumerate(NOUNS) if (i + j) % 16 == 0]
    for i, person in enumerate(GIRLS + BOYS)
}


# --------------------------------------------------------------------------------------------
# The Teller: chance, probability, and the state of the world while a text is told.


class Teller:
    """Tells one text: draws, says sentences, and keeps what they say true.

    `log_prob` is ln p of all that has been told. Every draw goes through `choose`, from what is
    allowed at that point, and can be read off the text: one that does not show would give the
    text a second derivation.
    """

    def __init__(self, rng: random.Random, held_out_pairs: bool = False):
        self.rng = rng
        self.held_out_pairs = held_out_pairs  # may they meet? in validation chats only
        self.log_prob = 0.0
        self.sentences: list[str] = []
        self.people: list[Person] = []  # in the order in which they come
        self.things: list[Thing] = []
        self.holder: dict[Thing, Holder] = {}
        self.where: dict[Person, Place] = {}
        self.scene: Place | None = None  # where the story is, and its spots
        self.owners: set[Person] = set()  # who has, or once had, something
        self.gifts: list[tuple[Person, Person, Thing]] = []  # giver, receiver, thing
        self.recent: set[Person] = set()  # named in the last sentence

    def choose(self, options: Any) -> Any:
        """One of a sequence, evenly, or one key of a dict, by weight; adds ln p."""
        if not isinstance(options, dict):
            self.log_prob -= math.log(len(options))
            return self.rng.choice(options)
        option = self.rng.choices(list(options), list(options.values()))[0]
        self.log_prob += math.log(options[option] / sum(options.values()))
        return option

    def maybe(self, p: float) -> bool:
        return self.choose({True: p, False: 1 - p})

    def person(self) -> Person:
        """A person who is new to the text and may meet all of its things."""
        nouns = set() if self.held_out_pairs else {thing.noun for thing in self.things}
        able = [person for person in EVERYONE if nouns.isdisjoint(HELD_OUT[person.name])]
        self.people.append(self.choose([person for person in able if person not in self.people]))
        return self.people[-1]

    def thing(self, nouns: Iterable[str] = NOUNS) -> Thing:
        """A thing whose noun, one of `nouns`, is new to the text and may meet all its people."""
        taken = {thing.noun for thing in self.things}
        if not self.held_out_pairs:
            taken.update(noun for person in self.people for noun in HELD_OUT[person.name])
        colour = self.choose(COLOURS)
        self.things.append(Thing(colour, self.choose([n for n in nouns if n not in taken])))
        return self.things[-1]

    def place(self, but: Place | None = None) -> Place:
        return self.choose([place for place in EVERYWHERE if place is not but])

    def tell(self, kind: str, **roles: Any) -> None:
        """Say one of SENTENCES[kind], which by itself changes nothing in the world.

        A person in front becomes he or she half of the time, where that can mean no one else:
        named in the sentence before, and no other of the text has that pronoun.
        """
        template = self.choose(SENTENCES[kind])
        if "{when}" in template:
            roles["when"] = self.choose(WHEN)
        if "{spot}" in template:
            roles["spot"] = self.choose(self.scene.spots)
        front = template[1] if template[:3] in ("{A}", "{B}") else ""
        person = roles.get(front)
        if person in self.recent and [p.he for p in self.people].count(person.he) == 1:
            if self.choose(["name", "pronoun"]) == "pronoun":
                template = "{" + front + ".he}" + template[3:]
        self.sentences.append(capital(template.format(**roles)))
        told = {value for role, value in roles.items() if "{" + role in template}
        self.recent = {someone for someone in told if isinstance(someone, Person)}

    # What happens: a sentence and the change that it means.

    def move(self, people: list[Person], place: Place) -> None:
        """Bring people to a place, and the story with them."""
        self.scene = place
        self.where.update(dict.fromkeys(people, place))

    def pass_on(self, thing: Thing, holder: Holder, kind: str, **roles: Any) -> None:
        self.tell(kind, T=thing, **roles)
        self.holder[thing] = holder
        if isinstance(holder, Person):
            self.owners.add(holder)

    def open(self) -> Person:
        hero, place = self.person(), self.place()
        self.tell("opens", A=hero, P=place)
        self.move([hero], place)
        return hero

    def be(self, person: Person) -> None:
        self.where[person] = self.place()
        self.tell("is, plainly", A=person, P=self.where[person])

    def get(self, person: Person, kind: str = "has", nouns: Iterable[str] = NOUNS) -> Thing:
        thing = self.thing(nouns)
        self.pass_on(thing, person, kind, A=person)
        return thing

    def join(self, hero: Person) -> Person:
        person = self.person()
        self.tell("joins", A=person, B=hero, P=self.scene)
        self.move([person], self.scene)
        return person

    def go(self, person: Person, place: Place | None = None, kind: str = "goes") -> None:
        place = place or self.place(but=self.where.get(person))
        self.tell(kind, A=person, P=place)
        self.move([person], place)

    def give(self, giver: Person, receiver: Person, thing: Thing, kind: str = "gives") -> None:
        self.pass_on(thing, receiver, kind, A=giver, B=receiver)
        self.gifts.append((giver, receiver, thing))

    def swap(self, a: Person, b: Person, t: Thing, u: Thing) -> None:
        """a has t and b has u; then the other way round. After that, "who gave" is not asked."""
        self.pass_on(t, b, "swaps", A=a, B=b, U=u)
        self.holder[u] = a
        self.owners.add(a)
        self.gifts = [gift for gift in self.gifts if gift[2] not in (t, u)]

    def whereabouts(self, thing: Thing) -> str:
        """Where a thing of a chat has come to, as in "The ball is with Tom"."""
        holder = self.holder[thing]
        return "lost" if holder is None else f"with {holder}"

    def questions(self) -> Questions:
        """All that can be asked now and has one answer, of which here the words that matter."""
        asked: Questions = {kind: [] for kind in QUESTIONS}
        for t in self.things:
            has = self.holder[t]
            someone = isinstance(has, Person | Animal)
            asked["who"].append(({"T": t}, str(has) if someone else "nobody"))
            asked["colour"].append(({"T": t}, t.colour))
            if isinstance(has, Place):
                asked["where it"].append(({"T": t}, str(has)))
            for p in self.people:
                answer = "yes" if has is p else "no"
                asked[answer].append(({"A": p, "T": t}, answer))
        if not asked["yes"]:  # so that a no is as likely as a yes
            asked["no"] = []
        for p in self.people:
            held = [t for t in self.things if self.holder[t] is p]
            if p in self.where:
                asked["where"].append(({"A": p}, str(self.where[p])))
            if len(held) == 1:
                asked["what"].append(({"A": p}, held[0].the))
            elif not held and p in self.owners:
                asked["what"].append(({"A": p}, "nothing"))
        receipts = [gift[1:] for gift in self.gifts]
        for giver, p, t in self.gifts:
            if receipts.count((p, t)) == 1:
                asked["gave"].append(({"A": p, "T": t}, giver.name))
        return {kind: some for kind, some in asked.items() if some}

    def ask(self, kind: str, roles: dict[str, Any], answer: str, first: bool) -> Chat:
        """The two messages of a question, behind the text if it is the first, and its answer."""
        question, reply = self.choose(list(zip(QUESTIONS[kind], ANSWERS[kind], strict=True)))
        question = question.format(**roles)
        words = roles | {"answer": answer}
        if "T" in roles:
            words["whereabouts"] = self.whereabouts(roles["T"])
        if kind == "what":
            each = [f"{thing.short} is {self.whereabouts(thing)}" for thing in self.things]
            held = [thing.short for thing in self.things if self.holder[thing] is roles["A"]]
            words["everything"] = capital(", ".join(each))
            words["held"] = held[0] if held else "nothing"
        if kind == "where":
            words["P"] = self.where[roles["A"]]
        text = " ".join([*self.sentences, question]) if first else question
        return [
            {"role": "user", "content": text},
            {"role": "assistant", "content": reply.format(**words)},
        ]


# --------------------------------------------------------------------------------------------
# The story shapes: what comes after the opening. Their first sentences tell them apart.


def gift(s: Teller, a: Person) -> None:
    """a has t, b comes, a gives it; b may give it back, or on to c."""
    t = s.get(a)
    b = s.join(a)
    if s.maybe(0.6):
        s.tell("talks", A=a, B=b, T=t)
    s.give(a, b, t)
    if s.maybe(0.5):
        s.tell("thanks", A=a, B=b)
    then = s.choose({"b keeps it": 3, "back": 1, "on": 1})
    if then == "back":
        s.give(b, a, t, "returns")
    if then == "on":
        c = s.join(b)
        s.give(b, c, t)


def loss(s: Teller, a: Person) -> None:
    """a loses t; a finds it, or b does and gives it back or keeps it, or nobody does."""
    t, b = s.get(a), None
    s.pass_on(t, None, "loses", A=a, P=s.scene)
    if s.maybe(0.5):
        s.tell("looks", A=a, T=t)
    if s.maybe(0.7):
        b = s.join(a)
        if s.maybe(0.6):
            s.tell("asks", A=a, B=b, T=t)
    finder = s.choose({b: 5, a: 2, None: 1} if b else {a: 2, None: 1})
    if finder is None:
        s.tell("stays lost", T=t)
        return
    s.pass_on(t, finder, "finds", A=finder)
    if finder is b:
        if s.maybe(0.7):
            s.give(b, a, t)
        else:
            s.tell("keeps", A=b)


def swap(s: Teller, a: Person) -> None:
    """a has t, b has u; one of them proposes to swap; they do or do not."""
    t = s.get(a)
    b = s.join(a)
    u = s.get(b)
    if s.maybe(0.5):  # from here on, a is the one who proposes
        a, b, t, u = b, a, u, t
    s.tell("proposes", A=a, T=t, U=u)
    if s.maybe(0.25):
        s.tell("refuses", B=b, U=u)
        return
    s.swap(a, b, t, u)
    if s.maybe(0.5):
        s.tell("likes", A=b)


def visit(s: Teller, a: Person) -> None:
    """a, who may have t, goes to see b elsewhere; a gift or a walk may follow."""
    t = s.get(a) if s.maybe(0.6) else None
    b = s.person()
    s.tell("wishes", A=a, B=b)
    s.where[b] = there = s.place(but=s.scene)
    s.tell("is away", B=b, P=there)
    if s.maybe(0.3):
        s.tell("passes", A=a, X=Animal(s.choose(LOOKS), s.choose(ANIMALS)))
    s.go(a, there)
    if s.maybe(0.6):
        s.tell("greets", A=a, B=b)
    then = s.choose({"gift": 3, "walk": 2, "end": 1} if t else {"walk": 2, "end": 1})
    if then == "gift":
        s.give(a, b, t)
    if then == "walk":
        s.go(b, kind="they go")
        s.move([a], s.scene)


def theft(s: Teller, a: Person) -> None:
    """An animal takes t; it drops it, keeps it, or b gets it and gives it back or does not."""
    t = s.get(a)
    x = Animal(s.choose(LOOKS), s.choose(ANIMALS))
    s.pass_on(t, x, "takes", X=x)
    if s.maybe(0.5):
        s.tell("cries", A=a, T=t)
    if s.maybe(0.5):
        place = s.place(but=s.scene)
        s.tell("flees", A=a, X=x, P=place)
        s.move([a], place)
    then = s.choose({"dropped": 2, "kept": 1, "rescued": 2})
    if then == "dropped":
        s.pass_on(t, a, "drops", A=a, X=x)
    if then == "kept":
        s.tell("will not", X=x, T=t)
    if then == "rescued":
        b = s.join(a)
        s.pass_on(t, b, "rescues", A=b, X=x)
        if s.maybe(0.7):
            s.give(b, a, t)


def outing(s: Teller, a: Person) -> None:
    """a, perhaps with b, plays and goes from place to place; a may come upon t in the end."""
    b = s.join(a) if s.maybe(0.5) else None
    s.tell("plays", A=s.choose([a, b]) if b else a)
    for _ in range(s.choose({0: 1, 1: 3, 2: 2})):
        s.go(a)
        s.tell("plays", A=a)
    if s.maybe(0.7):
        s.get(a)


def leaving(s: Teller, a: Person) -> None:
    """a puts t down and goes elsewhere; it stays, or b takes it, or a comes back for it."""
    t, here = s.get(a), s.scene
    s.pass_on(t, here, "puts", A=a)
    s.go(a)
    then = s.choose({"it stays": 1, "b takes it": 2, "a comes back": 1})
    if then == "b takes it":
        b = s.person()
        s.where[b] = here
        s.pass_on(t, b, "takes away", A=b, P=here)
    if then == "a comes back":
        s.pass_on(t, a, "goes back", A=a, P=here)
        s.move([a], here)


SHAPES = {gift: 4, loss: 3, swap: 3, visit: 3, theft: 3, outing: 2, leaving: 3}


def end(s: Teller, hero: Person) -> None:
    """One or two facts, or a question that the stars answer; then perhaps a last word."""
    if s.maybe(0.4):
        open_questions = s.questions()
        kind = s.choose({kind: MOON[kind] for kind in open_questions})
        roles, answer = s.choose(open_questions[kind])
        s.tell("moon asks", question=s.choose(QUESTIONS[kind]).format(**roles))
        s.tell("stars answer", answer=capital(answer))
    else:
        of_things = [fact_of(s, thing) for thing in s.things]
        facts = of_things + [("is at", {"A": p, "P": s.where[p]}) for p in s.people]
        if s.things:
            idle = [p for p in s.people if p not in s.holder.values()]
            facts += [("has nothing", {"A": p}) for p in idle]
        kind, roles = first = s.choose(of_things or facts)
        s.tell(kind, **roles)
        if len(facts) > 1 and s.maybe(0.6):
            kind, roles = s.choose([fact for fact in facts if fact is not first])
            s.tell("holds too" if kind == "holds" else kind, **roles)
    if s.maybe(0.5):
        s.tell("moral", A=hero)


def fact_of(s: Teller, t: Thing) -> tuple[str, dict[str, Any]]:
    """Where a thing has come to: the kind of sentence, and its roles."""
    holder = s.holder[t]
    if holder is None:
        return "is lost", {"T": t}
    if isinstance(holder, Place):
        return "lies", {"T": t, "P": holder}
    return "holds", {"T": t, "A": holder}


@dataclass(frozen=True)
class Story:
    """A text and ln p of it, its end included: a perfect model pays -log_prob nats for it."""

    text: str
    log_prob: float
    sentences: list[str]


def generate_story(rng: random.Random) -> Story:
    """Draw a story of 3 to 12 sentences, each of at most 13 words."""
    s = Teller(rng)
    hero = s.open()
    if s.maybe(0.2):
        s.tell("weather")
    shape = s.choose(SHAPES)
    shape(s, hero)
    end(s, hero)
    return Story(" ".join(s.sentences), s.log_prob, s.sentences)


# --------------------------------------------------------------------------------------------
# The chats: a few sentences of the same world, then questions.

# How many. Only answers are learned from, so a training chat asks more about its text: of three to
# six an answer costs 40 tokens. Of 60,000, 136 chats are longer than 256 tokens and are cut.
TURNS = {"train": [3, 4, 5, 6], "val": [1, 2, 3, 4]}


def happen(s: Teller) -> None:
    """One more event among those that can happen now."""
    held = [(t, holder) for t, holder in s.holder.items() if isinstance(holder, Person)]
    gifts = [(a, b, t) for t, a in held for b in s.people if b is not a and can_meet(s, a, b)]
    swaps = [(a, b, t, u) for a, b, t in gifts for u, owner in held if owner is b]
    event = s.choose(
        {
            "go": 2,
            "get": 2 if len(s.things) < 2 else 0,
            "come": 1 if len(s.people) < 3 else 0,
            "give": 5 if gifts else 0,
            "swap": 3 if swaps and len(s.people) == 2 else 0,  # "they" are the two
            "lose": 1 if held else 0,
            "theft": 1 if held else 0,
        }
    )
    if event == "go":
        s.go(s.choose(s.people))
    elif event == "get":
        s.get(s.choose(s.people), "has, plainly")
    elif event == "come":
        s.be(s.person())
    elif event == "give":
        s.give(*s.choose(gifts))
    elif event == "swap":
        s.swap(*s.choose(swaps))
    elif event == "lose":
        t, a = s.choose(held)
        s.pass_on(t, None, "loses, plainly", A=a)
    else:
        t, _ = s.choose(held)
        x = Animal(s.choose(LOOKS), s.choose(ANIMALS))
        s.pass_on(t, x, "takes", X=x)


def can_meet(s: Teller, a: Person, b: Person) -> bool:
    """Whether nothing that was said keeps a and b apart."""
    return a not in s.where or b not in s.where or s.where[a] is s.where[b]


def generate_chat(rng: random.Random, split: str) -> Chat:
    """Draw a chat: a text and questions about it, user and assistant taking turns.

    It ends early where nothing is left to ask.

    split: "train" or "val". In training no held-out pair of person and noun ever meets. In
    validation the first thing and its first owner are such a pair, and the first question is
    about the two: validation asks for what training never showed.
    """
    if split not in ("train", "val"):
        raise ValueError(f'split ({split!r}) must be "train" or "val"')
    s = Teller(rng, held_out_pairs=split == "val")
    as_in_stories = s.maybe(0.5)
    if as_in_stories:
        a = s.open()
    else:
        a = s.person()
        if s.maybe(0.3):
            s.be(a)
    nouns = HELD_OUT[a.name] if split == "val" else NOUNS
    t = s.get(a, "has" if as_in_stories else "has, plainly", nouns)
    if as_in_stories:
        s.join(a)
    elif s.maybe(0.5):
        s.be(s.person())
    else:
        s.get(s.person(), "has, plainly")
    for _ in range(s.choose([1, 2, 3])):
        happen(s)

    open_questions = s.questions()
    messages: Chat = []
    for turn in range(s.choose(TURNS[split])):
        if not open_questions:
            break
        kinds = open_questions
        if split == "val" and turn == 0:
            kinds = about(open_questions, a, t)
        ask_one(s, s.choose(list(kinds)), kinds, open_questions, messages)
    return messages


def ask_one(
    s: Teller, kind: str, questions: Questions, open_questions: Questions, messages: Chat
) -> None:
    """Add one of the questions of a kind, and its answer; it is open no more."""
    roles, answer = s.choose(questions[kind])
    open_questions[kind].remove((roles, answer))
    if not open_questions[kind]:
        del open_questions[kind]
    messages += s.ask(kind, roles, answer, first=not messages)


def about(questions: Questions, a: Person, t: Thing) -> Questions:
    """Those of the questions that ask who has t, what a has, or whether a has t."""
    asked = {"who": {"T": t}, "what": {"A": a}, "yes": {"A": a, "T": t}, "no": {"A": a, "T": t}}
    found = {
        kind: [question for question in questions.get(kind, []) if question[0] == roles]
        for kind, roles in asked.items()
    }
    return {kind: some for kind, some in found.items() if some}


def generate_easy_chat(rng: random.Random, split: str) -> Chat:
    """Draw a chat about what is said once: two or three people, each with a thing and a place.

    It does not ask what somebody has: that answer goes through all people and things in the order
    of the text, so it could be copied off without looking any of them up. For both splits alike: no
    pair of person and noun that is held out meets here.
    """
    s = Teller(rng)
    for _ in range(s.choose([2, 3])):
        s.get(s.person(), "has, plainly")
    for person in s.people:
        if s.maybe(0.5):
            s.be(person)
        else:
            s.go(person)
    all_kinds = s.questions()
    open_questions = {kind: all_kinds[kind] for kind in EASY}
    messages: Chat = []
    for _ in range(len(s.people) + 2):
        kind = s.choose({kind: EASY[kind] for kind in open_questions})
        ask_one(s, kind, open_questions, open_questions, messages)
    return messages


# --------------------------------------------------------------------------------------------
# On disk.

VERSION = 4  # raise it with every change of the words, the grammar or the files
NUM_STORIES = 61_500  # about 60,000 to train and 1,500 to validate, as their hashes fall
STORY_VAL_EVERY = 41
NUM_CHATS = 61_000  # 60,000 to train and 1,000 to validate; and a fifth as many easy ones
CHAT_VAL_EVERY = 61


def is_val(text: str) -> bool:
    """Whether a story belongs to validation: one text in 41, by a hash of it.

    So no text is ever in both splits, though nothing was compared or thrown away; and as the hash
    knows nothing of the grammar, validation is a fair sample of it. A text that is drawn again
    counts again: it is the draws that are the sample.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % STORY_VAL_EVERY == 0


def prepare(
    directory: Path,
    seed: int = 0,
    num_stories: int = NUM_STORIES,
    num_chats: int = NUM_CHATS,
    progress: bool = True,
) -> None:
    """Write the corpus into `directory`, whole or not at all; the same seed gives the same bytes.

    stories/train.jsonl, val.jsonl: {"text": ...} a line. stories/floor.json: {"val_nats": the
    total -ln p of val.jsonl, "val_stories": its lines}; divided by the number of targets, it is
    the loss of a perfect model. chats/train.jsonl, val.jsonl: {"messages": [...]} a line, and in
    easy/ a fifth as many of the easy kind.
    Returns at once where this very corpus lies already, and replaces another tinyworld corpus. Of
    several processes that want one in the same place, one makes it and the others wait for it.
    Raises UserError where the directory holds anything else, or cannot be written.
    """
    directory = Path(directory).resolve()
    stamp = {"corpus": "tinyworld", "version": VERSION, "seed": seed}
    stamp |= {"num_stories": num_stories, "num_chats": num_chats}
    if is_there(directory, stamp):
        return
    # Beside the directory and not in it: the whole directory is what gets replaced.
    lock = directory.with_name(f".{directory.name}.lock")
    unfinished, replaced = (
        directory.with_name(f".{directory.name}.{os.getpid()}.{what}")
        for what in ("unfinished", "replaced")
    )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(lock, f"making {directory}"):
            if is_there(directory, stamp):
                return
            write_corpus(unfinished, stamp, progress)
            if directory.exists():
                directory.rename(replaced)  # at once: half removed, it would look like another's
            unfinished.rename(directory)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror or error}") from error
    finally:
        for left in (unfinished, replaced):
            shutil.rmtree(left, ignore_errors=True)


def is_there(directory: Path, stamp: dict[str, Any]) -> bool:
    """Whether this very corpus is. UserError for all but a tinyworld corpus, or nothing."""
    try:
        found = read_json(directory, "corpus.json")
    except (OSError, ValueError):
        found = {}
    in_use = any(directory.iterdir()) if directory.is_dir() else directory.exists()
    if in_use and found.get("corpus") != "tinyworld":
        raise UserError(
            f"{directory} is there and is not a tinyworld corpus, so it is left as it is: "
            "name a directory that is new or empty"
        )
    return found == stamp


def write_corpus(directory: Path, stamp: dict[str, Any], progress: bool) -> None:
    seed, num_stories, num_chats = (stamp[n] for n in ("seed", "num_stories", "num_chats"))
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "stories").mkdir(parents=True)
    (directory / "chats").mkdir()
    (directory / "easy").mkdir()
    num_easy = num_chats // 5
    total = num_stories + num_chats + num_easy
    with tqdm(total=total, desc="tinyworld", unit=" texts", disable=not progress) as bar:
        write_stories(directory / "stories", seed, num_stories, bar)
        write_chats(directory / "chats", generate_chat, seed, num_chats, bar)
        write_chats(directory / "easy", generate_easy_chat, seed, num_easy, bar)
    write_json(directory / "corpus.json", stamp)


def write_stories(directory: Path, seed: int, num_stories: int, bar: tqdm) -> None:
    rng = random.Random(f"tinyworld stories {seed}")
    nats: list[float] = []
    with create(directory / "train.jsonl") as train, create(directory / "val.jsonl") as val:
        for _ in range(num_stories):
            story = generate_story(rng)
            file = train
            if is_val(story.text):
                file = val
                nats.append(-story.log_prob)
            file.write(json.dumps({"text": story.text}) + "\n")
            bar.update()
    write_json(directory / "floor.json", {"val_nats": math.fsum(nats), "val_stories": len(nats)})


def write_chats(
    directory: Path,
    generate: Callable[[random.Random, str], Chat],
    seed: int,
    num_chats: int,
    bar: tqdm,
) -> None:
    rng = random.Random(f"tinyworld chats {seed}")
    with create(directory / "train.jsonl") as train, create(directory / "val.jsonl") as val:
        for i in range(1, num_chats + 1):
            split, file = ("train", train) if i % CHAT_VAL_EVERY else ("val", val)
            file.write(json.dumps({"messages": generate(rng, split)}) + "\n")
            bar.update()


def create(path: Path) -> TextIO:
    return open(path, "x", encoding="utf-8", newline="\n")


def write_json(path: Path, content: dict[str, Any]) -> None:
    with create(path) as file:
        file.write(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.tinyworld", description="Write the tinyworld corpus."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        prepare(arguments.directory, arguments.seed)
    except UserError as error:
        parser.error(str(error))
    for path in sorted(arguments.directory.rglob("*.jsonl")):
        print(f"{path}: {path.read_text(encoding='utf-8').count(chr(10)):,} lines")
    rng = random.Random(arguments.seed)
    print("\n" + generate_story(rng).text + "\n")
    for message in generate_chat(rng, "val"):
        print(f"{message['role']}: {message['content']}")


if __name__ == "__main__":
    main()
