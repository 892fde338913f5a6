"""Samples the next token of every sequence of a step from its logits, on the device, in one pass for all options.

Owned by the engine thread. It never synchronises with the device: the host knows the options, and tokens stay on the
device. The token of a row depends only on its own logits, options and past, not on other rows, its slot or the device's
order of summation. Logits that differ by rounding change the token only if the scores of two tokens, or a token and the
border of a filter, are that close.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.sampling import gumbel
from services.dense_worker.sampling.editors import EDITORS
from services.dense_worker.sampling.logits_editor import EditedRows, EditedSequence, LogitsEditor
from services.dense_worker.sampling.logprobs import RankedTokens, rank_tokens
from services.dense_worker.sampling.token_filters import keep_min_p, keep_top
from services.dense_worker.sampling.upload import HostStages, upload

_OPTIONS = np.dtype(
    [
        ("is_used", np.bool_),
        ("is_greedy", np.bool_),
        ("has_logprobs", np.bool_),
        ("has_sampled_logprobs", np.bool_),  # of what tokens are drawn from, not of the model
        ("temperature", np.float32),
        ("top_k", np.int64),  # vocab_size: keep all
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("num_logprobs", np.int64),  # most likely tokens to report with the sampled one
    ]
)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step's rows, on the device."""

    token_ids: torch.Tensor  # int64 [r]
    num_logprobs: dict[int, int]  # most likely tokens to report with the sampled one, by row that requests any
    ranked: RankedTokens | None  # one row for each of `num_logprobs`; None if that is empty


def compile_kernels(
    vocab_size: int,
    device: torch.device,
    logits_dtypes: Iterable[torch.dtype],
    editors: Iterable[type[LogitsEditor]] = (),
) -> None:
    """Compiles what a `Sampler` on a GPU runs, unless that is in Triton's cache, and loads it."""
    from services.common.compile_kernels import compiling_together
    from services.dense_worker.sampling import triton_greedy, triton_gumbel, triton_tokens

    torch.cuda.set_device(device)  # of the calling thread
    with compiling_together():
        for kernels in (triton_gumbel, triton_greedy):
            kernels.compile_kernels(vocab_size, device, logits_dtypes)
        for editor in editors:
            editor.compile_kernels(vocab_size, device, logits_dtypes)
        triton_tokens.compile_kernels(device)


class Sampler:
    """Samples for up to `max_num_seqs` running sequences, each in a slot that the caller assigns.

    Options are on the host, one record per slot, and are copied to the device packed. This is on the device, because
    only the device knows it:

    last_token: torch.int64 [max_num_seqs + 1]  # sampled last in each slot: input of its next step, or any token; and 0
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        editors: Sequence[type[LogitsEditor]] = EDITORS,
        logits_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`editors` are applied to the logits in this order. `logits_dtype` is that of most logits, not of all."""
        self._device = torch.device(device)
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self._device)
        self._vocab_size = vocab_size
        self._options = np.zeros(max_num_seqs, dtype=_OPTIONS)
        self._editors = [editor(max_num_seqs, vocab_size, self._device) for editor in editors]
        self._needs = np.zeros((len(editors), max_num_seqs), dtype=np.bool_)  # which slots need which editor
        self._named: dict[int, tuple[int, ...]] = {}  # token ids whose log-probabilities are reported, by slot
        self._needed: list[tuple[LogitsEditor, np.ndarray]] = []  # editors that any slot needs: bool [max_num_seqs]
        # Most edits need float32. Other steps keep logits as they are: to convert those of a large step takes longer.
        edited_shape = (0 if logits_dtype == torch.float32 else max_num_seqs, vocab_size)
        self._edited = torch.empty(edited_shape, dtype=torch.float32, device=self._device)
        # The slots of the newest step, which mostly are those of the one before.
        self._slots, self._slots_on_device = np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)
        self._draw_tokens, self._find_greatest = gumbel.draw, partial(torch.argmax, dim=-1)
        self._keep_tokens, self._feed_tokens = _keep_tokens, _feed_tokens
        if self._device.type == "cuda":
            from services.dense_worker.sampling import triton_greedy, triton_gumbel, triton_tokens

            self._draw_tokens = partial(triton_gumbel.draw, stages=HostStages())
            self._find_greatest = triton_greedy.find_greatest
            self._keep_tokens, self._feed_tokens = triton_tokens.keep_tokens, triton_tokens.feed_tokens
            compile_kernels(vocab_size, self._device, {torch.float32, logits_dtype}, editors)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        num_logprobs: int | None = None,
        features: Sequence[SequenceFeature] = (),
    ) -> None:
        """Gives `slot` to a new sequence, or to a resumed one with its earlier tokens.

        `params` are valid; prompt and output ids are in [0, vocab_size). `min_tokens` forbids `stop_token_ids`
        (including EOS). `num_logprobs`: report log-probabilities of the sampled token, this many most likely ones, and
        `params.logprob_token_ids`.
        `features` are for editors that features have added.
        """
        assert not self._options[slot]["is_used"], f"slot {slot} is taken"
        self._options[slot] = (
            True,
            params.is_greedy,
            num_logprobs is not None,
            params.sampled_logprobs,
            params.temperature,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p,
            params.min_p,
            params.seed,
            num_logprobs or 0,
        )
        sequence = EditedSequence(params, prompt_token_ids, output_token_ids, stop_token_ids, features)
        given = params.given
        needs = [not given.isdisjoint(editor.options) and editor.set(slot, sequence) for editor in self._editors]
        self._note_needs(slot, needs)
        if params.logprob_token_ids:
            self._named[slot] = params.logprob_token_ids

    def remove(self, slot: int) -> None:
        """Frees `slot`; a later `add` starts it anew."""
        assert self._options[slot]["is_used"], f"slot {slot} is free"
        self._options[slot]["is_used"] = False
        self._named.pop(slot, None)
        for editor, is_needed in self._needed:
            if is_needed[slot]:
                editor.forget(slot)
        self._note_needs(slot, [False] * len(self._editors))

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int] | np.ndarray,
        positions: np.ndarray,
        output_lens: np.ndarray,
        on_host: torch.Tensor | None = None,
    ) -> SampledTokens:
        """Samples one token per row and stores it in `last_token` and in the state of the slot's editors.

        logits: [r, vocab_size], of any float type, contiguous; may be overwritten with the edited logits
        slots: int64 [r], all different, except that a sequence with drafts has several consecutive rows; which of their
            tokens `last_token` keeps is undefined
        positions: integers [r], number of tokens of the sequence before the sampled one
        output_lens: integers [r], number of output tokens among these
        on_host: int64 [r], gets the tokens when the device has run this; pinned, if the device is a GPU
        returns: the tokens; rows of NaN give an arbitrary token
        """
        slots = np.asarray(slots, dtype=np.int64)
        options = self._options[slots]
        assert options["is_used"].all(), f"sampling for free slots: {slots[~options['is_used']]}"
        reported = options["has_logprobs"].nonzero()[0]
        model_logits = logits[self._upload(reported)] if reported.size else None

        edits = self._find_edits(slots, output_lens)
        if any(editor.needs_float32 for editor, _ in edits):
            logits = self._to_edit(logits)
        for editor, rows in edits:
            editor.apply(logits, rows)
        token_ids = self._choose(logits, options, positions)
        if not np.array_equal(slots, self._slots):
            self._slots = slots.copy()  # on a CPU an upload is the same memory
            self._slots_on_device = self._upload(self._slots)
        if on_host is None:
            self.last_token[self._slots_on_device] = token_ids
        else:
            self._keep_tokens(token_ids, self._slots_on_device, self.last_token, on_host)
        for editor, rows in edits:
            editor.append(rows, token_ids)

        if model_logits is None:
            return SampledTokens(token_ids, {}, None)
        of_sampled = np.flatnonzero(options["has_sampled_logprobs"][reported])
        if of_sampled.size:
            rows = self._upload(reported[of_sampled])
            drawn_from = self._find_drawn_from(logits[rows], options[reported[of_sampled]], token_ids[rows])
            model_logits = model_logits.float()
            model_logits[self._upload(of_sampled)] = drawn_from
        num_logprobs = options["num_logprobs"][reported]
        named = [self._named.get(slot, ()) for slot in slots[reported].tolist()] if self._named else None
        ranked = rank_tokens(model_logits, token_ids[self._upload(reported)], int(num_logprobs.max()), named)
        wanted = dict(zip(reported.tolist(), num_logprobs.tolist(), strict=True))
        return SampledTokens(token_ids, wanted, ranked)

    def feed(self, token_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The tokens of a step's rows, int64 [n]: those that were sampled last in their slots.

        token_ids, slots: int64 [n]; rows with slot -1 have their own token, others have 0
        """
        return self._feed_tokens(token_ids, slots, self.last_token)

    def draw(self, logits: torch.Tensor, slots: np.ndarray, positions: torch.Tensor) -> torch.Tensor:
        """What `sample` would choose, int64 [r], if these were the model's logits and editors did nothing.

        Changes no state, and does not wait for the device. logits: [r, vocab_size], contiguous; slots: int64 [r];
        positions: int64 [r] on the device, see `sample`
        """
        return self._choose(logits, self._options[slots], positions)

    def _note_needs(self, slot: int, needs: list[bool]) -> None:
        if not any(needs) and not self._needs[:, slot].any():
            return  # as for nearly all sequences
        self._needs[:, slot] = needs
        pairs = zip(self._editors, self._needs, strict=True)
        self._needed = [(editor, is_needed) for editor, is_needed in pairs if is_needed.any()]

    def _find_edits(self, slots: np.ndarray, output_lens: np.ndarray) -> list[tuple[LogitsEditor, EditedRows]]:
        """The editors that any of the rows needs, with those rows. Costs nothing while no slot needs any editor."""
        edits = []
        for editor, is_needed in self._needed:
            rows = np.flatnonzero(is_needed[slots])
            if rows.size:
                edits.append((editor, EditedRows(rows, slots[rows], output_lens[rows], self._device)))
        return edits

    def _to_edit(self, logits: torch.Tensor) -> torch.Tensor:
        """The same in float32, if possible in memory that was set aside for it."""
        if logits.dtype == torch.float32:
            return logits
        return self._edited[: len(logits)].copy_(logits) if len(logits) <= len(self._edited) else logits.float()

    def _choose(self, logits: torch.Tensor, options: np.ndarray, positions: np.ndarray | torch.Tensor) -> torch.Tensor:
        drawn = (~options["is_greedy"]).nonzero()[0]
        if drawn.size == len(options):
            return self._draw(logits, options, positions)
        token_ids = self._find_greatest(logits)
        if drawn.size:
            rows = self._upload(drawn)
            of_drawn = positions[drawn] if isinstance(positions, np.ndarray) else positions[rows]
            token_ids[rows] = self._draw(logits[rows], options[drawn], of_drawn)
        return token_ids

    def _draw(self, logits: torch.Tensor, options: np.ndarray, positions: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Draws token ids [r] from the filtered distributions, by the rows' seeds and positions."""
        filtered = self._filter(logits, options)
        if isinstance(positions, np.ndarray):
            positions = positions.astype(np.uint64)
        return self._draw_tokens(filtered, options["temperature"], options["seed"], positions)

    def _filter(self, logits: torch.Tensor, options: np.ndarray) -> torch.Tensor:
        """Logits with -inf for tokens that top-k, top-p and min-p drop; the same logits if there are no filters."""
        has_top_k = options["top_k"] < self._vocab_size
        has_top_p = options["top_p"] < 1.0
        has_min_p = (options["min_p"] > 0.0).any()
        if not (has_min_p or has_top_k.any() or has_top_p.any()):
            return logits
        logits = logits.float()
        packed = np.stack([options[name] for name in ("temperature", "top_k", "top_p", "min_p")])
        temperature, top_k, top_p, min_p = self._upload(packed)[..., None]  # float64 [r, 1] each
        temperature, top_k = temperature.float(), top_k.long()

        filtered = logits
        # Handled separately, so that rows with top_k need not sort the vocabulary like those without.
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

    def _find_drawn_from(self, logits: torch.Tensor, options: np.ndarray, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [r, vocab_size], of the distributions that the tokens were drawn from.

        logits: edited; a greedy row's distribution has its token alone
        """
        is_greedy, options = self._upload(options["is_greedy"])[:, None], options.copy()
        options["temperature"][options["is_greedy"]] = 1.0
        scaled = self._filter(logits.float(), options) / self._upload(options["temperature"])[:, None]
        alone = torch.full_like(scaled, -torch.inf).scatter_(1, token_ids[:, None], 0.0)
        return torch.where(is_greedy, alone, scaled)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self._device)


def _keep_tokens(token_ids: torch.Tensor, slots: torch.Tensor, last_token: torch.Tensor, on_host: torch.Tensor) -> None:
    """As `triton_tokens.keep_tokens`, on any device."""
    last_token[slots] = token_ids
    on_host.copy_(token_ids, non_blocking=True)


def _feed_tokens(token_ids: torch.Tensor, fed_slots: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """As `triton_tokens.feed_tokens`, on any device; of each row one of both is 0, unless it is the token."""
    return torch.maximum(token_ids, last_token[fed_slots])
