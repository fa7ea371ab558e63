"""Files and hub data sets to rows, and a sentence for every row that is not one.

Read in this order: `Row`, `RowError`; `find_sources` (what --data may name); `read_chunks` (a file
cut into stretches of raw items, in bounded memory, one reader per format); `parse` (a raw item to a
row). Reading and parsing are apart so that parsing can run in worker processes.

JSON lines are read here and not by a library, since a reader of ours can name the line, loses
nothing else when one line is broken, and never guesses types (a text that looks like a date stays
text). For the same reason CSV is read by Python's own `csv`. Parquet is read by pyarrow; names on
the Hugging Face hub go through `datasets`.

A file may come from anybody, so memory follows from limits here and not from what a file holds: a
gzip of zeros, a line without end or a list of a million empty lists is a sentence. (Parquet is
decoded by pyarrow, which believes what a file says of itself.)
"""

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from config import UserError
from files import is_deeper, is_text

FORMATS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv", ".parquet", ".txt", ".txt.gz")
CHUNK_BYTES = 1 << 20  # about this much of a file is parsed and tokenised at a time
CHUNK_ROWS = 10_000  # at most, since a row of a few bytes takes hundreds when it is read
LONGEST_LINE = 32 << 20  # bytes; longer ones are files that are not JSON lines
JSON_WINDOW = 2 << 20  # characters of a list in a .json in which an element is looked for at first
MOST_LISTS = 1 << 20  # [ and { in a row, commas in one of CSV: when read, each takes 100 bytes
LARGEST_WHOLE = 1 << 30  # bytes of a .txt or a list in a .json, unpacked; they are read whole
DEEPEST_FIELD = 40  # levels of lists and objects in each other
MEND = "Fix it or pass --on_bad_row=skip."
MEND_FILE = "Fix the file or leave it out."


@dataclass(frozen=True)
class Row:
    """One document or chat.

    kind      what the row looked like in its file, for reports: "instruction/input/output"
    text      the document, or None for a chat
    messages  the chat as `Tokenizer.render_chat` takes it, or None for a document
    unused    names of fields that held something and were not used
    """

    kind: str
    text: str | None = None
    messages: list[dict] | None = None
    unused: tuple[str, ...] = ()

    @property
    def content(self) -> bytes:
        """What makes two rows the same document or chat."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The content in pieces: JSON of a Chinese text takes six bytes a character."""
        if self.messages is not None:
            yield json.dumps(self.messages, sort_keys=True).encode()
            return
        yield b'"'
        for start in range(0, len(self.text), CHUNK_BYTES):
            yield json.dumps(self.text[start : start + CHUNK_BYTES])[1:-1].encode()
        yield b'"'


class RowError(ValueError):
    """A row that cannot be used; the text says what is wrong, without file and line."""


@dataclass(frozen=True)
class Source:
    """A file (path) or a split of a hub data set (its rows)."""

    name: str  # as the person named it, for reports and errors
    path: Path | None = None
    rows: Any = None  # a datasets.Dataset, whose library is imported only for it

    @property
    def size(self) -> int:
        """Bytes of the file, or of the rows in memory maps of the hub's."""
        return self.rows.data.nbytes if self.path is None else self.path.stat().st_size

    @property
    def format(self) -> str:
        if self.path is None:
            return "hub"
        return next(f for f in sorted(FORMATS, key=len, reverse=True) if str(self.path).endswith(f))


@dataclass
class Chunk:
    """A stretch of a source.

    unit     what items are counted in, for errors: "line" or "row"
    items    [(number from 1, raw item)]: bytes (a line of JSON), an object, or a RowError
    whole    the one item is a whole .txt file
    size     bytes of the file that this stretch took, for the progress bar
    """

    name: str
    unit: str
    items: list = field(default_factory=list)
    whole: bool = False
    size: int = 0


def place(name: str, unit: str, number: int) -> str:
    """Where a row stands: "data.jsonl, line 17"; number 0 is the file itself."""
    return f"{name}, {unit} {number}" if number else name


def sentence(chunk: Chunk, number: int, error: ValueError) -> str:
    """The whole message about a bad row, or a bad file (number 0)."""
    text = str(error).removesuffix(".")
    colon = ", " if text.startswith("field ") else ": "
    mend = MEND if number else MEND_FILE
    return f"{place(chunk.name, chunk.unit, number)}{colon}{text}. {mend}"


# ----- what --data may name -----------------------------------------------------------------------


def find_sources(data, val_data=None) -> tuple[list[Source], list[Source]]:
    """(training sources, validation sources); the second is empty where validation has to be split
    off the first.

    data: a file; a directory (its train.* and val.* where it has both, else all its files of a
    known format, at any depth); a glob pattern; or the name of a data set on the hub (its
    `validation` split is the validation data where it has one). val_data: the same, but nothing is
    split. UserError where nothing is found.

    Unlike a model's directory, one of data may hold links to files elsewhere, as large ones often
    are kept: they are read, wherever they lead. So look for links in what a stranger packed.
    """
    if val_data is not None:
        return _sources(data, "data")[0], _all_of(_sources(val_data, "val_data"))
    return _sources(data, "data")


def _all_of(found: tuple[list[Source], list[Source]]) -> list[Source]:
    """What validation data means: the val part where there is one, else everything."""
    train, val = found
    return val or train


def _sources(data, option: str) -> tuple[list[Source], list[Source]]:
    path = Path(data)
    if os.path.isdir(path):  # unlike Path's, this bears names that no file can have
        train, val = (sorted(filter(_known, path.glob(f"{name}.*"))) for name in ("train", "val"))
        if not (train and val):
            train, val = sorted(filter(_known, path.rglob("*"))), []
        if not train:
            raise UserError(f"{path} holds no data file. Known formats: {', '.join(FORMATS)}.")
        return _files(train), _files(val)
    if os.path.isfile(path):
        if not _known(path):
            raise UserError(f"{path}: unknown format. Known formats: {', '.join(FORMATS)}.")
        return _files([path]), []
    if glob.has_magic(str(data)):
        found = sorted(filter(_known, map(Path, glob.glob(str(data), recursive=True))))
        if not found:
            raise UserError(f"No data file matches --{option}={data}.")
        return _files(found), []
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(data)) and not path.name.endswith(FORMATS):
        return _hub_sources(str(data))
    raise UserError(f"No such file or directory: --{option}={data}.")


def _known(path: Path) -> bool:
    """Whether it is a file that can be read; reading a pipe or a device would never end."""
    return path.name.endswith(FORMATS) and os.path.isfile(path)


def _files(paths: list[Path]) -> list[Source]:
    return [Source(str(path), path) for path in paths]


def _hub_sources(name: str) -> tuple[list[Source], list[Source]]:
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # else each retry is announced
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # network, no such name, a private data set, a broken script
        raise UserError(
            f"--data={name} is no file here, and the data set could not be loaded from the Hugging "
            f"Face hub ({type(error).__name__}). Check the name and the network, or give a file."
        ) from error
    if "train" not in splits:
        raise UserError(f"{name} has no split 'train', only {', '.join(splits)}.")
    validation = next((s for s in ("validation", "val") if s in splits), None)
    train = [Source(f"{name}/train", rows=splits["train"])]
    return train, [Source(f"{name}/{validation}", rows=splits[validation])] if validation else []


# ----- files to raw items -------------------------------------------------------------------------


def read_chunks(source: Source) -> Iterator[Chunk]:
    """The raw items of a source in order. What is wrong with the file itself comes as a RowError
    among them; only running out of memory or disk raises."""
    readers = {".jsonl": _read_lines, ".json": _read_json, ".csv": _read_csv}
    readers |= {".parquet": _read_parquet, ".txt": _read_txt, "hub": _read_hub}
    count = 0
    try:
        for chunk in readers[source.format.removesuffix(".gz")](source):
            count += len(chunk.items)
            yield chunk
    except OSError as error:  # no permission, a disk that fails
        problem = RowError(f"cannot be read ({error})")
        yield Chunk(source.name, "row", [(0, problem)])
        return
    if not count:
        yield Chunk(source.name, "row", [(0, RowError("the file is empty: it holds no row"))])


def _open(path: Path):
    """(binary stream of the content, the file underneath, whose position tells the progress)."""
    file = open(path, "rb")
    return (gzip.open(file), file) if path.name.endswith(".gz") else (file, file)


CUT_SHORT = "the file is no gzip, or cut short or damaged here; what follows cannot be read"


def _read_lines(source: Source) -> Iterator[Chunk]:
    stream, file = _open(source.path)
    with file:
        chunk, used, done = Chunk(source.name, "line"), 0, 0
        for number, item in _lines(stream):
            chunk.items.append((number, item))
            used += len(item) if isinstance(item, bytes) else 0
            if used >= CHUNK_BYTES or len(chunk.items) >= CHUNK_ROWS:
                chunk.size, done = file.tell() - done, file.tell()
                yield chunk
                chunk, used = Chunk(source.name, "line"), 0
        chunk.size = file.tell() - done
        if chunk.items:
            yield chunk


def _lines(stream) -> Iterator[tuple[int, bytes | RowError]]:
    """Lines without their ends; blank ones are passed over. CRLF and a byte-order mark are fine."""
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(LONGEST_LINE + 1)
            length, rest = len(line), line
            while length > LONGEST_LINE and rest and not rest.endswith(b"\n"):
                rest = stream.readline(LONGEST_LINE)
                length += len(rest)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            yield number, RowError(CUT_SHORT)
            return
        if not line:
            return
        if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
            yield 0, RowError("the file is UTF-16. Convert it to UTF-8")
            return
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if rest is not line and length > LONGEST_LINE:
            problem = f"the line is {length:,} bytes long; a row may have {LONGEST_LINE:,}"
            yield number, RowError(f"{problem}. Is it a .json or a binary file")
        elif line.strip():
            yield number, line.rstrip(b"\r\n")


def _read_whole(source: Source) -> str:
    """The text of a file, its line ends as \\n; RowError where it is not UTF-8, or too large."""
    content = bytearray()
    for block in _blocks(source):
        content += block
        if len(content) > LARGEST_WHOLE:
            raise RowError(
                f"such a file is read whole, and it holds more than {LARGEST_WHOLE >> 20:,} MiB. "
                "Cut it in several, or make it JSON lines (.jsonl), a document or chat in each"
            )
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RowError("the file is UTF-16. Convert it to UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RowError(f"invalid UTF-8 in line {line} ({_byte_of(error)})") from error
    return text.replace("\r\n", "\n")


def _blocks(source: Source) -> Iterator[bytes]:
    """The content of a file, about a MiB at a time. RowError where a gzip is damaged."""
    stream, file = _open(source.path)
    with file:
        try:
            while block := stream.read(1 << 20):
                yield block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise RowError("the file is no gzip, or cut short or damaged") from error


def _read_txt(source: Source) -> Iterator[Chunk]:
    """The whole file is one document."""
    try:
        text = _read_whole(source)
    except RowError as error:
        yield Chunk(source.name, "row", [(0, error)])
        return
    if text.strip():
        size = source.size
        yield Chunk(source.name, "document", [(0, {"text": text})], whole=True, size=size)


def _read_json(source: Source) -> Iterator[Chunk]:
    """A list of rows, or JSON lines under this name. The list is taken apart row by row, so that
    what stands before a broken place is read."""
    try:
        begins = (block.removeprefix(b"\xef\xbb\xbf").lstrip() for block in _blocks(source))
        if not next(filter(None, begins), b"").startswith(b"["):
            yield from _read_lines(source)
            return
        text = _read_whole(source)
    except RowError as error:
        yield Chunk(source.name, "row", [(0, error)])
        return
    size = source.size
    chunk, start = Chunk(source.name, "row"), 0
    for number, (item, end) in enumerate(_json_list(text), 1):
        chunk.items.append((number, item))
        if end - start >= CHUNK_BYTES or len(chunk.items) >= CHUNK_ROWS:
            chunk.size = (end - start) * size // len(text)
            yield chunk
            chunk, start = Chunk(source.name, "row"), end
    if chunk.items:
        chunk.size = (len(text) - start) * size // len(text)
        yield chunk


def _json_list(text: str) -> Iterator[tuple[object, int]]:
    """(element or RowError, where it ends) of a JSON list."""
    elements, space = _Elements(text), re.compile(r"[ \t\n\r]*")
    position = space.match(text, text.index("[") + 1).end()
    while True:
        if text.startswith("]", position):
            after = space.match(text, position + 1).end()
            if after < len(text):
                yield RowError(f"something follows the list ({_line_of(text, after)})"), after
            return
        try:
            element, end = elements.at(position)
        except RowError as error:
            yield RowError(f"{error} ({_line_of(text, position)}); what follows is lost"), position
            return
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            yield (
                RowError(f"not valid JSON ({error.msg} at {where}); what follows is lost"),
                position,
            )
            return
        except (ValueError, RecursionError) as error:
            problem = f"not valid JSON ({_short(str(error))}, {_line_of(text, position)})"
            yield RowError(f"{problem}; what follows is lost"), position
            return
        yield element, end
        position = space.match(text, end).end()
        if text.startswith(",", position):
            position = space.match(text, position + 1).end()
        elif not text.startswith("]", position):
            problem = f"not valid JSON (expected , or ] at {_line_of(text, position)})"
            yield RowError(f"{problem}; what follows is lost"), position
            return


class _Elements:
    """The elements of a JSON list, each parsed out of a window: nothing else would bound it."""

    def __init__(self, text: str):
        self.text, self.start, self.window = text, 0, ""
        self.decode = json.JSONDecoder().raw_decode

    def at(self, position: int) -> tuple[object, int]:
        """(the element that begins here, where it ends). ValueError and RecursionError of json's
        where there is none; RowError where it is too large."""
        most = LONGEST_LINE + len("e+5")  # 12 may be all of a number, or the beginning of 12e+5
        size = min(JSON_WINDOW, most)
        while True:
            is_last = self.start + len(self.window) == len(self.text)
            try:
                element, end = self.decode(self.window, position - self.start)
                if is_last or end + len("e+") < len(self.window):
                    return element, self.start + end
            except json.JSONDecodeError as error:
                if is_last:
                    place = self.start + error.pos
                    raise json.JSONDecodeError(error.msg, self.text, place) from error
            if self.start == position:  # cut off by the window's end, or broken
                if size == most:
                    raise RowError(f"not valid JSON, or longer than {LONGEST_LINE:,} characters")
                size = min(2 * size, most)
            self.start, self.window = position, self.text[position : position + size]
            if size > JSON_WINDOW:
                _check_lists(self.window)


def _check_lists(text: str) -> None:
    """RowError where JSON would become too many lists and objects."""
    if text.count("[") + text.count("{") > MOST_LISTS:
        raise RowError(f"it holds more than {MOST_LISTS:,} lists and objects. Cut it in several")


def _line_of(text: str, position: int) -> str:
    return f"line {text.count(chr(10), 0, position) + 1}"


def _read_csv(source: Source) -> Iterator[Chunk]:
    """The first line names the fields. Every value is a string."""
    csv.field_size_limit(LONGEST_LINE)
    with open(source.path, "rb") as file:
        # surrogateescape: invalid bytes are found, and named, when the field is used
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        lines = _RowLines(text)
        rows = csv.reader(lines, strict=True)
        names, number, is_over = None, 0, False
        chunk, done = Chunk(source.name, "row"), 0
        while not is_over:
            lines.used = lines.commas = 0
            try:
                values = next(rows)
                if not values:
                    continue
                if names is None:
                    names = values
                    continue
                item: dict[str, str] | RowError = dict(zip(names, values, strict=False))
                if len(values) > len(names):
                    problem = f"{len(values)} values, but the first line names {len(names)} fields"
                    item = RowError(problem)
            except StopIteration:
                break
            except csv.Error as error:
                item, is_over = RowError(f"not valid CSV ({error})"), names is None
            except RowError as error:
                item, is_over = error, True
            number += 1
            chunk.items.append((number, item))
            if file.tell() - done >= CHUNK_BYTES or len(chunk.items) >= CHUNK_ROWS:
                chunk.size, done = file.tell() - done, file.tell()
                yield chunk
                chunk = Chunk(source.name, "row")
        chunk.size = file.tell() - done
        if chunk.items:
            yield chunk


class _RowLines:
    """The lines of a text, for csv.reader; RowError where one row takes too many of them."""

    def __init__(self, text):
        self.text, self.used, self.commas = text, 0, 0  # of the row so far

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.text.readline(LONGEST_LINE + 1)
        self.used += len(line)
        self.commas += line.count(",")
        if self.used > LONGEST_LINE or self.commas > MOST_LISTS:
            problem = f"the row is longer than {LONGEST_LINE:,} characters"
            if self.used <= LONGEST_LINE:
                problem = f"the row has more than {MOST_LISTS:,} commas"
            raise RowError(f"{problem}; what follows is lost. Is a quotation mark missing")
        if not line:
            raise StopIteration
        return line


def _read_parquet(source: Source) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet

    number, size, used = 0, source.size, 0
    chunk = Chunk(source.name, "row")
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_batch_size(file.metadata)):
                for item in _batch_rows(batch):
                    number += 1
                    chunk.items.append((number, item))
                chunk.size += size * batch.num_rows // total
                used += batch.nbytes
                if used >= CHUNK_BYTES or len(chunk.items) >= CHUNK_ROWS:
                    yield chunk
                    chunk, used = Chunk(source.name, "row"), 0
    except (pyarrow.ArrowException, OSError) as error:
        problem = RowError(f"not a whole parquet file ({_short(str(error))})")
        chunk.items.append((number + 1 if number else 0, problem))
    if chunk.items:
        yield chunk


def _batch_size(metadata) -> int:
    """Rows that are unpacked at a time: at most 1 GiB, though each may repeat the longest value,
    which is stored once and no longer than all of its group. (A damaged description of a column
    would end the process: pyarrow does not catch what its C++ throws there.)"""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size for group in groups), default=1)
    return min(max(1, (1 << 30) // max(1, largest)), 100)


def _batch_rows(batch) -> Iterable:
    try:
        return batch.to_pylist()
    except Exception:  # invalid UTF-8, a date before the year 1, a time zone that is none: anything
        return [_batch_row(batch, i) for i in range(batch.num_rows)]


def _batch_row(batch, i: int):
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowError(f"invalid UTF-8 ({_byte_of(error)})")
    except Exception as error:
        return RowError(f"it cannot be read ({_short(str(error))})")


def _read_hub(source: Source) -> Iterator[Chunk]:
    number = 0
    for columns in source.rows.iter(batch_size=1000):
        chunk = Chunk(source.name, "row")
        for values in zip(*columns.values(), strict=True):
            number += 1
            chunk.items.append((number, dict(zip(columns, values, strict=True))))
        chunk.size = source.size * len(chunk.items) // len(source.rows)
        yield chunk


# ----- raw items to rows --------------------------------------------------------------------------

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant"}
ROLES |= {"gpt": "assistant", "tool": "tool"}
KNOWN = "text, messages, conversations, or instruction and output"
# Fields that change what a chat means and that have no place in our rows.
REFUSED = ("functions", "history", "function_call", "images")


def parse(item) -> Row:
    """A raw item as a row; RowError where it is not one."""
    if isinstance(item, RowError):
        raise item
    if isinstance(item, bytes):
        item = _parse_json(item)
    if not isinstance(item, dict):
        raise RowError(f"expected an object with fields, found {_described(item)}")
    for name in REFUSED:
        if item.get(name):
            raise RowError(f"field '{name}': not supported, and a chat would mean less without it")
    present = {name for name, value in item.items() if value is not None}
    for name in ("messages", "conversations"):
        if name in present:
            return _chat(item, name)
    if "instruction" in present or "output" in present:
        return _instruction(item)
    if "text" in present:
        text = _string(item, "text")
        if not text.strip():
            raise RowError("field 'text': the text is empty")
        return Row("text", text=text, unused=_unused(item, "text"))
    for name in ("text", "messages", "conversations", "instruction", "output"):
        if name in item:
            raise RowError(f"field '{name}': expected something, found null")
    found = ", ".join(_short(repr(name)) for name in list(item)[:8]) or "no field"
    raise RowError(f"no known field: expected {KNOWN}, found {found}")


def _parse_json(line: bytes):
    try:
        text = line.decode("utf-8")
        _check_lists(text)
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 ({_byte_of(error)})") from error
    except RowError:
        raise
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 10,000 brackets
        raise RowError(f"not valid JSON ({_short(str(error))})") from error


def _chat(item: dict, name: str) -> Row:
    messages, turns = chat_messages(item, name), item[name]
    _check_turns(messages, name, len(messages) - len(turns))
    unused = set(_unused(item, name, "system", "tools"))
    unused = unused.union(*(_unused(turn, *TURN_FIELDS) for turn in turns))
    return Row(name, messages=messages, unused=tuple(sorted(unused)))


def chat_messages(item: dict, name: str) -> list[dict]:
    """A chat in the field `name` as `Tokenizer.render_chat` takes it, each message checked for
    itself; RowError where one is none."""
    turns = item[name]
    if not isinstance(turns, list):
        raise RowError(f"field '{name}': expected a list, found {_described(turns)}")
    if not turns:
        raise RowError(f"field '{name}': the list is empty")
    messages = _system_of(item)
    tools = _listed(item, "tools")
    for i, turn in enumerate(turns):
        where = f"{name}[{i}]"
        if not isinstance(turn, dict):
            raise RowError(f"field '{where}': expected an object, found {_described(turn)}")
        messages.append(_message(turn, where))
        if messages[-1]["role"] == "system":  # MiniMind's rows have them here
            tools = _listed(turn, "tools", where) or tools
    if tools and messages[0]["role"] == "system":
        messages[0]["tools"] = tools
    elif tools:
        messages.insert(0, {"role": "system", "content": None, "tools": tools})
    return messages


TURN_FIELDS = ("role", "from", "content", "value", "reasoning_content", "tool_calls", "tools")


def _message(turn: dict, where: str) -> dict:
    """{"role", "content"} of one turn, "reasoning_content" and "tool_calls" where it has them."""
    for name in REFUSED:
        if turn.get(name):
            raise RowError(f"field '{where}.{name}': not supported")
    role_field = "from" if turn.get("role") is None and "from" in turn else "role"
    content_field = "value" if turn.get("content") is None and "value" in turn else "content"
    role = _string(turn, role_field, where)
    if role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise RowError(
            f"field '{where}.{role_field}': unknown role {_short(role)!r} (known: {known})"
        )
    role = ROLES[role]
    calls = _tool_calls(turn, where)
    silent = calls and turn.get(content_field) is None  # a call may stand without words
    message: dict[str, Any] = {"role": role}
    message["content"] = "" if silent else _string(turn, content_field, where)
    if role == "assistant" and not message["content"].strip() and not calls:
        raise RowError(f"field '{where}.{content_field}': the assistant's answer is empty")
    if calls:
        message["tool_calls"] = calls
    if turn.get("reasoning_content") is not None:
        if reasoning := _string(turn, "reasoning_content", where):
            message["reasoning_content"] = reasoning
    for name in ("reasoning_content", "tool_calls"):
        if name in message and role != "assistant":
            raise RowError(f"field '{where}.{name}': only an assistant has this, not {role}")
    return message


def _tool_calls(turn: dict, where: str) -> list[dict]:
    """[{"name", "arguments"}], the arguments an object or a string of JSON."""
    calls = []
    for i, call in enumerate(_listed(turn, "tool_calls", where)):
        place_of_call = f"{where}.tool_calls[{i}]"
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]
        if not isinstance(call, dict):
            raise RowError(f"field '{place_of_call}': expected an object, found {_described(call)}")
        arguments = call.get("arguments")
        if not isinstance(arguments, dict | str):
            found = _described(arguments)
            raise RowError(f"field '{place_of_call}.arguments': expected an object, found {found}")
        calls.append({"name": _string(call, "name", place_of_call), "arguments": arguments})
    return calls


def _listed(item: dict, name: str, where: str = "") -> list:
    """A field that is a list, or JSON text of one, or nothing."""
    label = f"{where}.{name}" if where else name
    value = item.get(name)
    if not value:
        return []
    if isinstance(value, str):
        _check_lists(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"field '{label}': the text is not valid JSON") from error
    if not isinstance(value, list):
        raise RowError(f"field '{label}': expected a list, found {_described(value)}")
    if is_deeper(value, DEEPEST_FIELD):
        raise RowError(f"field '{label}': nested deeper than {DEEPEST_FIELD} levels")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # a date in a parquet file
        raise RowError(f"field '{label}': not made of JSON's values ({error})") from error
    if not is_text(text):
        raise RowError(f"field '{label}': half of a surrogate pair is no character")
    return value


# what may stand before each role
BEFORE = {"user": (None, "assistant"), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}


def _check_turns(messages: list[dict], name: str, offset: int) -> None:
    """An optional system message, then user and assistant in turn; tools answer the calls between
    two of the assistant's."""
    before = None
    for i, message in enumerate(messages):
        role, where = message["role"], f"field '{name}[{i - offset}]'"
        if role == "system":
            if i:
                raise RowError(f"{where}: a system message may only stand first")
            continue
        if role == before != "tool":
            raise RowError(f"{where}: two {role} turns in a row")
        if before not in BEFORE[role]:
            if before is None:
                raise RowError(f"{where}: expected the user to begin, found {role}")
            raise RowError(f"{where}: {role} may not stand behind {before}")
        if role == "tool" and before == "assistant" and "tool_calls" not in messages[i - 1]:
            raise RowError(f"{where}: a tool answers, but the assistant did not call one")
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError(f"field '{name}': no assistant turn, so nothing to learn")


def _instruction(item: dict) -> Row:
    names = [name for name in ("instruction", "input", "output") if item.get(name) is not None]
    request, answer = _string(item, "instruction"), _string(item, "output")
    if item.get("input") is not None and (context := _string(item, "input")):
        request = f"{request}\n\n{context}"
    if not answer.strip():
        raise RowError("field 'output': the answer is empty")
    messages = _system_of(item)
    messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    unused = _unused(item, "instruction", "input", "output", "system")
    return Row("/".join(names), messages=messages, unused=unused)


def _system_of(item: dict) -> list[dict]:
    if not item.get("system"):
        return []
    return [{"role": "system", "content": _string(item, "system")}]


def _unused(item: dict, *used: str) -> tuple[str, ...]:
    """The names of the other fields that hold something (0 is something; "" and [] are not)."""
    empty: tuple = (None, "", [], {})
    names = (name for name, value in item.items() if name not in used and value not in empty)
    return tuple(sorted(_short(str(name)) for name in names))


def _string(item: dict, name: str, where: str = "") -> str:
    """A field that must be text made of characters."""
    label = f"{where}.{name}" if where else name
    if name not in item:
        raise RowError(f"field '{label}': missing")
    value = item[name]
    if not isinstance(value, str):
        raise RowError(f"field '{label}': expected a string, found {_described(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # a byte that the CSV reader could not decode
            raise RowError(
                f"field '{label}': invalid UTF-8 (byte 0x{code - 0xDC00:02x})"
            ) from error
        problem = f"half of a surrogate pair (\\u{code:04x}) is no character"
        raise RowError(f"field '{label}': {problem}") from error
    return value


def _described(value) -> str:
    """A value as JSON names it, for "expected a string, found ..."."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object"}
    kind = names.get(type(value), f"a {type(value).__name__}")
    try:
        parts = [value] if isinstance(value, str) else json.JSONEncoder().iterencode(value)
        shown = "".join(islice(parts, 100))  # of a million it is the beginning that is shown
    except (TypeError, ValueError, RecursionError):
        return kind
    return f"{kind} ({_short(shown)})"


def _byte_of(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at position {error.start:,}"


def _short(text: str, limit: int = 60) -> str:
    text = " ".join(text[:1000].split())
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 3] + "..."
