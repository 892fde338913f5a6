"""Prints the fields of each request type of the `anthropic` package as JSON. See test_anthropic.py."""

from __future__ import annotations

import json
import sys
from typing import get_type_hints

from anthropic.types import MessageCountTokensParams, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params

TYPES = {
    "count_tokens": MessageCountTokensParams,
    "messages": message_create_params.MessageCreateParamsStreaming,
    "beta": beta_create_params.MessageCreateParamsStreaming,
}
json.dump({name: sorted(get_type_hints(each, include_extras=True)) for name, each in TYPES.items()}, sys.stdout)
