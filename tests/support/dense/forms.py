"""A byte tokenizer with a few longer tokens, and walks through a form as some model would take them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.byte_tokenizer import byte_tokenizer
from services.grammar.lower import lower
from services.grammar.matcher import GrammarMatcher, MaskThreads, compile_grammar
from services.grammar.vocabulary import Vocabulary, read_vocabulary

EOS = 256
TOOL = 257  # a special token, written <tool>
WORDS = ('{"', '":', '", "', "name", "true", "12", "0.5", "}]", "</", "\\u00")


def make_vocabulary(path: Path) -> Vocabulary:
    """The bytes, EOS, TOOL and `WORDS`."""
    tokenizer = json.loads(byte_tokenizer().to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [
        {"id": token_id, "content": content, "special": True, **flags}
        for token_id, content in ((EOS, "<eos>"), (TOOL, "<tool>"))
    ]
    tokenizer["added_tokens"] += [
        {"id": TOOL + 1 + i, "content": word, "special": False, **flags} for i, word in enumerate(WORDS)
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return read_vocabulary(path, 300, [EOS])


class Forms:
    """Makes matchers with one tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLExecutor

        self.vocabulary = vocabulary
        self.tokenizer = vocabulary.load()
        self.threads = MaskThreads(LLExecutor(2), 2)

    def matcher(self, form: StructuredOutput, may_end: bool = True) -> GrammarMatcher:
        """A matcher at the beginning. Raises `GrammarError`."""
        start = compile_grammar(self.tokenizer, lower(form, self.vocabulary.special_tokens))
        return GrammarMatcher(start, self.threads, self.vocabulary, may_end)

    def accepts(self, form: StructuredOutput, text: str) -> bool:
        """Whether the form allows the text and lets it end there."""
        matcher = self.matcher(form)
        for token_id in self.tokenizer.tokenize_str(text):
            if not matcher.is_running or not allowed(matcher)[token_id]:
                return False
            GrammarMatcher.consume([(matcher, token_id)])
        return matcher.is_complete or (matcher.error is None and bool(allowed(matcher)[EOS]))

    def tokens(self, text: str) -> list[int]:
        """One token per byte."""
        byte_token = {self.tokenizer.decode_bytes([i]): i for i in range(EOS)}
        return [byte_token[bytes([byte])] for byte in text.encode()]

    def text(self, token_ids: Sequence[int]) -> str:
        """Raises `UnicodeDecodeError` for bytes that are no text."""
        return self.tokenizer.decode_bytes([each for each in token_ids if each != EOS]).decode()

    def walk(self, matcher: GrammarMatcher, generator: random.Random, max_tokens: int) -> list[int]:
        """Output tokens of a model that prefers no token; ends like a sequence of the engine."""
        output: list[int] = []
        while len(output) < max_tokens and matcher.is_running:
            choices = np.flatnonzero(allowed(matcher))
            if not len(choices) or matcher.error is not None:
                break
            # Quotes and brackets end strings and lists, which would go on for ever otherwise.
            closing = [each for each in choices.tolist() if each == EOS or chr(each & 127) in '"]}']
            token_id = generator.choice(closing if closing and generator.random() < 0.3 else choices.tolist())
            output.append(token_id)
            GrammarMatcher.consume([(matcher, token_id)])
        return output


def allowed(matcher: GrammarMatcher) -> np.ndarray:
    """bool [300]: the tokens that may come next."""
    masks = np.empty((1, matcher.num_words), dtype=np.uint32)
    GrammarMatcher.fill_masks([matcher], masks)
    return np.unpackbits(masks.view(np.uint8), bitorder="little")[:300].astype(bool)


def schema(value: object) -> StructuredOutput:
    """The form of a JSON Schema."""
    return StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(value))
