"""From logits to one token: temperature, filters and the draw, on integer weights.

Their sums are exact in any order, so that a row's token does not depend on how the device adds. All functions
work on the device where their arguments are, without waiting for it.
"""

from __future__ import annotations

import torch

# Weight of the most likely token. Tokens 2**40 times less likely weigh nothing and are never sampled, which
# together takes off less than 1e-6 of the probability for a million tokens; 2**23 tokens fit in an int64 sum.
WEIGHT_ONE = 2**40


def token_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Integer weights proportional to softmax(logits / temperature): `WEIGHT_ONE` for the most likely token.

    logits: torch.float32 [r, vocab_size]
    temperature: torch.float32 [r, 1], above 0
    returns: torch.int64 [r, vocab_size]
    """
    highest = logits.amax(-1, keepdim=True)
    return (logits - highest).div_(temperature).exp_().mul_(WEIGHT_ONE).long()


def keep_top(
    logits: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, max_top_k: int
) -> torch.Tensor:
    """Weights with all tokens outside top-k, and then outside top-p of what is left, set to 0.

    Top-k keeps every token that ties with the k-th. Top-p keeps the likeliest tokens, until they reach its
    share of the probability that top-k left; of those that tie at the border it keeps the lowest ids.

    logits: torch.float32 [r, vocab_size], the order of likelihood
    weights: torch.int64 [r, vocab_size]
    top_k: torch.int64 [r, 1], in [1, vocab_size]
    top_p: torch.float64 [r, 1], in (0, 1]
    max_top_k: largest of `top_k`; no more than so many tokens are sorted
    """
    listed, order = logits.topk(max_top_k)
    listed_weights = weights.gather(1, order)
    weights = weights.masked_fill(logits < listed.gather(1, top_k - 1), 0)

    # The list goes as far as needed while the tokens before do not reach the share. It can end among tokens
    # that tie with the k-th, so the last logit is a threshold and its tokens, all of one weight, are counted.
    total = weights.sum(-1, keepdim=True)
    share = torch.minimum((top_p * total).ceil().long(), total)
    before = listed_weights.cumsum(-1) - listed_weights
    last = ((before < share).sum(-1, keepdim=True) - 1).clamp_(min=0)
    threshold = listed.gather(1, last)
    share_of_tied = share - listed_weights.masked_fill(listed <= threshold, 0).sum(-1, keepdim=True)
    weight_of_tied = listed_weights.gather(1, last).clamp_(min=1)
    num_tied = (share_of_tied + weight_of_tied - 1) // weight_of_tied

    is_tied = logits == threshold
    is_dropped = (logits < threshold) | (is_tied & (is_tied.cumsum(-1, dtype=torch.int32) > num_tied))
    return weights.masked_fill_(is_dropped, 0)


def keep_min_p(weights: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Weights with tokens less likely than `min_p` (torch.float64 [r, 1]) times the most likely set to 0."""
    return weights.masked_fill(weights < (min_p * WEIGHT_ONE).ceil().long(), 0)


def invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token id whose cumulative share of the weights exceeds the uniform number.

    It never has weight 0, unless all have.

    weights: torch.int64 [r, vocab_size]
    uniforms: torch.float64 [r, 1], in [0, 1)
    returns: torch.int64 [r]
    """
    cumulative = weights.cumsum(-1)
    # Always below the total: the float64 of that is wrong by half a unit in the last place at most, and the
    # largest uniform number takes off a whole one.
    target = (uniforms * cumulative[:, -1:]).long()
    token_ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return token_ids.clamp_(max=weights.shape[1] - 1)  # weights made of NaN have no meaningful total
