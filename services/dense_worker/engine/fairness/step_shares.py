"""Divides a step among several clients. With one client the scheduler does not come here, but for `limit_values`.

Sequences that need a single token go first, as always, but leave room for the prompts of clients that have no such
sequence. The rest of the step goes to prompts, so that in the whole step tenants, and the clients of each tenant, get
as even numbers of tokens as possible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from services.common.fairness import Client
from services.dense_worker.engine.sequence import Sequence

Prefill = tuple[Sequence, int]  # with a number of tokens

MAX_VALUES = 2**14  # that one step reports of prompts: about 5 ms on one core
MIN_STREAMS = 8  # fewer of them do not make a step much longer


def newcomers(num_streams: Counter[Client], sequences: Iterable[Sequence]) -> set[Sequence]:
    """Those of `sequences` whose clients have no stream, if most streams are of one client.

    Streams give way to them once: a plan waits until they are open, and their prompts get a step of their own. Among
    many clients with few streams each, newcomers are the rule, and giving way would cost all of them more.

    num_streams: rows that streams have in a step, by client
    """
    num_rows = num_streams.total()
    if num_rows < MIN_STREAMS or 2 * max(num_streams.values()) <= num_rows:
        return set()
    return {sequence for sequence in sequences if sequence.spec.client_id not in num_streams}


def limit_decodes(decodes: list[Sequence], prefills: SequenceOf[Prefill], num_tokens: int) -> list[Sequence]:
    """The sequences that get a single token, or one for each of their rows, in a step of `num_tokens` tokens.

    They leave up to half of the step to the prompts of clients without a running stream. The clients with the most
    streams give way, with their last streams in order. This matters only with more streams than half of the step.
    """
    num_streams = count_rows(decodes)
    limit = most_decodes(num_streams, prefills, num_tokens)
    if num_streams.total() <= limit:
        return decodes
    shares = dict(zip(num_streams, fill([0] * len(num_streams), list(num_streams.values()), limit), strict=True))
    chosen = []
    for sequence in decodes:
        client = sequence.spec.client_id
        if shares[client] > 0:
            shares[client] -= sequence.num_rows
            chosen.append(sequence)
    return chosen


def most_decodes(num_streams: Counter[Client], prefills: SequenceOf[Prefill], num_tokens: int) -> int:
    """How many rows of a step streams may have; num_streams: how many they want, by client. See `limit_decodes`."""
    num_wanted = sum(count for sequence, count in prefills if sequence.spec.client_id not in num_streams)
    return num_tokens - min(num_wanted, num_tokens // 2)


def divide_prefills(
    prefills: SequenceOf[Prefill], num_planned: Counter[Client], num_tokens: int
) -> Counter[Sequence]:
    """How many tokens each sequence gets.

    prefills: with their remaining tokens, in the scheduler's order: a priority that comes earlier there is served
    first, and so is a client's earlier sequence; num_planned: tokens that each client gets already
    """
    num_planned = num_planned.copy()
    by_priority = defaultdict[int, list[Prefill]](list)
    for prefill in prefills:
        by_priority[prefill[0].spec.priority].append(prefill)
    shares = Counter[Sequence]()
    for group in by_priority.values():
        num_left = _shares_of_clients(group, num_planned, num_tokens)
        for sequence, num_remaining in group:
            client = sequence.spec.client_id
            shares[sequence] = min(num_remaining, num_left[client])
            num_left[client] -= shares[sequence]
            num_planned[client] += shares[sequence]
            num_tokens -= shares[sequence]
    return shares


def _shares_of_clients(prefills: list[Prefill], num_planned: Counter[Client], num_tokens: int) -> dict[Client, int]:
    """How many of `num_tokens` each client gets for its prompts, given how many it has got already."""
    wishes = Counter[Client]()
    clients = defaultdict[int, dict[Client, None]](dict)  # by tenant
    for sequence, num_remaining in prefills:
        wishes[sequence.spec.client_id] += num_remaining
        clients[sequence.spec.tenant][sequence.spec.client_id] = None
    of_tenant = Counter[int]()
    for (tenant, _), count in num_planned.items():
        of_tenant[tenant] += count
    tenant_shares = fill(
        [of_tenant[tenant] for tenant in clients],
        [sum(wishes[client] for client in group) for group in clients.values()],
        num_tokens,
    )
    shares: dict[Client, int] = {}
    for group, share in zip(clients.values(), tenant_shares, strict=True):
        levels, wanted = [num_planned[client] for client in group], [wishes[client] for client in group]
        shares.update(zip(group, fill(levels, wanted, share), strict=True))
    return shares


def fill(levels: SequenceOf[int], wishes: SequenceOf[int], total: int) -> list[int]:
    """Divides at most `total` so that levels and shares together are as even as possible: max-min fairness.

    Nobody gets more than its wish. What does not divide evenly goes to the first ones.

    >>> fill([0, 60], [300, 300], 452)
    [256, 196]
    """
    total = min(total, sum(wishes))
    low, high = 0, max((level + wish for level, wish in zip(levels, wishes, strict=True)), default=0)
    while low < high:  # find the highest line up to which all can be filled
        line = (low + high + 1) // 2
        if sum(_fill_up(levels, wishes, line)) <= total:
            low = line
        else:
            high = line - 1
    shares = _fill_up(levels, wishes, low)
    num_left = total - sum(shares)
    for index, more in enumerate(_fill_up(levels, wishes, low + 1)):
        if num_left and more > shares[index]:
            shares[index] += 1
            num_left -= 1
    return shares


def count_rows(sequences: Iterable[Sequence]) -> Counter[Client]:
    """How many rows of a step sequences have that need a single token, or one for each of their rows, by client."""
    rows = Counter[Client]()
    for sequence in sequences:
        rows[sequence.spec.client_id] += sequence.num_rows
    return rows


def _fill_up(levels: SequenceOf[int], wishes: SequenceOf[int], line: int) -> list[int]:
    return [min(wish, max(0, line - level)) for level, wish in zip(levels, wishes, strict=True)]


def limit_values(prefills: SequenceOf[Prefill], max_num_values: int = MAX_VALUES) -> list[Prefill]:
    """The same prompts with as many tokens as one step may compute of them; without those that have to wait.

    The host handles what a step reports of prompts, such as log-probabilities, value by value: a step with very many
    would make all others wait. So prompts that report values are computed in shorter pieces. Also with one client.

    Together they report at most `max_num_values` values, divided evenly among clients. A client's prompts are served
    in order, and the first one gets at least one token, however many values that reports. Prompts that report none
    keep their numbers.
    """
    wishes = Counter[Client]()
    for sequence, num_tokens in prefills:
        wishes[sequence.spec.client_id] += num_tokens * sequence.num_values_per_token
    shares = dict(zip(wishes, fill([0] * len(wishes), list(wishes.values()), max_num_values), strict=True))
    limited, advancing = list[Prefill](), set[Client]()
    for sequence, num_tokens in prefills:
        most = num_tokens
        if num_values := sequence.num_values_per_token:
            client = sequence.spec.client_id
            most = min(num_tokens, max(shares[client] // num_values, client not in advancing))
            shares[client] = max(0, shares[client] - most * num_values)
            advancing.add(client)
        if most:
            limited.append((sequence, most))
    return limited
