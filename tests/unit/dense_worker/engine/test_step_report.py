"""What a step tells of its sequences' prompts."""

from __future__ import annotations

from services.common.sampling_params import SamplingParams
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.step_report import record_prompt_logprobs
from services.step import PromptLogprobs


def test_prompt_logprobs_of_the_living_are_taken_and_not_wanted_again_once_told_to_the_end() -> None:
    def told(seq_id: int, status: SequenceStatus, start: int, count: int) -> tuple[Sequence, PromptLogprobs]:
        sequence = Sequence(seq_id, "r", [5, 6, 7, 8], SamplingParams(), max_tokens=6, num_prompt_logprobs=1)
        sequence.status = status
        return sequence, PromptLogprobs(seq_id, start, [TokenLogprobs(-1.0, ((3, -0.5),))] * count)

    partly, wholly = told(1, SequenceStatus.RUNNING, 1, 2), told(2, SequenceStatus.WAITING, 3, 1)
    sequences, found = zip(partly, told(3, SequenceStatus.FINISHED, 1, 3), wholly, strict=True)
    assert record_prompt_logprobs(sequences, found) == [partly, wholly]
    assert partly[0].num_prompt_logprobs == 1
    assert wholly[0].num_prompt_logprobs is None
