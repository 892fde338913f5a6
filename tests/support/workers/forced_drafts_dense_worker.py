"""A dense worker whose drafts are right as often as one wants, for benchmarks of what drafts cost.

The environment variable TWOSTROKE_FORCED_DRAFTS names a JSON file: `answers` (pairs of prompt and answer, as token
ids), `num_drafts` of each step, and `acceptance`: which part of the steps has right drafts; the others have only wrong
ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from services.dense_worker import service
from services.dense_worker.__main__ import main
from services.dense_worker.engine.sequence import Sequence
from tests.support.dense.eager_drafts import EagerDrafts

VARIABLE = "TWOSTROKE_FORCED_DRAFTS"


class ForcedDrafts(EagerDrafts):
    def __init__(self, answers: list[tuple[list[int], list[int]]], num_drafts: int, acceptance: float) -> None:
        self._answers = {tuple(prompt): answer for prompt, answer in answers}
        self._num_drafts = num_drafts
        self._acceptance = acceptance
        self._due = 0.0  # right drafts that are owed

    def propose(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        first = len(sequence.output_token_ids)
        answer = self._answers.get(tuple(sequence.prompt_token_ids), [])
        drafts = answer[first : first + min(self._num_drafts, max_num_tokens)]
        self._due += self._acceptance
        is_right = self._due >= 1.0
        self._due -= is_right
        return drafts if is_right else [token_id ^ 1 for token_id in drafts]


class ForcedDraftsDenseWorker(service.DenseWorker):
    def draft_source(self) -> ForcedDrafts:
        return ForcedDrafts(**json.loads(Path(os.environ[VARIABLE]).read_text()))


if __name__ == "__main__":
    service.DenseWorker = ForcedDraftsDenseWorker  # type: ignore[misc]
    main()
