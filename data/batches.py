"""Rows of ids to right-padded batches: few shapes, little padding, any position at once.

Read in this order: `Batches` (what training iterates), `_Plan` (which row stands in which batch of
an epoch), `choose_lengths` (the lengths that batches are padded to).

A batch has the shape (rows, T), where T is one of at most 16 lengths chosen from the data and the
rows are as many as the token budget allows: batch_size * max_seq_len positions. A row goes to the
smallest T that holds it. The rows of a length that do not fill a batch go to the next length, so
that only one batch of an epoch, of the largest length, can have missing rows.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from data.dataset import IGNORED, TokenRows

MAX_LENGTHS = 16
FEWEST_BATCHES = 3  # of each length, so that a row meets others in the next epoch
FEWEST_ROWS = 8  # of each length and batch, if batch_size has as many: a batch of two is noise
ENOUGH_PADDING = 0.03  # of positions: no further length is added for less than this
FORBIDDEN = 1 << 60  # more positions than any data has; twice it still fits int64
PREFETCHED = 4  # batches that wait for training


class Batches:
    """Batches by number.

    batches[g]      {"input_ids": int64 (B, T), "labels": int64 (B, T)}, CPU tensors: this rank's
                    rows of global micro-batch g, counted from 0 over all epochs; "num_tokens", the
                    real tokens in them; with `soften` also "soft_labels", fp32 (B, T, V): that
                    function of g, of the numbers of these rows, int64, and of (B, T)
    per_epoch       global micro-batches in an epoch, the same in each
    shapes          every (B, T) that can occur here
    padding         share of an epoch's positions that hold no token (all ranks)

    batches[g] is a function of (rows, batch_size, max_seq_len, seed, g) and `soften`: nothing has
    to be read to get there. In each epoch every row occurs exactly once, in other company. The
    global batch does not depend on world_size; rank r takes its rows r, r + world_size, ... Where
    they do not divide, the last ranks get a row of nothing but padding, so that all ranks have the
    same shape and the same number of steps. shuffle=False keeps one fixed order, for validation.

    batch_size counts rows at max_seq_len of the global micro-batch. Where there are several
    lengths, each has at least three batches, so data that would fill only a few gets smaller ones,
    and a length is only used where it gives batches of 8 rows (or of batch_size, if that is less).
    """

    def __init__(
        self,
        rows: TokenRows,
        batch_size: int,
        max_seq_len: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        soften: Callable[[int, np.ndarray, tuple[int, int]], torch.Tensor] | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size ({batch_size}) must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank ({rank}) must lie in [0, world_size ({world_size}))")
        if len(rows) == 0:
            raise ValueError("no rows to make batches of")
        longest = int(rows.lengths.max())
        if longest > max_seq_len:
            raise ValueError(
                f"a row of {longest} tokens is longer than max_seq_len ({max_seq_len})"
            )
        self.rows, self.rank, self.world_size, self.soften = rows, rank, world_size, soften
        self._plan = _Plan(rows.lengths, batch_size, max_seq_len, seed, shuffle)
        self.per_epoch = self._plan.per_epoch
        sizes = zip(self._plan.sizes, self._plan.lengths, strict=True)
        self.shapes = sorted({(-(-size // world_size), length) for size, length in sizes})
        self.padding = 1 - int(rows.lengths.sum(dtype=np.int64)) / self._plan.positions

    def __getitem__(self, g: int) -> dict[str, Any]:
        if g < 0:
            raise IndexError(f"batch number ({g}) must not be negative")
        chosen, length = self._plan.batch(g)
        mine = chosen[self.rank :: self.world_size]
        shape = (-(-len(chosen) // self.world_size), length)
        input_ids = np.full(shape, self.rows.pad_token_id, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        num_tokens = 0
        for b, i in enumerate(mine):
            if i >= 0:
                row_ids, row_labels = self.rows[i]
                input_ids[b, : len(row_ids)] = row_ids
                labels[b, : len(row_ids)] = row_labels
                num_tokens += len(row_ids)
        tensors = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.soften is not None:
            tensors["soft_labels"] = self.soften(g, mine, shape)
        return tensors | {"num_tokens": num_tokens}

    def rows_of(self, g: int) -> np.ndarray:
        """The rows of global micro-batch g, over all ranks, by their number in `rows`: int64."""
        chosen, _ = self._plan.batch(g)
        return chosen[chosen >= 0]

    def stream(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """batches[start], batches[start + 1], ... without end, made ahead by a thread. What the
        thread raises is raised here; the thread ends when the iterator is closed or forgotten."""
        ready: queue.Queue = queue.Queue(PREFETCHED)
        closed = threading.Event()
        worker = threading.Thread(
            target=_fill, args=(self, start, ready, closed), name="batches", daemon=True
        )
        worker.start()
        try:
            while True:
                batch = ready.get()
                if isinstance(batch, BaseException):
                    raise batch
                yield batch
        finally:
            closed.set()
            while not ready.empty():  # a worker that waits for room sees that it is over
                ready.get_nowait()
            worker.join()


def _fill(batches: Batches, g: int, ready: queue.Queue, closed: threading.Event) -> None:
    try:
        while not closed.is_set():
            ready.put(batches[g])
            g += 1
    except BaseException as error:
        ready.put(error)


class _Plan:
    """Which rows make which batch. The number and the shapes of the batches follow from the lengths
    of the rows alone; the epoch decides which rows share a batch and the order of the batches.

    lengths[k], sizes[k], counts[k]: positions, rows, and number of the batches of length k.
    """

    def __init__(
        self, row_lengths: np.ndarray, batch_size: int, max_seq_len: int, seed: int, shuffle: bool
    ):
        self.seed, self.shuffle, self.num_rows = seed, shuffle, len(row_lengths)
        self.lengths, self.sizes, self.counts, self.handed_on = [], [], [], []
        fewest = FEWEST_BATCHES if shuffle else 1
        edges = choose_lengths(row_lengths, MAX_LENGTHS, fewest * min(FEWEST_ROWS, batch_size))
        if len(edges) == 1:
            fewest = 1
        self.kind = np.searchsorted(edges, row_lengths).astype(np.uint8)  # (N,): which edge
        members = np.bincount(self.kind, minlength=len(edges))
        waiting = 0
        for k, edge in enumerate(edges.tolist()):
            waiting += int(members[k])
            most = max(1, min(batch_size * max_seq_len // edge, waiting // fewest))
            size, count = _divide(waiting, most, last=k == len(edges) - 1)
            waiting -= min(size * count, waiting)
            self.lengths.append(edge)
            self.sizes.append(size)
            self.counts.append(count)
            self.handed_on.append(waiting)
        self.per_epoch = sum(self.counts)
        # the batches of an epoch in the order of their lengths: (length k, first slot, slots)
        sizes = np.repeat(self.sizes, self.counts)
        self._ks = np.repeat(np.arange(len(edges)), self.counts)
        self._firsts = np.concatenate([[0], np.cumsum(sizes)])
        self.positions = int((sizes * np.repeat(self.lengths, self.counts)).sum())
        self._epoch: tuple | None = None  # (epoch, order of batches, rows in slots): the last used

    def batch(self, g: int) -> tuple[np.ndarray, int]:
        """(rows of global batch g, -1 for a missing one; the length that they are padded to)."""
        epoch = g // self.per_epoch if self.shuffle else 0
        made = self._epoch
        if made is None or made[0] != epoch:
            made = self._epoch = (epoch, *self._arrange(epoch))
        _, order, slots = made
        b = order[g % self.per_epoch]
        return slots[self._firsts[b] : self._firsts[b + 1]], self.lengths[self._ks[b]]

    def _arrange(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(batches in the order of the epoch, the row in each slot)."""
        rng = np.random.default_rng([self.seed, epoch])
        rows = np.arange(self.num_rows)
        if self.shuffle:
            rng.shuffle(rows)
        rows = rows[np.argsort(self.kind[rows], kind="stable")]  # by length, at random within one
        ends = np.cumsum(np.bincount(self.kind, minlength=len(self.lengths)))
        slots = np.full(self._firsts[-1], -1, np.int64)
        slot, begin, waiting = 0, 0, rows[:0]
        for k, end in enumerate(ends.tolist()):
            # those that came from the shorter length are placed first, so none is handed on twice
            # unless there is no other
            pool = np.concatenate([waiting, rows[begin:end]])
            placed, waiting = np.split(pool, [len(pool) - self.handed_on[k]])
            if self.shuffle:
                rng.shuffle(placed)
            slots[slot : slot + len(placed)] = placed
            slot, begin = slot + self.sizes[k] * self.counts[k], end
        order = rng.permutation(self.per_epoch) if self.shuffle else np.arange(self.per_epoch)
        return order, slots


def _divide(rows: int, most: int, last: bool) -> tuple[int, int]:
    """(size, count) of equal batches of at most `most` rows.

    For the last length the batches hold all rows and may lack some; else they hold at most the
    rows, and what is left goes to the next length. Sizes are even, and multiples of 8 where they
    are large, so that two to eight ranks can share them.
    """
    size = rows / -(-rows // most)  # as many batches as needed, equally full
    if last:
        size = int(-(-size // 1))
        return size, -(-rows // size)
    step = next(step for step in (8, 4, 2, 1) if step == 1 or size >= 16 * step)
    size = int(size) // step * step
    return size, rows // size


def choose_lengths(row_lengths: np.ndarray, most: int, fewest_rows: int = 1) -> np.ndarray:
    """The lengths to pad to, ascending int64, the last the longest row: as few as keep padding
    under ENOUGH_PADDING, at most `most`, each for at least `fewest_rows` rows (one length is always
    allowed), and the best so many.

    Dynamic programme over the histogram: best[j] after k rounds is the fewest positions that hold
    the rows of the shortest j + 1 candidates in k lengths, the last of them candidate j.
    """
    histogram = np.bincount(row_lengths)
    tokens = int((histogram * np.arange(len(histogram))).sum())
    # more than 1,024 candidates cost time and gain nothing: then look at every second, third, ...
    grain = -(-len(histogram) // 1024)
    longest = len(histogram) - 1
    candidates = np.unique(np.append(np.arange(grain, longest, grain), longest))
    below = np.cumsum(histogram)[candidates]  # rows that candidate j holds
    # step[i, j]: positions of the rows that j holds and i does not, i being the length before j
    between = below[None, :] - below[:, None]
    step = np.where(between >= fewest_rows, between * candidates[None, :], FORBIDDEN)
    best = np.where(below >= fewest_rows, below * candidates, FORBIDDEN)
    best[-1] = len(row_lengths) * longest
    previous: list[np.ndarray] = []
    while best[-1] > tokens / (1 - ENOUGH_PADDING) and len(previous) < most - 1:
        cost = best[:, None] + step
        before = cost.argmin(0)
        shorter = cost[before, np.arange(len(candidates))]
        previous.append(np.where(shorter < best, before, -1))
        best = np.minimum(best, shorter)
    chosen, j = [], len(candidates) - 1
    for before in reversed(previous):
        if before[j] >= 0:  # else this round gained nothing for the rows up to candidate j
            chosen.append(j)
            j = before[j]
    chosen.append(j)
    return candidates[sorted(chosen)].astype(np.int64)
