"""Attention, read from what the nodes of torch's kernels have saved."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian.fast.operation import Operation


class Attention(NamedTuple):
    """The inputs of attention: queries, keys, values, ``(*batch, tokens, features)``.

    Attributes:
        query: The queries.
        key: The keys.
        value: The values.
        scale: The factor of the scores.
        mask: A tensor added to the scores: torch saves a boolean mask as numbers.
        causal: Whether a token attends only to itself and those before it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None
    causal: bool

    @property
    def entries(self) -> int:
        """The number of scores."""
        return math.prod(self.query.shape[:-1]) * self.key.shape[-2]

    def probabilities(self) -> Tensor:
        """Compute the softmax of the scores again, ``(*batch, queries, keys)``."""
        scores = self.query @ self.key.mT * self.scale
        if self.mask is not None:
            scores = scores + self.mask
        if self.causal:
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores.softmax(-1)


def read(op: Operation) -> Attention | None:
    """Return the attention of a node; ``None`` where it does more, as dropout."""
    q, k, v, dropout, causal = (
        op.saved(it) for it in ("query", "key", "value", "dropout_p", "is_causal")
    )
    if any(it is None for it in (q, k, v, dropout, causal)):
        return None
    if dropout or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return None
    scale, mask = op.saved("scale"), op.saved("attn_mask")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = op.saved("attn_bias") if mask is None else mask
    return Attention(q, k, v, scale, mask, causal)
