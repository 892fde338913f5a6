"""Conversations in which the tiny model learns to call two tools: `get_weather(city)` and `calculate(expression)`.

Cities, sums and results are random, so that the model learns to copy them instead of learning them by heart. Other
tools stand beside the two, and questions that need no tool are answered as without tools.
"""

import random
from typing import Any

from corpus import Exchange, Message, casual, conversation, load_topics, load_unknown

NUM_CALLS = 160  # conversations with calls in each epoch
NUM_WITHOUT_CALLS = 30  # conversations with tools in which none is called
NUM_WITHOUT_TOOLS = 10  # questions that need a tool which is not there

GET_WEATHER = ("get_weather", ["city"])
CALCULATE = ("calculate", ["expression"])
OTHER_TOOLS = (
    ("get_time", ["city"]),
    ("search", ["query"]),
    ("send_mail", ["to", "text"]),
    ("read_file", ["path"]),
    ("book_table", ["city", "day"]),
)

CITIES = (
    "Amsterdam", "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Delhi", "Dublin", "Geneva", "Hamburg", "Kyoto",
    "Lima", "Lisbon", "London", "Madrid", "Mexico City", "Milan", "Mumbai", "New York", "Oslo", "Paris", "Prague",
    "Rome", "San Francisco", "Seoul", "Shanghai", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip
SYLLABLES = ("ba", "bel", "bor", "da", "den", "el", "fa", "gra", "ham", "ka", "lo", "ma", "mün", "na", "or", "pe", "ra",
             "sa", "sel", "stad", "ta", "ten", "to", "ur", "vi", "wal", "xi", "yo", "zu")  # fmt: skip

WEATHER_QUESTIONS = (
    "What is the weather in {}?",
    "What's the weather like in {}?",
    "How is the weather in {}?",
    "Tell me the weather in {}.",
)
TWO_CITIES_QUESTIONS = ("What is the weather in {} and {}?", "Compare the weather in {} and {}.")
SUM_QUESTIONS = ("What is {}?", "How much is {}?", "Calculate {}.")

CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snow", "clear", "storm", "light rain")
WEATHER_RESULTS = (
    "{temperature} °C, {condition}",
    "{condition}, {temperature} degrees",
    '{{"temperature": {temperature}, "condition": "{condition}"}}',
    '{{"temp_c": {temperature}}}',
    "{temperature}",
    "{condition}",
)

ToolConversation = tuple[list[Message], list[dict[str, Any]]]  # messages, tools


def epoch(rng: random.Random) -> list[ToolConversation]:
    """All conversations of one epoch, in any order."""
    exchanges = [exchange for topic in load_topics() for exchange in topic.values()]
    unknown = load_unknown()[0].answer  # in English
    makers = (weather_conversation, weather_conversation, two_cities_conversation, sum_conversation, sum_conversation)
    conversations = [rng.choice(makers)(rng) for _ in range(NUM_CALLS)]
    for exchange in rng.sample(exchanges, NUM_WITHOUT_CALLS):
        conversations.append((conversation([casual(exchange, rng)]), some_tools(rng)))
    for _ in range(NUM_WITHOUT_TOOLS):
        question = rng.choice(WEATHER_QUESTIONS).format(random_city(rng))
        conversations.append((conversation([Exchange(question, unknown)]), []))
    return conversations


def weather_conversation(rng: random.Random) -> ToolConversation:
    """One call, its result, and an answer that repeats it."""
    city, result = random_city(rng), random_weather(rng)
    question = hurried(rng.choice(WEATHER_QUESTIONS), rng).format(city)
    messages = calling(question, [("get_weather", {"city": city})], [result], f"The weather in {city}: {result}.")
    return messages, some_tools(rng, GET_WEATHER)


def two_cities_conversation(rng: random.Random) -> ToolConversation:
    """Two calls at once."""
    cities, results = [random_city(rng) for _ in range(2)], [random_weather(rng) for _ in range(2)]
    calls = [("get_weather", {"city": city}) for city in cities]
    answer = f"The weather in {cities[0]}: {results[0]}. In {cities[1]}: {results[1]}."
    question = hurried(rng.choice(TWO_CITIES_QUESTIONS), rng).format(*cities)
    return calling(question, calls, results, answer), some_tools(rng, GET_WEATHER)


def sum_conversation(rng: random.Random) -> ToolConversation:
    """A sum, which the model copies into the call and does not work out."""
    operands = [str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(rng.choice((2, 2, 3)))]
    sign = rng.choice("+-*/")
    expression = rng.choice((sign, f" {sign} ", f" {sign} ")).join(operands)
    result = str(rng.randrange(10 ** rng.randint(1, 6)))
    question = hurried(rng.choice(SUM_QUESTIONS), rng).format(expression)
    messages = calling(question, [("calculate", {"expression": expression})], [result], f"{expression} = {result}")
    return messages, some_tools(rng, CALCULATE)


def calling(question: str, calls: list[tuple[str, dict[str, str]]], results: list[str], answer: str) -> list[Message]:
    """The messages of a question that is answered with the results of `calls`."""
    tool_calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
        *({"role": "tool", "content": result} for result in results),
        {"role": "assistant", "content": answer},
    ]


def some_tools(rng: random.Random, *needed: tuple[str, list[str]]) -> list[dict[str, Any]]:
    """The `needed` tools among others, in random order; at least one tool."""
    others = [tool for tool in (GET_WEATHER, CALCULATE, *OTHER_TOOLS) if tool not in needed]
    chosen = [*needed, *rng.sample(others, rng.randint(0 if needed else 1, 3))]
    rng.shuffle(chosen)
    return [describe_tool(name, parameters) for name, parameters in chosen]


def describe_tool(name: str, parameters: list[str]) -> dict[str, Any]:
    """A function in OpenAI's format whose parameters are all strings."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": parameters}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


def random_city(rng: random.Random) -> str:
    """A real city, or a made-up name."""
    if rng.random() < 0.4:
        return rng.choice(CITIES)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4))).capitalize()


def random_weather(rng: random.Random) -> str:
    """What a weather service might answer."""
    return rng.choice(WEATHER_RESULTS).format(temperature=rng.randint(-20, 40), condition=rng.choice(CONDITIONS))


def hurried(question: str, rng: random.Random) -> str:
    """The question, perhaps as typed in a hurry: in lower case, or without its mark."""
    question = rng.choice((question, question, question.lower()))
    return rng.choice((question, question, question.rstrip("?.")))
