"""A judge: a language model behind an OpenAI-compatible server, asked with a rubric about responses. See judge_modes.py."""

import collections
import glob
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Optional

from trainer.comma_separated import names_in
from trainer.datasets.conversations.thoughts import after_thoughts
from trainer.errors import Failed, UserError
from trainer.rollout.peers import post_json
from trainer.rollout.rewards.judge_modes import MODES, Mode
from trainer.rollout.rewards.remote_rewards import FIRST_PAUSE_SECONDS, TROUBLE, given_up, tries, trouble_of
from trainer.rollout.rewards.reward_functions import GROUPS, JUDGE, needs_labels

FLAG = "--judge_url"
FOLDER = "judge_cache"  # in the run folder
PLACES = re.compile(r"\{([a-z]+)\}")  # of a rubric
DEFAULTS = {"temperature": 0, "max_tokens": 1024}  # of a request; --judge_args goes over them


@dataclass(frozen=True)
class JudgeOptions:
    """What a judge is asked, and how. `request` are more keys of each request. Times are in seconds."""

    url: str  # the part before /chat/completions
    model: str
    rubric: Optional[str] = None  # default: that of the mode
    score_range: tuple[float, float] = (0.0, 10.0)
    request: dict[str, Any] = field(default_factory=dict)
    key: Optional[str] = field(default=None, repr=False)
    timeout: float = 60.0
    retries: int = 3
    concurrency: int = 32
    cached: int = 10000  # answers
    mode: str = "alone"  # a key of MODES


def read_rubric(path: Optional[str], mode: str = "alone") -> str:
    """The rubric of a file, or that of the mode. Raises UserError for a file without a place that the mode needs."""
    if path is None:
        return MODES[mode].rubric
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        found = f"{path}: {getattr(error, 'strerror', 'not UTF-8')}"
        raise UserError("--judge_rubric", found, "a file with a rubric") from None
    if missing := [f"{{{name}}}" for name in MODES[mode].needed if f"{{{name}}}" not in text]:
        needed = " and ".join(f"{{{name}}}" for name in ("prompt", *MODES[mode].needed))
        found = f"{path} has no {missing[0]}, which --judge_mode {mode} needs"
        raise UserError("--judge_rubric", found, f"a rubric with {needed}")
    return text


def facts_of_judge(reward_func: Optional[str], mode: str) -> frozenset[str]:
    """GROUPS if --reward_func has a judge that compares responses."""
    return frozenset({GROUPS} if JUDGE in names_in(reward_func) and MODES[mode].compares else ())


def rewards_need_labels(reward_func: Optional[str], rubric_path: Optional[str], mode: str = "alone") -> bool:
    """Whether a function compares with labels, or the rubric of the judge has a place for them."""
    of_rubric = JUDGE in names_in(reward_func) and "{label}" in read_rubric(rubric_path, mode)
    return of_rubric or needs_labels(reward_func)


def key_of_environment(name: Optional[str]) -> Optional[str]:
    """The key in the environment variable `name`. Raises UserError if it has none."""
    key = os.environ.get(name, "").strip() if name else None
    if name and not (key and key.isascii() and key.isprintable() and " " not in key):
        shown = f"variable {name}" if name.isupper() else "variable of that name"  # else it may be the key itself
        raise UserError("--judge_key_env", f"the environment {shown} holds no key", "the name of one that does")
    return key


def read_request(text: Optional[str]) -> dict[str, Any]:
    """The JSON object of --judge_args. Raises UserError for anything else, and for keys that are set elsewhere."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys().isdisjoint(("model", "messages", "stream", "n")):
        raise UserError("--judge_args", str(text), "a JSON object of other keys than model, messages, stream and n")
    return found


@dataclass(frozen=True)
class Verdict:
    """The values of the responses that a request showed, or why there are none, and what it cost."""

    values: tuple[float, ...] | Failed
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


COSTS = ("requests", "prompt_tokens", "completion_tokens")


class Judge:
    """A `reward_functions.Scorer`. Scores are from 0 to 1, see judge_modes.py. A response without any value gets a `Failed`.

    Metrics are the costs of a response: requests with retries, and tokens as the server counts them. The responses that a
    request shows share its costs. What is cached, or equals an earlier request or response, costs nothing.
    """

    def __init__(self, options: JudgeOptions, folder: str, rank: int = 0, pause: float = FIRST_PAUSE_SECONDS):
        self._options, self._pause, self._mode = options, pause, MODES[options.mode]
        self._rubric = options.rubric or self._mode.rubric
        self._cache = Cache(folder, rank, options.cached)

    def __call__(self, prompts, responses, labels, finished=None, columns=None) -> tuple[list, dict]:
        """The columns have GROUPS if the mode compares. Raises UserError if the server refuses the key, model or address."""
        groups, asked = {}, []  # asked: (the responses shown, by the places of each text; the request)
        for place, group in enumerate(columns[GROUPS] if self._mode.compares else range(len(responses))):
            groups.setdefault(group, {}).setdefault(responses[place], []).append(place)
        for places in groups.values():
            first = min(places.values())[0]
            for shown in self._mode.shown(prompts[first], [*places]):
                texts = [[*places][at] for at in shown]
                asked.append(([places[text] for text in texts], self._body(prompts[first], texts, labels[first])))
        different = {body: len(shown) for shown, body in asked}
        with ThreadPoolExecutor(self._options.concurrency) as threads:
            verdicts = dict(zip(different, threads.map(self._verdict, *zip(*different.items())))) if different else {}
        values: list[list] = [[] for _ in responses]
        costs = {name: [0.0] * len(responses) for name in COSTS}
        for shown, body in asked:
            verdict, failed = verdicts[body], isinstance(verdicts[body].values, Failed)
            for at, places in enumerate(shown):
                for name, of_responses in costs.items():
                    of_responses[places[0]] += getattr(verdict, name) / len(shown)
                for place in places:
                    values[place].append(verdict.values if failed else verdict.values[at])
            verdicts[body] = Verdict(verdict.values)  # it is paid once
        return [_mean(of_response) for of_response in values], costs

    def _body(self, prompt: str, responses: list[str], label: Optional[str]) -> bytes:
        """The request as JSON. The texts are put in at once, so that no text can bring a place of its own."""
        low, high = self._options.score_range
        texts = {"prompt": prompt, "label": label or "", "lowest": f"{low:g}", "highest": f"{high:g}"}
        texts |= self._mode.filled(responses)
        content = PLACES.sub(lambda place: texts.get(place[1], place[0]), self._rubric)
        request = {**DEFAULTS, **self._options.request, "model": self._options.model}
        request = {name: value for name, value in request.items() if value is not None}
        return json.dumps(request | {"messages": [{"role": "user", "content": content}]}).encode()

    def _verdict(self, body: bytes, count: int) -> Verdict:
        """From the cache, or from the server. Only `retries` more requests are sent, after pauses that double."""
        kind = f"{self._options.mode * self._mode.compares}{self._options.score_range!r}"
        digest = hashlib.sha256(kind.encode() + body).hexdigest()
        if (known := self._cache.get(digest)) is not None:
            return Verdict(known)
        options, url = self._options, f"{self._options.url.rstrip('/')}/chat/completions"
        where, problem, spent = f"{FLAG} {options.url}", "", [0, 0]
        for attempt in tries(options.retries, self._pause):
            try:
                answer = post_json(url, body, options.timeout, options.key)
                if not isinstance(answer, dict):
                    raise TypeError(f"a {type(answer).__name__} instead of an object")
                for place, name in enumerate(COSTS[1:]):
                    spent[place] += tokens_of(answer, name)
                values = values_of(answer, options.score_range, self._mode, count)
                self._cache.put(digest, values)
                return Verdict(values, attempt + 1, *spent)
            except TROUBLE as error:
                problem, refusal = trouble_of(error, where)
                if isinstance(refusal, Failed):
                    return Verdict(refusal, attempt + 1, *spent)
                if refusal:
                    raise refusal from None
        return Verdict(given_up(where, options.retries, problem), options.retries + 1, *spent)


def tokens_of(answer: dict, name: str) -> int:
    """A count of `usage`, or 0 if the server gives none."""
    usage = answer.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else 0
    return count if type(count) is int and 0 <= count < 1 << 40 else 0


def _mean(values: list[float | Failed]) -> float | Failed:
    """The mean of what a response got. The first failure if it got nothing, and 0.5 if nothing was compared."""
    found = [value for value in values if not isinstance(value, Failed)]
    return math.fsum(found) / len(found) if found else [*values, 0.5][0]


def values_of(answer: dict, score_range: tuple[float, float], mode: Mode, count: int) -> tuple[float, ...]:
    """What the last line of the judge's text says of `count` responses, after its thoughts. Raises ValueError."""
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    if choice.get("finish_reason") == "length":
        raise ValueError("an answer that was cut; max_tokens in --judge_args raises its limit")
    found = mode.pattern.findall(after_thoughts(text)) if isinstance(text, str) else []
    if not found:
        shown = " ".join(str(text).split())[-80:]
        raise ValueError(f"no line `{mode.line}` in the answer that ends with {shown!r}")
    return mode.values(found[-1], count, score_range)


class Cache:
    """The newest values by the digest of their request, also in `<folder>/RANK.jsonl`. Each rank reads all files once.

    On a full disk, it goes on without the file.
    """

    def __init__(self, folder: str, rank: int, size: int):
        self._path, self._size, self._lock = os.path.join(folder, f"{rank}.jsonl"), size, threading.Lock()
        self._values: collections.OrderedDict[str, tuple[float, ...]] = collections.OrderedDict()
        self._lines = 0  # of this rank's file
        paths = glob.glob(os.path.join(glob.escape(folder), "*.jsonl")) if size else ()
        for path in sorted(paths, key=lambda path: (path == self._path, path)):  # its own comes last, and wins
            for digest, values in _lines_of(path):
                self._keep(digest, values)
                self._lines += path == self._path
        self._can_write = size > 0

    def get(self, digest: str) -> Optional[tuple[float, ...]]:
        with self._lock:
            return self._values.get(digest)

    def put(self, digest: str, values: tuple[float, ...]) -> None:
        with self._lock:
            self._keep(digest, values)
            if self._can_write:
                try:
                    self._write(digest, values)
                except OSError as error:
                    self._can_write = False
                    print(f"{self._path}: {error.strerror}: scores of the judge are kept in memory only", flush=True)

    def _keep(self, digest: str, values: tuple[float, ...]) -> None:
        self._values[digest] = values
        self._values.move_to_end(digest)
        while len(self._values) > self._size:
            self._values.popitem(last=False)

    def _write(self, digest: str, values: tuple[float, ...]) -> None:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        if self._lines < 2 * self._size:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps([digest, *values]) + "\n")
            self._lines += 1
            return
        with open(f"{self._path}.tmp", "w", encoding="utf-8") as file:
            file.writelines(json.dumps([digest, *values]) + "\n" for digest, values in self._values.items())
        os.replace(f"{self._path}.tmp", self._path)
        self._lines = len(self._values)


def _lines_of(path: str) -> Iterator[tuple[str, tuple[float, ...]]]:
    """The entries of a file. Torn lines, and values that no judge gives, are left out."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                digest, *values = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(digest, str) and values and all(isinstance(v, (int, float)) and 0 <= v <= 1 for v in values):
                yield digest, tuple(map(float, values))
