"""`Answer`: one answer as a client gets it, whole or from a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from services.pb import gateway_pb2, gateway_pb2_grpc

TIMEOUT_S = 600.0  # on a busy machine, with kills


@dataclass
class Answer:
    """What the client sees. `calls` are names and arguments."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: int = gateway_pb2.FINISH_REASON_UNSPECIFIED
    stop: str = ""

    def is_like(self, other: Answer) -> bool:
        """Whether it is the same answer; log-probabilities may differ by rounding."""
        if replace(self, logprobs=[]) != replace(other, logprobs=[]) or len(self.logprobs) != len(other.logprobs):
            return False
        return all(abs(one - another) < 1e-3 for one, another in zip(self.logprobs, other.logprobs, strict=True))


def ask(
    gateway: gateway_pb2_grpc.GatewayStub, message: gateway_pb2.GenerateRequest, *, is_streamed: bool
) -> list[Answer]:
    """The answers of a request, by index."""
    if is_streamed:
        return _join(gateway.GenerateStream(message, timeout=TIMEOUT_S))
    return [
        Answer(
            each.text,
            each.reasoning,
            [(call.name, call.arguments) for call in each.tool_calls],
            list(each.token_ids),
            [token.logprob for token in each.logprobs],
            each.finish.reason,
            each.finish.stop_string,
        )
        for each in gateway.Generate(message, timeout=TIMEOUT_S).completions
    ]


def _join(chunks: Iterable[gateway_pb2.GenerateChunk]) -> list[Answer]:
    answers = defaultdict[int, Answer](Answer)
    for chunk in chunks:
        answer = answers[chunk.index]
        assert answer.reason == gateway_pb2.FINISH_REASON_UNSPECIFIED, "nothing may follow the finish"
        answer.text += chunk.text
        answer.reasoning += chunk.reasoning
        answer.token_ids += chunk.token_ids
        answer.logprobs += [token.logprob for token in chunk.logprobs]
        for delta in chunk.tool_calls:
            if delta.index == len(answer.calls):
                answer.calls.append((delta.name, ""))
            name, arguments = answer.calls[delta.index]
            answer.calls[delta.index] = name, arguments + delta.arguments
        if chunk.HasField("finish"):
            answer.reason, answer.stop = chunk.finish.reason, chunk.finish.stop_string
    return [answers[index] for index in sorted(answers)]
