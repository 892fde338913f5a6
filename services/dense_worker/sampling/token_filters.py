"""Top-k, top-p and min-p: which tokens may be drawn. A dropped token's logit becomes -inf.

All functions work on the device of their arguments, without waiting for it. Top-p adds integer weights, whose sums are
exact in any order, so its result does not depend on the device's order of summation. Logits with another rounding can
still move a token over the border of a filter.
"""

from __future__ import annotations

import torch

# Weight of the most likely token. Tokens 2**40 times less likely have weight 0, and top-p drops them: for a million
# tokens that removes less than 1e-6 of the probability. The sum of 2**23 tokens fits into an int64.
WEIGHT_ONE = 2**40


def keep_top(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    max_top_k: int,
    *,
    has_top_p: bool,
) -> torch.Tensor:
    """Logits without the tokens outside top-k, and then outside top-p of the remaining distribution.

    Top-k keeps every token that ties with the k-th. Top-p keeps the most likely tokens until they reach the fraction
    top_p of the probability that top-k left; of tokens that tie at the border it keeps the lowest ids.

    logits: torch.float32 [r, vocab_size], not changed
    temperature: torch.float32 [r, 1], above 0
    top_k: torch.int64 [r, 1], in [1, vocab_size]
    top_p: torch.float64 [r, 1], in (0, 1]
    max_top_k: largest of `top_k`; at most this many tokens are sorted
    has_top_p: whether any of `top_p` is below 1
    returns: torch.float32 [r, vocab_size]
    """
    listed = logits.topk(max_top_k).values
    kth = listed.gather(1, top_k - 1)
    if not has_top_p:
        return logits.masked_fill(logits < kth, -torch.inf)
    weights = token_weights(listed, temperature).masked_fill_(listed < kth, 0)

    # The list may end among tokens that tie with the k-th, so all tokens of this weight are counted.
    num_kth = (logits == kth).sum(-1, keepdim=True)
    total = weights.masked_fill(listed == kth, 0).sum(-1, keepdim=True) + num_kth * weights.gather(1, top_k - 1)
    # A token is kept while the tokens before it do not reach the fraction. The last kept token gives a threshold.
    share = torch.minimum((top_p * total).ceil().long(), total)
    before = weights.cumsum(-1) - weights
    last = ((before < share).sum(-1, keepdim=True) - 1).clamp_(min=0)
    threshold = listed.gather(1, last)
    share_of_tied = share - weights.masked_fill(listed <= threshold, 0).sum(-1, keepdim=True)
    weight_of_tied = weights.gather(1, last).clamp_(min=1)
    num_tied = (share_of_tied + weight_of_tied - 1) // weight_of_tied

    is_tied = logits == threshold
    is_dropped = (logits < threshold) | (is_tied & (is_tied.cumsum(-1, dtype=torch.int32) > num_tied))
    return logits.masked_fill(is_dropped, -torch.inf)


def keep_min_p(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Logits without the tokens less likely than `min_p` times the most likely one.

    logits: torch.float32 [r, vocab_size], not changed
    temperature: torch.float32 [r, 1], above 0
    min_p: torch.float64 [r, 1], in [0, 1]
    returns: torch.float32 [r, vocab_size]
    """
    lowest = logits.amax(-1, keepdim=True) + (temperature * min_p.log()).float()
    return logits.masked_fill(logits < lowest, -torch.inf)


def token_weights(listed: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Integer weights proportional to softmax(listed / temperature): `WEIGHT_ONE` for the most likely token.

    listed: torch.float32 [r, n], the logit of the most likely token first
    temperature: torch.float32 [r, 1], above 0
    returns: torch.int64 [r, n]
    """
    return (listed - listed[:, :1]).div_(temperature).exp_().mul_(WEIGHT_ONE).long()
