"""Schemas that others have published: Kubernetes' own and those of SchemaStore, as installed packages carry them.

Whatever a model does, an answer that ends is valid by `jsonschema`, and no invalid change of it is accepted. What
cannot be enforced is refused by name.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.grammar_error import GrammarError
from services.grammar.trial import try_grammar
from tests.support.dense.forms import EOS, Forms, make_vocabulary

MAX_CHARACTERS = 256 * 1024  # of a form
NUM_KUBERNETES = 40
MAX_TOKENS = 250
NUM_WALKS = 3
NUM_CHANGES = 4  # of each answer
OTHERS: list[Any] = [None, True, -1, 2.5, "x", [], {}, [None], {"x": None}]


def directory_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is in requirements-dev.txt"
    return Path(spec.origin).parent


def kubernetes() -> dict[str, Any]:
    """Schemas of Kubernetes' newest version by name, each with all definitions that it names."""
    newest = max((directory_of("kubernetes_validate") / "kubernetes-json-schema").glob("*-local"))
    definitions = json.loads((newest / "_definitions.json").read_text())["$defs"]
    schemas = {}
    for name in random.Random(0).sample(sorted(definitions), NUM_KUBERNETES):
        found, more = set[str](), {name}
        while more:
            found |= more
            inner = json.dumps([definitions[each] for each in more])
            more = set(re.findall(r'"\$ref": "#/\$defs/([^"]+)"', inner)) - found
        own = {each: definitions[each] for each in sorted(found)}
        schemas[name] = {"$ref": f"#/$defs/{name}", "$defs": own}
    return schemas


def schema_store() -> dict[str, Any]:
    """Schemas of the configuration files of well-known programs, by name."""
    files = sorted((directory_of("check_jsonschema") / "builtin_schemas" / "vendor").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files if file.stat().st_size <= MAX_CHARACTERS}


def as_form(value: Any) -> StructuredOutput:
    return StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(value))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def answers(forms: Forms, form: StructuredOutput) -> Iterator[Any]:
    """What a model that prefers no token answers, if it ends."""
    for seed in range(NUM_WALKS):
        matcher = forms.matcher(form)
        output = forms.walk(matcher, random.Random(seed), MAX_TOKENS)
        if matcher.is_complete or output[-1:] == [EOS]:
            yield json.loads(forms.text(output))


def changed(value: Any, generator: random.Random) -> Any:
    """The value with another one somewhere in it, or without a property."""
    children = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not children or generator.random() < 0.2:
        return generator.choice(OTHERS)
    copy, key = value.copy(), generator.choice(list(children))
    if isinstance(value, dict) and generator.random() < 0.3:
        del copy[key]
    else:
        copy[key] = changed(value[key], generator)
    return copy


def check_answers(forms: Forms, value: Any) -> int:
    """Returns how many answers ended."""
    validator, form, num_ended = jsonschema.validators.validator_for(value)(value), as_form(value), 0
    generator = random.Random(0)
    for answer in answers(forms, form):
        num_ended += 1
        assert validator.is_valid(answer), answer
        for _ in range(NUM_CHANGES):
            other = changed(answer, generator)
            if not validator.is_valid(other):
                text = json.dumps(other, ensure_ascii=False, separators=(",", ":"))
                assert not forms.accepts(form, text), f"{text} is not valid"
    return num_ended


@pytest.mark.parametrize(("source", "least_kept", "least_ended"), [(kubernetes, 20, 40), (schema_store, 5, 5)])
def test_published_schemas_are_kept_or_refused_by_name(
    forms: Forms, source: Callable[[], dict[str, Any]], least_kept: int, least_ended: int
) -> None:
    """A refusal names the keyword, or the reference, that cannot be enforced; it is in the schema."""
    num_kept = num_ended = 0
    for name, value in source().items():
        try:
            try_grammar(forms.tokenizer, forms.vocabulary, as_form(value))
        except GrammarError as error:
            words = re.findall(r"[A-Za-z.:/_-]{3,}", str(error))
            assert any(f'"{word}' in json.dumps(value) for word in words), f"{name}: {error}"
            continue
        num_kept += 1
        num_ended += check_answers(forms, value)
    assert num_kept >= least_kept and num_ended >= least_ended, (num_kept, num_ended)
