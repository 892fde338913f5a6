"""The angles of tokens in grids, as the Triton kernels read them: rows of a table, some of them made for the step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.layers.mha.rope_angles import RopeAngles
from services.attn_worker.layers.step_upload import StepUpload
from services.common.attention.rope import RotaryEmbedding
from services.common.config import EMBEDDED_MODEL
from services.common.model_config import load_model_config
from services.step.prompt_span import PromptSpan
from tests.support.attention.open_now import open_sequence
from tests.support.plans import make_plan
from tests.unit.attn_worker.cache.test_kv_cache import make_cache

CPU = torch.device("cpu")
MAX_LEN, MAX_TOKENS = 64, 40


def test_tokens_in_grids_have_rows_of_their_own() -> None:
    config = load_model_config(EMBEDDED_MODEL)
    num_pairs = config.rope.rotary_dim // 2
    axes = tuple(index % 3 for index in range(num_pairs))
    config = replace(config, rope=replace(config.rope, axes=axes))
    angles, upload = RopeAngles(config, MAX_LEN, MAX_TOKENS, CPU), StepUpload(1024, CPU)
    cache: KVCache = make_cache()
    spans = (PromptSpan(2, 6, "aa", 2, 3), PromptSpan(9, 4, "bb", 4, 1))
    open_sequence(cache, 1, list(range(15)), 15, spans=spans)
    open_sequence(cache, 2, list(range(5)), 5)
    step = cache.plan_step(make_plan([(1, 15, 0), (2, 5, 0)])).metadata
    # By hand: text 0 and 1, a grid from 2, text behind its longer side of 3, a grid from 6, text behind its side of 4.
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 10, 11, 0, 1, 2, 3, 4],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 10, 11, 0, 1, 2, 3, 4],
    ]
    assert step.rope_positions is not None and step.rope_positions.tolist() == expected
    upload.begin()
    rows = angles.write(step, upload)
    upload.send()
    angles.compute()
    found = angles.table[torch.from_numpy(rows.astype(np.int64))]
    table = RotaryEmbedding(replace(config.rope, axes=()), MAX_LEN, CPU)
    lens = torch.zeros(20, dtype=torch.int64)
    of_axes = [table(torch.tensor(each), lens) for each in expected]
    half = found.shape[1] // 2
    for pair, axis in enumerate(axes):
        assert torch.equal(found[:, pair], of_axes[axis][0][:, pair])
        assert torch.equal(found[:, half + pair], of_axes[axis][1][:, pair])
    cache.commit_step()
    step = cache.plan_step(make_plan([(1, 1, 15), (2, 1, 5)], sampled=[(1, 3), (2, 3)])).metadata
    upload.begin()
    assert angles.write(step, upload).tolist() == [12, 5], "behind the grids a token has one position"
