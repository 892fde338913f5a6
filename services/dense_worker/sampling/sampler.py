"""From logits to the next token of every sequence of a step, on the device, in one pass over mixed options.

Owned by the engine thread. No host synchronisation: the host knows the options, tokens stay on the device.
A row's token depends on its own logits, options and past alone, not on its neighbours, its slot or the
device's order of summation. Logits that differ by rounding give another token only where two tokens' scores,
or a token and a filter's border, are that close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.sampling import gumbel
from services.dense_worker.sampling.allowed_tokens import AllowedTokens
from services.dense_worker.sampling.bad_words import BadWords
from services.dense_worker.sampling.logit_bias import LogitBias
from services.dense_worker.sampling.logprobs import RankedTokens, rank_tokens
from services.dense_worker.sampling.penalties import Penalties
from services.dense_worker.sampling.token_filters import keep_min_p, keep_top
from services.dense_worker.sampling.upload import upload

_OPTIONS = np.dtype(
    [
        ("is_used", np.bool_),
        ("is_greedy", np.bool_),
        ("has_bias", np.bool_),
        ("has_penalties", np.bool_),
        ("has_bad_words", np.bool_),
        ("has_allowed_tokens", np.bool_),
        ("has_logprobs", np.bool_),
        ("temperature", np.float32),
        ("top_k", np.int64),  # vocab_size: keep all
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("min_tokens", np.int64),
        ("seed", np.uint64),
        ("num_logprobs", np.int64),  # likeliest tokens to report beside the sampled one
    ]
)

# Most requests have none of them.
_EXTENSIONS = ("has_bias", "has_penalties", "has_bad_words", "has_allowed_tokens", "has_logprobs")
_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step's rows got, on the device."""

    token_ids: torch.Tensor  # int64 [r]
    num_logprobs: dict[int, int]  # likeliest tokens wanted beside the sampled one, by row that wants any
    ranked: RankedTokens | None  # one row for each of `num_logprobs`; None where that is empty


class Sampler:
    """Samples for up to `max_num_seqs` running sequences, each in a slot that the caller assigns.

    Options live on the host, one record per slot, and go to the device packed. What only the device knows
    lives there:

    last_token: torch.int64 [max_num_seqs]  # the newest token of each slot: input of the slot's next step
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)
        self._forbidden = torch.tensor(-torch.inf, device=self._device)  # assigning a number would synchronise
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._options = np.zeros(max_num_seqs, dtype=_OPTIONS)
        self._stop_token_ids = np.full((max_num_seqs, 1), -1, dtype=np.int64)  # rows padded with -1
        self._bias = LogitBias(max_num_seqs, self._device)
        self._bad_words = BadWords(max_num_seqs, self._device)
        self._allowed_tokens = AllowedTokens(max_num_seqs, self._device)
        self._penalties: Penalties | None = None  # None: no request has had any yet
        self._num_extended = 0  # used slots with an option of `_EXTENSIONS`
        self._draw_tokens = gumbel.draw
        if self._device.type == "cuda":
            from services.dense_worker.backends import triton_gumbel

            self._draw_tokens = triton_gumbel.draw
            triton_gumbel.compile_kernels(vocab_size, self._device)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        num_logprobs: int | None = None,
    ) -> None:
        """Give `slot` to a sequence, new or resumed with the tokens it had sampled before.

        `params` are valid, prompt and output ids in [0, vocab_size). `stop_token_ids` (EOS ids among them)
        are those that `min_tokens` holds back. `num_logprobs`: report log-probabilities, and of so many
        likeliest tokens beside the sampled one.
        """
        assert not self._options[slot]["is_used"], f"slot {slot} is taken"
        self._options[slot] = (
            True,
            params.is_greedy,
            bool(params.logit_bias),
            params.has_penalties,
            bool(params.bad_words),
            bool(params.allowed_token_ids),
            num_logprobs is not None,
            params.temperature,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.min_tokens,
            params.seed,
            num_logprobs or 0,
        )
        self._num_extended += self._is_extended(slot)
        self._set_stop_token_ids(slot, stop_token_ids)
        self.last_token[slot].fill_(output_token_ids[-1] if output_token_ids else prompt_token_ids[-1])
        if params.logit_bias:
            self._bias.set(slot, params.logit_bias)
        if params.has_penalties:
            if self._penalties is None:
                self._penalties = Penalties(self._max_num_seqs, self._vocab_size, self._device)
            self._penalties.set(slot, prompt_token_ids, output_token_ids)
        if params.bad_words:
            self._bad_words.set(slot, params.bad_words, output_token_ids)
        if params.allowed_token_ids:
            self._allowed_tokens.set(slot, params.allowed_token_ids)

    def remove(self, slot: int) -> None:
        """Take `slot` back; a later `add` starts it afresh."""
        assert self._options[slot]["is_used"], f"slot {slot} is free"
        self._options[slot]["is_used"] = False
        self._num_extended -= self._is_extended(slot)

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int] | np.ndarray,
        positions: np.ndarray,
        output_lens: np.ndarray,
    ) -> SampledTokens:
        """Sample one token for each row, keep it in `last_token` and in what the slot's options depend on.

        logits: torch.float32 [r, vocab_size], contiguous; overwritten with what bias, penalties, bad words
            and forbidden stop tokens make of them
        slots: int64 [r], all different
        positions: integers [r], number of tokens of the sequence before the sampled one
        output_lens: integers [r], how many of those are output
        returns: rows of NaN give some token
        """
        slots = np.asarray(slots, dtype=np.int64)
        options = self._options[slots]
        assert options["is_used"].all(), f"sampling for free slots: {slots[~options['is_used']]}"
        reported = self._rows_with(options, "has_logprobs")
        model_logits = logits[self._upload(reported)] if reported.size else None

        self._edit(logits, slots, options, output_lens)
        token_ids = self._choose(logits, options, positions)
        self._keep(token_ids, slots, options)

        if model_logits is None:
            return SampledTokens(token_ids, {}, None)
        num_logprobs = options["num_logprobs"][reported]
        ranked = rank_tokens(model_logits, token_ids[self._upload(reported)], int(num_logprobs.max()))
        wanted = dict(zip(reported.tolist(), num_logprobs.tolist(), strict=True))
        return SampledTokens(token_ids, wanted, ranked)

    def _edit(self, logits: torch.Tensor, slots: np.ndarray, options: np.ndarray, output_lens: np.ndarray) -> None:
        """Changes the logits by all options but temperature and filters, in the order of `SamplingParams`."""
        biased = self._rows_with(options, "has_bias")
        if biased.size:
            self._bias.apply(logits, *self._upload(np.stack([biased, slots[biased]])))
        penalized = self._rows_with(options, "has_penalties")
        if penalized.size:
            rows_and_slots = self._upload(np.stack([penalized, slots[penalized]]))
            self._penalties.apply(logits, *rows_and_slots, options[penalized])
        watched = self._rows_with(options, "has_bad_words")
        if watched.size:
            self._bad_words.forbid(logits, *self._upload(np.stack([watched, slots[watched]])))
        too_short = np.flatnonzero(output_lens < options["min_tokens"])
        if too_short.size:
            self._forbid_stop_tokens(logits, too_short, slots[too_short])
        restricted = self._rows_with(options, "has_allowed_tokens")
        if restricted.size:
            self._allowed_tokens.restrict(logits, *self._upload(np.stack([restricted, slots[restricted]])))

    def _choose(self, logits: torch.Tensor, options: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        drawn = np.flatnonzero(~options["is_greedy"])
        if drawn.size == len(options):
            return self._draw(logits, options, positions)
        token_ids = logits.argmax(-1)
        if drawn.size:
            rows = self._upload(drawn)
            token_ids[rows] = self._draw(logits[rows], options[drawn], positions[drawn])
        return token_ids

    def _draw(self, logits: torch.Tensor, options: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Token ids [r], each from its row's filtered distribution, by the row's seed and position."""
        filtered = self._filter(logits, options)
        return self._draw_tokens(filtered, options["temperature"], options["seed"], positions.astype(np.uint64))

    def _filter(self, logits: torch.Tensor, options: np.ndarray) -> torch.Tensor:
        """Logits with -inf for what top-k, top-p and min-p drop; the logits themselves where there are no filters."""
        has_top_k = options["top_k"] < self._vocab_size
        has_top_p = options["top_p"] < 1.0
        has_min_p = (options["min_p"] > 0.0).any()
        if not (has_min_p or has_top_k.any() or has_top_p.any()):
            return logits
        packed = np.stack([options[name] for name in ("temperature", "top_k", "top_p", "min_p")])
        temperature, top_k, top_p, min_p = self._upload(packed)[..., None]  # float64 [r, 1] each
        temperature, top_k = temperature.float(), top_k.long()

        filtered = logits
        # Apart, so that rows with top_k do not sort the vocabulary for those without.
        for group in (has_top_k & ~has_top_p, has_top_k & has_top_p, ~has_top_k & has_top_p):
            rows = np.flatnonzero(group)
            if not rows.size:
                continue
            arguments = (logits, temperature, top_k, top_p)
            if rows.size < len(options):
                index = self._upload(rows)
                arguments = tuple(argument[index] for argument in arguments)
            kept = keep_top(*arguments, int(options["top_k"][rows].max()), has_top_p=bool(has_top_p[rows[0]]))
            if rows.size == len(options):
                filtered = kept
            else:
                filtered = logits.clone() if filtered is logits else filtered
                filtered[index] = kept
        return keep_min_p(filtered, temperature, min_p) if has_min_p else filtered

    def _keep(self, token_ids: torch.Tensor, slots: np.ndarray, options: np.ndarray) -> None:
        device_slots = self._upload(slots)
        self.last_token[device_slots] = token_ids
        for name, state in (("has_penalties", self._penalties), ("has_bad_words", self._bad_words)):
            rows = self._rows_with(options, name)
            if rows.size:
                index = self._upload(rows)
                state.append(device_slots[index], token_ids[index])

    def _is_extended(self, slot: int) -> bool:
        return any(self._options[slot][name] for name in _EXTENSIONS)

    def _rows_with(self, options: np.ndarray, name: str) -> np.ndarray:
        """Rows that have an option of `_EXTENSIONS`; costs nothing while nobody has any."""
        return np.flatnonzero(options[name]) if self._num_extended else _NO_ROWS

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

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self._device)
