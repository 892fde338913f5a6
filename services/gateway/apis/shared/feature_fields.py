"""The fields of a body that takes all features of the gateway that HTTP has, and the objects of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

import pydantic
from typing_extensions import TypedDict

from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.features.installed import FEATURES, REPORTS
from services.gateway.features.report import ReportPart
from services.pb import gateway_pb2

_SHOWN = {each.field: each for each in FEATURES if each.json_field is not None}

# A field for each feature that has one.
FeatureFields: Any = pydantic.create_model(
    "FeatureFields",
    __base__=RequestModel,
    **{name: (each.json_field[0] | None, each.json_field[1]) for name, each in _SHOWN.items() if each.json_field},
)

# The same where a body does not take them, with the values that ask for nothing.
NO_FEATURES: Mapping[str, tuple[Any, ...]] = {name: each.json_neutral for name, each in _SHOWN.items()}

# The objects of reports, by the names of the features.
ReportObjects: Any = TypedDict(  # type: ignore[misc]
    "ReportObjects", {each.name: NotRequired[Any] for each in REPORTS.values() if each.field in _SHOWN}
)


def asked_reports(body: FeatureFields) -> list[str]:
    """Names of the fields by which a body asks for reports."""
    names = [report.field for report in REPORTS.values() if report.field in _SHOWN]
    return [name for name in names if getattr(body, name) not in (None, *_SHOWN[name].json_neutral)]


def add_features(message: gateway_pb2.GenerateRequest, body: FeatureFields) -> None:
    """Asks for what the fields of a body ask for."""
    for name, feature in _SHOWN.items():
        if (value := getattr(body, name)) not in (None, *feature.json_neutral):
            feature.ask(value, message)


def report_objects(
    body: FeatureFields, reports: Mapping[str, Sequence[ReportPart]], num_prompt_tokens: int
) -> dict[str, Any]:
    """What a body has asked for of a whole answer, by the names of the features. `reports`: all parts of the answer."""
    asked = asked_reports(body)
    return {
        name: report.json(reports.get(name, ()), num_prompt_tokens)
        for name, report in REPORTS.items()
        if report.field in asked
    }
