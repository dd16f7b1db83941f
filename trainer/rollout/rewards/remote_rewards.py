"""Scores from reward servers over HTTP: several addresses, a key, retries. A response without a score gets a `Failed`."""

import http.client
import itertools
import json
import math
import random
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Optional

from trainer.comma_separated import names_in, names_to_check
from trainer.errors import Failed, UserError
from trainer.rollout.peers import post_json
from trainer.rollout.rewards.reward_functions import Scorer, check_scores
from trainer.rollout.user_code import RETRIED

FLAG = "--remote_rm_url"
CUT = "remote_rm_truncated"  # a metric
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
TROUBLE = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)  # of a request or its answer
OF_TEXTS = (400, 413, 422)  # 4xx statuses that one text of a request may cause
THREADS = 16  # that ask about single responses


def read_key(flag: str, path: str) -> str:
    """The key that a file holds. Raises UserError if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            key = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(flag, f"{path}: {getattr(error, 'strerror', 'not UTF-8')}", "a file that holds a key") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(flag, f"{path} holds no key", "one word of ASCII letters, digits and signs")
    return key


def split_urls(urls: str, flag: str = FLAG) -> list[str]:
    """The addresses of a flag. Raises UserError for one without http:// or https://, or with a password."""
    for url in names_to_check(urls):
        if not url.startswith(("http://", "https://")):
            raise UserError(flag, url or "an empty address", "http://... or https://..., or several (comma-separated)")
        if "@" in url.split("://", 1)[1].split("/", 1)[0]:
            found = "an address with a user or a password"
            raise UserError(flag, found, "the address alone; a key has a flag of its own")
    return names_in(urls)


def tries(retries: int, pause: float) -> Iterator[int]:
    """The numbers of the tries, from 0. Pauses between them double, from `pause` seconds on."""
    yield 0
    for attempt in range(1, retries + 1):
        time.sleep(pause * random.uniform(0.75, 1.25))  # so that ranks do not all return at once
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        yield attempt


def trouble_of(error: Exception, where: str) -> tuple[str, Optional[UserError]]:
    """What was wrong with an answer of the server `where`, and its refusal. None: another try may go well.

    The refusal is a Failed if the texts may be its cause. Otherwise the server never takes such a request.
    """
    if not isinstance(error, urllib.error.HTTPError):
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", None
    problem = f"HTTPError: {error.code} {error.reason}"
    refused = f"refuses the request: {problem}"
    if error.code in OF_TEXTS:
        return refused, Failed(where, refused)
    if 400 <= error.code < 500 and error.code not in RETRIED:
        return refused, UserError(where, refused)
    return problem, None


def given_up(where: str, retries: int, problem: str) -> Failed:
    """The failure after the last try."""
    shown = "1 try" if retries == 0 else f"{retries + 1} tries"
    return Failed(where, f"no usable answer after {shown}: {problem}")


def remote_scorer(
    urls: str, timeout: float, retries: int, key: Optional[str] = None, pause: float = FIRST_PAUSE_SECONDS
) -> Scorer:
    """A scorer that POSTs {"prompts", "responses", "labels", "finished"} as JSON.

    The answer is {"rewards": [...]}, with one number per response. It may also have "truncated", with true for each response
    whose text the server cut. Their share is the metric remote_rm_truncated. Several addresses share the responses of a call. If
    one fails, the next one gets its part at once. When all have failed, they are tried again, `retries` times, after
    pauses that double each time. Then each response is asked about alone, once. Those without an answer get a `Failed`.
    A failure is a refused or lost connection, a time-out, a status other than 200, a redirect, or an answer of a wrong
    form. `timeout` is for a whole answer. A request that all servers call wrong (4xx) is not sent again. It raises
    UserError, unless texts may be the cause.
    """
    addresses = split_urls(urls)

    def ask(first: int, columns: tuple[list, ...], retries: int = retries) -> list:
        """(score, 1.0 for a cut text) of one part, from the address of number `first` or those after it."""
        request = dict(zip(("prompts", "responses", "labels", "finished"), columns))
        body, problem = json.dumps(request).encode(), ""
        order = addresses[first:] + addresses[:first]
        for _ in tries(retries, pause):
            refusals = []
            for url in order:
                try:
                    answer = post_json(url, body, timeout, key)
                    scores, _ = check_scores(f"{FLAG} {url}", answer["rewards"], len(columns[1]))
                    return list(zip(scores, _cuts(answer, len(scores))))
                except TROUBLE as error:
                    problem, refusal = trouble_of(error, f"{FLAG} {url}")
                    refusals += [refusal] if refusal else []
                except UserError as error:
                    problem = error.found
            if len(refusals) == len(order):  # every server calls it wrong, so it is not sent again
                raise next((refusal for refusal in refusals if isinstance(refusal, Failed)), refusals[0])
        raise given_up(f"{FLAG} {','.join(addresses)}", retries, problem)

    def ask_patiently(first: int, columns: tuple[list, ...]) -> list:
        """The same, with a `Failed` for each response without a score. One bad text costs itself only."""
        try:
            return ask(first, columns)
        except Failed as failed:
            if len(columns[1]) == 1:
                return [failed]

        def alone(row: tuple) -> tuple[float, float] | Failed:
            try:
                return ask(first, tuple([value] for value in row), retries=0)[0]
            except Failed as failed:
                return failed

        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(alone, zip(*columns)))

    def score(prompts, responses, labels, finished, columns=None):
        asked, count = (prompts, responses, labels, finished), min(len(addresses), len(responses))
        bounds = [len(responses) * part // count for part in range(count + 1)] if count else []
        parts = [tuple(column[start:end] for column in asked) for start, end in itertools.pairwise(bounds)]
        with ThreadPoolExecutor(max(count, 1)) as threads:
            found = list(itertools.chain.from_iterable(threads.map(ask_patiently, range(count), parts)))
        cuts = [math.nan if isinstance(one, Failed) else one[1] for one in found]
        scores = [one if isinstance(one, Failed) else one[0] for one in found]
        return scores, {} if all(map(math.isnan, cuts)) else {CUT: cuts}

    return score


def _cuts(answer: dict, count: int) -> list[float]:
    """1.0 for each text that the server cut, else 0.0. NaN: it does not tell, or uses the word for something else."""
    told = answer.get("truncated")
    if not isinstance(told, list) or len(told) != count or not all(isinstance(one, bool) for one in told):
        return [math.nan] * count
    return list(map(float, told))
