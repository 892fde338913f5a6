"""Models: `preprocessing` (text to token ids), `postprocessing` (token ids to text) and `embedding` (either to
a vector).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.common.errors import InvalidRequest
from services.gateway.access.access import Caller
from services.gateway.apis.triton.pictures import pictures_of
from services.gateway.apis.triton.rows import Row
from services.gateway.apis.triton.tensors import Tensor, text_tensor
from services.gateway.apis.triton.to_message import prompt_token_ids, word_list
from services.gateway.core.request_service import RequestService
from services.gateway.request.read_request import MAX_BAD_WORDS, MAX_STRING_CHARACTERS
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES
from services.gateway.resources.memory_budget import HeldMemory, settle_body
from services.gateway.vectors.vectors import InputOptions, VectorInput, Vectors, shaped
from services.pb import gateway_pb2

WORDS = {"bad_words": "BAD_WORDS_IDS", "stop_words": "STOP_WORDS_IDS"}


async def preprocess(
    service: RequestService, rows: Sequence[Row], caller: Caller, held: HeldMemory
) -> list[Tensor]:
    """Token ids of texts and their pictures, padded to equal lengths, and the lists of words as token ids. `held` holds
    the memory of the former.
    """
    messages = [await _tokenize_message(row, service) for row in rows]
    token_ids = await service.tokenize(messages, caller, held)
    eos_token_id = service.eos_token_ids[0] if service.eos_token_ids else 0
    end_ids = [row.get("end_id", eos_token_id) for row in rows]
    pad_ids = [row.get("pad_id", eos_token_id) for row in rows]
    num_bytes = 4 * len(rows) * max(map(len, token_ids))  # a long text beside many short ones makes it large
    is_large = num_bytes > MAX_INLINE_BYTES
    if is_large:
        advice = "send texts of like lengths, or fewer at once"
        await held.reserve(num_bytes, "tokens padded to equal lengths", "text_input", advice)
    held.settle()
    settle_body()
    if is_large:
        padded = await service.heavy_work.in_thread(_padded, token_ids, pad_ids, goes_on=True)
    else:
        padded = _padded(token_ids, pad_ids)
    outputs = [
        Tensor("INPUT_ID", "INT32", padded),
        _column("REQUEST_INPUT_LEN", [len(each) for each in token_ids]),
        _column("REQUEST_OUTPUT_LEN", [row["max_tokens"] for row in rows]),
        _column("OUT_END_ID", end_ids),
        _column("OUT_PAD_ID", pad_ids),
    ]
    for option, name in WORDS.items():
        lists = [word_list(await _word_token_ids(service, option, row)) for row in rows]
        size = max(each.shape[1] for each in lists)
        values = np.stack([_widened(each, size) for each in lists])
        outputs.append(Tensor(name, "INT32", values))
    return outputs


async def postprocess(
    service: RequestService, rows: Sequence[Row], caller: Caller, held: HeldMemory
) -> list[Tensor]:
    """The text of each list of token ids, whose memory `held` holds."""
    texts = []
    num_lists = len(rows) * len(rows[0]["TOKENS_BATCH"])
    if num_lists > service.section.max_answers:
        raise InvalidRequest(
            f"TOKENS_BATCH has {num_lists} lists, gateway.max_answers is {service.section.max_answers}", "TOKENS_BATCH"
        )
    for row in rows:
        lists = [each.tolist() for each in row["TOKENS_BATCH"]]
        lengths = row.get("SEQUENCE_LENGTH", [len(each) for each in lists])
        if len(lengths) != len(lists):
            raise InvalidRequest(
                f"SEQUENCE_LENGTH has {len(lengths)} numbers, TOKENS_BATCH has {len(lists)} lists", "SEQUENCE_LENGTH"
            )
        for each, length in zip(lists, lengths, strict=True):
            if not 0 <= length <= len(each):
                raise InvalidRequest(
                    f"SEQUENCE_LENGTH is {length}, must be 0 to {len(each)}: TOKENS_BATCH has no more",
                    "SEQUENCE_LENGTH",
                )
        kept = [each[:length] for each, length in zip(lists, lengths, strict=True)]
        texts += await service.detokenize(kept, row.get("SKIP_SPECIAL_TOKENS", True), caller, held, "TOKENS_BATCH")
    outputs = [text_tensor("OUTPUT", texts)]
    for name in ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS"):
        if name in rows[0]:
            outputs.append(Tensor(f"OUT_{name}", "FP32", np.array([row[name] for row in rows], dtype=np.float32)))
    return outputs


async def embed(vectors: Vectors, rows: Sequence[Row], caller: Caller, held: HeldMemory) -> list[Tensor]:
    """The vector of each text or list of token ids, whose memory `held` holds."""
    normalizes = vectors.embeds.normalizes
    name = "input_ids" if "input_ids" in rows[0] else "text_input"
    if name not in rows[0] or (name == "input_ids" and "text_input" in rows[0]):
        raise InvalidRequest("exactly one of text_input and input_ids is required", "text_input")
    inputs = [VectorInput(name, row["text_input"] if name == "text_input" else _token_ids(row)) for row in rows]
    pooled = await vectors.pool(inputs, InputOptions(), caller, held, name)
    return [Tensor("embedding", "FP32", np.stack([shaped(each.values, None, normalizes) for each in pooled]))]


def _token_ids(row: Row) -> list[int]:
    if "input_lengths" in row:
        return prompt_token_ids(row)
    token_ids: list[int] = row["input_ids"]
    return token_ids


def _padded(token_ids: Sequence[Sequence[int]], pad_ids: Sequence[int]) -> np.ndarray:
    """int32 [num_texts, most tokens]"""
    padded = np.empty((len(token_ids), max(map(len, token_ids))), dtype=np.int32)
    for target, each, pad_id in zip(padded, token_ids, pad_ids, strict=True):
        for start in range(0, len(each), MAX_INLINE_BYTES):  # others may run between two parts
            part = each[start : start + MAX_INLINE_BYTES]
            target[start : start + len(part)] = part
        target[len(each) :] = pad_id
    return padded


async def _tokenize_message(row: Row, service: RequestService) -> gateway_pb2.TokenizeRequest:
    message = gateway_pb2.TokenizeRequest(text=row["text_input"], pictures=await pictures_of(row, service))
    if message.pictures and service.sources is not None and service.sources.reads_pictures:
        message.add_special_tokens = False  # the decoder begins with the text beside a page
    return message


async def _word_token_ids(service: RequestService, option: str, row: Row) -> list[tuple[int, ...]]:
    words = [word for word in row.get(option, ()) if word]
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"{option} has {len(words)} words, at most {MAX_BAD_WORDS} allowed", option)
    for word in words:
        if len(word) > MAX_STRING_CHARACTERS:
            raise InvalidRequest(
                f"{option} has a word of {len(word)} characters, at most {MAX_STRING_CHARACTERS} allowed", option
            )
    return await service.tokenizer.word_token_ids(words)


def _column(name: str, values: Sequence[int]) -> Tensor:
    return Tensor(name, "INT32", np.array(values, dtype=np.int32)[:, None])


def _widened(words: np.ndarray, size: int) -> np.ndarray:
    """A list of words with more padding: int32 [2, size]."""
    filling = np.array([[0], [-1]], dtype=np.int32)
    return np.concatenate([words, filling.repeat(size - words.shape[1], axis=1)], axis=1)
