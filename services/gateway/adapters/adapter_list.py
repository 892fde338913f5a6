"""`AdapterList`: the adapters that a gateway serves, by owner and name, and the room that each owner may use."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from services.common.errors import InvalidRequest
from services.common.fairness import may_wait, refusal
from services.lora.adapter import Adapter

SHARED = ""  # the owner of the adapters that all callers may name
MAX_ADAPTERS = 1024
MAX_VIRTUAL_TOKEN_BYTES = 2**30  # of all adapters together, which a gateway keeps in memory


class AdapterList:
    """An owner is the name of an API key, or `SHARED`. Two owners may have adapters of one name."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Adapter]] = {SHARED: {}}  # by owner and name

    def of(self, owner: str) -> Mapping[str, Adapter]:
        """An owner's adapters, by name."""
        return self._of.get(owner, {})

    def visible_to(self, key_name: str) -> Mapping[str, Adapter]:
        """What the requests of a key may name: its own adapters and those that are shared; its own come first."""
        own, shared = self._of.get(key_name), self._of[SHARED]
        return ChainMap(own, shared) if own and own is not shared else shared

    def put(self, owner: str, adapter: Adapter) -> None:
        """Adds an adapter, in place of one of this owner and name."""
        self._of.setdefault(owner, {})[adapter.name] = adapter

    def remove(self, owner: str, name: str) -> None:
        """Removes an adapter if it is there."""
        self._of.get(owner, {}).pop(name, None)

    def check_number(self, owner: str, name: str) -> None:
        """Raises `InvalidRequest` if there is no room for one more adapter, or none that this owner may take."""
        if name in self.of(owner):
            return
        num_adapters, num_own = sum(map(len, self._of.values())), len(self.of(owner))
        if num_adapters >= MAX_ADAPTERS:
            raise InvalidRequest(f"{MAX_ADAPTERS} adapters are loaded, which is the limit; unload one", "lora_name")
        if owner != SHARED and not may_wait(MAX_ADAPTERS, num_adapters, num_own, 1):
            what = f"{num_own} of {num_adapters} loaded adapters"
            raise InvalidRequest(refusal(what, 1, MAX_ADAPTERS), "lora_name")

    def check_memory(self, owner: str, adapter: Adapter) -> None:
        """Raises `InvalidRequest` if there is no room for the bytes of an adapter's virtual tokens."""
        if adapter.table is None:
            return
        num_more, num_replaced = _num_bytes(adapter), _num_bytes(self.of(owner).get(adapter.name))
        num_bytes_of = {each: sum(map(_num_bytes, adapters.values())) for each, adapters in self._of.items()}
        num_loaded = sum(num_bytes_of.values()) - num_replaced
        num_own = num_bytes_of.get(owner, 0) - num_replaced
        what = f"Loading lora {adapter.name} failed: "
        if num_loaded + num_more > MAX_VIRTUAL_TOKEN_BYTES:
            raise InvalidRequest(
                f"{what}the virtual tokens of all adapters would have {num_loaded + num_more} bytes, "
                f"at most {MAX_VIRTUAL_TOKEN_BYTES} allowed; unload one",
                "lora_path",
            )
        if owner != SHARED and not may_wait(MAX_VIRTUAL_TOKEN_BYTES, num_loaded, num_own, num_more):
            used = f"{num_own} of {num_loaded} bytes of virtual tokens"
            raise InvalidRequest(what + refusal(used, num_more, MAX_VIRTUAL_TOKEN_BYTES), "lora_path")


def _num_bytes(adapter: Adapter | None) -> int:
    return 0 if adapter is None or adapter.table is None else len(adapter.table.values)
