"""Log-probabilities of the prompt's tokens. All APIs that have log-probabilities show them with the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import InvalidRequest
from services.common.token_logprobs import LogprobRows
from services.gateway.features.report import AnswerMessage, Report, Reporter, ReportRecord
from services.pb import gateway_pb2, prompt_logprobs_pb2
from services.step.sequence_spec import SequenceSpec

MAX_PROMPT_LOGPROBS = 20


class _Record(ReportRecord):
    def __init__(self) -> None:
        self._rows = LogprobRows()  # of all tokens but the first

    @property
    def num_reported(self) -> int:
        return 1 + len(self._rows)

    def keep(self, start: int, num_tokens: int, values: bytes) -> bool:
        num_known = self.num_reported - start
        if 0 <= num_known < num_tokens:  # else those before them are still to come again, or all are known
            self._rows.extend_encoded(values, num_tokens, num_known)
        return False

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> LogprobRows | None:
        """None if an abort came before they were computed."""
        return self._rows if self.num_reported == reporter.spec.num_prompt_tokens else None


class PromptLogprobs(Report):
    """How many of them a request may have is limited together with those of its output."""

    name = "prompt_logprobs"
    field = "prompt_logprobs"
    is_of_prompt = True
    is_shown_with_prompt = True

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes:
        if message.prompt_logprobs > MAX_PROMPT_LOGPROBS and message.prompt_logprobs != vocab_size:
            raise InvalidRequest(
                f"prompt_logprobs is {message.prompt_logprobs}, must be from 0 to {MAX_PROMPT_LOGPROBS}, or -1 for all "
                f"{vocab_size} tokens of the vocabulary",
                "prompt_logprobs",
            )
        request = prompt_logprobs_pb2.PromptLogprobsRequest(num_likeliest=message.prompt_logprobs)
        return request.SerializeToString()

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        return _Record()

    def num_logprobs(self, spec: SequenceSpec) -> int:
        """Those of all tokens of the prompt."""
        num_likeliest = prompt_logprobs_pb2.PromptLogprobsRequest.FromString(spec.features[self.name]).num_likeliest
        return spec.num_prompt_tokens * (1 + num_likeliest + len(spec.sampling.logprob_token_ids))

    def write(self, parts: Sequence[LogprobRows], message: AnswerMessage) -> None:
        """They are written some at a time: see the servicer."""
