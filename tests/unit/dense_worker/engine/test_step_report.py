"""What only some sequences report, in the report of a step."""

from __future__ import annotations

from services.common.sampling_params import SamplingParams
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.step_report import record_reports
from services.dense_worker.features.returned_logits.reports import PromptLogprobs
from tests.support.dense.sequences import new_sequence


def test_live_sequences_report_their_prompt_logprobs_once() -> None:
    def found_for(seq_id: int, status: SequenceStatus, start: int, count: int) -> tuple[Sequence, PromptLogprobs]:
        sequence = new_sequence(seq_id, "r", [5, 6, 7, 8], SamplingParams(), max_tokens=6, num_prompt_logprobs=1)
        sequence.status = status
        return sequence, PromptLogprobs(seq_id, start, [TokenLogprobs(-1.0, ((3, -0.5),))] * count)

    partial, complete = found_for(1, SequenceStatus.RUNNING, 1, 2), found_for(2, SequenceStatus.WAITING, 3, 1)
    sequences, found = zip(partial, found_for(3, SequenceStatus.FINISHED, 1, 3), complete, strict=True)
    assert record_reports(sequences, found) == [partial, complete]
    assert partial[0].describe().ignores_prefix_cache
    assert not complete[0].describe().ignores_prefix_cache
