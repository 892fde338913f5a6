"""All models' descriptions can be sent in the messages of Triton's gRPC API."""

from __future__ import annotations

import pytest
from google.protobuf.json_format import ParseDict

from services.gateway.apis.triton.models import MODELS
from services.pb import triton_pb2


@pytest.mark.parametrize("name", MODELS)
def test_configuration_and_metadata_are_messages(name: str) -> None:
    model = MODELS[name]
    configuration = ParseDict(model.configuration(4), triton_pb2.ModelConfig())
    metadata = ParseDict(model.metadata(), triton_pb2.ModelMetadataResponse())
    assert [each.name for each in configuration.input] == [each.name for each in metadata.inputs]
    assert all(each.data_type for each in (*configuration.input, *configuration.output))
