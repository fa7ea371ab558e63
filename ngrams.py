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
from data.dataset import IGNORED, TokenRows

MOST_TOKENS = 2**24  # of a text: its counts take some 16 bytes a token and order
FEW_DISCOUNTS = [0.5, 1.0, 1.5]  # where there are too few counts to estimate them, as in KenLM


class Table:
    """How often each key occurs among `keys`, and what is to be taken off such a number."""

    def __init__(self, keys: np.ndarray):
        self.keys, self.numbers = np.unique(keys, return_counts=True)  # sorted, and int64
        self.discounts = discounts_of(self.numbers)

    def number(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of these keys, 0 where there is none."""
        place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.numbers[place], 0)


def discounts_of(numbers: np.ndarray) -> np.ndarray:
    """What to take off a number of 0, 1, 2, and 3 or more: (4,) fp32. Chen and Goodman 1999,
    section 3, estimate how much less often such sequences come in another text of this kind."""
    once, twice, thrice, four = (int((numbers == n).sum()) for n in (1, 2, 3, 4))
    off = FEW_DISCOUNTS
    if min(once, twice, thrice, four) > 0:
        share = once / (once + 2 * twice)
        ratios = (twice / once, thrice / twice, four / thrice)
        off = [max(0.0, n - (n + 1) * share * r) for n, r in zip((1, 2, 3), ratios, strict=True)]
    return np.array([0.0, *off], np.float32)


class NGrams:
    """Smoothed counts of up to `order` tokens and the one that follows, in texts, not in chats.

    counts[k]  how often each sequence of k tokens and a next one occurs
    kinds[k]   how many different tokens stand before that sequence somewhere

    A key is the k + 1 tokens as the digits of one int64, in a base of as many digits as there are
    different tokens, the next one last: sequences that share their first k tokens stand together in
    the sorted keys. Kneser and Ney's idea is `kinds`: what
    follows the last k tokens, where the last k + 1 are unknown, is what follows them in many
    places, not what follows them often in one. "Francisco" is frequent, but only after "San".

    Raises UserError for a text that is too long, or an order that does not fit into a key.
    """

    def __init__(self, rows: TokenRows, vocab_size: int, order: int):
        if rows.is_chat:
            raise UserError("--ngram_weight is for texts, and these are chats: set it to 0")
        if rows.num_tokens > MOST_TOKENS:
            raise UserError(
                f"--ngram_weight is for small texts, of {MOST_TOKENS:,} tokens at most, and this "
                f"has {rows.num_tokens:,}: set it to 0"
            )
        tokens = np.asarray(rows.tokens)
        self.symbols = np.unique(tokens).astype(np.int64)  # ids that occur; below, their numbers
        self.base = max(2, len(self.symbols))
        self.vocab_size, self.order = vocab_size, order
        longest = next(k for k in range(63) if self.base ** (k + 2) >= 2**63)  # of keys that fit
        if order > longest:
            raise UserError(
                f"--ngram_order={order}: with {len(self.symbols):,} different tokens in the text "
                f"it must be at most {longest}"
            )
        text = np.searchsorted(self.symbols, tokens)  # int64
        ends = rows.starts + rows.lengths
        goes_on = rows.starts[1:] == ends[:-1] - 1  # two rows of a document share a token
        is_first = np.zeros(len(text), np.int64)  # of a document
        is_first[rows.starts[np.append(True, ~goes_on)]] = 1
        document = is_first.cumsum()
        self.counts, self.kinds = [], []
        keys = np.zeros(len(text) + 1, np.int64)
        for k in tqdm(range(order + 1), "counting n-grams", leave=False, delay=2):
            keys = keys[:-1] * self.base + text[k:]  # one for each place, of k + 1 tokens
            within = document[: len(keys)] == document[k:]
            self.counts.append(Table(keys[within]))
            if k > 0:
                self.kinds.append(Table(self.counts[k].keys % self.base**k))  # without the first

    def soft_labels(self, input_ids: Tensor, labels: Tensor, weight: float) -> Tensor:
        """What each target is to be: (B, T, V) fp32, aligned with labels (B, T); zeros where -100.

        `weight` of it is what the counts expect after the tokens of the row before it, and the rest
        the label itself. The place itself is left out of the counts (Ney, Essen and Kneser 1995):
        else a sequence that occurs once would always have been followed by its label.
        """
        B, T = labels.shape
        soft = np.zeros((B * T, self.vocab_size), np.float32)
        targets = np.flatnonzero(labels.numpy() != IGNORED)  # (N,) places in B * T
        if len(targets):
            # (B, T); pads stand behind the targets, so what number they get does not matter
            ids = np.searchsorted(self.symbols, input_ids.numpy())
            expected = self.expected(ids, targets)  # (N, symbols)
            soft[targets[:, None], self.symbols] = weight * expected
            soft[targets, labels.numpy().ravel()[targets]] += 1 - weight
        return torch.from_numpy(soft).view(B, T, -1)

    def expected(self, ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Probabilities of the next symbol at `targets`, places in ids (B, T): (N, symbols) fp32.

        From shorter contexts to longer ones, a sequence's count less its discount, and what the
        discounts leave shared out as the context shorter by one expects. Where the row has no more
        tokens, or the order is reached, `counts` say how often; before that `kinds` do.
        """
        seen = targets % ids.shape[1]  # (N,) tokens of the row before the target
        answers = ids.ravel()[targets]
        p = np.full((len(targets), len(self.symbols)), 1 / len(self.symbols), np.float32)
        context = np.zeros_like(targets)  # (N,) the last k tokens
        for k in range(self.order + 1):
            is_longest = (seen == k) | ((seen > k) & (k == self.order))
            self.interpolate(p, self.counts[k], context, answers, is_longest, is_longest)
            has_more = seen > k
            if k == self.order or not has_more.any():
                break
            before = ids.ravel()[np.where(has_more, targets - k - 1, 0)]
            longer = before * self.base**k + context
            alone = self.counts[k + 1].number(longer * self.base + answers) == 1
            self.interpolate(p, self.kinds[k], context, answers, has_more, alone & has_more)
            context = longer
        return p

    def interpolate(self, p, table: Table, context, answers, chosen, without) -> None:
        """Refine the rows `chosen` of p (N, symbols), in place, by what `table` has for `context`,
        with 1 less for the answer in the rows `without`."""
        rows = np.flatnonzero(chosen)
        begin = np.searchsorted(table.keys, context[rows] * self.base)
        length = np.searchsorted(table.keys, context[rows] * self.base + self.base) - begin
        rows = np.repeat(rows, length)  # (M,) one for each token that has followed, of all rows
        entries = np.arange(len(rows)) + np.repeat(begin - length.cumsum() + length, length)
        symbols = table.keys[entries] % self.base
        count = table.numbers[entries] - ((symbols == answers[rows]) & without[rows])
        off = table.discounts[np.minimum(count, 3)]
        total = np.bincount(rows, count, len(p))  # (N,)
        left = np.bincount(rows, off, len(p))
        known = total > 0
        p[known] *= (left[known] / total[known]).astype(np.float32)[:, None]
        p[rows, symbols] += (count - off) / np.maximum(total[rows], 1)  # a pair occurs once
