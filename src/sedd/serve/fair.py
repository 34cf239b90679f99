"""A queue in which clients take turns, and so do the requests of each client."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final


class Sent(Protocol):
    """What a client has sent."""

    @property
    def client(self) -> str:
        """Who sent it."""

    @property
    def request(self) -> object:
        """The request that it is part of."""


Item = TypeVar("Item", bound=Sent)


@final
class FairQueue(Generic[Item]):
    """Items in the order of their clients' turns, for each client of its requests' turns, and then of their arrival.

    A client that has many items waiting delays each item of another client by at most one item per turn, and so does
    a request with many items that of another request of the same client.
    """

    def __init__(self) -> None:
        self._items: dict[str, dict[object, deque[Item]]] = {}
        """By client and request; the first of each is next."""

    def __len__(self) -> int:
        return sum(len(items) for requests in list(self._items.values()) for items in list(requests.values()))

    def push(self, item: Item) -> None:
        """Add an item; a new client's turn is the last, and a new request's that of its client."""
        self._items.setdefault(item.client, {}).setdefault(item.request, deque()).append(item)

    def pop(self, may: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """Remove the next item that may have a turn; None if there is none.

        Args:
            may: Whether an item may have one; the same for all items of a request.
        """
        for client, requests in self._items.items():
            for request, items in requests.items():
                if not may(items[0]):
                    continue
                item = items.popleft()
                del requests[request]
                if items:
                    requests[request] = items
                del self._items[client]
                if requests:
                    self._items[client] = requests
                return item
        return None

    def remove(self, is_gone: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items for which ``is_gone`` holds."""
        gone: list[Item] = []
        for client, requests in list(self._items.items()):
            for request, items in list(requests.items()):
                kept: deque[Item] = deque()
                for item in items:  # once each: another thread may change the answer
                    (gone if is_gone(item) else kept).append(item)
                if kept:
                    requests[request] = kept
                else:
                    del requests[request]
            if not requests:
                del self._items[client]
        return gone
