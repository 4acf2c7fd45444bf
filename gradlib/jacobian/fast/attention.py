"""Attention, as the nodes of torch's kernels have saved it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian.fast.operation import Operation


class Attention(NamedTuple):
    """What went into it: queries, keys and values, ``(*batch, tokens, features)``.

    Attributes:
        query: The queries.
        key: The keys.
        value: The values.
        scale: What the scores are multiplied by.
        mask: What is added to them: torch has made numbers of a boolean one.
        causal: Whether a token sees only those before it, and itself.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None
    causal: bool

    @property
    def entries(self) -> int:
        """How many entries the scores have."""
        return math.prod(self.query.shape[:-1]) * self.key.shape[-2]

    def probabilities(self) -> Tensor:
        """Compute again what each query gives to each key."""
        scores = self.query @ self.key.mT * self.scale
        if self.mask is not None:
            scores = scores + self.mask
        if self.causal:
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores.softmax(-1)


def read(op: Operation) -> Attention | None:
    """Return what a node has saved; ``None`` where the formula is not all of it."""
    q, k, v, dropout, causal = (
        op.saved(it) for it in ("query", "key", "value", "dropout_p", "is_causal")
    )
    if any(it is None for it in (q, k, v, dropout, causal)):
        return None
    if op.number or dropout or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return None
    scale, mask = op.saved("scale"), op.saved("attn_mask")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = op.saved("attn_bias") if mask is None else mask
    return Attention(q, k, v, scale, mask, causal)
