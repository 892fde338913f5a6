"""Writes what llguidance reads differently from JSON Schema in another way, so that its answers are valid.

- Beside `prefixItems`, `additionalItems` means nothing since draft 2020-12; llguidance would ignore `prefixItems`. What
  the client means is `items`.
- Numbers of items, characters or properties may be written with a decimal point, as 2.0.
- A format that JSON Schema does not define, such as OpenAPI's `byte`, only describes; llguidance would refuse it.
- llguidance's dates have a 29th of February in every year, and its times may end with a 60th second.
"""

from __future__ import annotations

import json
from typing import Any

from services.grammar.grammar_error import GrammarError
from services.grammar.schema_ids import References, check_ids

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_YEAR = "(?:[1-9][0-9]{3}|0(?:[1-9][0-9]{2}|0(?:[1-9][0-9]|0[1-9])))"  # 0001 to 9999
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_DEFINED = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
)
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}


def translate(text: str) -> str:
    """The schema, as JSON text, for llguidance; the same text if it reads it as it is meant.

    Raises `GrammarError` for JSON that is nested too deeply, and for an `$id` that two subschemas have.
    """
    try:
        root = json.loads(text)
        check_ids(root)
        changes = [_change(schema) for schema in References(root).subschemas()]
        return json.dumps(root, ensure_ascii=False, allow_nan=False) if any(changes) else text
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except GrammarError:
        raise
    except ValueError:
        return text  # llguidance says what is wrong


def _change(schema: dict[str, Any]) -> bool:
    """Changes a schema in place; returns whether it had to."""
    before = dict(schema)
    if "prefixItems" in schema and "additionalItems" in schema:
        schema.setdefault("items", schema.pop("additionalItems"))
        schema.pop("additionalItems", None)
    for key in _COUNTS:
        if isinstance(schema.get(key), float) and schema[key].is_integer():
            schema[key] = int(schema[key])
    name = schema.get("format")
    if isinstance(name, str) and name in _FORMATS:
        del schema["format"]
        others = schema.get("allOf")
        schema["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": f"^{_FORMATS[name]}$"}]
    elif isinstance(name, str) and name not in _DEFINED:
        del schema["format"]
    return schema != before or any(type(schema[key]) is not type(before[key]) for key in schema if key in before)
