"""Checks the options of a request for beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.common.beams.options import BeamSearchOptions, decode_beam_search
from services.common.errors import InvalidRequest
from services.common.sampling_params import SamplingParams
from services.pb import gateway_pb2


def read_widths(message: gateway_pb2.GenerateRequest, max_beam_width: int) -> tuple[int, int]:
    """The numbers of answers and of beams, which are `best_of`, else `n`. Raises `InvalidRequest`."""
    n = message.n if message.HasField("n") else 1
    field = "best_of" if message.HasField("best_of") else "n"
    num_beams = message.best_of if field == "best_of" else n
    if not 1 <= num_beams <= max_beam_width:
        raise InvalidRequest(
            f"{field} is {num_beams}, the number of beams must be from 1 to {max_beam_width} "
            "(scheduler.max_beam_width)",
            field,
        )
    if not 1 <= n <= num_beams:
        raise InvalidRequest(f"n is {n}, must be from 1 to best_of, the number of beams, which is {num_beams}", "n")
    return n, num_beams


def decode_beams(message: gateway_pb2.GenerateRequest, num_beams: int, num_answers: int) -> BeamSearchOptions:
    """The options of a search. Raises `InvalidRequest` for those out of range."""
    options = decode_beam_search(message.beam_search, num_beams, num_answers)
    options.validate()
    return options


def greedy_for_beams(
    message: gateway_pb2.GenerateRequest, sampling: SamplingParams, refused: Sequence[str]
) -> SamplingParams:
    """The options without sampling. Raises `InvalidRequest` for the first one that a search would have to ignore.

    refused: fields of the features that the message asks for and a search cannot have
    """
    if not message.sampling.HasField("temperature") or sampling.top_k == 1:
        sampling = replace(sampling, temperature=0.0)
    if not sampling.is_greedy:
        raise InvalidRequest(
            f"temperature is {sampling.temperature}, must be 0 or unset with beam search", "temperature"
        )
    plain = SamplingParams(temperature=sampling.temperature, min_tokens=sampling.min_tokens, seed=sampling.seed)
    if sampling.top_k == 1:
        plain = replace(plain, top_k=1)
    for name in SamplingParams.__dataclass_fields__:
        value = getattr(sampling, name)
        if value != getattr(plain, name):
            structure = sampling.structured_output
            field = structure.field_name if name == "structured_output" and structure is not None else name
            shown = f" is {value:g}, which" if isinstance(value, int | float) else ""
            raise InvalidRequest(f"{field}{shown} cannot be used with beam search", field)
    for name in (*(("stop",) if message.stop else ()), *refused):
        raise InvalidRequest(f"{name} cannot be used with beam search", name)
    return sampling
