"""`PairTemplate`: the text that a reranker made from a language model reads of a query and a document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """Pieces of text, each of which is tokenized by itself, with places for texts of the client."""

    pieces: tuple[str, ...]  # with {instruction}, {query} and {document}, the last one at the end of its piece
    tokens: tuple[str, ...]  # of the language head: the model's value is the last one's logit, less that of the first
    instruction: str | None = None  # what the model is told if the client tells nothing; None: no place for one

    @property
    def document_piece(self) -> int:
        """The index of the piece that has the document, which may be cut at its end."""
        return next(i for i, piece in enumerate(self.pieces) if "{document}" in piece)

    def fill(self, texts: Mapping[str, str]) -> list[str]:
        """The pieces with texts for `instruction`, `query` and `document`, in which braces mean nothing."""
        return [re.sub(r"\{(\w+)\}", lambda found: texts[found[1]], piece) for piece in self.pieces]


TEMPLATES: dict[str, PairTemplate] = {
    "qwen3": PairTemplate(
        (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        ("no", "yes"),
        "Given a web search query, retrieve relevant passages that answer the query",
    ),
    "gemma": PairTemplate(
        (
            "<bos>",
            "A: {query}",
            "\n",
            "B: {document}",
            "\n",
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        ("Yes",),
    ),
}
