"""JSON Schemas of every keyword: which are accepted, and how long they take; beside xgrammar, if it is installed.

    python bench/schemas.py                     # 2,000 schemas made of the keywords of the official test suite
    python bench/schemas.py --suite DIR         # and the schemas of that suite (JSON-Schema-Test-Suite)

Each schema comes with values. `jsonschema_rs` says which are valid, or the suite itself; an engine accepts a value if
its masks allow every token of it, and then the end. *Refused* schemas have an error of the compiler. A process of its
own runs each engine, so that what does not end, or ends the process, is counted. xgrammar is no dependency of this
project:
`pip install --no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jsonschema_rs
import numpy as np

from bench.gpu.models import write_model
from bench.load.own_server import write_vocabulary
from services.common.model_config import load_model_config
from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.grammar_error import GrammarError
from services.grammar.lower import lower
from services.grammar.matcher import compile_grammar
from services.grammar.vocabulary import Vocabulary, read_vocabulary

TIMEOUT_S = 10.0  # of a schema with all its values
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "hostname")
PATTERNS = ("^[a-z]{2,5}$", "^(red|green)", "[0-9]+", "^\\w+ \\w+$", "^.{3}$")
WORDS = ("", "a", "red", "green", "ab cd", "longer text", "12", "é", "2024-02-29", "12:30:00Z", "a@b.org", "10.0.0.1")


@dataclass(frozen=True)
class Example:
    """A schema with values. `is_valid`: by `jsonschema_rs`."""

    schema: Any
    values: Sequence[Any]
    is_valid: Sequence[bool]


@dataclass(frozen=True)
class Result:
    """What an engine has made of a schema; times in seconds of processor time."""

    error: str | None  # None: it is accepted
    compile_s: float = 0.0
    accepted: Sequence[bool] = ()  # of the values
    masks_s: Sequence[float] = ()  # of the accepted values' tokens


def make_schema(generator: random.Random, depth: int = 0) -> Any:
    """A schema of one to three keywords of the suite for one type, or of a combination of schemas."""
    choose, chance = generator.choice, generator.random
    if depth < 3 and chance() < 0.25:
        keyword = choose(["anyOf", "oneOf", "allOf", "$ref", "not", "if", "enum", "const"])
        if keyword in ("anyOf", "oneOf", "allOf"):
            return {keyword: [make_schema(generator, depth + 1) for _ in range(generator.randint(1, 3))]}
        if keyword == "not":
            return {"type": "string", "not": {"const": choose(WORDS)}}
        if keyword == "if":
            return {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": "integer"}}
        if keyword == "enum":
            return {"enum": generator.sample([*WORDS, 1, 2.5, None, True, [], {}], generator.randint(1, 5))}
        if keyword == "const":
            return {"const": choose([*WORDS, 7, False, [1, 2], {"a": 1}])}
        if depth == 0:
            return {"$defs": {"part": make_schema(generator, 2)}, "type": "array", "items": {"$ref": "#/$defs/part"},
                    "maxItems": 3}  # fmt: skip
    kinds = ["string", "integer", "number", "boolean", "null"] + ["object", "array"] * (2 * (depth < 3))
    kind = choose(kinds)
    schema: dict[str, Any] = {"type": kind}

    def maybe(name: str, value: Any, probability: float = 0.4) -> None:
        if chance() < probability:
            schema[name] = value

    if kind == "string":
        maybe("minLength", generator.randint(0, 3))
        maybe("maxLength", generator.randint(3, 12))
        maybe("pattern", choose(PATTERNS), 0.2)
        maybe("format", choose(FORMATS), 0.2)
    elif kind in ("integer", "number"):
        low = generator.randint(-20, 20)
        maybe(choose(["minimum", "exclusiveMinimum"]), low)
        maybe(choose(["maximum", "exclusiveMaximum"]), low + generator.randint(1, 60))
        maybe("multipleOf", choose([2, 5, 10] + [0.5] * (kind == "number")), 0.2)
    elif kind == "array":
        maybe("items", make_schema(generator, depth + 1), 0.8)
        maybe("prefixItems", [make_schema(generator, depth + 1) for _ in range(generator.randint(1, 2))], 0.25)
        maybe("minItems", generator.randint(0, 2))
        maybe("maxItems", generator.randint(2, 4))
        maybe(*choose([("uniqueItems", True), ("contains", {"type": "integer"})]), probability=0.08)
    elif kind == "object":
        names = generator.sample(["a", "b", "name", "street address", "é", "kind"], generator.randint(1, 4))
        schema["properties"] = {name: make_schema(generator, depth + 1) for name in names}
        maybe("required", generator.sample(names, generator.randint(1, len(names))), 0.7)
        maybe("additionalProperties", choose([False, True, {"type": "integer"}]), 0.7)
        maybe("patternProperties", {"^x_": make_schema(generator, depth + 1)}, 0.15)
        maybe(*choose([("minProperties", 1), ("maxProperties", 3), ("propertyNames", {"maxLength": 5}),
                       ("dependentRequired", {names[0]: [names[-1]]})]), probability=0.12)  # fmt: skip
    return schema


def make_value(generator: random.Random, schema: Any, root: Any) -> Any:
    """A value that may be valid; properties are in the schema's order."""
    choose = generator.choice
    if not isinstance(schema, dict) or generator.random() < 0.04:
        return choose([*WORDS, 0, 3, -7, 2.5, None, True, [], {}, [1], {"a": 1}])
    if "$ref" in schema:
        return make_value(generator, root["$defs"]["part"], root)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return make_value(generator, choose(schema[keyword]), root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return choose(schema["enum"])
    kind = schema.get("type", choose(["string", "integer"]))
    if kind == "string":
        return choose([*WORDS, *WORDS, "x" * generator.randint(0, 14)])
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -5))
        step = schema.get("multipleOf", 1)
        value = (low // step + generator.randint(-1, 8)) * step
        return int(value) if value == int(value) else value
    if kind == "array":
        prefix = schema.get("prefixItems", [])
        number = generator.randint(schema.get("minItems", 0), schema.get("maxItems", 3) + 1)
        parts = [*prefix, *[schema.get("items")] * number][:max(number, len(prefix))]
        return [make_value(generator, part, root) for part in parts]
    if kind == "object":
        required = schema.get("required", ())
        made = {
            name: make_value(generator, part, root)
            for name, part in schema["properties"].items()
            if generator.random() < (0.95 if name in required else 0.5)
        }
        if generator.random() < 0.2:
            made[choose(["more", "x_1"])] = choose([1, "a", None])
        return made
    return {"boolean": True, "null": None}[kind]


def made_examples(number: int, seed: int) -> Iterator[Example]:
    """Schemas of this program, each with twelve values."""
    generator = random.Random(seed)
    for _ in range(number):
        schema = make_schema(generator)
        values = [make_value(generator, schema, schema) for _ in range(12)]
        judge = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        yield Example(schema, values, [judge.is_valid(value) for value in values])


def suite_examples(path: Path) -> Iterator[Example]:
    """The schemas of the official suite, which says itself what is valid."""
    for draft, uri in DRAFTS.items():
        for file in sorted((path / "tests" / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                schema = case["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": uri} | schema
                tests = case["tests"]
                yield Example(schema, [each["data"] for each in tests], [each["valid"] for each in tests])


class Llguidance:
    """As this server uses it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._tokenizer = vocabulary, vocabulary.load()
        self._eos = vocabulary.eos_token_ids[0]

    def compile(self, schema: Any) -> Any:
        structure = StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(schema))
        return compile_grammar(self._tokenizer, lower(structure, self._vocabulary.special_tokens))

    def accepts(self, compiled: Any, token_ids: Sequence[int], times: list[float]) -> bool:
        matcher, mask = compiled.deep_copy(), np.empty(-(-self._tokenizer.vocab_size // 32), np.uint32)
        for token_id in [*token_ids, None]:
            if matcher.is_stopped():
                return token_id is None and not matcher.is_error()
            begin = time.thread_time()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            times.append(time.thread_time() - begin)
            if token_id is None:
                return bool(mask[self._eos >> 5] >> np.uint32(self._eos & 31) & 1)
            # A forced token is allowed alone; the same bytes in other tokens are the same text.
            is_allowed = mask[token_id >> 5] >> np.uint32(token_id & 31) & 1
            if not is_allowed and matcher.validate_tokens([token_id]) != 1:
                return False
            matcher.consume_token(token_id)
        raise AssertionError("the end has been looked at")


class Xgrammar:
    """With its own defaults: any white space, and objects without `additionalProperties` are closed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        tokenizer = json.loads(vocabulary.tokenizer_json)
        tokens = {**tokenizer["model"]["vocab"], **{each["content"]: each["id"] for each in tokenizer["added_tokens"]}}
        names = [""] * vocabulary.num_tokens
        for name, token_id in tokens.items():
            names[token_id] = name
        self._eos = vocabulary.eos_token_ids[0]
        info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[self._eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, vocabulary.num_tokens)

    def compile(self, schema: Any) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

    def accepts(self, compiled: Any, token_ids: Sequence[int], times: list[float]) -> bool:
        matcher = self._xgrammar.GrammarMatcher(compiled)
        for token_id in [*token_ids, self._eos]:
            begin = time.thread_time()
            matcher.fill_next_token_bitmask(self._mask)
            times.append(time.thread_time() - begin)
            if not matcher.accept_token(token_id):
                return False
        return True


def examine(engine: Any, example: Example, texts: Sequence[Sequence[int]]) -> Result:
    """What the engine makes of a schema and of its values' tokens."""
    begin = time.thread_time()
    try:
        compiled = engine.compile(example.schema)
    except (GrammarError, RuntimeError, ValueError, TypeError) as error:
        return Result(str(error)[:200])
    compile_s, accepted, masks_s = time.thread_time() - begin, [], list[float]()
    for token_ids in texts:
        times = list[float]()
        accepted.append(engine.accepts(compiled, token_ids, times))
        if accepted[-1]:
            masks_s += times
    return Result(None, compile_s, accepted, masks_s)


def work(make: Callable[[Vocabulary], Any], vocabulary: Vocabulary, pipe: Connection) -> None:
    """The process of an engine."""
    engine = make(vocabulary)
    while True:
        pipe.send(examine(engine, *pipe.recv()))


class EngineProcess:
    """Runs an engine; starts it again if a schema ends it, or takes too long."""

    def __init__(self, make: Callable[[Vocabulary], Any], vocabulary: Vocabulary) -> None:
        self._make, self._vocabulary = make, vocabulary
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(self._make, self._vocabulary, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def examine(self, example: Example, texts: Sequence[Sequence[int]]) -> Result:
        self._pipe.send((example, texts))
        try:
            if self._pipe.poll(TIMEOUT_S + 20.0 * self._is_new()):
                return self._pipe.recv()
            error = f"not ended after {TIMEOUT_S:.0f} s"
        except EOFError:
            error = "the process has ended"
        self._process.kill()
        self._start()
        return Result(error)

    def _is_new(self) -> bool:
        """Whether it may still import its modules."""
        is_new, self._was_used = not getattr(self, "_was_used", False), True
        return is_new

    def close(self) -> None:
        self._process.kill()


def tokens_of(tokenizer: Any, value: Any) -> list[int]:
    return tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))


def describe(name: str, examples: Sequence[Example], results: Sequence[Result]) -> str:
    """A row of the table."""
    counts: Counter[tuple[bool, bool]] = Counter()
    for example, result in zip(examples, results, strict=True):
        counts.update(zip(example.is_valid, result.accepted, strict=False))
    accepted = [each for each in results if each.error is None]
    ended = sum(each.error is not None and each.error.startswith(("not ended", "the process")) for each in results)
    compile_ms = _quantiles([1e3 * each.compile_s for each in accepted])
    masks_us = _quantiles([1e6 * each for result in accepted for each in result.masks_s])
    cells = [name, len(results) - len(accepted), ended, len(accepted), counts[True, True], counts[False, False]]
    cells += [counts[True, False], counts[False, True], "{:.2f}, {:.2f}".format(*compile_ms)]
    return " | ".join(map(str, [*cells, "{:.0f}, {:.0f}".format(*masks_us)]))


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    """P50 and P99."""
    return statistics.median(values), sorted(values)[int(0.99 * len(values))]


def compare(title: str, examples: Sequence[Example], vocabulary: Vocabulary, engines: dict[str, Any]) -> None:
    print(f"\n{title}: {len(examples)} schemas, {sum(len(each.values) for each in examples)} values\n")
    print("| engine | schemas refused | of these not ended | accepted | valid and accepted | invalid and refused "
          "| valid and refused | invalid and accepted | compiling, ms: P50, P99 | masks, µs: P50, P99 |")
    print("|---" * 10 + "|")
    tokenizer = vocabulary.load()
    texts = [[tokens_of(tokenizer, value)for value in example.values] for example in examples]
    found: dict[str, list[Result]] = {}
    for name, make in engines.items():
        process = EngineProcess(make, vocabulary)
        found[name] = [process.examine(*pair) for pair in zip(examples, texts, strict=True)]
        process.close()
        print(f"| {describe(name, examples, found[name])} |", flush=True)
    if len(found) == 2:  # the same schemas
        both = [i for i in range(len(examples)) if all(results[i].error is None for results in found.values())]
        for name, results in found.items():
            row = describe(f"{name}, both accept", [examples[i] for i in both], [results[i] for i in both])
            print(f"| {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=2000, help="that are made; default: %(default)s, 0: none")
    parser.add_argument("--seed", type=int, default=1, help="of these")
    parser.add_argument("--suite", type=Path, metavar="DIR", help="the official test suite")
    options = parser.parse_args()
    engines: dict[str, Any] = {"this server": Llguidance}
    if importlib.util.find_spec("xgrammar") is not None:
        engines["xgrammar"] = Xgrammar
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", "llama-2-7b", "stored")
        write_vocabulary(model)
        config = load_model_config(model)
        vocabulary = read_vocabulary(model, config.vocab_size, config.eos_token_ids, is_optional=True)
        if options.schemas:
            compare("Made schemas", [*made_examples(options.schemas, options.seed)], vocabulary, engines)
        if options.suite is not None:
            compare("The official suite", [*suite_examples(options.suite)], vocabulary, engines)


if __name__ == "__main__":
    main()
