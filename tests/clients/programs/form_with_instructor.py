"""The `instructor` package: an object by a demanded call, over chats and responses. See test_agents.py."""

from __future__ import annotations

import json
import sys
from enum import StrEnum

import instructor
import openai
from pydantic import BaseModel, Field

base_url, model, question = sys.argv[1:]


class City(StrEnum):
    """Cities that an answer may name."""

    paris = "Paris"
    rome = "Rome"


class Trip(BaseModel):
    """A trip to a city"""

    city: City
    days: int = Field(ge=1, le=9)


client = openai.OpenAI(base_url=base_url, api_key="none needed", max_retries=0, timeout=60)
of_chats = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
of_responses = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
trips = [
    of_chats.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        response_model=Trip,
        max_retries=0,
        temperature=0,
    ),
    of_responses.responses.create(model=model, input=question, response_model=Trip, max_retries=0, temperature=0),
]
json.dump([trip.model_dump(mode="json") for trip in trips], sys.stdout)
