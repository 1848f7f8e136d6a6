# SPDX-License-Identifier: Apache-2.0
"""Changes of logits before a token is chosen: biases, suppressed tokens, grammars.

Every function changes float32 logits [R, V] in place; `rows` (int64 [n]) names the rows it is about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashinfer_backend.ops.torch_ops import allowed_tokens

NEVER = float("-inf")


def add_bias(logits: Tensor, where: Tensor, bias: Tensor) -> None:
    """Add bias (float32 [n]) to the logits at `where` (int64 [n], row * V + token)."""
    logits.view(-1).index_add_(0, where, bias)


@dataclass
class Allowed:
    """Rows that have allowed ids alone: rows int64 [n], mask int32 [n, ceil(V / 32)] as in allow_only, and
    marker int64 [n], one id each that is not allowed."""

    rows: Tensor
    mask: Tensor
    marker: Tensor


def mark_stuck(logits: Tensor, allowed: Allowed) -> None:
    """Where a row has no token left, let its marker be chosen: the host sees by that that there was none."""
    stuck = (logits[allowed.rows] == NEVER).all(dim=1)
    logits[allowed.rows, allowed.marker] = torch.where(stuck, 0.0, NEVER)


@dataclass
class BadWords:
    """n token sequences that must not be completed, and the m tokens of all of them but the last ones."""

    rows: Tensor  # int64 [n], row of the logits
    slots: Tensor  # int64 [n], row of the token history
    last: Tensor  # int64 [n], the word's last token
    word: Tensor  # int64 [m], whose token it is
    token: Tensor  # int32 [m]
    back: Tensor  # int32 [m], so far before the last token


def mask_bad_words(logits: Tensor, words: BadWords, history: Tensor | None, position: Tensor) -> None:
    """Suppress the last token of each word whose other tokens end the sequence so far, prompt included.

    history: int32 [slots, length], may be None where no word has two tokens; position: int32 [R], the
    length of each row's sequence.
    """
    differing = torch.zeros_like(words.rows, dtype=torch.int32)
    if len(words.word) and history is not None:
        at = position[words.rows[words.word]] - words.back
        differs = (history[words.slots[words.word], at.clamp(min=0)] != words.token) | (at < 0)
        differing.index_add_(0, words.word, differs.int())
    # Added, not written: of two words with one last token only one may be complete.
    change = torch.where(differing == 0, NEVER, 0.0)
    logits.view(-1).index_add_(0, words.rows * logits.shape[1] + words.last, change)


def suppress_tokens(logits: Tensor, suppressed: Tensor) -> None:
    """Make token suppressed[r] (int32 [R], -1 for none) impossible in row r."""
    index = suppressed.clamp(min=0).long().unsqueeze(1)
    kept = logits.gather(1, index)
    logits.scatter_(1, index, kept.masked_fill(suppressed.unsqueeze(1) >= 0, NEVER))


def allow_only(logits: Tensor, rows: Tensor, mask: Tensor, fallback: Tensor) -> None:
    """Keep the tokens whose bit is set in mask (int32 [n, ceil(V / 32)], token t is bit t % 32 of word
    t // 32). Where every one of them has been suppressed, the row is taken from fallback (float32 [n, V])
    instead: a grammar outranks what would leave it without a token."""
    allowed = allowed_tokens(mask, logits.shape[1])
    kept = logits[rows].masked_fill(~allowed, NEVER)
    stuck = (kept == NEVER).all(dim=1, keepdim=True)
    logits[rows] = torch.where(stuck, fallback.masked_fill(~allowed, NEVER), kept)
