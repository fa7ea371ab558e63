"""Batches: every row once per epoch, few shapes, little padding, any position, any number of ranks.

The rows are made here, each with ids that occur in no other, so that a batch says which rows it
holds.
"""

import itertools
import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tinyworld
from data.batches import ENOUGH_PADDING, MAX_LENGTHS, Batches, choose_lengths
from data.dataset import TokenRows, load_dataset
from data.tokenizer import Tokenizer

REAL = Path(__file__).parents[2] / "shared" / "data"
PAD = 0


def rows_of(lengths) -> TokenRows:
    """Row i holds the id i + 1, as often as it is long; the last of them is PAD (an end)."""
    lengths = np.array(lengths, np.int32)
    tokens = np.repeat(np.arange(len(lengths), dtype=np.uint32) + 1, lengths)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    tokens[starts + lengths - 1] = PAD
    return TokenRows(tokens, None, starts, lengths, len(lengths), 0, 0, PAD, "", "")


def some_lengths(n=500, longest=120, seed=0):
    rng = np.random.default_rng(seed)
    return np.clip(rng.gamma(4, 12, n).astype(int), 2, longest)


def members(batch) -> list[int]:
    """The rows of a batch, those that are all padding left out."""
    return [int(row[0]) - 1 for row in batch["input_ids"] if row[0] != PAD]


def epoch(batches, e):
    return [batches[g] for g in range(e * batches.per_epoch, (e + 1) * batches.per_epoch)]


LENGTHS = {
    "typical": some_lengths(),
    "one row": [5],
    "two rows": [2, 90],
    "all equal": [64] * 37,
    "mostly full": [128] * 300 + [3, 17, 60],
    "few": [2, 3, 5, 8, 13, 21, 34, 55, 89],
    "many lengths": list(range(2, 129)) * 3,
}
lengths = pytest.mark.parametrize("name", LENGTHS)


# ----- what a batch is ----------------------------------------------------------------------------


@lengths
@pytest.mark.parametrize("batch_size", [1, 4, 33])
def test_rows_are_right_padded_and_labels_know_padding_by_length(name, batch_size):
    rows = rows_of(LENGTHS[name])
    batches = Batches(rows, batch_size, 128, seed=0)
    for batch in epoch(batches, 0):
        ids, labels = batch["input_ids"], batch["labels"]
        assert ids.dtype == labels.dtype == torch.int64 and ids.shape == labels.shape
        assert tuple(ids.shape) in batches.shapes
        assert ids.numel() <= batch_size * 128
        assert batch["num_tokens"] == sum(int(rows.lengths[i]) for i in members(batch))
        for row, row_labels in zip(ids, labels, strict=True):
            if row[0] == PAD:
                assert (row == PAD).all() and (row_labels == -100).all()
                continue
            n = int(rows.lengths[int(row[0]) - 1])
            assert (row[: n - 1] == row[0]).all() and (row[n - 1 :] == PAD).all()
            # the end is supervised though it equals the padding behind it
            assert row_labels[0] == -100 and (row_labels[1:n] == row[1:n]).all()
            assert (row_labels[n:] == -100).all()


@lengths
@pytest.mark.parametrize("batch_size", [1, 4, 33])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_row_once(name, batch_size, shuffle):
    rows = rows_of(LENGTHS[name])
    batches = Batches(rows, batch_size, 128, seed=3, shuffle=shuffle)
    for e in (0, 1, 5):
        made = epoch(batches, e)
        assert sorted(i for batch in made for i in members(batch)) == list(range(len(rows)))
        lacking = [len(b["input_ids"]) - len(members(b)) for b in made]
        assert sum(n > 0 for n in lacking) <= 1  # only one batch has missing rows


@lengths
@pytest.mark.parametrize("batch_size", [1, 4, 33])
def test_shapes_are_few_and_all_occur(name, batch_size):
    batches = Batches(rows_of(LENGTHS[name]), batch_size, 128, seed=0)
    seen = {tuple(batch["input_ids"].shape) for e in (0, 1) for batch in epoch(batches, e)}
    assert seen == set(batches.shapes)
    assert len(batches.shapes) == len({length for _, length in batches.shapes}) <= MAX_LENGTHS


# ----- order --------------------------------------------------------------------------------------


def test_any_position_is_a_function_of_the_seed_alone():
    rows = rows_of(LENGTHS["typical"])
    one, other = (Batches(rows, 4, 128, seed=7) for _ in range(2))
    order = list(range(3 * one.per_epoch))
    expected = {g: one[g] for g in order}
    np.random.default_rng(0).shuffle(order)
    for g in order:
        for key in ("input_ids", "labels"):
            assert torch.equal(other[g][key], expected[g][key])
    third = Batches(rows, 4, 128, seed=8)
    assert any(members(third[g]) != members(one[g]) for g in range(5))


def test_a_rows_company_changes_from_epoch_to_epoch():
    batches = Batches(rows_of(LENGTHS["typical"]), 16, 128, seed=0)

    def companions(e):
        return {i: set(members(batch)) - {i} for batch in epoch(batches, e) for i in members(batch)}

    first, second = companions(0), companions(1)
    shared = np.mean([len(first[i] & second[i]) / max(1, len(first[i])) for i in first])
    assert shared < 0.5
    assert sum(first[i] == second[i] for i in first) < 0.02 * len(first)


def test_rows_that_move_to_a_longer_length_differ_and_are_spread_over_its_batches():
    batches = Batches(rows_of([10] * 208 + [20] * 200), 16, 20, seed=0)
    assert [length for _, length in batches.shapes] == [20, 10]
    moved, together = [], []
    for e in range(5):
        made = [batch for batch in epoch(batches, e) if batch["input_ids"].shape[1] == 20]
        shorter = [[i for i in members(batch) if i < 208] for batch in made]
        moved.append(frozenset(itertools.chain(*shorter)))
        together.append(max(map(len, shorter)) == len(moved[-1]))
    assert {len(rows) for rows in moved} == {5}
    assert len(set(moved)) == 5 and not all(together)


def test_neighbouring_batches_are_not_sorted_by_length():
    batches = Batches(rows_of(LENGTHS["typical"]), 4, 128, seed=0)
    for e in range(3):
        widths = np.array([batch["input_ids"].shape[1] for batch in epoch(batches, e)])
        assert len(widths) > 40
        assert abs(np.corrcoef(widths[1:], widths[:-1])[0, 1]) < 0.35
        rising = np.mean(np.diff(widths) > 0)
        assert 0.25 < rising < 0.75
    assert not np.array_equal(widths, [b["input_ids"].shape[1] for b in epoch(batches, 0)])


def test_validation_keeps_one_order():
    batches = Batches(rows_of(LENGTHS["typical"]), 4, 128, seed=0, shuffle=False)
    for a, b in zip(epoch(batches, 0), epoch(batches, 3), strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
    other = Batches(rows_of(LENGTHS["typical"]), 4, 128, seed=1, shuffle=False)
    assert torch.equal(other[5]["input_ids"], batches[5]["input_ids"])


# ----- ranks --------------------------------------------------------------------------------------


@lengths
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_share_the_batches_of_one(name, world_size):
    rows = rows_of(LENGTHS[name])
    alone = Batches(rows, 6, 128, seed=1)
    ranks = [Batches(rows, 6, 128, 1, rank, world_size) for rank in range(world_size)]
    assert {rank.per_epoch for rank in ranks} == {alone.per_epoch}
    for g in range(alone.per_epoch, 2 * alone.per_epoch):
        parts = [rank[g] for rank in ranks]
        assert len({part["input_ids"].shape for part in parts}) == 1
        assert tuple(parts[0]["input_ids"].shape) in ranks[0].shapes
        shared = [members(part) for part in parts]
        assert sorted(itertools.chain(*shared)) == sorted(members(alone[g]))
        # one after the other, as rows r, r + world_size, ... of the global batch
        woven = [row for turn in itertools.zip_longest(*shared) for row in turn if row is not None]
        if len(members(alone[g])) == len(alone[g]["input_ids"]):
            assert woven == members(alone[g])
    assert len(ranks[0].shapes) <= MAX_LENGTHS


# ----- the stream ---------------------------------------------------------------------------------


def test_the_stream_goes_on_from_any_position_across_epochs():
    batches = Batches(rows_of(LENGTHS["typical"]), 16, 128, seed=0)
    start = batches.per_epoch - 3
    stream = batches.stream(start)
    for g, batch in zip(range(start, start + 10), stream, strict=False):
        assert torch.equal(batch["input_ids"], batches[g]["input_ids"])
    stream.close()
    assert not [t for t in threading.enumerate() if t.name == "batches"]


def test_what_goes_wrong_in_the_worker_is_raised_in_training(monkeypatch):
    batches = Batches(rows_of(LENGTHS["typical"]), 16, 128, seed=0)
    get = Batches.__getitem__

    def failing(self, g):
        if g == 3:
            raise OSError("disk gone")
        return get(self, g)

    monkeypatch.setattr(Batches, "__getitem__", failing)
    stream = batches.stream(0)
    assert [next(stream)["input_ids"].ndim for _ in range(3)] == [2, 2, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(stream)
    assert not [t for t in threading.enumerate() if t.name == "batches"]


# ----- lengths and padding ------------------------------------------------------------------------


def positions(row_lengths, edges):
    return sum(min(edge for edge in edges if edge >= n) for n in row_lengths)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(2, 14), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 8))
def test_lengths_are_the_best_so_many(row_lengths, most, fewest_rows):
    """Against every choice of lengths."""
    edges = choose_lengths(np.array(row_lengths, np.int32), most, fewest_rows).tolist()
    assert edges == sorted(set(edges)) and edges[-1] == max(row_lengths) and len(edges) <= most
    distinct = sorted(set(row_lengths))
    best = {}  # number of lengths -> fewest positions
    for k in range(1, most + 1):
        choices = itertools.combinations(distinct[:-1], k - 1)
        allowed = [
            positions(row_lengths, [*choice, distinct[-1]])
            for choice in choices
            if k == 1 or fewest_in(row_lengths, [*choice, distinct[-1]]) >= fewest_rows
        ]
        best[k] = min([*allowed, *best.values()])
    enough = sum(row_lengths) / (1 - ENOUGH_PADDING)
    wanted = next((k for k in best if best[k] <= enough), most)
    assert positions(row_lengths, edges) == best[wanted]
    assert len(edges) == 1 or fewest_in(row_lengths, edges) >= fewest_rows


def fewest_in(row_lengths, edges):
    """Rows of the length that has the fewest."""
    return min(
        Counter(min(e for e in edges if e >= n) for n in [*row_lengths]).get(e, 0) for e in edges
    )


def test_lengths_of_very_long_rows_take_a_moment():
    row_lengths = np.random.default_rng(0).integers(2, 32_768, 100_000).astype(np.int32)
    edges = choose_lengths(row_lengths, MAX_LENGTHS)
    assert len(edges) == MAX_LENGTHS and edges[-1] == row_lengths.max()
    assert 1 - row_lengths.sum() / edges[np.searchsorted(edges, row_lengths)].sum() < 0.06


def test_padding_is_what_the_batches_hold():
    rows = rows_of(LENGTHS["typical"])
    batches = Batches(rows, 8, 128, seed=0)
    held = sum(batch["input_ids"].numel() for batch in epoch(batches, 0))
    assert batches.padding == pytest.approx(1 - rows.lengths.sum() / held)


@pytest.mark.parametrize(
    "batch_size, max_seq_len", list(itertools.product([2, 8, 32], [128, 512, 4096]))
)
def test_padding_is_small_whatever_the_budget(batch_size, max_seq_len):
    assert Batches(rows_of(some_lengths(1000)), batch_size, max_seq_len, seed=0).padding < 0.06


@pytest.mark.parametrize("tokenizer", ["minimind_tokenizer.json", "bytes"])
def test_padding_on_the_instructions_is_under_5_percent(tmp_path, tokenizer):
    if not (REAL / "instructions.json").is_file():
        pytest.skip(f"{REAL}/instructions.json is not here")
    bare = tokenizer == "bytes"
    loaded = Tokenizer.load("bytes" if bare else REAL / tokenizer)
    for max_seq_len in (128, 256, 512, 1024, 2048):
        train, val = load_dataset(
            REAL / "instructions.json",
            tokenizer=loaded,
            max_seq_len=max_seq_len,
            cache_dir=tmp_path,
            progress=False,
        )
        for batch_size in (4, 8, 16, 32, 64):
            batches = Batches(train, batch_size, max_seq_len, seed=0)
            assert batches.padding < 0.05, (max_seq_len, batch_size)
            assert len(batches.shapes) <= MAX_LENGTHS


def test_padding_on_the_embedded_chats_is_under_5_percent():
    rng, bare = random.Random(0), Tokenizer.load("bytes")
    chats = [tinyworld.generate_chat(rng, "train") for _ in range(1000)]
    lengths = [len(bare.render_chat(messages)[0]) for messages in chats]
    for batch_size in (4, 16):
        assert Batches(rows_of(lengths), batch_size, max(lengths), seed=0).padding < 0.05


def test_short_rows_come_in_larger_numbers():
    sizes = {t: b for b, t in Batches(rows_of([10] * 1000 + [100] * 100), 4, 100, seed=0).shapes}
    assert 32 <= sizes[10] <= 40 and sizes[100] == 4
    counts = Counter(tuple(b["input_ids"].shape) for b in epoch(
        Batches(rows_of([10] * 1000 + [100] * 100), 4, 100, seed=0), 0))  # fmt: skip
    assert counts[4, 100] == 25


# ----- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ((0, 128, 0), r"batch_size \(0\) must be at least 1"),
        ((4, 64, 0), r"a row of 120 tokens is longer than max_seq_len \(64\)"),
        ((4, 128, 0, 2, 2), r"rank \(2\) must lie in \[0, world_size \(2\)\)"),
    ],
)
def test_settings_are_checked(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        Batches(rows_of(LENGTHS["typical"]), *arguments)


def test_no_rows_and_no_such_batch():
    with pytest.raises(ValueError, match="no rows"):
        Batches(rows_of([]), 4, 128, seed=0)
    with pytest.raises(IndexError):
        Batches(rows_of([3]), 4, 128, seed=0)[-1]
