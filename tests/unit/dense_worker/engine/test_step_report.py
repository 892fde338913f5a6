"""What only some sequences report, in the report of a step."""

from __future__ import annotations

from services.common.sampling_params import SamplingParams
from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.step_report import record_reports
from services.dense_worker.features.report import TokenReport
from tests.support.dense.sequences import new_sequence
from tests.support.reports import prompt_logprobs, write_prompt_logprobs


def test_live_sequences_report_their_prompt_logprobs_once() -> None:
    asked = prompt_logprobs(1)

    def found_for(seq_id: int, status: SequenceStatus, start: int, count: int) -> tuple[Sequence, TokenReport]:
        sequence = new_sequence(seq_id, "r", [5, 6, 7, 8], SamplingParams(), max_tokens=6, features=asked)
        sequence.status = status
        rows = write_prompt_logprobs([TokenLogprobs(-1.0, ((3, -0.5),))] * count)
        return sequence, TokenReport(seq_id, "prompt_logprobs", start, rows)

    partial, complete = found_for(1, SequenceStatus.RUNNING, 1, 2), found_for(2, SequenceStatus.WAITING, 3, 1)
    sequences, found = zip(partial, found_for(3, SequenceStatus.FINISHED, 1, 3), complete, strict=True)
    assert record_reports(sequences, found) == [partial, complete]
    assert partial[0].describe().ignores_prefix_cache
    assert not complete[0].describe().ignores_prefix_cache
