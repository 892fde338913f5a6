"""`StreamSequences`: the open sequences that one stream to a dense worker runs. Lives in the gateway's event loop."""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.link.journal_entry import JournalEntry


class StreamSequences:
    """Filled by the `Journal`, which gives each sequence to one stream at most. Its length counts ended ones, too."""

    def __init__(self, gateway: int) -> None:
        """`gateway`: the upper half of all seq_ids of this gateway."""
        self.gateway = gateway
        self._entries: dict[int, JournalEntry] = {}
        self.get = self._entries.get  # the entry with a seq_id, or None; asked for every token

    def add(self, entry: JournalEntry) -> None:
        """The stream runs this sequence from now on."""
        self._entries[entry.seq_id] = entry

    def discard(self, entry: JournalEntry) -> None:
        """Lets go of a sequence, if it is here; tokens that still come for it are ignored."""
        self._entries.pop(entry.seq_id, None)

    def unfinished(self) -> Iterator[JournalEntry]:
        """Sequences that the dense worker has to continue, in the order in which they came here."""
        return (entry for entry in self._entries.values() if not entry.is_ended)

    def __len__(self) -> int:
        return len(self._entries)
