"""Draws tokens by the Gumbel-max trick, keyed by (seed, position, token), on the host.

argmax of logit / temperature + Gumbel noise is distributed as softmax(logit / temperature) (Gumbel, "Statistical
theory of extreme values", 1954; Maddison, Tarlow, Minka, "A* sampling", NIPS 2014). Every token has its own noise, so a
small change of the logits changes the drawn token only if the two best scores are that close. With an inverted
cumulative distribution every logit would move all borders.

`triton_gumbel.py` does the same on a GPU. Both compute scores in float64; the GPU's noise is float32.

Resolution. Noise is -log(E), where E = -log(u) and u is the middle of one of 2**32 equal parts of (0, 1), so E is
at least 2**-33. The probability p of a token has a relative error of about 2**-33 / p: tokens below 2**-33 are drawn
almost never, and a vocabulary of 2**17 tokens loses at most 2**-16 of its probability, if all tokens were that small.
"""

from __future__ import annotations

import numpy as np
import torch

from services.dense_worker.sampling.philox import token_words

_STEP = 2.0**-32  # distance of the uniform numbers
_TOKENS_AT_A_TIME = 1 << 16  # in whole rows, so that intermediate values stay in the processor's cache


def draw(
    logits: torch.Tensor, temperatures: np.ndarray, seeds: np.ndarray, positions: np.ndarray | torch.Tensor
) -> torch.Tensor:
    """Token ids, int64 [r]. The lowest of equal scores wins. Tokens of -inf are drawn only if there are no others.

    logits: torch.float32 [r, vocab_size]; rows of NaN give an arbitrary token
    temperatures: np.float32 [r], above 0
    seeds, positions: np.uint64 [r]; positions may also be an int64 tensor on the device of the logits
    """
    num_rows, vocab_size = logits.shape
    if isinstance(positions, torch.Tensor):
        positions = positions.numpy().astype(np.uint64)
    inverse_temperatures = 1.0 / temperatures.astype(np.float64)[:, None]
    token_ids = np.empty(num_rows, dtype=np.int64)
    rows_at_a_time = max(_TOKENS_AT_A_TIME // vocab_size, 1)
    for start in range(0, num_rows, rows_at_a_time):
        rows = slice(start, start + rows_at_a_time)
        scores = logits[rows].double().numpy()
        scores *= inverse_temperatures[rows]
        scores += gumbel_noise(token_words(seeds[rows], positions[rows], vocab_size))
        token_ids[rows] = scores.argmax(-1)
    return torch.from_numpy(token_ids)


def gumbel_noise(words: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, float64, one number for each np.uint32 of `words`."""
    noise = words * _STEP
    noise += _STEP / 2  # exact, so that numbers next to 1, which are the best scores, keep all their bits
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
