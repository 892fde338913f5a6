"""Results of Hugging Face with the same weights, and random models that the services can serve."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from services.common.config import EMBEDDED_MODEL
from tests.support.dense.family_models import load_true_model
from tests.support.models import make_model_dir

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VOCAB_SIZE = 1024  # of the embedded model, whose tokenizer the random models borrow


def make_served_model(path: Path, family: str, **options: Any) -> Path:
    """A random model with a tokenizer; see `make_model_dir` for the options."""
    make_model_dir(path, family, vocab_size=VOCAB_SIZE, **options)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, path)
    return path


@lru_cache(maxsize=2)
def reference_model(path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model as Hugging Face runs it."""
    return load_true_model(path, dtype).to(device)


def reference_tokens(
    path: Path, prompt: list[int], max_tokens: int, device: str = "cpu", *, ignore_eos: bool = False
) -> list[int]:
    """The tokens that Hugging Face generates greedily in float32 for this single prompt."""
    model = reference_model(path, device)
    options = {"eos_token_id": model.config.vocab_size} if ignore_eos else {}  # which is no token
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=device),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            **options,
        )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_beams(
    path: Path, prompt: Sequence[int], num_beams: int, max_tokens: int, eos_token_id: int | None, **options: Any
) -> list[tuple[list[int], float]]:
    """Token ids and score of each answer of a beam search by Hugging Face, the best one first.

    Options are those of `generate`; by default it returns all beams.
    """
    output = reference_model(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        num_beams=num_beams,
        return_dict_in_generate=True,
        output_scores=True,
        **{"num_return_sequences": num_beams} | options,
    )
    rows = output.sequences[:, len(prompt) :].tolist()
    ends = [row.index(eos_token_id) + 1 if eos_token_id in row else len(row) for row in rows]
    return [(row[:end], score) for row, end, score in zip(rows, ends, output.sequences_scores.tolist(), strict=True)]


@torch.inference_mode()
def reference_logprobs(path: Path, token_ids: list[int]) -> list[float]:
    """The log-probability of every token but the first, given the tokens before it, by Hugging Face."""
    logits = reference_model(path)(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def random_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of `count` different lengths, from 1 token to `longest`; a single one has `longest`."""
    rng = random.Random(seed)
    lengths = [longest] if count == 1 else [1 + round(i * (longest - 1) / (count - 1)) for i in range(count)]
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
