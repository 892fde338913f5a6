"""The limits of `ResponseStore`, checked against a model that recounts everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.apis.responses.response_store import OVERHEAD_BYTES, ResponseStore, StoredResponse

MAX_RESPONSES, MAX_BYTES_OF_OWNER, MAX_BYTES = 3, 4 * OVERHEAD_BYTES, 7 * OVERHEAD_BYTES


def stored(num_bytes: int) -> StoredResponse:
    """A response of this many bytes, overhead included."""
    return StoredResponse((b"x" * (num_bytes - OVERHEAD_BYTES),), (), b"")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete"]),
        st.sampled_from("abc"),
        st.sampled_from("12345"),
        st.integers(OVERHEAD_BYTES, MAX_BYTES_OF_OWNER + 2),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_least_recently_used_responses_are_dropped(steps: list[tuple[str, str, str, int]]) -> None:
    store = ResponseStore(MAX_RESPONSES, MAX_BYTES_OF_OWNER, MAX_BYTES)
    held: list[tuple[str, str, int]] = []  # least recently used first

    def of(owner: str) -> list[tuple[str, str, int]]:
        return [each for each in held if each[0] == owner]

    def size(some: list[tuple[str, str, int]]) -> int:
        return sum(num_bytes for _, _, num_bytes in some)

    for kind, owner, response_id, num_bytes in steps:
        found = next((each for each in held if each[:2] == (owner, response_id)), None)
        if kind == "put":
            store.put(owner, response_id, stored(num_bytes))
            if num_bytes > MAX_BYTES_OF_OWNER:
                continue
            held = [each for each in held if each != found] + [(owner, response_id, num_bytes)]
            while len(of(owner)) > MAX_RESPONSES or size(of(owner)) > MAX_BYTES_OF_OWNER:
                held.remove(of(owner)[0])
            while size(held) > MAX_BYTES:
                del held[0]
        elif kind == "get":
            assert (store.get(owner, response_id) is None) == (found is None)
            if found is not None:
                held = [each for each in held if each != found] + [found]
        else:
            assert store.delete(owner, response_id) == (found is not None)
            held = [each for each in held if each != found]
        assert store.num_bytes == size(held) <= MAX_BYTES
    for owner in "abc":
        for response_id in "12345":
            expected = [num_bytes for each, name, num_bytes in held if (each, name) == (owner, response_id)]
            response = store.get(owner, response_id)
            assert ([] if response is None else [response.num_bytes]) == expected


def test_a_response_counts_what_it_holds() -> None:
    held = StoredResponse((b"{}",), (b"[1]", b"[22]"), b"[333]")
    assert held.num_bytes == 2 + 3 + 4 + 5 + OVERHEAD_BYTES
    assert held.conversation == (b"[1]", b"[22]", b"[333]")
