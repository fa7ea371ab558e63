"""Soft labels from counts, against counts made one by one. (tests/test_learning.py: what for.)"""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch

from config import UserError
from data.dataset import IGNORED, TokenRows
from ngrams import NGrams, discounts_of

IDS = [3, 5, 6, 9]  # those that occur: not all, and not from 0 on
V = 12
PAD = 0


def rows_of(documents: list[list[int]], max_seq_len: int) -> TokenRows:
    """Documents cut into rows as data/dataset.py does: two neighbours share a token."""
    starts, lengths, begin = [], [], 0
    for document in documents:
        for start in range(0, max(1, len(document) - 1), max_seq_len - 1):
            starts.append(begin + start)
            lengths.append(len(document[start : start + max_seq_len]))
        begin += len(document)
    tokens = np.array([token for document in documents for token in document], np.uint16)
    places = np.array(starts, np.int64), np.array(lengths, np.int32)
    return TokenRows(tokens, None, *places, len(documents), 0, 0, PAD, "", "")


def documents_of(seed: int) -> list[list[int]]:
    """Six texts of 2 to 30 tokens in which some sequences are frequent, and some are alone."""
    rng = random.Random(seed)
    weights = [8, 4, 2, 1]
    return [rng.choices(IDS, weights, k=rng.randint(2, 30)) for _ in range(6)]


def soft_labels(rows: TokenRows, order: int, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(labels, soft labels) of all rows as one batch."""
    shape = len(rows), int(rows.lengths.max())
    labels = torch.full(shape, IGNORED)
    for i in range(len(rows)):
        labels[i, : rows.lengths[i]] = torch.from_numpy(rows[i][1])
    return labels, NGrams(rows, V, order).soft_labels(np.arange(len(rows)), shape, weight)


def by_hand(documents, order: int, row: list[int], place: tuple[int, int], seen: int) -> list:
    """Kneser-Ney's probabilities after `row`, whose next token stands at `place`: (document, token)
    of the text, and is left out. Counted anew, in dictionaries, by the definition."""

    def counts(k: int, left_out: tuple[int, int] | None) -> Counter:
        """Sequences of k + 1 tokens, but for the one that ends where it is left out."""
        found: Counter = Counter()
        for d, document in enumerate(documents):
            for end in range(k, len(document)):
                if (d, end) != left_out:
                    found[tuple(document[end - k : end + 1])] += 1
        return found

    def kinds(k: int, left_out: tuple[int, int] | None) -> Counter:
        """For each sequence of k + 1 tokens, how many tokens are seen before it somewhere."""
        return Counter(sequence[1:] for sequence in counts(k + 1, left_out))

    longest = min(order, seen)
    p = {token: 1 / len(IDS) for token in IDS}
    for k in range(longest + 1):
        count = counts if k == longest else kinds
        table = count(k, place)
        discounts = discounts_of(np.array(list(count(k, None).values())))  # those of the whole text
        context = tuple(row[len(row) - k :])
        follow = {token: table[(*context, token)] for token in IDS}
        total = sum(follow.values())
        if total > 0:
            off = {token: float(discounts[min(n, 3)]) for token, n in follow.items()}
            left = sum(off.values())
            p = {t: (follow[t] - off[t] + left * p[t]) / total for t in IDS}
    return [p[token] for token in IDS]


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("at_once", [3, 1000])
def test_what_the_counts_expect_is_kneser_and_neys_without_the_place_itself(
    order, seed, at_once, monkeypatch
):
    monkeypatch.setattr("ngrams.PLACES_AT_ONCE", at_once)
    documents = documents_of(seed)
    rows = rows_of(documents, max_seq_len=8)
    labels, soft = soft_labels(rows, order, weight=1.0)
    assert soft.dtype == torch.float32 and soft.shape == (*labels.shape, V)

    place_of = [(d, i) for d, document in enumerate(documents) for i in range(len(document))]
    compared = 0
    for b in range(len(rows)):
        for t in range(1, int(rows.lengths[b])):
            row = rows[b][0][:t].tolist()
            expected = by_hand(documents, order, row, place_of[rows.starts[b] + t], seen=t)
            assert soft[b, t, IDS].tolist() == pytest.approx(expected, abs=1e-6), (b, t)
            compared += 1
    assert compared == sum(len(document) - 1 for document in documents)
    others = [token for token in range(V) if token not in IDS]
    assert soft[..., others].abs().max() == 0
    assert torch.allclose(soft.sum(-1), (labels != IGNORED).float(), atol=1e-5)


def test_discounts_are_those_of_chen_and_goodman():
    """Their formulas, with numbers that give round results; and what KenLM takes without any."""
    numbers = [1] * 60 + [2] * 20 + [3] * 10 + [4] * 5 + [7] * 3
    share = 60 / (60 + 2 * 20)  # Y
    expected = [0, 1 - 2 * share * 20 / 60, 2 - 3 * share * 10 / 20, 3 - 4 * share * 5 / 10]
    assert discounts_of(np.array(numbers)).tolist() == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx([0, 0.6, 1.1, 1.8])
    assert discounts_of(np.array([5, 9])).tolist() == [0, 0.5, 1, 1.5]


def test_a_weight_mixes_the_counts_with_the_token_that_came():
    rows = rows_of(documents_of(2), max_seq_len=8)
    labels, counted = soft_labels(rows, 3, weight=1.0)
    hard = torch.nn.functional.one_hot(labels.clamp(min=0), V) * (labels != IGNORED)[..., None]
    for weight in (0.0, 0.3):
        _, mixed = soft_labels(rows, 3, weight)
        assert torch.allclose(mixed, weight * counted + (1 - weight) * hard, atol=1e-6)


def test_soft_labels_of_a_row_do_not_depend_on_its_batch():
    rows = rows_of(documents_of(3), max_seq_len=8)
    ngrams = NGrams(rows, V, order=3)
    chosen = np.array([2, -1, 0])  # as a rank's part of a batch: one of padding, and one missing
    found = ngrams.soft_labels(chosen, (4, 9), 0.5)
    for b, row in ((0, 2), (2, 0)):
        alone = ngrams.soft_labels(np.array([row]), (1, 9), 0.5)
        assert torch.equal(found[b], alone[0]) and alone.sum() > 0
    assert found[[1, 3]].abs().max() == 0


def test_an_order_beyond_every_document_is_that_of_the_longest():
    rows = rows_of([[3, 5], [3, 5, 6], [5, 6, 9], [3]], max_seq_len=8)
    found = [soft_labels(rows, order, 1.0)[1] for order in (2, 5)]
    assert torch.equal(*found)


@pytest.mark.parametrize("different", [1, 2, 3, 66, 120, 1024])
def test_the_longest_order_fits_into_an_int64(different):
    """A text that ends in a run of its last token, whose number is the largest there is."""
    tokens = [*range(different), *[different - 1] * 80]
    rows = rows_of([tokens], max_seq_len=len(tokens))
    order = 62
    while max(different, 2) ** (order + 1) >= 2**63:
        order -= 1
    soft = NGrams(rows, different, order).soft_labels(np.array([0]), (1, len(tokens)), 1.0)
    assert torch.allclose(soft[0, 1:].sum(-1), torch.ones(len(tokens) - 1), atol=1e-5)
    assert soft[0, -1].argmax() == different - 1 and soft[0, -1].max() > 0.9
    with pytest.raises(UserError, match=f"at most {order}"):
        NGrams(rows, different, order + 1)


def test_what_cannot_be_counted_is_a_sentence(monkeypatch):
    rows = rows_of(documents_of(0), max_seq_len=8)
    with pytest.raises(UserError, match="--ngram_order=31: with 4 different tokens .* at most 30"):
        NGrams(rows, V, order=31)  # 4 ** 32 is beyond an int64
    monkeypatch.setattr("ngrams.MOST_ENTRIES", rows.num_tokens * 4 - 1)
    with pytest.raises(UserError, match="small texts, and this has .* tokens, 4 of them different"):
        NGrams(rows, V, order=3)
    chats = dataclasses.replace(rows, supervised=np.ones(len(rows.tokens), np.uint8))
    with pytest.raises(UserError, match="these are chats"):
        NGrams(chats, V, order=3)
