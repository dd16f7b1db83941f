"""Which server gets which request, and how several servers get the same tensors in one pass over them."""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

END, BROKEN = object(), object()


class Router:
    """Routes by load, and keeps the samples of a prompt together. Threads may share it.

    A prompt's first request goes to the server with the fewest requests in flight. Its other requests follow while that
    server has less than `room` in flight. So a server can read the prompt once, and none waits while another has work.
    """

    def __init__(self, room: int):
        self.in_flight: Counter[str] = Counter()  # requests, by server
        self._room, self._homes, self._lock = room, {}, threading.Lock()

    def take(self, prompt: tuple[int, ...], urls: Sequence[str]) -> str:
        """The server for one more request, which is then in flight. The first of equally loaded `urls` comes first."""
        with self._lock:
            home = self._homes.get(prompt)
            if home not in urls or self.in_flight[home] >= self._room:
                home = min(urls, key=lambda url: self.in_flight[url])
                self._homes[prompt] = home
            self.in_flight[home] += 1
            return home

    def give(self, url: str) -> None:
        """A request has ended."""
        with self._lock:
            self.in_flight[url] -= 1


def send_to_each(items: Iterable, sends: Sequence[Callable[[Iterator], Any]]) -> list[Future]:
    """Call each of `sends` with an iterator over the same items, each in its own thread. Returns their results.

    The next item is taken in this thread, once every call that goes on has asked for it. A call that raises stops no other.
    """
    asked, turns, results = queue.SimpleQueue(), [queue.SimpleQueue() for _ in sends], [Future() for _ in sends]

    def own_items(number: int) -> Iterator:
        while True:
            asked.put((number, True))
            if (item := turns[number].get()) is END:
                return
            if item is BROKEN:
                raise ConnectionError("the source of the weights has failed")
            yield item

    def run(number: int) -> None:
        try:
            results[number].set_result(sends[number](own_items(number)))
        except BaseException as error:
            results[number].set_exception(error)
        asked.put((number, False))

    for number in range(len(sends)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    going, source = set(range(len(sends))), iter(items)
    try:
        while going:
            waiting: set[int] = set()
            while waiting != going:
                number, goes_on = asked.get()
                (waiting.add if goes_on else going.discard)(number)
            item = next(source, END) if going else END
            for number in waiting:
                turns[number].put(item)
            if item is END:
                break
    finally:
        for turn in turns:  # for those that wait while the source raises; nobody else reads it
            turn.put(BROKEN)
    for result in results:
        result.exception()  # waits
    return results
