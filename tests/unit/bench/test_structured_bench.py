"""The benchmark of structured output: its schemas are schemas, and its parts print their figures."""

from __future__ import annotations

import asyncio
import random
import re

import jsonschema
import pytest

from bench.structured import ENDLESS, make_request, measure_compiling, measure_masks, random_schema
from services.common.config import EMBEDDED_MODEL


def test_its_schemas_are_schemas_of_many_kinds() -> None:
    generator = random.Random(0)
    schemas = [random_schema(generator) for _ in range(50)]
    for schema in [ENDLESS, *schemas]:
        jsonschema.Draft202012Validator.check_schema(schema)
    text = str(schemas)
    assert all(f"'{kind}'" in text for kind in ("object", "array", "string", "integer", "number", "boolean", "enum"))


def test_only_streams_with_a_form_have_one() -> None:
    plain, formed = make_request(1, 20, False), make_request(1, 20, True)
    assert not plain.sampling.HasField("structured_output")
    assert formed.sampling.structured_output.WhichOneof("constraint") == "json_schema"
    formed.sampling.ClearField("structured_output")
    assert formed == plain


def test_masks_and_compile_times_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(measure_masks(EMBEDDED_MODEL, False, [1, 9], num_steps=3))
    asyncio.run(measure_compiling(EMBEDDED_MODEL, False, num_forms=3))
    printed = capsys.readouterr().out
    lines = re.findall(r"^\| \d.* \|$", printed, re.MULTILINE)
    rows = [[int(cell.replace(",", "")) for cell in line.strip("| ").split(" | ")] for line in lines]
    assert [size for size, *_ in rows] == [1, 9]
    assert all(0 < median <= most and 0 < mean <= most and rate > 0 for _, median, mean, most, rate, _ in rows)
    assert re.search(r"^3 schemas, .*: P50 [\d.]+ ms, P99 [\d.]+ ms, longest [\d.]+ ms$", printed, re.MULTILINE)
