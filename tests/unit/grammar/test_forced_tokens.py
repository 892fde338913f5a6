"""Where a form leaves no choice, its forced tokens are those, and the only ones, that its masks allow."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.structured_output import Constraint, StructuredOutput
from services.dense_worker.features.drafting.drafter import Acceptance, ForcedTokens
from services.grammar.matcher import MAX_FORCED_AT_ONCE, GrammarMatcher
from tests.support.dense.forms import Forms, allowed, make_vocabulary
from tests.support.dense.sequences import with_grammar
from tests.support.examples import examples

NAMES = st.sampled_from(["a", "name", "street_address", "é", 'quote"', "x y"])
VALUES: Any = st.sampled_from(
    [{"type": "integer"}, {"type": "string"}, {"enum": ["red", "reddish", "blue"]}, {"const": "fixed"}]
)
SCHEMAS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=4).flatmap(
    lambda properties: st.builds(
        lambda num_required, is_compact: {
            "type": "object", "properties": properties, "required": list(properties)[:num_required],
            "additionalProperties": False,
        } | ({"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}} if is_compact else {}),
        st.integers(0, 4), st.booleans(),
    )
)  # fmt: skip
TAGS: Any = {
    "type": "structural_tag",
    "format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": [
        {"begin": "<call>now", "content": {"type": "regex", "pattern": "[0-9]{3}(long end)?"}, "end": "</call>"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def check_walk(matcher: GrammarMatcher, seed: int) -> int:
    """Follows random tokens; returns the number of forced ones."""
    generator, before, num_forced = random.Random(seed), list[int](), 0
    for _ in range(150):
        if not matcher.is_running:
            break
        forced = list(matcher.forced_tokens)
        assert forced[: len(before)] == before, "a forced token changes the ones after it"
        choices = np.flatnonzero(allowed(matcher)).tolist()
        if forced:
            assert choices == forced[:1]
            num_forced += 1
        token_id = generator.choice(choices)
        before = forced[1:]
        GrammarMatcher.consume([(matcher, token_id)])
    return num_forced


@settings(deadline=None, max_examples=examples(50))
@given(value=SCHEMAS, seed=st.integers(0, 2**32))
def test_the_mask_of_a_forced_token_allows_only_it(forms: Forms, value: dict[str, Any], seed: int) -> None:
    check_walk(forms.matcher(StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(value))), seed)


@pytest.mark.parametrize("form", [
    StructuredOutput(Constraint.REGEX, "abc(def|deg)?hij{3}"),
    StructuredOutput(Constraint.CHOICE, choices=("the first text", "the first choice")),
    StructuredOutput(Constraint.STRUCTURAL_TAG, json.dumps(TAGS)),
    StructuredOutput(Constraint.GRAMMAR, 'start: "begin " x+ " end"\nx: "one " | "two "'),
])  # fmt: skip
def test_other_forms_have_forced_tokens_too(forms: Forms, form: StructuredOutput) -> None:
    numbers = [check_walk(forms.matcher(form), seed) for seed in range(8)]
    assert form.constraint is Constraint.STRUCTURAL_TAG or min(numbers) > 0


def test_rows_of_drafts_have_the_masks_that_are_found_one_by_one(forms: Forms) -> None:
    def matcher() -> GrammarMatcher:
        return forms.matcher(StructuredOutput(Constraint.REGEX, "(abcdef|x)+"))

    drafting, other, alone = matcher(), matcher(), matcher()
    first = forms.tokens("a")[0]
    GrammarMatcher.consume([(drafting, first), (alone, first)])
    forced = ForcedTokens(with_grammar(drafting), Acceptance())
    drafts = forced.draft(7)
    assert drafts == forms.tokens("bcdef") and len(forced.chances(7)) == 5
    assert forced.draft(2) == forms.tokens("bc") and forced.chances(2) == [1.0, 1.0]
    masks = np.empty((8, drafting.num_words), dtype=np.uint32)
    GrammarMatcher.fill_masks([other, *[drafting] * 6, alone], masks)
    assert (masks[7] == masks[1]).all(), "the row of another sequence"
    for row, token_id in enumerate([*forms.tokens("bcdef"), None], start=1):
        expected = np.empty((1, alone.num_words), dtype=np.uint32)
        GrammarMatcher.fill_masks([alone], expected)
        assert (masks[row] == expected[0]).all()
        if token_id is not None:
            GrammarMatcher.consume([(alone, token_id)])
    assert drafting.forced_tokens == forms.tokens("bcdef"), "finding masks moves nothing"


def test_a_matcher_that_is_moved_back_has_other_forced_tokens(forms: Forms) -> None:
    matcher = forms.matcher(StructuredOutput(Constraint.REGEX, "(abc|xyz)!?"))
    forced = ForcedTokens(with_grammar(matcher), Acceptance())
    assert matcher.forced_tokens == [] and forced.draft(3) == [] == forced.chances(3)
    matcher.sync(forms.tokens("a"))
    assert matcher.forced_tokens == forms.tokens("bc")
    matcher.sync(forms.tokens("x"))
    assert matcher.forced_tokens == forms.tokens("yz")
    matcher.sync([])
    assert matcher.forced_tokens == []


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[GrammarMatcher]:
    """A list that gets each matcher that looks up what is forced."""
    looked, find_forced = list[GrammarMatcher](), GrammarMatcher._find_forced

    def find(matcher: GrammarMatcher) -> list[int]:
        looked.append(matcher)
        return find_forced(matcher)

    monkeypatch.setattr(GrammarMatcher, "_find_forced", find)
    return looked


def test_what_is_forced_is_looked_up_once_for_many_tokens(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes as long as the rest of the form is, which its sequence pays for."""
    text = "".join(random.Random(0).choice("abcdefghijklmnopqrstuvwxyz") for _ in range(3 * MAX_FORCED_AT_ONCE))
    matcher, looked = forms.matcher(StructuredOutput(Constraint.REGEX, text + "[0-9]+")), count_looks(monkeypatch)
    expected, found = forms.tokens(text), list[int]()
    while matcher.forced_tokens and len(found) < len(expected):
        assert len(matcher.forced_tokens) <= MAX_FORCED_AT_ONCE
        token_id = matcher.forced_tokens[0]
        GrammarMatcher.consume([(matcher, token_id)])
        found.append(token_id)
    assert found == expected[: len(found)] and len(found) >= len(expected) - 1
    assert len(looked) <= len(expected) / MAX_FORCED_AT_ONCE + 2


def test_a_matcher_with_a_lexer_of_its_own_does_not_look_again(forms: Forms) -> None:
    """What it looked at may have used up the states of the one before."""
    matcher = forms.matcher(StructuredOutput(Constraint.REGEX, "abcdefghi[0-9]+"))
    assert matcher.forced_tokens
    matcher.remake = lambda: forms.matcher(StructuredOutput(Constraint.REGEX, "abcdefghi[0-9]+"))._start
    matcher._recover(matcher._matcher)
    assert matcher.is_running and not matcher.forced_tokens
    assert np.flatnonzero(allowed(matcher)).tolist() == forms.tokens("a")
