"""`Feature`: what a client may ask for of a sequence, and a feature of the dense worker with the same name does.

Spec and wire carry it by name. All here runs in the gateway's event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from services.pb import gateway_pb2
from services.step.sequence_spec import SequenceSpec

WITH_HIDDEN_STATES = "dense.backend must be torch, and dense.pipeline_parallel_size 1"


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What the memory that a request may take depends on."""

    spec: SequenceSpec
    num_answers: int  # sequences
    max_tokens: int  # output tokens of each
    vocab_size: int
    hidden_size: int  # 0: the dense worker cannot give hidden states away
    num_messages: int  # copies of the answers as messages
    may_be_cut: bool  # an answer may end before the last token that arrives


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Memory that a request may take until it ends. Features with the same `what` count together."""

    num_bytes: int
    what: str
    advice: str = "shorten the prompt or lower max_tokens or n"


class Feature:
    """There is one object of each, without state. A feature overrides what it needs."""

    name: str  # of the dense worker's feature, and in `SequenceSpec.features`
    field: str  # of `GenerateRequest` that asks for it
    is_of_prompt: bool = False  # just the first of several answers has it
    goes_with_beams: bool = False  # a beam search may have it

    # Over HTTP, the field of the bodies that take all features; it has the same name. None: they do not have it.
    json_field: tuple[Any, FieldInfo] | None = None
    json_neutral: tuple[Any, ...] = (False,)  # values of the field that ask for nothing

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes | None:
        """What the dense worker's feature is asked for by a message that has the field; None: nothing.

        Raises `InvalidRequest`.
        """
        return b""

    def ask(self, value: Any, message: gateway_pb2.GenerateRequest) -> None:
        """Asks for it as the field of a body does."""
        setattr(message, self.field, value)

    def held(self, size: RequestSize) -> HeldBytes | None:
        """The memory that is reserved for it; None: not worth counting. Raises `InvalidRequest` if it cannot be had."""
        return None

    def num_logprobs(self, spec: SequenceSpec) -> int:
        """Log-probabilities that it reports of a sequence, which count towards the limit of a request."""
        return 0
