"""A dense worker that proposes drafts: it knows the answers to given prompts, and makes some mistakes.

The environment variable TWOSTROKE_TEST_DRAFTS names a JSON file with pairs of prompt and answer, as token ids.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from services.dense_worker import service
from services.dense_worker.__main__ import main
from services.dense_worker.engine.sequence import Sequence
from tests.support.dense.eager_drafting import EagerDrafting

VARIABLE = "TWOSTROKE_TEST_DRAFTS"
NUM_DRAFTS = 4
ONE_WRONG_IN = 7


class KnownAnswers(EagerDrafting):
    """Drafts what it was told."""

    def __init__(self, pairs: list[tuple[list[int], list[int]]]) -> None:
        super().__init__()
        self._answers = {tuple(prompt): answer for prompt, answer in pairs}

    def draft(self, sequence: Sequence, max_num_tokens: int) -> list[int]:
        answer = self._answers.get(tuple(sequence.spec.prompt_token_ids), [])
        first = len(sequence.output_token_ids)
        drafts = answer[first : first + min(NUM_DRAFTS, max_num_tokens)]
        return [token + (index % ONE_WRONG_IN == 0) for index, token in enumerate(drafts, start=first)]


class DraftingDenseWorker(service.DenseWorker):
    def drafting(self) -> KnownAnswers:
        return KnownAnswers(json.loads(Path(os.environ[VARIABLE]).read_text()))


if __name__ == "__main__":
    service.DenseWorker = DraftingDenseWorker  # type: ignore[misc]
    main()
