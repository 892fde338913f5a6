"""`WholeModel`: both workers' parts in one process, without channel and scheduler: the test plans each step itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from services.attn_worker.cache.build_cache import SourceSlots, WindowBlocks, build_cache
from services.attn_worker.cache.kv_cache import PlannedStep
from services.attn_worker.cache.source_group import StepSources
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import AttentionBackend, BackendSetup
from services.attn_worker.layers.backends import torch_backend
from services.common.attention.rope import length_dependent_beyond
from services.common.encoders.source_pieces import source_pieces
from services.common.model_config import load_model_config
from services.common.rank import ALONE, Rank, seam_config
from services.dense_worker.backends import DenseBackend, InputEmbeds
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.features.images.images_feature import ImageRows
from services.dense_worker.features.prompt_embeds.embeds_loader import LoadedEmbeds
from services.dense_worker.features.prompt_embeds.prompt_embeds_feature import EmbedRows
from services.dense_worker.model.learned import read_learned
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.model.weights import load_weights
from services.step.prompt_span import PromptSpan
from tests.support.attention.open_now import open_sequence
from tests.support.dense.encoder_output import output_of
from tests.support.plans import make_plan

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, NUM_STATE_SLOTS = 4, 64, 12
NUM_SOURCE_SLOTS, MAX_SEAM_ROWS = 3, 24


class WholeModel:
    """A model of a directory: `KVCache`, an attention backend and a dense backend."""

    def __init__(
        self,
        path: Path,
        make_dense: Callable[[ModelWeights], DenseBackend] = TorchBackend,
        max_model_len: int = 128,
        make_attention: Callable[[BackendSetup], AttentionBackend] = torch_backend,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        num_window_blocks: int | None = None,
        num_blocks: int = NUM_BLOCKS,
        rank: Rank = ALONE,
    ) -> None:
        """`make_attention`: for all layers of the model. `num_window_blocks`: layers with a window have
        as many blocks of their own; None: all have the same.
        """
        whole, self.device, self.dtype = load_model_config(path), device, dtype
        self.config = seam_config(whole, rank)
        self.weights = load_weights(path, whole, dtype, device, rank=rank)
        self.dense = make_dense(self.weights)
        beyond = length_dependent_beyond(self.config.rope)
        spec = KVCacheSpec.of_model(self.config, dtype, num_blocks, BLOCK_SIZE)
        if num_window_blocks is not None:
            window = max(each for each in spec.windows if each is not None)
            spec = replace(spec, window_blocks=WindowBlocks(window, num_window_blocks))
        if spec.recurrences:
            spec = replace(spec, num_state_slots=NUM_STATE_SLOTS)
        if self.config.encoder is not None:
            spec = replace(spec, source_slots=SourceSlots(NUM_SOURCE_SLOTS, self.config.encoder.max_source_len))
        self.cache = build_cache(
            num_blocks,
            BLOCK_SIZE,
            max_model_len,
            length_dependent_beyond=beyond,
            window_blocks=spec.window_blocks,
            num_state_slots=spec.num_state_slots or None,
            sources=spec.source_slots,
        )
        self.attention = make_attention(BackendSetup(self.config, spec, dtype, device, max_model_len))
        learned = read_learned(path, whole)
        self.attention.use_learned(learned.of_part(rank.layers(whole.num_layers), rank.share(whole.num_heads)))
        self._path, self._make_dense = path, make_dense
        self._token_ids: dict[int, list[int]] = {}
        self._tables: dict[int, LoadedEmbeds] = {}
        self._sources: dict[int, torch.Tensor] = {}  # what the encoder reads, of sequences that wait for its output
        self._pictures: dict[int, tuple[torch.Tensor, Sequence[tuple[PromptSpan, torch.Tensor]]]] = {}
        self.image_token_id = -1

    def open(
        self,
        seq_id: int,
        prompt: list[int],
        table: LoadedEmbeds | None = None,
        source: torch.Tensor | None = None,
        pictures: Sequence[tuple[PromptSpan, torch.Tensor]] = (),
    ) -> int:
        """Opens a sequence; returns the number of its tokens that lie in the prefix cache.

        source: what the encoder reads, which the sequence's next step computes, if the cache lacks its output
        pictures: spans of the prompt, each with the tower's output, [num_outputs, width]
        """
        self._token_ids[seq_id] = list(prompt)
        if table is not None:
            self._tables[seq_id] = table
        self._pictures[seq_id] = torch.tensor(prompt), pictures
        spans = tuple(span for span, _ in pictures)
        num_rows, key = 0, b""
        if source is not None:
            num_rows, key = self.weights.encoder.body.num_rows(source), hashlib.sha256(source.numpy()).digest()
        opened = open_sequence(self.cache, seq_id, prompt, len(prompt), key, num_extra_rows=num_rows, spans=spans)
        if not opened.has_extra_rows:
            self._sources[seq_id] = source
        return opened.num_cached_tokens

    def waits_for_source(self, seq_id: int) -> bool:
        """Whether the next step of a sequence computes the output of its encoder."""
        return seq_id in self._sources

    def replace_dense(self) -> None:
        """As after the death of a dense worker: the weights are loaded anew, the cache stays."""
        self.weights = load_weights(self._path, self.config, self.dtype, self.device)
        self.dense = self._make_dense(self.weights)

    @torch.inference_mode()
    def step(
        self,
        *entries: tuple[int, int, int],
        sampled: Iterable[tuple[int, int]] = (),
        forks: Iterable[tuple[int, int, int]] = (),
        forced: Iterable[tuple[int, int]] = (),
        is_lost: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Runs (seq_id, num_tokens, position) as one batch; returns each entry's logits, [num_tokens, vocab_size].

        A middle stage has none.

        `is_lost`: the step has run, but is taken back.
        """
        planned, token_ids, given = self.prepare(entries, sampled, forks=forks, forced=forced)
        self.attention.begin_step(planned.metadata)
        logits = self.run(torch.tensor(token_ids, device=self.device), given)
        if is_lost:
            self.cache.abort_steps()
        else:
            self.cache.commit_step()
        self.cache.check_integrity()
        return logits.split([num_tokens for _, num_tokens, _ in entries] if len(logits) else [0])

    def prepare(
        self,
        entries: Iterable[tuple[int, int, int]],
        sampled: Iterable[tuple[int, int]],
        num_rows: int | None = None,
        forks: Iterable[tuple[int, int, int]] = (),
        forced: Iterable[tuple[int, int]] = (),
    ) -> tuple[PlannedStep, list[int], InputEmbeds | None]:
        """Plans a step and prepares the dense backend for `num_rows` rows; None: as many as there are tokens.

        A fork is (parent, child, position), and `forced` are tokens behind it. Returns the cache's part of the plan,
        and the step's token ids with the vectors that stand for some of them.
        """
        for parent, child, position in forks:
            self._token_ids[child] = self._token_ids[parent][:position]
            self._pictures[child] = self._pictures[parent]
        for seq_id, token_id in (*sampled, *forced):
            self._token_ids[seq_id].append(token_id)
        sources = [(seq_id, self._sources.pop(seq_id)) for seq_id, _, _ in entries if seq_id in self._sources]
        num_rows_of = [(seq_id, self.weights.encoder.body.num_rows(source)) for seq_id, source in sources]
        plan = replace(
            make_plan(entries, sampled=sampled, forks=forks, forced=forced), extra_rows=tuple(num_rows_of)
        )
        planned = self.cache.plan_step(plan)
        assert planned.errors == {}
        token_ids: list[int] = []
        given, of_pictures = EmbedRows(), ImageRows(self.image_token_id, self.config.hidden_size)
        for seq_id, num_tokens, position in entries:
            known = self._token_ids[seq_id][position : position + num_tokens]
            if seq_id in self._tables:
                known = given.take(self._tables[seq_id], known, len(token_ids))
            prompt, pictures = self._pictures[seq_id]
            outputs = [(span, lambda output=output: output) for span, output in pictures]
            of_pictures.take(prompt, outputs, range(position, position + num_tokens), len(token_ids))
            token_ids += known
        self.dense.begin_step(plan, num_rows or len(token_ids))
        self.attention.storage.copy_blocks(planned.block_copies)
        self._write_sources([source for _, source in sources], planned)
        embeds = [each for each in (given.gather(), of_pictures.gather()) if each is not None]
        return planned, token_ids, InputEmbeds.join(embeds)

    def _write_sources(self, sources: list[torch.Tensor], planned: PlannedStep) -> None:
        """What crosses the seam before the layers of a step that computes outputs of the encoder."""
        if not sources:
            return
        operations, slots = TorchOperations(), [slot for slot, _ in planned.metadata.of(StepSources).writes]
        output = output_of(self.weights.encoder.body, [each.to(self.device) for each in sources])
        first = 0
        for pieces in source_pieces([length for _, length in planned.metadata.of(StepSources).writes], MAX_SEAM_ROWS):
            rows = output[first : first + sum(piece.num_rows for piece in pieces)]
            first += len(rows)
            of_layers = self.weights.encoder.keys_and_values(operations, rows)
            storage = self.attention.others.storage
            for layer, keys_and_values in zip(storage.layers, of_layers, strict=True):
                storage.write(layer, keys_and_values, pieces, slots)

    def run(self, token_ids: torch.Tensor, input_embeds: InputEmbeds | None = None) -> torch.Tensor:
        """token_ids int64 [n], padding included -> logits [n, vocab_size], by the segments and the attention calls."""
        num_rows, dtype, device = len(token_ids), self.dtype, self.device
        qkv = torch.empty(num_rows, self.config.qkv_size, dtype=dtype, device=device)
        attn_out = torch.empty(num_rows, self.config.attn_size, dtype=dtype, device=device)
        residual = self.dense.first(token_ids, qkv, input_embeds)
        for layer in range(self.config.num_layers):
            self.attention.forward(layer, qkv, attn_out)
            if layer + 1 < self.config.num_layers:
                added = None if input_embeds is None else input_embeds.after_layer(layer)
                further = () if added is None else (added,)
                residual = self.dense.middle(layer, attn_out, residual, qkv, *further)
        return self.dense.last(attn_out, residual, torch.arange(num_rows, device=device))
