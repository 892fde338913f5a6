"""Converts rows to the messages of the gateway's API, so that all limits are checked in `gateway/request/`.

Options have the meaning that TensorRT-LLM gives them. Without `top_k` and `top_p` the most likely token is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from services.common.errors import InvalidRequest
from services.common.sampling_params import MAX_BAD_TOKEN_SEQUENCES, MAX_BAD_WORD_TOKENS, MAX_TEMPERATURE
from services.common.shorten import quote
from services.gateway.apis.triton.rows import Row
from services.pb import gateway_pb2, sampling_pb2

NO_END = -1  # the value of `end_id` for an answer that no token ends
PADDING = -1  # of the offsets in a list of words
# Fields of `StructuredOutput`, by the type of a guide.
GUIDES = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
# Names of a table's dtypes, by that of the array: bits of BF16 are integers.
TABLE_DTYPES = {"float16": "float16", "float32": "float32", "uint16": "bfloat16"}
SAME_SAMPLING_OPTIONS = (
    "frequency_penalty",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
)


def generate_message(
    row: Row,
    request_id: str,
    decode: Callable[[Sequence[int]], str],
    pictures: Sequence[gateway_pb2.MessagePicture],
) -> gateway_pb2.GenerateRequest:
    """The message of a row of a model that generates. `decode` gives the text of token ids."""
    message = gateway_pb2.GenerateRequest(
        request_id=request_id,
        sampling=_sampling(row),
        max_tokens=row["max_tokens"],
        stop=[word for word in row.get("stop_words", ()) if word],
        return_context_logits=row.get("return_context_logits", False),
        return_generation_logits=row.get("return_generation_logits", False),
        bad_words=[word for word in row.get("bad_words", ()) if word],
    )
    if "input_ids" in row:
        message.prompt_token_ids.ids.extend(prompt_token_ids(row))
    else:
        message.prompt = row["text_input"]
    message.pictures.extend(pictures)
    table = _prompt_table(row)
    if table is not None:
        message.prompt_embedding_table.CopyFrom(table)
    if "num_return_sequences" in row:
        message.n = _count("num_return_sequences", row["num_return_sequences"])
    num_beams = _count("beam_width", row.get("beam_width", 1))
    if num_beams > 1:  # all beams are returned, unless a number of answers is given
        message.best_of = num_beams
        message.n = message.n or num_beams
        message.beam_search.CopyFrom(_beam_search(row))
    if row.get("return_log_probs"):
        message.logprobs = 0
    end_id = row.get("end_id")
    if end_id is not None:  # then the model's own EOS is a token like any other
        message.ignore_eos = True
        if end_id != NO_END:
            message.stop_token_ids.append(end_id)
    for token_ids in _words("stop_words_list", row):
        if len(token_ids) == 1:
            message.stop_token_ids.append(token_ids[0])
        else:
            message.stop.append(decode(token_ids))
    message.sampling.bad_words.extend(
        sampling_pb2.TokenSequence(token_ids=token_ids) for token_ids in _words("bad_words_list", row)
    )
    return message


def word_list(words: Sequence[Sequence[int]]) -> np.ndarray:
    """Words as TensorRT-LLM lists them: int32 [2, num_tokens] with all token ids, and the end of each word."""
    ends = np.cumsum([len(word) for word in words], dtype=np.int32)
    token_ids = np.array([token_id for word in words for token_id in word], dtype=np.int32)
    values = np.full((2, max(1, len(token_ids))), PADDING, dtype=np.int32)
    values[0, : len(token_ids)] = token_ids
    values[0, len(token_ids) :] = 0
    values[1, : len(ends)] = ends
    return values


def _sampling(row: Row) -> sampling_pb2.SamplingParams:
    options: dict[str, Any] = {name: row[name] for name in SAME_SAMPLING_OPTIONS if name in row}
    top_k, top_p = row.get("top_k", 0), row.get("top_p", 0.0)
    if top_k:
        options["top_k"] = top_k
    if top_p:
        options["top_p"] = top_p
    elif not top_k and 0.0 <= row.get("temperature", 1.0) <= MAX_TEMPERATURE:  # a wrong one is left to be refused
        options["temperature"] = 0.0
    structure = _structured_output(row)
    if structure is not None:
        options["structured_output"] = structure
    options["seed"] = row.get("seed", 0) % 2**64
    return sampling_pb2.SamplingParams(**options)


def _beam_search(row: Row) -> sampling_pb2.BeamSearch:
    """Scores and end of a search. TensorRT-LLM's defaults are no length penalty, and an early end."""
    is_early = row.get("early_stopping", True)
    return sampling_pb2.BeamSearch(
        length_penalty=row.get("length_penalty", 0.0),
        early_stopping=sampling_pb2.EARLY_STOPPING_ALWAYS if is_early else sampling_pb2.EARLY_STOPPING_HEURISTIC,
    )


def _structured_output(row: Row) -> sampling_pb2.StructuredOutput | None:
    """The structured output that a guide asks for; None without one."""
    kind, guide = row.get("guided_decoding_guide_type", ""), row.get("guided_decoding_guide", "")
    if not kind:
        if guide:
            raise InvalidRequest(
                "guided_decoding_guide needs a guided_decoding_guide_type", "guided_decoding_guide_type"
            )
        return None
    if kind not in GUIDES:
        raise InvalidRequest(
            f"guided_decoding_guide_type is {quote(kind)}, must be one of {', '.join(GUIDES)}",
            "guided_decoding_guide_type",
        )
    if kind == "json":
        return sampling_pb2.StructuredOutput(json_object=True, field_name="guided_decoding_guide_type")
    if not guide:
        raise InvalidRequest(
            f"guided_decoding_guide_type {kind} needs a guided_decoding_guide", "guided_decoding_guide"
        )
    return sampling_pb2.StructuredOutput(**{GUIDES[kind]: guide}, field_name="guided_decoding_guide")


def _prompt_table(row: Row) -> gateway_pb2.PromptEmbeds | None:
    """The vectors that come with a prompt. The prefix cache knows them by their values, so it needs no extra ids."""
    values: np.ndarray | None = row.get("prompt_embedding_table")
    if values is None:
        for name in ("prompt_vocab_size", "prompt_table_extra_id", "prompt_table_extra_ids"):
            if name in row:
                raise InvalidRequest(f"{name} needs a prompt_embedding_table", name)
        return None
    num_rows, hidden_size = values.shape
    if row.get("prompt_vocab_size", num_rows) != num_rows:
        raise InvalidRequest(
            f"prompt_vocab_size is {row['prompt_vocab_size']}, prompt_embedding_table has {num_rows} rows",
            "prompt_vocab_size",
        )
    num_extra_ids, num_tokens = len(row.get("prompt_table_extra_ids", ())), row.get("input_lengths", 0)
    if "prompt_table_extra_ids" in row and num_extra_ids < num_tokens:
        raise InvalidRequest(
            f"prompt_table_extra_ids has {num_extra_ids} numbers, the prompt has {num_tokens} tokens",
            "prompt_table_extra_ids",
        )
    return gateway_pb2.PromptEmbeds(
        values=values.tobytes(), num_tokens=num_rows, hidden_size=hidden_size, dtype=TABLE_DTYPES[values.dtype.name]
    )


def prompt_token_ids(row: Row) -> list[int]:
    """The `input_ids` of a row without what pads them. Raises `InvalidRequest` for a wrong length."""
    token_ids: list[int] = row["input_ids"]
    length = row["input_lengths"]
    if not 1 <= length <= len(token_ids):
        raise InvalidRequest(
            f"input_lengths is {length}, must be 1 to {len(token_ids)}: input_ids has no more", "input_lengths"
        )
    return token_ids[:length]


def _count(name: str, value: int) -> int:
    if not 1 <= value < 2**31:
        raise InvalidRequest(f"{name} is {value}, must be at least 1", name)
    return value


def _words(name: str, row: Row) -> list[list[int]]:
    """The words of a list as in `word_list`. Raises `InvalidRequest` if the ends of the words do not rise."""
    if name not in row:
        return []
    token_ids, ends = (each.tolist() for each in row[name])
    words, begin = [], 0
    for end in ends:
        if end == PADDING:
            break
        if not begin < end <= len(token_ids):
            raise InvalidRequest(
                f"{name} has a word that ends at {end}, must be {begin + 1} to {len(token_ids)}", name
            )
        if end - begin > MAX_BAD_WORD_TOKENS or len(words) == MAX_BAD_TOKEN_SEQUENCES:
            raise InvalidRequest(
                f"{name} has a word of {end - begin} tokens as number {len(words) + 1}, at most "
                f"{MAX_BAD_TOKEN_SEQUENCES} words of {MAX_BAD_WORD_TOKENS} tokens are allowed",
                name,
            )
        words.append(token_ids[begin:end])
        if min(words[-1]) < 0:
            raise InvalidRequest(f"{name} has the token id {min(words[-1])}, must be at least 0", name)
        begin = end
    return words
