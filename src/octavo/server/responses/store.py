"""Responses that can be read again and gone on from: in memory, bounded in number and bytes, the least used go first.

An item is encoded once and shared by all conversations that go through it, yet counted in full for each: so the limit
holds whatever is deleted. Whoever asks is known by a digest of its key; what is another's is not there. Knows nothing
of HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.server.responses.items import Item, decode_item

if TYPE_CHECKING:
    from octavo.server.responses.background import EventLog, Job

ENTRY_BYTES = 1024  # what a response takes beside its content
ITEM_BYTES = 256  # what an item does


@dataclass(slots=True)
class StoredResponse:
    """Encoded items: `before` is the conversation that `inputs` and `outputs` went on from."""

    owner: bytes
    before: tuple[bytes, ...]
    inputs: tuple[bytes, ...]
    item_ids: tuple[str, ...]  # of inputs and outputs
    status: str
    outputs: tuple[bytes, ...] = ()
    reply: bytes = b""
    is_background: bool = False
    job: Job | None = None  # while it runs in the background
    log: EventLog | None = None  # of one in the background whose events may be read again

    @property
    def is_running(self) -> bool:
        return self.job is not None

    @property
    def num_bytes(self) -> int:
        items = (*self.before, *self.inputs, *self.outputs)
        size = ENTRY_BYTES + ITEM_BYTES * len(items) + sum(map(len, items)) + len(self.reply)
        if self.log is not None:
            size += self.log.num_bytes + len(self.reply)  # which its last frame repeats
        return size

    def encoded(self) -> bytes:
        """The response as it stands."""
        return self.reply if self.job is None else self.job.snapshot()

    def conversation(self) -> tuple[bytes, ...]:
        return (*self.before, *self.inputs, *self.outputs)


class ResponseStore:
    """max_responses 0: nothing is stored."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0
        self._items: dict[tuple[bytes, str], tuple[str, bytes]] = {}  # owner and id -> whose it is, and the item

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, response_id: str, stored: StoredResponse) -> bool:
        """Store it, in place of what is there under this id. False if there is no room beside those that run."""
        self.remove(response_id)
        size = stored.num_bytes
        if size > self.max_bytes or not self._make_room(size):
            return False
        self._stored[response_id] = stored
        self._sizes[response_id] = size
        self._num_bytes += size
        for item_id, raw in zip(stored.item_ids, (*stored.inputs, *stored.outputs), strict=True):
            self._items[stored.owner, item_id] = (response_id, raw)
        return True

    def recount(self, response_id: str) -> bool:
        """Count what a response has grown to. False if there is no room for that beside those that run."""
        stored = self._stored.get(response_id)
        if stored is None:
            return True
        growth = stored.num_bytes - self._sizes[response_id]
        if not self._make_room(growth, places=0):
            return False
        self._sizes[response_id] += growth
        self._num_bytes += growth
        return True

    def get(self, response_id: str, owner: bytes) -> StoredResponse | None:
        """None if there is none, or it is another's."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._stored.move_to_end(response_id)
        return stored

    def find_item(self, item_id: str, owner: bytes) -> Item | None:
        found = self._items.get((owner, item_id))
        return None if found is None else decode_item(found[1])

    def remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is None:
            return
        self._num_bytes -= self._sizes.pop(response_id)
        for item_id in stored.item_ids:
            key = (stored.owner, item_id)
            if self._items.get(key, ("", b""))[0] == response_id:  # no later response has the same item
                del self._items[key]

    def _make_room(self, size: int, places: int = 1) -> bool:
        while len(self._stored) + places > self.max_responses or self._num_bytes + size > self.max_bytes:
            oldest = next((i for i, stored in self._stored.items() if not stored.is_running), None)
            if oldest is None:
                return False
            self.remove(oldest)
        return True
