"""A dense worker whose drafts are right as often as one wants, for benchmarks of what drafts cost.

The environment variable TWOSTROKE_FORCED_DRAFTS names a JSON file, which is read again for each sequence: `answers`
(pairs of prompt and answer, as token ids), `num_drafts` of each step, and `acceptance`: which part of the steps has
right drafts; the others have only wrong ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from services.dense_worker import service
from services.dense_worker.__main__ import main
from services.dense_worker.engine.sequence import Sequence
from tests.support.dense.eager_drafting import EagerDrafting
from tests.support.workers.known_text_dense_worker import say_known_text

VARIABLE = "TWOSTROKE_FORCED_DRAFTS"


class ForcedDrafts(EagerDrafting):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._sequence: Sequence | None = None  # the one that the file was last read for

    def draft(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        if sequence is not self._sequence:
            self._sequence = sequence
            self._read()
        first = len(sequence.output_token_ids)
        answer = self._answers.get(tuple(sequence.spec.prompt_token_ids), [])
        drafts = answer[first : first + min(self._num_drafts, max_num_tokens)]
        self._due += self._acceptance
        is_right = self._due >= 1.0
        self._due -= is_right
        return drafts if is_right else [token_id ^ 1 for token_id in drafts]

    def _read(self) -> None:
        content = json.loads(self._file.read_text())
        self._answers = {tuple(prompt): answer for prompt, answer in content["answers"]}
        self._num_drafts: int = content["num_drafts"]
        self._acceptance: float = content["acceptance"]
        self._due = 0.0  # right drafts that are owed


class ForcedDraftsDenseWorker(service.DenseWorker):
    def drafting(self) -> ForcedDrafts:
        return ForcedDrafts(Path(os.environ[VARIABLE]))


if __name__ == "__main__":
    say_known_text()
    service.DenseWorker = ForcedDraftsDenseWorker  # type: ignore[misc]
    main()
