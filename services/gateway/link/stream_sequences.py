"""`StreamSequences`: the open sequences that one stream to a dense worker runs. Used in the gateway's event loop."""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.link.journal_entry import JournalEntry


class StreamSequences:
    """Filled by the `Journal`, which gives each sequence to at most one stream. Its length includes ended ones."""

    def __init__(self, gateway: int) -> None:
        """`gateway`: the upper half of all seq_ids of this gateway."""
        self.gateway = gateway
        self._entries: dict[int, JournalEntry] = {}
        self.get = self._entries.get  # returns the entry of a seq_id, or None; called for every token

    def add(self, entry: JournalEntry) -> None:
        """Adds a sequence, which the stream runs from now on."""
        self._entries[entry.seq_id] = entry

    def discard(self, entry: JournalEntry) -> None:
        """Removes a sequence, if present; later tokens for it are ignored."""
        self._entries.pop(entry.seq_id, None)

    def unfinished(self) -> Iterator[JournalEntry]:
        """Sequences that the dense worker must continue, in the order in which they were added."""
        return (entry for entry in self._entries.values() if not entry.is_ended)

    def __len__(self) -> int:
        return len(self._entries)
