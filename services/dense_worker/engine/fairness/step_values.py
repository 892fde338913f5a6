"""Limits how many values a step reports of prompts, such as log-probabilities: the host handles them one by one.

A step with very many would make all others wait. Prompts that report values are computed in shorter pieces instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from services.dense_worker.engine.fairness.step_shares import Client, Prefill, client_of, fill

MAX_VALUES = 2**14  # of one step: about 5 ms on one core


def limit_values(prefills: SequenceOf[Prefill], max_num_values: int = MAX_VALUES) -> list[Prefill]:
    """The same prompts with as many tokens as one step may compute of them; without those that have to wait.

    Together they report at most `max_num_values` values, divided evenly among clients. A client's prompts are served
    in order, and the first one gets at least one token, however many values that reports. Prompts that report none
    keep their numbers.
    """
    wishes = Counter[Client]()
    for sequence, num_tokens in prefills:
        wishes[client_of(sequence)] += num_tokens * sequence.num_values_per_token
    shares = dict(zip(wishes, fill([0] * len(wishes), list(wishes.values()), max_num_values), strict=True))
    limited, advancing = list[Prefill](), set[Client]()
    for sequence, num_tokens in prefills:
        most = num_tokens
        if num_values := sequence.num_values_per_token:
            client = client_of(sequence)
            most = min(num_tokens, max(shares[client] // num_values, client not in advancing))
            shares[client] = max(0, shares[client] - most * num_values)
            advancing.add(client)
        if most:
            limited.append((sequence, most))
    return limited
