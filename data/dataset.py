"""Rows of a source to rows of ids on disk: tokenised once, memory-mapped ever after.

Read in this order: `load_dataset` (what training calls), `TokenRows` (what it gets), `_prepare`
(the cache: one directory per content and settings), `_tokenize` (one chunk of rows to arrays, in a
worker process where the data is large), `_SideWriter` (arrays to files).

The cache is never cleared: a directory in it takes 2 bytes a token (4 with more than 65,536 ids; a
chat's take one more) and 24 a row, and may be deleted whenever nothing trains on it.

What a row is. A document is [bos] tokens eos. One that is longer than max_seq_len becomes several
rows that overlap by one token: the last token of a row is the first of the next, where it is only
read. So every token after the document's first is a target exactly once per epoch, and each row
sees what stands in it and nothing of the rows before. A chat is one row (`Tokenizer.render_chat`);
a chat that is too long loses its oldest turns, whole (the system message stays), and is then cut at
the end; one that keeps no supervised token is dropped and counted.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config import UserError
from data.sources import MEND_FILE, Chunk, Row, RowError, Source, find_sources, parse, read_chunks
from data.sources import sentence as sentence_about
from data.tokenizer import Tokenizer
from files import sync
from locks import file_lock, waiting_lock

IGNORED = -100  # the label of a position that is no target
LAYOUT = 2  # of the cache; raise it when the files or the rows change
PARALLEL_ABOVE = 8 << 20  # bytes; below, starting workers takes longer than the work
MAX_WORKERS = 8  # each imports the program again, torch and all


@dataclass(frozen=True)
class TokenRows:
    """Rows of ids in memory-mapped files.

    len(rows)       number of rows N
    rows[i]         (input_ids, labels): int64 arrays (T,), labels aligned with input_ids, -100
                    where a position is no target, which position 0 never is
    lengths         (N,) int32: T of each row
    num_tokens      tokens on disk (the one that two rows of a document share counts once)
    num_targets     positions with a label, one epoch
    target_bytes    UTF-8 bytes of these targets, special tokens counting nothing
    num_documents   documents or chats
    pad_token_id    fills batches
    report          a line for each file: rows, kinds, tokens, what was dropped
    fingerprint     hash of the content and the settings that these rows were made of
    """

    tokens: np.ndarray  # uint16 or uint32, flat
    supervised: np.ndarray | None  # uint8 beside tokens; None where every token is
    starts: np.ndarray  # (N,) int64
    lengths: np.ndarray
    num_documents: int
    num_targets: int
    target_bytes: int
    pad_token_id: int
    report: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, length = int(self.starts[i]), int(self.lengths[i])
        input_ids = self.tokens[start : start + length].astype(np.int64)
        labels = input_ids.copy()
        if self.supervised is not None:
            labels[self.supervised[start : start + length] == 0] = IGNORED
        labels[0] = IGNORED
        return input_ids, labels

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_chat(self) -> bool:
        return self.supervised is not None


def load_dataset(
    data,
    val_data=None,
    val_fraction: float = 0.1,
    *,
    tokenizer: Tokenizer,
    max_seq_len: int,
    on_bad_row: str = "stop",
    cache_dir: Path = Path("data/cache"),
    progress: bool = True,
) -> tuple[TokenRows, TokenRows]:
    """The training and the validation rows of data, tokenised now or read from the cache.

    data, val_data  a file, a directory (its train.* and val.* where it has both), a glob, or a name
                    on the hub
    val_fraction    without validation data: the share of rows that validates, chosen by a hash of
                    their content, so that it stays the same when rows are added; of a .txt, which
                    is one document, the last so much of its characters
    max_seq_len     the longest row, in tokens
    on_bad_row      "stop": the first bad row is an error; "skip": bad rows are counted and reported
    cache_dir       keeps the tokenised rows under a key of content and settings

    No document validates that trains too: a training row that equals a validation row is left out.
    UserError says what is wrong with the input.
    """
    _check_settings(val_fraction, max_seq_len, on_bad_row)
    job = _Job(tokenizer, max_seq_len, on_bad_row)
    train_sources, val_sources = find_sources(data, val_data)
    if val_sources:
        held = _prepare(val_sources, job, cache_dir, progress, "validation")
        hashes = np.unique(np.load(held / "train" / "hashes.npy", mmap_mode="r"))
        job = _Job(tokenizer, max_seq_len, on_bad_row, held_out=hashes)
        kept = _prepare(train_sources, job, cache_dir, progress, "training")
        train = _open_rows(kept / "train", train_sources, tokenizer)
        val = _open_rows(held / "train", val_sources, tokenizer)
    else:
        job = _Job(tokenizer, max_seq_len, on_bad_row, val_fraction=val_fraction)
        both = _prepare(train_sources, job, cache_dir, progress, "the data")
        sides = (both / "train", both / "val")
        train, val = (_open_rows(side, train_sources, tokenizer) for side in sides)
    if not len(train):
        raise UserError(f"--data={data}: no row is left to train on.\n{train.report}")
    if not len(val):
        mend = "Give a larger --val_fraction, or --val_data."
        if val_sources:
            mend = "Give other --val_data."
        raise UserError(f"--data={data}: no row is left to validate on. {mend}\n{val.report}")
    return train, val


def training_texts(
    data, val_data=None, val_fraction: float = 0.1, on_bad_row: str = "stop"
) -> Iterator[str]:
    """The texts of the training split, for `Tokenizer.train`: documents (a long one in parts) and
    the contents of chats. The same split as `load_dataset` makes, whatever the tokenizer."""
    _check_settings(val_fraction, 2, on_bad_row)
    train_sources, val_sources = find_sources(data, val_data)
    held_out = {_hash(row) for row in _good_rows(val_sources, on_bad_row)}
    if val_sources:
        val_fraction = 0.0
    for source in train_sources:
        for chunk in read_chunks(source):
            for row in _good_rows_of(chunk, on_bad_row):
                if chunk.whole:
                    train, _ = _split_text(row.text, val_fraction)
                    if _hash(row) not in held_out:
                        yield from _parts(train)
                elif _hash(row) not in held_out and not _validates(_hash(row), val_fraction):
                    for text in _strings_of(row):
                        yield from _parts(text)


def _strings_of(row: Row) -> Iterator[str]:
    """The document, or what stands in the messages of a chat."""
    if row.messages is None:
        yield row.text
        return
    for message in row.messages:
        for name in ("content", "reasoning_content"):
            if message.get(name):
                yield message[name]


def _check_settings(val_fraction: float, max_seq_len: int, on_bad_row: str) -> None:
    if not 0 < val_fraction < 1:
        raise UserError(f"--val_fraction ({val_fraction}) must lie between 0 and 1.")
    if max_seq_len < 2:
        raise UserError(f"--max_seq_len ({max_seq_len}) must be at least 2.")
    if on_bad_row not in ("stop", "skip"):
        raise UserError(f'--on_bad_row ({on_bad_row!r}) must be "stop" or "skip".')


# ----- the split ----------------------------------------------------------------------------------


def _hash(row: Row) -> int:
    """64 bits of a row's content."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in row.pieces():
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little")


def _validates(content_hash: int, val_fraction: float) -> bool:
    return content_hash < val_fraction * 2**64


def _split_text(text: str, val_fraction: float) -> tuple[str, str]:
    """A single document by position: the first part trains."""
    cut = round(len(text) * (1 - val_fraction))
    return text[:cut], text[cut:]


def _good_rows(sources: list[Source], on_bad_row: str) -> Iterator[Row]:
    for source in sources:
        for chunk in read_chunks(source):
            yield from _good_rows_of(chunk, on_bad_row)


def _good_rows_of(chunk: Chunk, on_bad_row: str) -> Iterator[Row]:
    for number, item in chunk.items:
        try:
            row = parse(item)
            for text in _strings_of(row):
                deque(_parts(text), maxlen=0)  # it can be cut
        except RowError as error:
            if on_bad_row == "stop":
                raise UserError(sentence_about(chunk, number, error)) from error
        else:
            yield row


# ----- one chunk to arrays ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What a worker needs to know."""

    tokenizer: Tokenizer
    max_seq_len: int
    on_bad_row: str
    val_fraction: float = 0.0
    held_out: np.ndarray | None = None  # sorted uint64 hashes of the validation rows


@dataclass
class _Side:
    """The rows of a chunk that train (or validate), in order: lists of what becomes flat arrays."""

    tokens: list[np.ndarray] = field(default_factory=list)
    supervised: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # from the chunk's first token
    hashes: list[int] = field(default_factory=list)
    size: int = 0  # tokens so far
    has_chats: bool = False
    counts: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)

    def add(self, ids: np.ndarray, supervised: np.ndarray, spans) -> None:
        """One document or chat; spans are the (start, length) of its rows in ids."""
        supervised[0] = 0  # nothing comes before it that could predict it
        self.tokens.append(ids)
        self.supervised.append(supervised)
        for start, length in spans:
            self.starts.append(self.size + start)
            self.lengths.append(length)
        self.size += len(ids)

    def pack(self, byte_counts: np.ndarray) -> None:
        """Makes one array of many, which is faster to send and to write, and counts."""
        if not self.tokens:
            return
        tokens, supervised = np.concatenate(self.tokens), np.concatenate(self.supervised)
        targets = tokens[supervised != 0]
        self.tokens, self.supervised = [tokens], [supervised]
        self.counts["tokens"] = len(tokens)
        self.counts["targets"] = len(targets)
        some_at_a_time = np.array_split(targets, 1 + len(targets) // 2**20)
        self.counts["target_bytes"] = sum(int(byte_counts[some].sum()) for some in some_at_a_time)


@dataclass
class _Tokenized:
    """What a chunk became. `first_problem` says where its first bad row is, and what is wrong."""

    name: str
    size: int
    train: _Side
    val: _Side
    skipped: int = 0
    first_problem: str = ""
    shared: int = 0  # training rows that validate too, left out
    unused: set = field(default_factory=set)


_worker_job: _Job | None = None  # of this worker process, set once when it starts


def _start_worker(job: _Job) -> None:
    global _worker_job
    _worker_job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed tells nobody: its workers would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _tokenize_in_worker(chunk: Chunk) -> _Tokenized:
    return _tokenize(chunk, _worker_job)


def _tokenize(chunk: Chunk, job: _Job) -> _Tokenized:
    """Parses and tokenises the items of a chunk. UserError for a bad row that is to stop."""
    result = _Tokenized(chunk.name, chunk.size, _Side(), _Side())
    for number, item in chunk.items:
        try:
            row = parse(item)
            content_hash = _hash(row)
            if chunk.whole:
                parts = _split_text(row.text, job.val_fraction)
                pairs = [(s, Row(row.kind, text=t)) for s, t in zip("tv", parts, strict=True) if t]
            else:
                held = _validates(content_hash, job.val_fraction)
                pairs = [("v" if held else "t", row)]
            if job.held_out is not None and _is_in(content_hash, job.held_out):
                result.shared += 1
                continue
            encoded = [(side, *_encode(part, job)) for side, part in pairs]
        except (RowError, UserError) as error:
            if job.on_bad_row == "stop":
                raise UserError(sentence_about(chunk, number, error)) from error
            result.skipped += 1
            where = f"{chunk.unit} {number}" if number else "the file"
            result.first_problem = result.first_problem or f"{where}: {error}"
            continue
        result.unused |= set(row.unused)
        for name, ids, supervised, spans, cut in encoded:
            side = result.train if name == "t" else result.val
            side.kinds[row.kind] += 1
            side.counts["rows"] += 1
            side.counts["cut"] += cut
            if not supervised[1:].any():
                side.counts["dropped"] += 1
                continue
            side.counts["kept"] += 1
            side.has_chats |= row.messages is not None
            side.hashes.append(content_hash)
            side.add(ids, supervised, spans)
    for side in (result.train, result.val):
        side.pack(job.tokenizer.byte_counts)
    return result


def _is_in(value: int, ordered: np.ndarray) -> bool:
    i = int(np.searchsorted(ordered, np.uint64(value)))
    return i < len(ordered) and int(ordered[i]) == value


def _encode(row: Row, job: _Job) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]], bool]:
    """(ids, supervised as uint8, the (start, length) of each row, whether something was cut)."""
    limit = job.max_seq_len
    if row.messages is None:
        ids = _document_ids(row.text, job.tokenizer)
        starts = range(0, len(ids) - 1, limit - 1)
        spans = [(start, min(limit, len(ids) - start)) for start in starts]
        return ids, np.ones(len(ids), np.uint8), spans, False
    messages, cut = row.messages, False
    if sum(map(len, _strings_of(row))) > LONGEST_PART:
        raise RowError(f"the chat has more than {LONGEST_PART:,} characters. Cut it in several")
    chat_ids, supervised = job.tokenizer.render_chat(messages)
    while len(chat_ids) > limit and (shorter := _without_oldest_turn(messages)):
        messages, cut = shorter, True
        chat_ids, supervised = job.tokenizer.render_chat(messages)
    cut |= len(chat_ids) > limit
    ids = np.array(chat_ids[:limit], _dtype(job.tokenizer))
    return ids, np.array(supervised[:limit], np.uint8), [(0, len(ids))], cut


def _without_oldest_turn(messages: list[dict]) -> list[dict] | None:
    """The chat without its oldest question and all that answers it; None where no later question
    has an answer."""
    system = messages[:1] if messages[0]["role"] == "system" else []
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    rest = messages[questions[1] :] if len(questions) > 1 else []
    answered = any(message["role"] == "assistant" for message in rest)
    return system + rest if answered else None


def _document_ids(text: str, tokenizer: Tokenizer) -> np.ndarray:
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    dtype = _dtype(tokenizer)
    texts = _parts(text, tokenizer.plain_added)
    parts = [np.array(tokenizer.encode(part), dtype) for part in texts]
    return np.concatenate([np.array(bos, dtype), *parts, np.array([tokenizer.eos_token_id], dtype)])


# White space and punctuation behind a letter or digit belong to no word with it, under GPT-2's
# pattern and its descendants (data.tokenizer.PATTERNS): cut there, a text gives the same ids. Only
# an apostrophe and a combining mark may, so neither is here; U+037E would become another character.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=[ \n.,;:!?()<>\"、。，；：！？])")
PART_CHARACTERS = 1 << 20
LONGEST_PART = 4 << 20  # characters; in the tokenizer and as ids each takes 30 bytes, 100 of some


def _parts(text: str, added: Iterable[str] = ()) -> Iterator[str]:
    """A long text in parts of about a million characters whose ids, joined, are those of the whole.
    (A list of Python ints takes 36 bytes an id; parts become arrays of two or four.)

    added: tokens that are recognised in text; none is cut in two. RowError where a stretch of
    LONGEST_PART characters cannot be cut, since only memory out of proportion would hold it.
    """
    start = 0
    while len(text) - start > PART_CHARACTERS:
        cuts = _SAFE_CUT.finditer(text, start + PART_CHARACTERS, start + LONGEST_PART)
        places = (cut.start() for cut in cuts if not _is_within(added, text, cut.start()))
        end = next(places, len(text))
        if end - start > LONGEST_PART:
            raise RowError(
                f"it goes on for {LONGEST_PART - PART_CHARACTERS:,} characters without a space, a "
                "line break or a punctuation mark, too long a word to tokenise. Cut it in several"
            )
        yield text[start:end]
        start = end
    yield text[start:]


def _is_within(tokens: Iterable[str], text: str, place: int) -> bool:
    """Whether one of the tokens stands on both sides of a place in the text."""
    return any(t in text[max(0, place - len(t) + 1) : place + len(t) - 1] for t in tokens)


def _dtype(tokenizer: Tokenizer):
    return np.uint16 if tokenizer.vocab_size <= 65536 else np.uint32


# ----- the cache ----------------------------------------------------------------------------------


def _prepare(sources: list[Source], job: _Job, cache_dir: Path, progress: bool, label: str) -> Path:
    """The directory with the tokenised rows of sources: train/ and, where the job splits, val/.

    Its name is a hash of the content and of all that the rows depend on. It is written beside and
    renamed when whole, so a killed run leaves nothing that looks finished. Of several processes
    that want the same, one prepares it and the others wait for it. One that was damaged since, by a
    full disk or by hand, is made anew.
    """
    cache_dir, key = Path(cache_dir), _key(sources, job)
    directory = cache_dir / key
    if _is_whole(directory, sources, job):
        return directory
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _sweep(cache_dir)
        with waiting_lock(cache_dir / f"{key}.lock", "preparing the same data"):
            if not _is_whole(directory, sources, job):
                if directory.is_dir():
                    print(f"{directory} is damaged: it is made anew", file=sys.stderr, flush=True)
                    shutil.rmtree(directory)
                building = cache_dir / f"{key}.{os.getpid()}.building"
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()
                try:
                    _build(sources, job, building, progress, label)
                    sync(building)
                    building.rename(directory)
                    sync(cache_dir)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        problem = error.strerror or error
        raise UserError(f"The cache {cache_dir} cannot be written: {problem}.") from error
    return directory


def _is_whole(directory: Path, sources: list[Source], job: _Job) -> bool:
    """Whether these rows are in the cache, and nothing of them was cut off or lost there."""
    sides = ("train", "val") if job.val_fraction else ("train",)
    try:
        for side in sides:
            _open_rows(directory / side, sources, job.tokenizer)
    except (OSError, EOFError, ValueError, TypeError, AttributeError, KeyError):
        return False
    return True


def _sweep(cache_dir: Path) -> None:
    """Remove what processes left here that were killed: what is being built is locked."""
    for building in cache_dir.glob("*.building"):
        key = building.name.partition(".")[0]
        with suppress(BlockingIOError), file_lock(cache_dir / f"{key}.lock", wait=False):
            shutil.rmtree(building, ignore_errors=True)


def _key(sources: list[Source], job: _Job) -> str:
    parts = [LAYOUT, job.tokenizer.fingerprint, job.max_seq_len, job.on_bad_row, job.val_fraction]
    if job.held_out is not None:
        parts.append(hashlib.sha256(job.held_out.tobytes()).hexdigest())
    for source in sources:
        if source.path is None:
            parts.append(source.rows._fingerprint)
            continue
        try:
            with open(source.path, "rb") as file:
                parts.append([source.format, hashlib.file_digest(file, "sha256").hexdigest()])
        except OSError as error:
            problem = f"{source.name}: cannot be read ({error.strerror})"
            raise UserError(f"{problem}. {MEND_FILE}") from error
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _build(sources: list[Source], job: _Job, directory: Path, progress: bool, label: str) -> None:
    size = sum(source.size for source in sources)
    sides = {"train": _SideWriter(directory / "train", job.tokenizer)}
    if job.val_fraction:
        sides["val"] = _SideWriter(directory / "val", job.tokenizer)
    workers = _processors() if size > PARALLEL_ABOVE else 1
    chunks = itertools.chain.from_iterable(map(read_chunks, sources))
    with tqdm(
        total=size,
        desc=f"tokenising {label}",
        unit="B",
        unit_scale=True,
        disable=not progress,
        leave=False,
    ) as bar:
        for result in _tokenized(chunks, job, workers):
            for name, side in sides.items():
                side.append(result, result.train if name == "train" else result.val)
            bar.update(result.size)
    for side in sides.values():
        side.close()


def _tokenized(chunks: Iterator[Chunk], job: _Job, workers: int) -> Iterator[_Tokenized]:
    """The chunks in order, tokenised; at most a few per worker are in memory at once."""
    if workers == 1:
        for chunk in chunks:
            yield _tokenize(chunk, job)
        return
    # spawn: a fork would copy the threads' locks of torch in whatever state they are
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(job,))
    pending: deque[Future[_Tokenized]] = deque()
    try:
        for chunk in chunks:
            if chunk.whole:  # too large to send
                while pending:
                    yield pending.popleft().result()
                yield _tokenize(chunk, job)
                continue
            pending.append(pool.submit(_tokenize_in_worker, chunk))
            if len(pending) >= 2 * workers + 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "A process that tokenises was ended from outside: perhaps memory ran out. Close other "
            "programs and try again."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _processors() -> int:
    """How many worker processes to start."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on macOS
    return min(len(allowed(0)) if allowed else os.cpu_count() or 1, MAX_WORKERS)


class _SideWriter:
    """Appends chunks to the arrays of one side, and their counts to its report."""

    def __init__(self, directory: Path, tokenizer: Tokenizer):
        directory.mkdir()
        self.directory = directory
        self.tokens = _ArrayWriter(directory / "tokens.npy", _dtype(tokenizer))
        self.supervised = _ArrayWriter(directory / "supervised.npy", np.uint8)
        self.starts = _ArrayWriter(directory / "starts.npy", np.int64)
        self.lengths = _ArrayWriter(directory / "lengths.npy", np.int32)
        self.hashes = _ArrayWriter(directory / "hashes.npy", np.uint64)
        self.has_chats = False
        self.files: dict[str, _FileReport] = {}

    def append(self, result: _Tokenized, side: _Side) -> None:
        offset = self.tokens.count
        for tokens, supervised in zip(side.tokens, side.supervised, strict=True):
            self.tokens.append(tokens)
            self.supervised.append(supervised)
        self.starts.append(np.array(side.starts, np.int64) + offset)
        self.lengths.append(np.array(side.lengths, np.int32))
        self.hashes.append(np.array(side.hashes, np.uint64))
        self.has_chats |= side.has_chats
        self.files.setdefault(result.name, _FileReport()).add(result, side)

    def close(self) -> None:
        for writer in (self.tokens, self.supervised, self.starts, self.lengths, self.hashes):
            writer.close()
        if not self.has_chats:
            (self.directory / "supervised.npy").unlink()  # every token of a document is
        counts = sum((file.counts for file in self.files.values()), Counter())
        summary = {"counts": counts, "files": [vars(file) for file in self.files.values()]}
        with open(self.directory / "summary.json", "w", encoding="utf-8") as file:
            json.dump(summary, file, default=sorted)  # sorted: a set as a list
            file.flush()
            os.fsync(file.fileno())
        sync(self.directory)


@dataclass
class _FileReport:
    """The counts of one file on one side. Its name is not among them: it may be another tomorrow,
    and the same content is then found in the cache."""

    counts: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    unused: set = field(default_factory=set)
    first_problem: str = ""

    def add(self, result: _Tokenized, side: _Side) -> None:
        self.counts.update(side.counts)
        self.counts.update(skipped=result.skipped, shared=result.shared)
        self.kinds.update(side.kinds)
        self.unused |= result.unused
        self.first_problem = self.first_problem or result.first_problem

    def line(self, name: str) -> str:
        """A sentence such as "x.json: 1,100 rows: text, 62,345 tokens, ..., 0 dropped"."""
        counts, kinds = Counter(self.counts), self.kinds
        what = ", ".join(
            kind if len(kinds) == 1 else f"{n:,} {kind}" for kind, n in sorted(kinds.items())
        )
        parts = [
            f"{name}: {counts['rows']:,} row{'s' * (counts['rows'] != 1)}" + (what and f": {what}"),
            f"{counts['tokens']:,} tokens",
            f"{counts['targets']:,} supervised",
            f"{counts['dropped']:,} dropped",
        ]
        if counts["cut"]:
            parts.append(f"{counts['cut']:,} cut to fit")
        if counts["shared"]:
            parts.append(f"{counts['shared']:,} left out because they validate")
        if self.unused:
            parts.append(f"fields not used: {' '.join(sorted(self.unused))}")
        if counts["skipped"]:
            parts.append(f"{counts['skipped']:,} bad skipped (first: {self.first_problem})")
        return ", ".join(parts)


class _ArrayWriter:
    """A flat .npy file that grows. The header keeps room for any length, so that closing can write
    the final one in its place."""

    def __init__(self, path: Path, dtype):
        self.dtype, self.count = np.dtype(dtype), 0
        self.file = open(path, "wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        assert values.dtype == self.dtype
        self.file.write(values.tobytes())
        self.count += len(values)

    def close(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())  # on the disk, before the directory gets its name
        self.file.close()

    def _write_header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)


def _open_rows(directory: Path, sources: list[Source], tokenizer: Tokenizer) -> TokenRows:
    """One side of what `_build` wrote. ValueError, or another of what `_is_whole` expects, where
    its files do not belong together."""

    def array(name):
        path = directory / f"{name}.npy"
        # numpy cannot map an empty file
        empty = path.stat().st_size <= 128
        return np.load(path) if empty else np.load(path, mmap_mode="r")

    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    counts = Counter(summary["counts"])
    reports = zip(sources, summary["files"], strict=True)
    tokens, starts, lengths = array("tokens"), array("starts"), array("lengths")
    # every token of a document but its first is a target, so that this is of documents only
    has_chats = counts["targets"] != counts["tokens"] - counts["kept"]
    supervised = array("supervised") if has_chats else None
    found = [len(tokens), len(array("hashes")), len(starts)]
    if found != [counts["tokens"], counts["kept"], len(lengths)]:
        raise ValueError(f"{directory}: its files are not as long as they were")
    if has_chats and len(supervised) != len(tokens):
        raise ValueError(f"{directory}: supervised.npy is not as long as it was")
    return TokenRows(
        tokens=tokens,
        supervised=supervised,
        starts=starts,
        lengths=lengths,
        num_documents=counts["kept"],
        num_targets=counts["targets"],
        target_bytes=counts["target_bytes"],
        pad_token_id=tokenizer.pad_token_id,
        report="\n".join(_FileReport(**file).line(source.name) for source, file in reports),
        fingerprint=directory.parent.name,
    )
