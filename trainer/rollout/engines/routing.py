"""Which server gets which request, and how several servers get the same tensors in one pass over them."""

import hashlib
import queue
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

END, BROKEN = object(), object()
MOST_TEXTS = 1 << 16  # of which a rank knows the server; they need some 20 MB


class Homes:
    """Which server has read which text. Of more than `most` texts, those that were not used for longest are forgotten."""

    def __init__(self, most: int = MOST_TEXTS):
        self._most, self._known = most, OrderedDict[bytes, tuple[str, int]]()  # (server, length), by digest
        self._lengths: Counter[int] = Counter()

    def note(self, text: Sequence[int], url: str) -> None:
        self._keep(hashlib.blake2b(array("q", text), digest_size=16).digest(), url, len(text))

    def _keep(self, digest: bytes, url: str, length: int) -> None:
        if digest not in self._known:
            self._lengths[length] += 1
        self._known[digest] = url, length
        self._known.move_to_end(digest)
        if len(self._known) > self._most:
            _, (_, forgotten) = self._known.popitem(last=False)
            self._lengths[forgotten] -= 1
            if not self._lengths[forgotten]:
                del self._lengths[forgotten]

    def of(self, text: Sequence[int]) -> list[str]:
        """The servers of the known texts that this one begins with, the longest text first. They count as used."""
        values, digest, start, found = memoryview(array("q", text)), hashlib.blake2b(digest_size=16), 0, []
        for end in sorted(length for length in self._lengths if length <= len(text)):
            digest.update(values[start:end])  # one pass over the text gives the digests of all its beginnings
            start, key = end, digest.digest()
            if key in self._known:
                url, length = self._known[key]
                self._keep(key, url, length)
                found.append(url)
        return found[::-1]


class Router:
    """Routes by load, and keeps the samples of a prompt and the turns of an episode together. Threads may share it.

    A prompt's first request goes to the server with the fewest requests in flight. Its other requests follow while that
    server has less than `room` in flight. So a server can read the prompt once, and none waits while another has work.
    A later turn follows in the same way to the server that has read most of it: the turn before, or at least the prompt.
    """

    def __init__(self, room: int):
        self.in_flight: Counter[str] = Counter()  # requests, by server
        self._room, self._homes, self._lock = room, Homes(), threading.Lock()

    def take(self, prompt: Sequence[int], urls: Sequence[str]) -> str:
        """The server for one more request, which is then in flight. The first of equally loaded `urls` comes first."""
        with self._lock:
            known = (url for url in self._homes.of(prompt) if url in urls and self.in_flight[url] < self._room)
            home = next(known, None) or min(urls, key=lambda url: self.in_flight[url])
            self._homes.note(prompt, home)
            self.in_flight[home] += 1
            return home

    def give(self, url: str, text: Sequence[int] = ()) -> None:
        """A request has ended. If it was answered, the server has read `text`: the prompt and the response."""
        with self._lock:
            self.in_flight[url] -= 1
            if text:
                self._homes.note(text, url)


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
