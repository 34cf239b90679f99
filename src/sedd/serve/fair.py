"""A queue in which clients take turns."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final


class Sent(Protocol):
    """What a client has sent."""

    @property
    def client(self) -> str:
        """Who sent it."""


Item = TypeVar("Item", bound=Sent)


@final
class FairQueue(Generic[Item]):
    """Items in the order of their clients' turns, and of their arrival for each client.

    A client that has many items waiting holds up those of another one by at most one item per turn.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}
        """By client; the first client is next."""

    def __len__(self) -> int:
        return sum(len(items) for items in list(self._items.values()))

    def push(self, item: Item) -> None:
        """Add an item; a new client's turn is the last."""
        self._items.setdefault(item.client, deque()).append(item)

    def pop(self, may: Callable[[str], bool] = lambda client: True) -> Item | None:
        """Remove the next item of the clients that may have a turn; None if there is none."""
        for client in filter(may, self._items):
            items = self._items.pop(client)
            item = items.popleft()
            if items:
                self._items[client] = items
            return item
        return None

    def remove(self, is_gone: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items for which ``is_gone`` holds."""
        gone: list[Item] = []
        for client, items in list(self._items.items()):
            kept: deque[Item] = deque()
            for item in items:  # once each: another thread may change the answer
                (gone if is_gone(item) else kept).append(item)
            if kept:
                self._items[client] = kept
            else:
                del self._items[client]
        return gone
