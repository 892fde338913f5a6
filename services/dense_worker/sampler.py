"""From logits to the next token of every sequence of a step, on the device, in one pass over mixed options.

Owned by the engine thread. No host synchronisation: the host knows the options, tokens stay on the device.
A row's token depends on its own logits, options and past alone, not on its neighbours, its slot or the
device's order of summation: probabilities become integer weights, whose sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker import philox

# Weight of the most likely token. Tokens 2**40 times less likely weigh nothing and are never sampled, which
# together takes off less than 1e-6 of the probability for a million tokens; 2**23 tokens fit in an int64 sum.
WEIGHT_ONE = 2**40

_OPTIONS = np.dtype(
    [
        ("is_used", np.bool_),
        ("is_greedy", np.bool_),
        ("has_penalties", np.bool_),
        ("temperature", np.float32),
        ("top_k", np.int64),  # vocab_size: keep all
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("min_tokens", np.int64),
        ("seed", np.uint64),
    ]
)


class Sampler:
    """Samples for up to `max_num_seqs` running sequences, each in a slot that the caller assigns.

    Options live on the host, one record per slot, and go to the device packed, with the step's random
    numbers. What only the device knows lives there:

    last_token: torch.int64 [max_num_seqs]  # the newest token of each slot: input of the slot's next step
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._device = torch.device(device)
        self._forbidden = torch.tensor(-torch.inf, device=device)  # assigning a number would synchronise
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._options = np.zeros(max_num_seqs, dtype=_OPTIONS)
        self._stop_token_ids = np.full((max_num_seqs, 1), -1, dtype=np.int64)  # rows padded with -1
        # [max_num_seqs, vocab_size]; large, so they come with the first request that has penalties.
        self._output_counts: torch.Tensor | None = None  # int32
        self._prompt_mask: torch.Tensor | None = None  # bool

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> None:
        """Give `slot` to a sequence, new or resumed with the tokens it had sampled before.

        `params` are valid, prompt and output ids in [0, vocab_size). `stop_token_ids` (EOS ids among them)
        are those that `min_tokens` holds back.
        """
        assert not self._options[slot]["is_used"], f"slot {slot} is taken"
        self._options[slot] = (
            True,
            params.is_greedy,
            params.has_penalties,
            params.temperature,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.min_tokens,
            params.seed,
        )
        self._set_stop_token_ids(slot, stop_token_ids)
        self.last_token[slot].fill_(output_token_ids[-1] if output_token_ids else prompt_token_ids[-1])
        if params.has_penalties:
            self._count_tokens(slot, prompt_token_ids, output_token_ids)

    def remove(self, slot: int) -> None:
        """Take `slot` back; a later `add` starts it afresh."""
        assert self._options[slot]["is_used"], f"slot {slot} is free"
        self._options[slot]["is_used"] = False

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int] | np.ndarray,
        positions: np.ndarray,
        output_lens: np.ndarray,
    ) -> torch.Tensor:
        """Sample one token for each row, keep it in `last_token` and count it.

        logits: torch.float32 [r, vocab_size]; overwritten with penalties and forbidden stop tokens applied
        slots: int64 [r], all different
        positions: integers [r], number of tokens of the sequence before the sampled one
        output_lens: integers [r], how many of those are output
        returns: torch.int64 [r] on the device; rows of NaN give some token
        """
        slots = np.asarray(slots, dtype=np.int64)
        options = self._options[slots]
        assert options["is_used"].all(), f"sampling for free slots: {slots[~options['is_used']]}"

        penalized = np.flatnonzero(options["has_penalties"])
        if penalized.size:
            self._apply_penalties(logits, penalized, slots[penalized], options[penalized])
        too_short = np.flatnonzero(output_lens < options["min_tokens"])
        if too_short.size:
            self._forbid_stop_tokens(logits, too_short, slots[too_short])

        drawn = np.flatnonzero(~options["is_greedy"])
        if drawn.size == len(slots):
            token_ids = self._draw(logits, options, positions)
        else:
            token_ids = logits.argmax(-1)
            if drawn.size:
                rows = self._upload(drawn)
                token_ids[rows] = self._draw(logits[rows], options[drawn], positions[drawn])

        device_slots = self._upload(slots)
        self.last_token[device_slots] = token_ids
        if penalized.size:
            rows = self._upload(penalized)
            self._output_counts[device_slots[rows], token_ids[rows]] += 1
        return token_ids

    def _draw(self, logits: torch.Tensor, options: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Token ids [r], each from its row's filtered distribution, by the row's seed and position."""
        uniforms = philox.uniform(options["seed"], positions.astype(np.uint64))
        packed = np.stack([options["temperature"], options["top_p"], options["min_p"], uniforms])
        temperature, top_p, min_p, uniforms = self._upload(packed)[..., None]  # float64 [r, 1] each
        weights = token_weights(logits, temperature.float())

        has_top_k = options["top_k"] < self._vocab_size
        for rows in (np.flatnonzero(has_top_k), np.flatnonzero(~has_top_k & (options["top_p"] < 1.0))):
            if rows.size:
                index, limits = self._upload(rows), options["top_k"][rows]
                top_k = self._upload(limits)[:, None]
                weights[index] = keep_top(
                    logits[index], weights[index], top_k, top_p[index], int(limits.max())
                )
        if (options["min_p"] > 0.0).any():
            weights = keep_min_p(weights, min_p)
        return invert_cdf(weights, uniforms)

    def _apply_penalties(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, options: np.ndarray
    ) -> None:
        """Penalise tokens that occurred, in place.

        Repetition: Keskar et al., "CTRL", 2019, section 4.1, over prompt and output; negative logits are
        multiplied. Then, over the output: logit - frequency * count - presence * (count > 0).
        """
        index, device_slots = self._upload(rows), self._upload(slots)
        packed = np.stack([options[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")])
        repetition, frequency, presence = self._upload(packed)[..., None]
        counts = self._output_counts[device_slots]
        is_output = counts > 0
        is_seen = is_output | self._prompt_mask[device_slots]
        penalized = logits[index]
        repeated = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
        penalized = torch.where(is_seen, repeated, penalized)
        logits[index] = penalized - frequency * counts - presence * is_output

    def _forbid_stop_tokens(self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        stop_token_ids = self._stop_token_ids[slots]
        owners, columns = np.nonzero(stop_token_ids >= 0)
        index = self._upload(np.stack([rows[owners], stop_token_ids[owners, columns]]))
        logits[index[0], index[1]] = self._forbidden

    def _set_stop_token_ids(self, slot: int, stop_token_ids: Sequence[int]) -> None:
        # Configurations name EOS ids that a cut vocabulary does not have.
        stop_token_ids = [token_id for token_id in stop_token_ids if token_id < self._vocab_size]
        missing = len(stop_token_ids) - self._stop_token_ids.shape[1]
        if missing > 0:
            self._stop_token_ids = np.pad(self._stop_token_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_token_ids[slot] = -1
        self._stop_token_ids[slot, : len(stop_token_ids)] = stop_token_ids

    def _count_tokens(
        self, slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        if self._output_counts is None:
            shape = (self._max_num_seqs, self._vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        prompt = self._upload(np.asarray(prompt_token_ids, dtype=np.int64))
        output = self._upload(np.asarray(output_token_ids, dtype=np.int64))
        self._prompt_mask[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones(len(output), dtype=torch.int32, device=self._device)
        self._output_counts[slot].zero_().index_add_(0, output, ones)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(array)
        if self._device.type == "cuda":
            # From pageable memory the copy would first wait for the stream; torch keeps pinned memory until
            # the copy is done.
            source = source.pin_memory()
        return source.to(self._device, non_blocking=True)


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
