"""Text to ids and back, documents and chats, for every tokenizer that the project reads.

Read in this order: `Tokenizer` (what the rest of the project calls), `ChatStyle` (how a chat
becomes ids, and which of them are supervised), then the border: `_read_tokenizer_json` turns a
Hugging Face `tokenizer.json` into a `tiktoken.Encoding`, `_write_tokenizer_json` goes back.

Text that spells a special token stays text; only added tokens that are not special (`<think>`,
`<tool_call>` of MiniMind and Qwen3) are recognised in it, as transformers does with
`split_special_tokens=True` (tokenizers: `encode_special_tokens=True`).
"""

import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from config import UserError
from data.template import Template, to_json
from files import read_file, read_json, shown

END_OF_TEXT, BEGIN, CHAT_START, CHAT_END = "<|endoftext|>", "<|bos|>", "<|im_start|>", "<|im_end|>"
OWN_SPECIALS = [END_OF_TEXT, BEGIN, CHAT_START, CHAT_END]  # ids 0 to 3 of the tokenizers made here

# Plain ChatML: how chats are written with a tokenizer that has the two chat tokens but no template
# of its own, which ours get with their first chats.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# How Qwen3's and MiniMind-3's templates tell the model of its tools, behind the system message.
TOOLS_BEGIN = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_END = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

# The pattern behind `ByteLevel(use_regex=True)`: GPT-2's.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The patterns that a tokenizer.json may name. A stranger's own could be one that takes hours for a
# line; and what `data.dataset` knows of where a long text may be cut is known of these.
PATTERNS = {
    "GPT-2": GPT2_PATTERN,
    "GPT-2 as released": (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ),
    "r50k_base": (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    ),
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k_base": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Qwen3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
LARGEST_TOKENIZER = 40 << 20  # bytes of a tokenizer.json; Qwen3's has 11 million, gpt-oss's 28
MOST_LISTS = 1 << 20  # [ and { in it; one for each merge, of which gpt-oss has 446,000

# The regex engine gives up inside a run of about a million white-space characters.
LONGEST_SPACE_RUN = 100_000


class Tokenizer:
    """A byte-level BPE with its special tokens and its way of writing chats.

    encoding       the `tiktoken.Encoding` that does the work
    vocab_size     the largest id + 1 (an embedding may be padded beyond it)
    bos_token_id   None where the tokenizer has no bos; then none is added anywhere
    eos_token_id   ends a document
    pad_token_id   fills a batch; may equal eos, since padding is known by length
    stop_ids       the ids at which generation ends: eos, and <|im_end|> where there is one
    unused_ids     ids below vocab_size that stand for nothing; never sampled

    Make one with `Tokenizer.load` or `Tokenizer.train`. It can be pickled, for worker processes.
    """

    def __init__(self, encoding, *, special, plain_added, normalize, bos, eos, pad, files):
        """
        encoding     tiktoken.Encoding whose special tokens are all added tokens, `<think>` too
        special      names that text can never become
        plain_added  names of added tokens that are recognised in text
        normalize    True: text is brought to Unicode NFC first
        bos, eos, pad  names of tokens (bos may be None)
        files        (tokenizer.json, tokenizer_config.json) as dicts; the first None if unknown
        """
        ids = encoding._special_tokens
        for role, name in (("bos_token", bos), ("eos_token", eos), ("pad_token", pad)):
            if name is not None and name not in ids:
                raise UserError(
                    f"{encoding.name}: its {role} {shown(name)} is not among its tokens."
                )
        self.encoding = encoding
        self.vocab_size = encoding.max_token_value + 1
        self.bos_token_id = None if bos is None else ids[bos]
        self.eos_token_id = ids[eos]
        self.pad_token_id = ids[pad]
        self.plain_added = frozenset(plain_added)
        self.normalize = normalize
        self._files = files

        self._bytes = [b""] * self.vocab_size  # id -> what it decodes to
        for piece, i in encoding._mergeable_ranks.items():
            self._bytes[i] = piece
        for name, i in ids.items():
            self._bytes[i] = name.encode()
        self.special_ids = frozenset(ids[name] for name in special)
        self.unused_ids = [i for i, piece in enumerate(self._bytes) if not piece]

        self.stop_ids = [self.eos_token_id]
        if CHAT_END in ids and ids[CHAT_END] != self.eos_token_id:
            self.stop_ids.append(ids[CHAT_END])
        self.chat_style = None  # None: this tokenizer writes no chats
        if CHAT_START in ids and CHAT_END in ids:
            template = files[1].get("chat_template", CHATML_TEMPLATE)
            self.chat_style = ChatStyle.of_template(template, bos, encoding.name)

    # ----- making one ---------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path) -> "Tokenizer":
        """Reads a tokenizer: a directory that holds tokenizer.json, such a file itself, "bytes",
        or a name of tiktoken's ("gpt2", "cl100k_base", ...).

        Beside `x_tokenizer.json` lies `x_tokenizer_config.json`, which names bos, eos, pad and the
        chat template. UserError where there is no such tokenizer, or none that we can follow.
        """
        path = Path(name_or_path)
        if os.path.isdir(path):  # unlike Path's, this bears names that no file can have
            path = path / "tokenizer.json"
            if not path.is_file():
                raise UserError(f"{path.parent} holds no tokenizer.json.")
        if os.path.isfile(path):
            return _read_tokenizer_json(path)
        if str(name_or_path) == "bytes":
            return cls._own(alphabet=_BYTE_TO_CHARACTER, merges=[])
        if str(name_or_path) in tiktoken.list_encoding_names():
            return _from_tiktoken(str(name_or_path))
        raise UserError(
            f"No tokenizer {str(name_or_path)!r}: it is neither a directory with a tokenizer.json "
            "nor such a file, nor one of bytes, " + ", ".join(tiktoken.list_encoding_names()) + "."
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, progress: bool = True) -> "Tokenizer":
        """Learns a byte-level BPE of vocab_size ids (special tokens and bytes included) from texts.

        Reads `texts` once; memory holds the distinct words, not the text. Fewer ids come out where
        the text offers fewer merges. The same texts give the same tokenizer.
        """
        from tokenizers import Tokenizer as Trainee
        from tokenizers import models, pre_tokenizers, trainers

        smallest = len(OWN_SPECIALS) + 256
        if vocab_size < smallest:
            raise UserError(
                f"vocab_size ({vocab_size}) must be at least {smallest}: "
                f"{len(OWN_SPECIALS)} special tokens and 256 bytes."
            )
        trainee = Trainee(models.BPE())
        trainee.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                # the time is the square of a word's length
                pre_tokenizers.FixedLength(length=1000),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=OWN_SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with tqdm(
            desc="training the tokenizer",
            unit=" chars",
            unit_scale=True,
            disable=not progress,
            leave=False,
        ) as bar:
            trainee.train_from_iterator(_counted(texts, bar), trainer)
        model = json.loads(trainee.to_str())["model"]
        alphabet = sorted(_BYTE_TO_CHARACTER, key=model["vocab"].get)
        return cls._own(alphabet, [tuple(pair) for pair in model["merges"]])

    @classmethod
    def _own(cls, alphabet: Iterable[str], merges: list[tuple[str, str]]) -> "Tokenizer":
        """A tokenizer of ours: the special tokens, the 256 bytes, then one id per merge."""
        vocab = {name: i for i, name in enumerate([*OWN_SPECIALS, *alphabet])}
        kept = []
        for left, right in merges:  # the trainer may list two ways to make one token; one is enough
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                kept.append((left, right))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000_000,
        }
        added = {name: (i, True) for i, name in enumerate(OWN_SPECIALS)}
        content = _write_tokenizer_json(vocab, kept, added, pattern=None)
        return _from_files(content, config, "a tokenizer of ours")

    # ----- text ---------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of text. No special token can come out of it, whatever it spells."""
        if self.normalize:
            text = self._to_nfc(text)
        return self._encode(text, self.plain_added)

    def encode_prompt(self, text: str) -> list[int]:
        """[bos] tokens: the beginning of a document, for the model to go on."""
        bos = [] if self.bos_token_id is None else [self.bos_token_id]
        return bos + self.encode(text)

    def encode_document(self, text: str) -> list[int]:
        """[bos] tokens eos."""
        return [*self.encode_prompt(text), self.eos_token_id]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of ids; half a character at either end becomes U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The bytes of ids: a special token gives its name (nothing with skip_special), an id that
        the tokenizer does not know gives nothing."""
        known = (i for i in map(int, ids) if 0 <= i < self.vocab_size)
        if skip_special:
            known = (i for i in known if i not in self.special_ids)
        return b"".join(self._bytes[i] for i in known)

    def _encode(self, text: str, allowed: frozenset[str]) -> list[int]:
        try:
            return self.encoding.encode(text, allowed_special=allowed, disallowed_special=())
        except ValueError:
            # Only white space in runs of a million does this. Cut the runs: such text costs a few
            # ids more than in the `tokenizers` library, and still decodes to itself.
            parts = re.findall(rf"\s{{1,{LONGEST_SPACE_RUN}}}|\S+", text)
            return list(
                itertools.chain.from_iterable(
                    self.encoding.encode(part, allowed_special=allowed, disallowed_special=())
                    for part in parts
                )
            )

    def _to_nfc(self, text: str) -> str:
        """NFC of all but the added tokens: a combining mark behind `<think>` must not eat its >."""
        if unicodedata.is_normalized("NFC", text):
            return text
        if not self.plain_added:
            return unicodedata.normalize("NFC", text)
        parts = re.split("(" + "|".join(map(re.escape, sorted(self.plain_added))) + ")", text)
        return "".join(
            p if p in self.plain_added else unicodedata.normalize("NFC", p) for p in parts
        )

    @cached_property
    def byte_counts(self) -> np.ndarray:
        """(vocab_size,) int64: the bytes of text that each id stands for; 0 for special tokens."""
        counts = np.array([len(piece) for piece in self._bytes], np.int64)
        counts[list(self.special_ids)] = 0
        return counts

    # ----- chats --------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        """Whether its files say how chats are written. A base model's do not."""
        return "chat_template" in self._files[1]

    def learn_chats(self) -> None:
        """From now on a chat model's: its files get our ChatML template if they have none."""
        self._files[1].setdefault("chat_template", CHATML_TEMPLATE)

    def render_chat(
        self, messages: list[dict], add_generation_prompt: bool = False
    ) -> tuple[list[int], list[bool]]:
        """The ids of a chat and, for each, whether it is supervised; lists of the same length.

        messages: [{"role": "system" | "user" | "assistant" | "tool", "content": str}]. Where the
        template has a place for them (UserError where not), an assistant's message may carry
        "reasoning_content" (str) and "tool_calls" ([{"name", "arguments"}]), and the first, the
        system's, may carry "tools" (a list); its content is None where it has only these.

        Supervised is what the model would have to write behind the generation prompt: the
        assistant's content and the <|im_end|> behind it.

        The ids are those of transformers' `apply_chat_template(messages, enable_thinking=False)`,
        with two exceptions. Contents that spell a special token stay text. And the prompt of an
        assistant's turn is encoded apart from the answer, since that is what generation sees: what
        begins with white space (such an answer, or the end of an open block without reasoning) may
        split from the line break before it otherwise than in transformers. With Qwen3's pattern
        "\\n" + "\\nHi" is two tokens here and one there; with GPT-2's, "\\n" + "  Hi" differs.
        """
        if self.chat_style is None:
            raise UserError(
                f"The tokenizer {self.encoding.name} has no {CHAT_START} and {CHAT_END}, so it "
                "cannot write chats. Use one that has them, or train on text."
            )
        ids, supervised = [], []
        for piece in self.chat_style.pieces(messages, add_generation_prompt):
            if piece.name is None:
                new = self.encode(piece.text)
            elif piece.name == "bos":
                new = [self.bos_token_id]
            else:
                new = [self.encoding._special_tokens[piece.name]]
            ids += new
            supervised += [piece.supervised] * len(new)
        return ids, supervised

    # ----- files and identity -------------------------------------------------------------------

    def save(self, directory) -> None:
        """Writes tokenizer.json and tokenizer_config.json (with the chat template) as transformers
        reads them; a tokenizer that came from such files is written as it was."""
        content, config = self._files
        if content is None:
            content = _content_of_encoding(self.encoding)
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in (("tokenizer.json", content), ("tokenizer_config.json", config)):
            text = json.dumps(value, ensure_ascii=False, indent=2)
            (directory / name).write_text(text, encoding="utf-8", newline="\n")

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever any text, document or chat could get other ids."""
        parts = hashlib.sha256()
        for piece, i in sorted(self.encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            parts.update(b"%d:%s\n" % (i, piece.hex().encode()))
        settings = [
            self.encoding._pat_str,
            sorted(self.encoding._special_tokens.items()),
            sorted(self.plain_added),
            sorted(self.special_ids),
            self.normalize,
            [self.bos_token_id, self.eos_token_id, self.pad_token_id],
            self.chat_style and asdict(self.chat_style),
        ]
        parts.update(json.dumps(settings).encode())
        return parts.hexdigest()


def _counted(texts: Iterable[str], bar) -> Iterator[str]:
    for text in texts:
        bar.update(len(text))
        yield text


# ----- chats ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A stretch of a chat: a special token by name ("bos" for the bos), or text that is encoded as
    one string."""

    text: str
    supervised: bool = False
    name: str | None = None


@dataclass(frozen=True)
class ChatStyle:
    """What may differ between ChatML templates: a `<think>` block opening the assistant's turn.

    prompt   what a generation prompt holds: "none", "empty" (`<think>\\n\\n</think>\\n\\n`) or
             "open" (`<think>\\n`, the model goes on reasoning)
    last     whether what the assistant says to the last user's turn is written with a block: its
             last message is, the ones before it only with reasoning in them
    always   whether every assistant's message is
    splits   whether `</think>` in an answer parts reasoning from content
    begins   whether the chat begins with the bos
    tools    whether tools, calls of them and their answers are written, as Qwen3 does

    Qwen3's template thinks or not by `enable_thinking`; this project reads it with False, which is
    how it trains on answers without reasoning, so its prompt is "empty" there. Where the block is
    empty and stands in the generation prompt it is prompt; whatever a generation prompt does not
    give, the model must write, and it is supervised.
    """

    prompt: str = "none"
    last: bool = False
    always: bool = False
    splits: bool = False
    begins: bool = False
    tools: bool = False

    def pieces(self, messages: list[dict], add_generation_prompt: bool) -> Iterator[Piece]:
        """The chat in order. Joined, their texts are what the checkpoint's template writes."""
        if self.begins:
            yield Piece("", name="bos")
        last_query = _last_query(messages)
        for i, message in enumerate(messages):
            if message["role"] == "tool" and i and messages[i - 1]["role"] == "tool":
                continue  # the answers of tools in a row are one turn, written at its first
            yield Piece(CHAT_START, name=CHAT_START)
            if message["role"] == "assistant":
                is_final = i == len(messages) - 1
                prompt, answer = self._assistant_turn(message, i > last_query, is_final)
                yield Piece("assistant\n" + prompt)
                yield Piece(answer, supervised=True)
                yield Piece(CHAT_END, supervised=True, name=CHAT_END)
            else:
                yield Piece(self._other_turn(messages, i))
                yield Piece(CHAT_END, name=CHAT_END)
            yield Piece("\n")
        if add_generation_prompt:
            block = {"none": "", "empty": "<think>\n\n</think>\n\n", "open": "<think>\n"}
            yield Piece(CHAT_START, name=CHAT_START)
            yield Piece("assistant\n" + block[self.prompt])

    def _other_turn(self, messages: list[dict], i: int) -> str:
        """What stands in message i, which is not the assistant's."""
        message = messages[i]
        if message["role"] == "tool":
            self._needs_tools("a message of the role 'tool'")
            group = itertools.takewhile(lambda m: m["role"] == "tool", messages[i:])
            answers = (f"\n<tool_response>\n{m['content']}\n</tool_response>" for m in group)
            return "user" + "".join(answers)
        if not message.get("tools"):
            return message["role"] + "\n" + message["content"]
        self._needs_tools("tools")
        content = "" if message["content"] is None else message["content"] + "\n\n"
        tools = "".join("\n" + to_json(tool) for tool in message["tools"])
        return message["role"] + "\n" + content + TOOLS_BEGIN + tools + TOOLS_END

    def _needs_tools(self, what: str) -> None:
        if not self.tools:
            raise UserError(
                f"this tokenizer's chat template has no place for {what}. Use the tokenizer of a "
                "model that has tools, as MiniMind-3, or leave such chats out."
            )

    def _assistant_turn(self, message: dict, is_new: bool, is_final: bool) -> tuple[str, str]:
        """(what belongs to the prompt behind "assistant\\n", what the model must write).

        is_new: no question of the user follows; is_final: nothing at all follows.
        """
        content, reasoning = message["content"], message.get("reasoning_content")
        if not self.splits:
            if reasoning:
                raise UserError(
                    "field 'reasoning_content': this tokenizer's chat template has no place for "
                    "it. Use the tokenizer of a model with <think> blocks, or remove the field."
                )
            reasoning = ""
        elif reasoning is None and "</think>" in content:
            before, _, _ = content.partition("</think>")
            reasoning = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
        calls = self._calls(message.get("tool_calls"), after_content=bool(content))
        if not (self.always or (self.last and is_new and (is_final or reasoning))):
            return "", content + calls
        answer = content.lstrip("\n") + calls
        reasoning = (reasoning or "").strip("\n")
        if self.prompt == "empty" and not reasoning:
            return "<think>\n\n</think>\n\n", answer
        if self.prompt == "none":
            return "", f"<think>\n{reasoning}\n</think>\n\n{answer}"
        return "<think>\n", f"{reasoning}\n</think>\n\n{answer}"

    def _calls(self, calls: list[dict] | None, after_content: bool) -> str:
        """The assistant's calls of tools, each on lines of its own."""
        if not calls:
            return ""
        self._needs_tools("tool calls")
        written = []
        for call in calls:
            arguments = call["arguments"]
            if not isinstance(arguments, str):
                arguments = to_json(arguments)
            name = call["name"]
            written.append(
                f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            )
        return "\n" * after_content + "\n".join(written)

    def text(self, messages: list[dict], add_generation_prompt: bool, bos: str | None) -> str:
        """The chat as one string."""
        pieces = self.pieces(messages, add_generation_prompt)
        return "".join((bos or "") if piece.name == "bos" else piece.text for piece in pieces)

    @classmethod
    def of_template(cls, template, bos: str | None, name: str) -> "ChatStyle":
        """The style that writes what a chat template (Jinja) writes, found by trying them all on a
        few chats; UserError where none does, because the template is not ChatML."""
        if isinstance(template, list):  # several named templates
            named = [entry for entry in template if isinstance(entry, dict)]
            default = (e.get("template") for e in named if e.get("name") == "default")
            template = next(default, None)
        if not isinstance(template, str):
            raise UserError(f"{name}: its chat template is not text, but {shown(template)}.")
        if template == CHATML_TEMPLATE:
            return cls()
        user = {"role": "user", "content": "Why?"}
        assistant = {"role": "assistant", "content": "So."}
        thoughtful = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."}
        opening = [{"role": "system", "content": "Be brief."}, user]
        probes = [
            ([user, assistant], False),
            ([*opening, assistant, user, assistant], False),
            ([user, thoughtful, user, thoughtful], False),
            (opening, True),
            ([user, assistant, user], True),
        ]
        try:
            theirs = Template(template)
            expected = [theirs.render(chat, prompted, bos) for chat, prompted in probes]
        except Exception as error:  # a template is a program of somebody else: anything may happen
            problem = str(error)[:200] or type(error).__name__
            raise UserError(f"{name}: its chat template cannot be rendered: {problem}") from error
        switches = itertools.product((False, True), repeat=4)
        for prompt, flags in itertools.product(("none", "empty", "open"), switches):
            style = cls(prompt, *flags)
            if style.begins and bos is None:
                continue
            if [style.text(chat, prompted, bos) for chat, prompted in probes] == expected:
                return style._with_tools(theirs, bos)
        raise UserError(
            f"{name}: its chat template is not ChatML (<|im_start|>role, line break, content, "
            f"<|im_end|>). For a short chat it writes {shown(expected[0])}. Train on text with "
            "this tokenizer, or replace the template."
        )

    def _with_tools(self, theirs: Template, bos: str | None) -> "ChatStyle":
        """This style, with tools if the template writes them as Qwen3's does."""
        style = replace(self, tools=True)
        call = {"name": "f", "arguments": {"a": ["é", 1]}}
        chat: list[dict] = [
            {"role": "system", "content": "Be brief.", "tools": [{"name": "f"}, {"name": "g"}]},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "See:", "tool_calls": [call, call]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "g", "arguments": "{}"}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "So."},
        ]
        bare = [{**chat[0], "content": None}, *chat[1:]]
        try:
            same = all(
                style.text(messages, False, bos) == theirs.render(messages, False, bos)
                for messages in (chat, bare)
            )
        except Exception:  # what a template does with messages that it does not know
            same = False
        return style if same else self


def _last_query(messages: list[dict]) -> int:
    """The place of the last message that the user wrote; tools answer in the user's name too."""
    for i in reversed(range(len(messages))):
        content = messages[i]["content"]
        if messages[i]["role"] == "user" and not (
            content.startswith("<tool_response>") and content.endswith("</tool_response>")
        ):
            return i
    return len(messages) - 1


# ----- the border: tokenizer.json <-> tiktoken ----------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: each byte as one printable character, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {table[byte]: byte for byte in range(256)}


_BYTE_TO_CHARACTER = _byte_alphabet()  # character -> byte, in byte order
_CHARACTER_OF = {byte: character for character, byte in _BYTE_TO_CHARACTER.items()}


def _read_tokenizer_json(path: Path) -> Tokenizer:
    config_name = path.name.removesuffix("tokenizer.json") + "tokenizer_config.json"
    template_path = path.with_name("chat_template.jinja")
    try:
        text = read_file(path.parent, path.name, LARGEST_TOKENIZER)
        if text.count(b"[") + text.count(b"{") > MOST_LISTS:  # read, each takes a hundred bytes
            raise ValueError(f"{path} holds more than {MOST_LISTS:,} lists and objects")
        content = read_json(path.parent, path.name, LARGEST_TOKENIZER)
        has_config = path.with_name(config_name).is_file()
        config = read_json(path.parent, config_name) if has_config else {}
        if template_path.is_file():
            template = read_file(path.parent, template_path.name).decode("utf-8")
            config["chat_template"] = template.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{template_path} is not UTF-8 (byte {error.start}).") from error
    except ValueError as error:
        raise UserError(f"{error}.") from error
    return _from_files(content, config, str(path))


def _from_files(content: dict, config: dict, name: str) -> Tokenizer:
    """The one way from a Hugging Face tokenizer to ours; refuses by name what tiktoken cannot do
    exactly."""
    if config.get("chat_template", "") is None:
        del config["chat_template"]
    try:
        pattern = _pattern_of(content.get("pre_tokenizer"), name)
        normalize = _normalizes(content.get("normalizer"), name)
        added = _added_tokens(content, name)
        ranks = _ranks_of(content["model"], added, name)
        bos, eos, pad = (_token_name(config, f"{role}_token", name) for role in TOKEN_ROLES)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name} is not a tokenizer.json as Hugging Face writes it.") from error
    if eos is None and not config and END_OF_TEXT in added:
        eos = END_OF_TEXT  # a bare tokenizer.json does not say
    if eos is None:
        raise UserError(f"{name}: no eos_token. Name it in the tokenizer_config.json beside it.")
    try:
        encoding = tiktoken.Encoding(
            name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={token: i for token, (i, _) in added.items()},
        )
    except ValueError as error:
        raise UserError(f"{name}: tiktoken cannot work with it: {error}.") from error
    # What gives chats and documents their form never comes out of text, whatever the file says.
    form = {CHAT_START, CHAT_END, bos, eos, pad}
    special = [token for token, (_, special) in added.items() if special or token in form]
    return Tokenizer(
        encoding,
        special=special,
        plain_added=added.keys() - special,
        normalize=normalize,
        bos=bos,
        eos=eos,
        pad=pad or eos,
        files=(content, config),
    )


TOKEN_ROLES = ("bos", "eos", "pad")


def _token_name(config: dict, role: str, name: str) -> str | None:
    value = config.get(role)
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str | None):
        raise UserError(f"{name}: its {role} is not text, but {shown(value)}.")
    return value


def _pattern_of(pre_tokenizer, name: str) -> str:
    """The regex that cuts text into words."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get(
            "use_regex", True
        ):
            return GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", **split},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if not split.get("invert") and pattern in PATTERNS.values():
            return pattern
    raise UserError(
        f"{name}: its pre-tokenizer is not supported ({json.dumps(pre_tokenizer)[:200]}). "
        "Supported: ByteLevel, or Split followed by ByteLevel, without a prefix space; Split by "
        f"the regex of {', '.join(PATTERNS)}."
    )


def _normalizes(normalizer, name: str) -> bool:
    if normalizer is None:
        return False
    if normalizer.get("type") == "NFC":
        return True
    raise UserError(
        f"{name}: its normalizer {shown(normalizer.get('type'))} is not supported, only NFC."
    )


def _added_tokens(content: dict, name: str) -> dict[str, tuple[int, bool]]:
    """name -> (id, special)."""
    added = {}
    for token in content.get("added_tokens", []):
        for option in ("single_word", "lstrip", "rstrip"):
            if token.get(option):
                raise UserError(
                    f"{name}: added token {shown(token['content'])} with {option}=true."
                )
        text = token["content"]
        if not isinstance(text, str) or not text:
            raise UserError(f"{name}: its added token {shown(text)} is not text.")
        added[text] = (token["id"], token["special"] is True)
    return added


def _ranks_of(model: dict, added: dict, name: str) -> dict[bytes, int]:
    """bytes -> id for all but the added tokens, where the ids are also the order of the merges, as
    tiktoken has it; UserError where they are not."""
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise UserError(f"{name}: its model is not a byte-level BPE, the only kind supported.")
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise UserError(f"{name}: {option} ({shown(model[option])}) is not supported.")
    vocab = model["vocab"]
    ordinary = {token: i for token, i in vocab.items() if token not in added}
    _check_ids([*ordinary.values(), *(i for i, _ in added.values())], name)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    made = [vocab[left + right] for left, right in merges]
    if any(later <= earlier for earlier, later in itertools.pairwise(made)):
        raise UserError(f"{name}: its merges do not stand in the order of their ids.")
    missing = [byte for character, byte in _BYTE_TO_CHARACTER.items() if character not in ordinary]
    if missing:
        raise UserError(
            f"{name}: it has no token for byte 0x{missing[0]:02x}, so it cannot read all text."
        )
    orphans = set(ordinary.values()) - set(made) - {vocab[c] for c in _BYTE_TO_CHARACTER}
    if orphans:
        token = next(token for token, i in ordinary.items() if i in orphans)
        raise UserError(f"{name}: no merge makes its token {shown(token)} ({len(orphans)} such).")
    return {bytes(_BYTE_TO_CHARACTER[c] for c in token): i for token, i in ordinary.items()}


def _check_ids(ids: list[int], name: str) -> None:
    """Ids are 0, 1, 2, ... with few holes: tables are made that reach to the largest."""
    wrong = [i for i in ids if type(i) is not int or i < 0]
    if wrong:
        raise UserError(f"{name}: {shown(wrong[0])} is not an id.")
    if len(set(ids)) < len(ids):
        raise UserError(f"{name}: two of its tokens have the same id.")
    if ids and max(ids) > 2 * len(ids) + 1000:
        raise UserError(f"{name}: it has an id {shown(max(ids))}, but only {len(ids)} tokens.")


def _write_tokenizer_json(vocab: dict, merges: list, added: dict, pattern: str | None) -> dict:
    """The content of a tokenizer.json; pattern None means GPT-2's, which ByteLevel has built in."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if pattern is None:
        pre_tokenizer = {**byte_level, "use_regex": True}
    else:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        pre_tokenizer = {
            "type": "Sequence",
            "pretokenizers": [{**split, "invert": False}, {**byte_level, "use_regex": False}],
        }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": special}
            for token, (i, special) in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def _from_tiktoken(name: str) -> Tokenizer:
    """One of tiktoken's own encodings, which it downloads once."""
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # requests, ssl, hash mismatch: all mean that the file is not there
        raise UserError(
            f"The tokenizer {name!r} is not on this machine and could not be downloaded "
            f"({type(error).__name__}). Set TIKTOKEN_CACHE_DIR to a directory that holds it, or "
            "give a local tokenizer.json."
        ) from error
    if END_OF_TEXT not in encoding._special_tokens:
        raise UserError(f"The tokenizer {name!r} has no {END_OF_TEXT} to end documents with.")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {role: END_OF_TEXT for role in ("bos_token", "eos_token", "pad_token")}
    return Tokenizer(
        encoding,
        special=encoding.special_tokens_set,
        plain_added=[],
        normalize=False,
        bos=END_OF_TEXT,  # GPT-2 saw the end of the document before, so that begins one too
        eos=END_OF_TEXT,
        pad=END_OF_TEXT,
        files=(None, config),
    )


def _content_of_encoding(encoding: tiktoken.Encoding) -> dict:
    """The tokenizer.json of a tiktoken encoding: the merge behind each token is the pair that the
    earlier merges leave of it."""
    ranks = encoding._mergeable_ranks
    spelled = {i: "".join(_CHARACTER_OF[byte] for byte in piece) for piece, i in ranks.items()}
    merges = []
    for piece, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(piece) > 1:
            parts = _merge_below(piece, ranks, rank)
            merges.append(tuple(spelled[ranks[part]] for part in parts))
    added = {token: (i, True) for token, i in encoding._special_tokens.items()}
    vocab = {token: i for i, token in spelled.items()} | {t: i for t, (i, _) in added.items()}
    is_gpt2 = encoding.name in ("gpt2", "r50k_base")
    pattern = None if is_gpt2 else encoding._pat_str
    return _write_tokenizer_json(vocab, merges, added, pattern)


def _merge_below(piece: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """The parts of piece after all merges of a rank below limit."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [ranks.get(a + b, limit) for a, b in itertools.pairwise(parts)]
        if not pairs or min(pairs) >= limit:
            return parts
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
