"""What the counts of a text expect to come next, as softer targets for a small corpus.

The next token of a text is one draw from a distribution that nobody knows. A model that has only
such draws to learn from needs many of them; how often each token has followed the same few tokens,
anywhere in the text, is a rougher guide with far less noise. So each target becomes a mixture: the
token that did come, and what the counts expect. The model is the same, and so is what it reads.

The counts are smoothed as Kneser and Ney do (1995; interpolated, with three discounts, as in Chen
and Goodman 1999). Malagutti et al. 2024 train neural models with smoothed counts.
"""

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from config import UserError
from data.dataset import TokenRows

MOST_ENTRIES = 2**28  # tokens of the text times different ones: 1 GiB of probabilities
FEW_DISCOUNTS = [0.5, 1.0, 1.5]  # where there are too few counts to estimate them, as in KenLM
PLACES_AT_ONCE = 2**12  # of the text: what is computed for them should fit into a cache


class NGrams:
    """What smoothed counts of up to `order` tokens and the one that follows expect, in a text.

    symbols    (S,): the ids that occur, ascending. Below, a token is its number among them
    expected   (N, S) fp32: for each of the N tokens of the text the probabilities of what stands
               there, after those before it in its row. That place itself is left out of the counts
               (Ney, Essen and Kneser 1995): else a sequence that occurs once would have been
               followed by its label every time.

    From shorter contexts to longer ones, a count less its discount, and what the discounts leave
    shared out as the context shorter by one expects. Only for the longest context it counts how
    often a token followed; for shorter ones, by Kneser and Ney, behind how many different tokens
    context and token stood together. What follows an unknown sequence is what follows in many
    places: "Francisco" is frequent, but after "San" only.

    `vocab_size` is V, the model's number of logits. Raises UserError for chats, for a text that is
    too long, and for an order whose sequences do not fit into an int64.
    """

    def __init__(self, rows: TokenRows, vocab_size: int, order: int, progress: bool = True):
        if rows.is_chat:
            raise UserError("--ngram_weight is for texts, and these are chats: set it to 0")
        tokens = np.asarray(rows.tokens)
        self.rows, self.vocab_size = rows, vocab_size
        self.symbols, text = np.unique(tokens, return_inverse=True)  # text (N,): int64
        N, S = len(tokens), len(self.symbols)
        if N * S > MOST_ENTRIES:
            raise UserError(
                f"--ngram_weight is for small texts, and this has {N:,} tokens, {S:,} of them "
                f"different; their product may be {MOST_ENTRIES:,} at most: set it to 0"
            )
        base = max(2, S)
        longest = next(k for k in range(63) if base ** (k + 2) >= 2**63)
        if order > longest:
            raise UserError(
                f"--ngram_order={order}: with {S:,} different tokens in the text it must be at "
                f"most {longest}"
            )
        seen, depth = tokens_before(rows)
        self.expected = np.full((N, S), 1 / S, np.float32)
        keys = text.copy()  # (N,): a token and the k before it, as digits, the token last
        counts = Table(keys, base)
        entry = counts.entry  # (N,): of the sequence that ends at each place
        bar = tqdm(range(order + 1), "counting n-grams", leave=False, delay=1, disable=not progress)
        for k in bar:
            longest_here = np.flatnonzero((seen == k) | ((seen > k) & (k == order)))
            self.refine(longest_here, counts, entry[longest_here], without=1)
            shorter_here = np.flatnonzero(seen > k)
            if k == order or len(shorter_here) == 0:
                continue
            keys[k + 1 :] += text[: -k - 1] * base ** (k + 1)
            is_whole = depth > k  # the k + 1 tokens before are of the same document
            counts = Table(keys[is_whole], base)
            entry = np.zeros(N, np.int64)
            entry[is_whole] = counts.entry
            kinds = Table(counts.keys % base ** (k + 1), base)
            once = counts.numbers == 1  # without its place a kind less
            longer = entry[shorter_here]
            self.refine(shorter_here, kinds, kinds.entry[longer], without=once[longer])

    def refine(
        self, places: np.ndarray, table: "Table", entry: np.ndarray, without: np.ndarray | int
    ) -> None:
        """Interpolate `expected` at `places` (n,) of the text with `table`, whose `entry` (n,) is
        the context and the token there, and counts `without`, 0 or 1 for each or for all, less."""
        fewer = np.broadcast_to(without, places.shape)
        known = table.total[table.context[entry]] > fewer  # else nothing else has followed
        places, entry, fewer = places[known], entry[known], fewer[known]
        for start in range(0, len(places), PLACES_AT_ONCE):
            now = slice(start, start + PLACES_AT_ONCE)
            place, own = places[now], entry[now]
            context = table.context[own]
            total = table.total[context] - fewer[now]
            less = (table.kept[own] - table.kept_of_one_less[own]) * fewer[now]
            left = total - table.kept_total[context] + less
            # All tokens that have followed, of the first place, of the second, ...: (m,) in all.
            length = table.length[context]
            of = np.repeat(np.arange(len(place)), length)
            first = table.begin[context] - (length.cumsum() - length)
            followed = np.arange(len(of)) + np.repeat(first, length)
            p = self.expected[place] * (left / total)[:, None].astype(np.float32)  # (n, S)
            p[of, table.token[followed]] += table.kept[followed] / total[of]
            p[np.arange(len(place)), table.token[own]] -= less / total
            self.expected[place] = p

    def soft_labels(self, chosen: np.ndarray, shape: tuple[int, int], weight: float) -> Tensor:
        """What each target of a batch of these rows is to be: (B, T, V) fp32, beside labels of that
        shape (B, T), on the CPU, and zeros where there is no target. `chosen` (at most B,) int64:
        numbers of rows, -1 for one of padding.

        `weight` of it is what the counts expect, and the rest the label itself.
        """
        soft = np.zeros((*shape, self.vocab_size), np.float32)
        for b, row in enumerate(chosen):
            if row >= 0:
                start, length = int(self.rows.starts[row]), int(self.rows.lengths[row])
                labels = self.rows.tokens[start + 1 : start + length]  # position 0 is no target
                targets = soft[b, 1:length]  # (length - 1, V)
                targets[:, self.symbols] = weight * self.expected[start + 1 : start + length]
                targets[np.arange(length - 1), labels] += 1 - weight
        return torch.from_numpy(soft)


class Table:
    """Sequences of tokens, as int64 numbers whose last digit in `base` is the last token: arrays
    over sequences, over entries (E different sequences) and over contexts.

    entry                     of each sequence, which entry it is
    keys, numbers, token      of each entry: itself, how often it occurs, its last token
    kept, kept_of_one_less    numbers less their discounts, and that for one less: float64
    context                   of each entry, the number of all its tokens but the last
    begin, length             of each context, where its entries stand
    total, kept_total         of each context, the sums of numbers and of kept
    """

    def __init__(self, sequences: np.ndarray, base: int):
        self.keys, self.entry, self.numbers = np.unique(
            sequences, return_inverse=True, return_counts=True
        )
        self.token = self.keys % base
        discounts = discounts_of(self.numbers)
        one_less = self.numbers - 1
        self.kept = self.numbers - discounts[np.minimum(self.numbers, 3)]
        self.kept_of_one_less = one_less - discounts[np.minimum(one_less, 3)]
        before = self.keys // base
        is_first = np.append(True, before[1:] != before[:-1])
        self.context = is_first.cumsum() - 1
        self.begin = np.flatnonzero(is_first)
        self.length = np.diff(np.append(self.begin, len(self.keys)))
        self.total = np.add.reduceat(self.numbers, self.begin)
        self.kept_total = np.add.reduceat(self.kept, self.begin)


def discounts_of(numbers: np.ndarray) -> np.ndarray:
    """What to take off a number of 0, 1, 2, and 3 or more: (4,). Chen and Goodman 1999, section 3,
    estimate how much less often such sequences come in another text of this kind."""
    once, twice, thrice, four = (int((numbers == n).sum()) for n in (1, 2, 3, 4))
    off = FEW_DISCOUNTS
    if min(once, twice, thrice, four) > 0:
        share = once / (once + 2 * twice)
        ratios = (twice / once, thrice / twice, four / thrice)
        off = [max(0.0, n - (n + 1) * share * r) for n, r in zip((1, 2, 3), ratios, strict=True)]
    return np.array([0.0, *off])


def tokens_before(rows: TokenRows) -> tuple[np.ndarray, np.ndarray]:
    """For each token of the text, how many stand before it in the row whose target it is, and in
    its document: (N,) int64 each. Two rows of a document share a token, and only one's target."""
    place = np.arange(rows.num_tokens)
    targets = rows.lengths.astype(np.int64) - 1  # of each row: all but its first token
    within = np.arange(targets.sum()) - np.repeat(targets.cumsum() - targets, targets) + 1
    seen = np.zeros_like(place)
    seen[np.repeat(rows.starts, targets) + within] = within
    begins = np.where(seen == 0, place, 0)  # no row's target: the first of a document
    return seen, place - np.maximum.accumulate(begins)
