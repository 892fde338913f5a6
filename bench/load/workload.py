"""The workload of a benchmark: prompts, output lengths and arrival times, all decided by one seed.

Lengths come from a distribution (then prompts are random token ids) or from a file of conversations (then prompts are
texts). Prompts, lengths and arrivals use separate random generators, so the request rate does not affect the prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

MIN_DATASET_TOKENS = 4  # shorter prompts and answers of a dataset are skipped, as `vllm bench serve` does
MAX_DATASET_PROMPT_TOKENS = 1024
MAX_DATASET_TOKENS = 2048  # of prompt and answer together

Encode = Callable[[str], Sequence[int]]  # text to token ids


class WorkloadError(Exception):
    """The requested workload cannot be made."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's content. Either `token_ids` or `text`."""

    token_ids: list[int] | None
    text: str | None
    num_tokens: int  # of the prompt, counted by the benchmark
    max_tokens: int  # tokens to generate


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths in tokens, each at least 1.

    uniform: whole numbers from floor(mean * (1 - range_ratio)) to ceil(mean * (1 + range_ratio)), both included.
    normal: standard deviation mean * range_ratio, rounded. constant: always the mean.
    """

    kind: Literal["uniform", "normal", "constant"]
    mean: int
    range_ratio: float  # in [0, 1)

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` independent lengths."""
        if self.kind == "constant":
            return [self.mean] * count
        if self.kind == "normal":
            lengths = np.rint(rng.normal(self.mean, self.mean * self.range_ratio, count)).astype(np.int64)
        else:
            low = math.floor(self.mean * (1 - self.range_ratio))
            high = math.ceil(self.mean * (1 + self.range_ratio))
            lengths = rng.integers(low, high, count, endpoint=True)
        return np.maximum(lengths, 1).tolist()


def random_prompts(
    count: int, prompt_lengths: LengthDistribution, output_lengths: LengthDistribution, vocab_size: int, seed: int
) -> list[Prompt]:
    """Prompts of token ids drawn uniformly from the whole vocabulary."""
    length_rng, token_rng = _generators(seed)[:2]
    num_prompt_tokens = prompt_lengths.sample(count, length_rng)
    num_output_tokens = output_lengths.sample(count, length_rng)
    return [
        Prompt(token_rng.integers(0, vocab_size, length).tolist(), None, length, max_tokens)
        for length, max_tokens in zip(num_prompt_tokens, num_output_tokens, strict=True)
    ]


def dataset_prompts(file: Path, count: int, encode: Encode, seed: int, output_len: int | None = None) -> list[Prompt]:
    """Prompts of a JSON file in ShareGPT's schema, in an order decided by the seed.

    The file is a list of `{"conversations": [{"from": ..., "value": TEXT}, ...]}`. The first message is the
    prompt; the second one's length is the number of tokens to generate, unless `output_len` is given. An item may
    also be `{"input": PROMPT, "output": ANSWER}`, without an answer if `output_len` is given.
    Conversations that are too short or too long are skipped. Raises `WorkloadError`.
    """
    pairs = _read_pairs(file, needs_answers=output_len is None)
    prompts = []
    for index in _generators(seed)[0].permutation(len(pairs)):
        if len(prompts) == count:
            break
        text, answer = pairs[index]
        num_tokens = len(encode(text))
        max_tokens = len(encode(answer)) if output_len is None else output_len
        if num_tokens < MIN_DATASET_TOKENS or (output_len is None and max_tokens < MIN_DATASET_TOKENS):
            continue
        if num_tokens > MAX_DATASET_PROMPT_TOKENS or num_tokens + max_tokens > MAX_DATASET_TOKENS:
            continue
        prompts.append(Prompt(None, text, num_tokens, max_tokens))
    if len(prompts) < count:
        raise WorkloadError(f"{file} has {len(prompts)} usable conversations, {count} were asked for")
    return prompts


def load_encode(directory: Path) -> Encode:
    """The tokenizer of a Hugging Face directory, as a function. Raises `WorkloadError`."""
    from tokenizers import Tokenizer  # only datasets need it

    file = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust code raises no narrower type
        raise WorkloadError(f"tokenizer {file} cannot be read: {error}") from error
    return lambda text: tokenizer.encode(text).ids


def arrival_times(count: int, rate: float, process: Literal["poisson", "constant"], seed: int) -> list[float]:
    """Seconds from the start of the run at which each request is due, ascending; `rate` in requests/s.

    An infinite rate: all at once. constant: every 1/rate seconds, from 0. poisson: exponential gaps, scaled
    so that the last request comes after exactly count/rate seconds (as `vllm bench serve` does): every seed
    then offers the same load. Without that, the load of 500 requests would vary by 4.5 % between seeds.
    """
    if math.isinf(rate):
        return [0.0] * count
    if process == "constant":
        return [index / rate for index in range(count)]
    times = _generators(seed)[2].standard_exponential(count).cumsum()
    return (times * (count / rate / times[-1])).tolist()


def _generators(seed: int) -> list[np.random.Generator]:
    """The random generators for lengths (or the choice from a dataset), token ids and arrivals."""
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)]


def _read_pairs(file: Path, needs_answers: bool) -> list[tuple[str, str]]:
    """Prompt and answer of each conversation that has both. If no answers are needed, they are empty."""
    try:
        conversations = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"dataset {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WorkloadError(f"dataset {file} is not JSON: {error}") from error
    try:
        pairs = [_pair(conversation, needs_answers) for conversation in conversations]
    except (TypeError, KeyError) as error:
        raise WorkloadError(f"dataset {file} is not in ShareGPT's schema: {error!r}") from error
    return [pair for pair in pairs if pair is not None]


def _pair(conversation: dict[str, Any], needs_answers: bool) -> tuple[str, str] | None:
    if "input" in conversation:
        texts = [conversation[name] for name in ("input", "output") if name in conversation]
    else:
        texts = [message["value"] for message in conversation["conversations"][:2]]
    if len(texts) == 1 and not needs_answers:
        return texts[0], ""
    return (texts[0], texts[1]) if len(texts) == 2 else None
