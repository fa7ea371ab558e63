"""Conversation: what `python sample.py --chat` does around a Writer (sample.py).

Chat keeps the messages and the cache and computes only what is new; chat_ids turns the messages
into ids; talk reads lines and carries out commands.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from config import UserError
from data.sources import RowError, parse
from data.tokenizer import Tokenizer
from kv_cache import KVCache

if TYPE_CHECKING:
    from sample import Writer

HELP = """\
/reset          forget the conversation, all but the system message
/system TEXT    set the system message; without TEXT there is none
/retry          answer the last message again
/save FILE      append the conversation to FILE, as a row of JSONL that train.py reads
/quit           end (so does Ctrl-D); Ctrl-C stops an answer
A line that ends in \\ goes on in the next."""


class Chat:
    """A conversation. The cache stays from turn to turn; `cached` says which ids it holds.

    Before each answer the chat is written as ids anew, and the cache is kept as far as the two
    agree. So a turn computes what is new; /retry the last token of the prompt; and /reset, /system
    or the loss of the oldest turn all that follows the change. One rule for all of them.
    """

    def __init__(self, writer: "Writer"):
        self.writer = writer
        self.messages: list[dict] = []
        self.cache: KVCache | None = None
        self.cached: list[int] = []
        self.prefilled = 0  # tokens that the last answer had to compute before its first
        self.answers = 0  # each has its own seed, so that another try is another answer

    def answer(self) -> str:
        """Answer the last message, print the answer and add it; returns a sentence on the speed.

        Raises UserError where the last message alone is longer than the context.
        """
        prompt = self.fit_context()
        shared = len(os.path.commonprefix([self.cached, prompt[:-1]]))
        self.prefilled = len(prompt) - shared
        self.cached = self.cached[:shared]
        self.cache = self.writer.prepare_cache(self.cache, shared, len(prompt))
        seed = self.writer.config.seed + self.answers
        self.answers += 1
        (answer,), report = self.writer.write([prompt], seed, leads=[""], cache=self.cache)
        if answer.ids:
            self.cached = prompt + answer.ids[:-1]  # the last one was not fed back
        ids = [id for id in answer.ids if id not in self.writer.stop_ids]
        self.messages.append({"role": "assistant", "content": answer.text, "ids": ids})
        return report

    def fit_context(self) -> list[int]:
        """The chat as ids; while it leaves too little room for an answer, its oldest turn goes."""
        limit = self.writer.model.config.max_position_embeddings
        room = min(self.writer.config.max_new_tokens, limit // 4)
        kept, dropped = list(self.messages), 0
        while len(ids := chat_ids(self.writer.tokenizer, kept)) > limit - room:
            users = [i for i, message in enumerate(kept) if message["role"] == "user"]
            if len(users) == 1:
                break
            del kept[users[0] : users[1]]  # a user's message and its answer
            dropped += 1
        if len(ids) > limit:
            raise UserError(f"this makes {len(ids)} tokens, but the model's context is {limit}")
        if dropped:
            turns = "turn has" if dropped == 1 else f"{dropped} turns have"
            note(f"the context of {limit} tokens is full: the oldest {turns} left")
            self.messages = kept
        return ids

    def command(self, line: str) -> bool:
        """Carry out a command; True if the last message is to be answered now."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        has_system = bool(self.messages) and self.messages[0]["role"] == "system"
        system, turns = self.messages[:has_system], self.messages[has_system:]
        if name == "/reset":
            self.messages = system
            note("the conversation starts anew")
        elif name == "/system":
            system = [{"role": "system", "content": argument}] if argument else []
            self.messages = system + turns
            note("the system message is set" if argument else "there is no system message now")
        elif name == "/retry" and turns:
            turns.pop()
            self.messages = system + turns
            return True
        elif name == "/retry":
            note("there is no answer to try again")
        elif name == "/save":
            self.save(argument)
        elif name == "/help":
            note(HELP)
        else:
            note(f"there is no {name}; /help lists the commands")
        return False

    def save(self, file: str) -> None:
        """Append the conversation to a file, without questions that got an empty answer."""
        messages: list[dict] = []
        for message in self.messages:
            messages.append({name: message[name] for name in ("role", "content")})
            if not message["content"].strip():
                del messages[-2:]
        left_out = len(self.messages) - len(messages)
        try:
            parse({"messages": messages})
            append_line(file, json.dumps({"messages": messages}, ensure_ascii=False))
        except RowError as error:
            note(f"there is nothing to /save that train.py would read ({error})")
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            note(f"/save needs a file that can be written, not {file!r} ({error})")
        else:
            empty = f", all but {left_out // 2} empty answers" if left_out else ""
            note(f"the conversation is in {file}{empty}")


def append_line(file: str, line: str) -> None:
    """Add a line to a file; where that fails, OSError, and the file is as it was."""
    length = os.path.getsize(file) if os.path.isfile(file) else 0
    try:
        with open(file, "ab+") as out:
            out.seek(max(0, length - 1))
            gap = "" if out.read(1) in (b"", b"\n") else "\n"
            out.write(f"{gap}{line}\n".encode())
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(file, length)
        raise


def chat_ids(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """The chat as ids, up to where the model answers.

    An earlier answer keeps the ids that it was written with ("ids" of its message): its text,
    encoded again, could be cut into other tokens, and the cache would no longer be right. Where the
    template writes another text (some leave out earlier reasoning), the template counts.
    """
    ids, supervised = tokenizer.render_chat(messages, add_generation_prompt=True)
    answers = (message for message in messages if message["role"] == "assistant")
    chat: list[int] = []
    for is_answer, places in itertools.groupby(range(len(ids)), lambda place: supervised[place]):
        run = [ids[place] for place in places]  # of an answer: its content and the end of its turn
        if is_answer:
            written = next(answers)["ids"]
            if tokenizer.decode(written) == tokenizer.decode(run[:-1]):
                run = written + run[-1:]
        chat += run
    return chat


def talk(writer: "Writer", first: str | None) -> None:
    """Answer `first` (None: nothing) and then each line, until there is none or /quit."""
    chat = Chat(writer)
    lines = itertools.chain([] if first is None else [first], read_lines())
    for line in lines:
        if not line.strip():
            continue
        if line.split()[0] == "/quit":
            return
        if line.startswith("/"):
            if not chat.command(line):
                continue
        else:
            chat.messages.append({"role": "user", "content": line})
        try:
            report = chat.answer()
        except UserError as error:
            chat.messages.pop()
            note(f"{error}; the message is not part of the conversation")
            continue
        print(flush=True)
        note(report)


def read_lines() -> Iterator[str]:
    """What the person types, with line editing, or pipes in. Ctrl-C at the prompt ends nothing."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # there is none on Windows
            import readline  # noqa: F401  input() then has editing and a history
    line = ""
    while True:
        try:
            line += input(("  " if line else "> ") if terminal else "")
        except EOFError:
            if line:
                yield line
            return
        except KeyboardInterrupt:
            note("\n/quit ends the chat")
            line = ""
            continue
        if line.endswith("\\"):
            line = line[:-1] + "\n"
        else:
            yield line
            line = ""


def note(text: str) -> None:
    """What is not the model's text goes to stderr."""
    print(text, file=sys.stderr, flush=True)
