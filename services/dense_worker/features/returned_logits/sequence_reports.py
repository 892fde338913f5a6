"""`SequenceReports`: what a sequence reports of its tokens besides the tokens."""

from __future__ import annotations

from services.dense_worker.features.returned_logits.reports import Logits, PromptLogprobs
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.step import SequenceSpec, TokenReport


class SequenceReports(SequenceFeature):
    """What its spec asks for, less what has been reported."""

    def __init__(self, spec: SequenceSpec, *, prompt_logprobs: bool, token_report: TokenReport) -> None:
        """prompt_logprobs: those that the spec asks for have not all been reported; token_report: the same"""
        self.spec = spec
        self.prompt_logprobs = prompt_logprobs
        self.token_report = token_report

    @property
    def reports(self) -> bool:
        """Whether there is something to report of output tokens, or of each token of the prompt."""
        return self.spec.return_generation_logits or bool(self.token_report)

    @property
    def reports_prompt(self) -> bool:
        """Whether anything is reported of its prompt's tokens."""
        return self.prompt_logprobs or bool(self.token_report)

    @property
    def num_values_per_token(self) -> int:
        """Log-probabilities of each token of the prompt. Logits and hidden states are not handled one by one."""
        if not self.prompt_logprobs:
            return 0
        assert self.spec.num_prompt_logprobs is not None
        return 1 + self.spec.num_prompt_logprobs + len(self.spec.sampling.logprob_token_ids)

    @property
    def ignores_prefix_cache(self) -> bool:
        """Whether something is reported that has to be computed for each token."""
        return self.prompt_logprobs or self.token_report.needs_all_tokens

    def note_reported(self, report: object) -> None:
        """What is of the prompt only ends with the prompt."""
        if isinstance(report, PromptLogprobs):
            if report.start + len(report.tokens) == self.spec.num_prompt_tokens:
                self.prompt_logprobs = False
        elif isinstance(report, Logits) and not report.is_output:
            is_complete = report.start + len(report.values) == self.spec.num_prompt_tokens
            if is_complete and self.token_report is not TokenReport.HIDDEN_STATES:
                self.token_report = TokenReport.NONE
