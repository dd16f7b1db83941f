"""Scores from Python functions. Every failure there becomes one UserError, or a `Failed` for each response that it costs.

HTTP endpoints are in remote_rewards.py.
"""

import inspect
import itertools
import math
import numbers
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.comma_separated import names_in
from trainer.errors import Failed, UserError
from trainer.metrics import counted
from trainer.rollout.rewards.format_rewards import answer_reward, format_reward, multiple_choice_reward
from trainer.rollout.rewards.math_reward import MATH_REWARDS, exact_match
from trainer.rollout.rewards.other_signatures import adapted
from trainer.rollout.user_code import check_syntax, describe_error, import_code, is_passing, patiently_tried, settled

BUILT_IN = {
    **MATH_REWARDS,
    "exact_match": exact_match,
    "format": format_reward,
    "answer": answer_reward,
    "multiple_choice": multiple_choice_reward,
}
WITHOUT_LABELS = ("format",)
JUDGE = "judge"  # see judge.py
FLAG = "--reward_func"
OWN = "reward_func"  # the function of a file, if none is named
LARGEST_SCORE = 1e15  # gradients grow with scores, and their squares must have room in fp32
TOKEN_FACTS = ("prompt_ids", "response_ids", "completion_ids", "raw_responses")  # passed to arguments of these names
UNORDERED = (str, bytes, Mapping, Set)  # no list of scores, though Python reads numbers from "10", {0: 1.0} and {1, 0}
GROUPS = "groups"  # a function with this argument gets all responses to a prompt at once
THREADS = 8  # that ask about single responses, after a call of all of them was too slow
# a column with one of these names is not passed
ARGUMENTS = ("prompts", "responses", "labels", "finished", *TOKEN_FACTS, GROUPS)
RESERVED_METRICS = frozenset({"std"})  # the log calls the deviation of scores reward_std
# score(prompts, responses, labels, finished, columns) -> (scores, further metrics), each with one number per response.
# `finished` says whether the response ended with a stop token, which the text does not show. `columns`: of the dataset.
# In place of a score, a `Failed` says that this response could not be scored, and may be another time.
Scorer = Callable[
    [list[str], list[str], list, list[bool], dict[str, list]], tuple[list[float | Failed], dict[str, list[float]]]
]


def needs_labels(reward_func: str | None) -> bool:
    return any(name in BUILT_IN and name not in WITHOUT_LABELS for name in names_in(reward_func))


def load_reward_functions(reward_func: str | None) -> dict[str, Callable]:
    """The functions of --reward_func, by their names, except a judge.

    Raises UserError if two have the same short name in the log.
    """
    names = names_in(reward_func)
    taken = [*RESERVED_METRICS, *map(short_name, names)]
    if len(names) > 1 and len(set(taken)) < len(taken):
        raise UserError(FLAG, f"{reward_func}: the log needs different names", "files with names of their own")
    return {name: load_reward_function(name) for name in names if name != JUDGE}


def short_name(name: str) -> str:
    """The name of a reward function in the log: math, `style` of rewards/style.py, or `length` of rewards/style.py:length."""
    path, function = path_and_function(name)
    return os.path.basename(path).removesuffix(".py") if function == OWN else function


def path_and_function(name: str) -> tuple[str, str]:
    """rewards/style.py:length is (rewards/style.py, length). Without a name, the function is reward_func."""
    path, mark, function = name.rpartition(":")
    return (path, function) if mark and path.endswith(".py") else (name, OWN)


def extra_arguments(function: Callable) -> tuple[list[str], list[str], bool]:
    """The arguments after (prompts, responses, labels): all names, names without a default, and whether it takes any."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function that is not written in Python
        return [], [], False
    named = [p for p in parameters[3:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    return [p.name for p in named], [p.name for p in named if p.default is p.empty], takes_any


def wanted_columns(functions: dict[str, Callable], columns: list[str], flag: str) -> list[str]:
    """The columns of the dataset `flag` that reward functions take by name, or all for `**columns`.

    Raises UserError if a function needs an argument that is no column.
    """
    wanted: set[str] = set()
    for name, function in functions.items():
        names, needed, takes_any = extra_arguments(function)
        missing = next((name for name in needed if name not in (*columns, *ARGUMENTS)), None)
        if missing:
            found = f"reward_func takes {missing}, which is no column of {flag}"
            raise UserError(f"{FLAG} {name}", found, ", ".join([*ARGUMENTS[3:], *columns]))
        wanted |= set(columns if takes_any else names)
    return [name for name in columns if name in wanted and name not in ARGUMENTS]


def wanted_facts(functions: dict[str, Callable]) -> frozenset[str]:
    """The names of TOKEN_FACTS and GROUPS that reward functions take as arguments."""
    taken = (name for function in functions.values() for name in extra_arguments(function)[0])
    return frozenset(taken) & {*TOKEN_FACTS, GROUPS}


def check_file(name: str) -> None:
    """Raise UserError for a reward that is neither built in nor of a Python file that is there and can be parsed."""
    path, _ = path_and_function(name)
    if name in (*BUILT_IN, JUDGE):
        return
    if not (path.endswith(".py") and os.path.isfile(path)):
        found = f"{path} is not found" if path.endswith(".py") else f"{name} is not a Python file"
        raise UserError(FLAG, found, f"{', '.join(BUILT_IN)}, judge, FILE.py or FILE.py:FUNCTION")
    check_syntax(path, FLAG)


def load_reward_function(name: str) -> Callable:
    """A built-in reward, or a function of a Python file: reward_func, or F of FILE.py:F. Raises UserError if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    check_file(name)
    path, own = path_and_function(name)
    found = vars(import_code(path, FLAG))
    if own == OWN and OWN not in found:
        own = "compute_score"  # verl's name
    if not callable(found.get(own)):
        wanted = own if path != name else OWN
        raise UserError(FLAG, f"{path} has no function {wanted}", f"{wanted}(prompts, responses, labels)")
    return adapted(found[own])


def function_scorer(name: str, function: Callable, timeout: float, alone: bool = True) -> Scorer:
    """A scorer that calls the function with lists of texts. Each call may take up to `timeout` seconds, unless it is built in.

    The function also gets `finished`, TOKEN_FACTS, GROUPS and the columns of the dataset for which it has arguments. It may
    be async.
    If it is not `alone`, a score of None says that the response is not for this function. Such a score is NaN. So is a
    metric that a dict of a response leaves out.

    If a connection fails (`is_passing`), the function is called again, and then for each response, or group, alone. If a
    call is too slow, each is called alone at once, some at a time: the slow ones then cost no others. Those without a score
    after `timeout` seconds in all get a `Failed`.
    """
    where, (names, _, takes_any) = f"{FLAG} {name}", extra_arguments(function)

    first_limit = None if name in BUILT_IN else timeout  # formulas have a limit that grows with their number

    def ask(
        prompts, responses, labels, extra: dict[str, list], limit=first_limit
    ) -> tuple[list, dict[str, list[float]]]:
        result = _call(where, limit, function, prompts, responses, labels, **extra)
        result, components = _without_dicts(where, result)
        result, passed = _without_none(result)
        if passed and alone:
            found = f"gave None for response {min(passed) + 1} of {len(responses)}, and no other function scores it"
            raise UserError(where, found, "a number for each response")
        scores, metrics = check_scores(where, result, len(responses))
        return [math.nan if place in passed else score for place, score in enumerate(scores)], metrics | components

    def score(prompts, responses, labels, finished, columns=None):
        if not responses:
            return [], {}
        values = {**(columns or {}), "finished": finished}
        extra = {key: value for key, value in values.items() if takes_any or key in names}
        extra = {key: value for key, value in extra.items() if key in names or key not in (*TOKEN_FACTS, GROUPS)}
        try:
            return patiently_tried(lambda: ask(prompts, responses, labels, extra))
        except (Failed, Late) as failed:
            return _each_alone(ask, failed, timeout, (prompts, responses, labels), extra)

    return score


class Late(UserError):
    """A call that was too slow. It is not made again: it may still run."""


def _each_alone(ask: Callable, error: UserError, timeout: float, texts: tuple[list, ...], extra: dict[str, list]):
    """What `ask` gives for each response alone, or each group if it takes groups. After the `error` of all of them."""
    count, end, failed = len(texts[0]), time.monotonic() + timeout, Failed(*error.args)
    scores, metrics, parts = [failed] * count, {}, {}
    for place, group in enumerate(extra.get(GROUPS, range(count))):
        parts.setdefault(group, []).append(place)

    def ask_alone(places: list[int]) -> tuple[list, dict[str, list[float]]]:
        own = [[column[place] for place in places] for column in (*texts, *extra.values())]
        left = end - time.monotonic()
        try:
            if left > 0:
                return ask(*own[: len(texts)], dict(zip(extra, own[len(texts) :])), limit=left)
        except Failed as own_failure:
            return [own_failure] * len(places), {}
        except Late:
            pass
        return [failed] * len(places), {}

    together = list(parts.values()) if len(parts) > 1 else []
    with ThreadPoolExecutor(THREADS if isinstance(error, Late) else 1) as threads:
        answers = list(threads.map(ask_alone, together))
    for places, (found, of_names) in zip(together, answers):
        for row, place in enumerate(places):
            scores[place] = found[row]
            for name, values in of_names.items():
                metrics.setdefault(name, [math.nan] * count)[place] = values[row]
    return scores, metrics


def _without_dicts(where: str, result: Any) -> tuple[Any, dict[str, list[float]]]:
    """A reward's result with a score in place of each dict, and the other numbers of the dicts as metrics.

    The score is `score` of the dict, or the sum of its numbers. A metric is NaN for a response whose dict lacks it.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list) and isinstance(result[1], dict):
        scores, metrics = _without_dicts(where, result[0])
        return (scores, result[1]), metrics
    if not (isinstance(result, (list, tuple)) and any(isinstance(part, dict) for part in result)):
        return result, {}
    scores, metrics = [], {}
    for place, part in enumerate(result):
        if not isinstance(part, dict):
            scores.append(part)
            continue
        here = f"{where}: response {place + 1} of {len(result)}"
        if not part or not RESERVED_METRICS.isdisjoint(part):
            raise UserError(here, f"gave the dict {part}", "score, or numbers to add up, with names other than std")
        given = {str(name): value for name, value in part.items() if value is not None}
        values = {name: _numbers(f"{here}: {name}", [value], 1)[0] for name, value in given.items()}
        scores.append(values.pop("score", None) if "score" in part else sum(values.values()) if values else None)
        for name, value in values.items():
            metrics.setdefault(name, [math.nan] * len(result))[place] = value
    return scores, metrics


def _without_none(result: Any) -> tuple[Any, set[int]]:
    """A reward's result with 0 in place of each score of None, and the places of these."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    scores = result[0] if is_pair else result
    if not isinstance(scores, (list, tuple)):
        return result, set()
    passed = {place for place, score in enumerate(scores) if score is None}
    scores = [0.0 if score is None else score for score in scores] if passed else scores
    return ((scores, result[1]) if is_pair else scores), passed


def weighted_scorer(scorers: dict[str, Scorer], weights: list[float], may_pass: bool = False) -> Scorer:
    """A scorer that gives the weighted sum of several, and the scores of each one as a metric of its name.

    A function that gave None for a response adds 0 to its sum, as in TRL, and its metric is NaN there. A `Failed` of one
    function is that of the sum. Raises UserError if all of them gave None, unless they `may_pass`.
    """

    def score(*arguments):
        scores, metrics = {}, {}
        for name, scorer in scorers.items():
            scores[name], own = scorer(*arguments)
            metrics |= {f"{name}_{metric}": values for metric, values in own.items()}
        lost = {place: v for values in scores.values() for place, v in enumerate(values) if isinstance(v, Failed)}
        for place, values in enumerate(zip(*scores.values())):
            if place not in lost and all(map(math.isnan, values)) and not may_pass:
                raise UserError(FLAG, f"every function gave None for response {place + 1}", "one that scores it")
        rows = enumerate(zip(*scores.values()))
        totals = [
            0.0 if place in lost else sum(w * value for w, value in zip(weights, row) if not math.isnan(value))
            for place, row in rows
        ]
        totals, _ = check_scores("--reward_weights", totals, len(totals))
        scores = {
            name: [math.nan if place in lost else v for place, v in enumerate(own)] for name, own in scores.items()
        }
        return [lost.get(place, total) for place, total in enumerate(totals)], scores | metrics

    return score


def _call(where: str, timeout: float | None, function: Callable, *arguments, **extra) -> Any:
    """`function(*arguments, **extra)` in its own thread. If the call never returns, the thread dies with the process."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            value = settled(function(*arguments, **extra))
            outcome["value"] = _realized(value, limit=len(arguments[1]) + 1)
        except BaseException as error:  # the user's code may raise anything, and call sys.exit()
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise Late(where, f"no result after {timeout:g} s", "a faster function, or a longer --reward_timeout")
    if "error" in outcome:
        kind = Failed if is_passing(outcome["error"]) else UserError
        raise kind(where, f"raised {describe_error(outcome['error'])}")
    return outcome["value"]


def _realized(result: Any, limit: int) -> Any:
    """A reward's result with lists in place of lazy values, such as a generator or a `map`.

    They run here, where errors are caught and time is limited. At most `limit` values of an endless one are taken.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return _realized(result[0], limit), {name: _realized(value, limit) for name, value in result[1].items()}
    return list(itertools.islice(result, limit)) if isinstance(result, Iterator) else result


def check_scores(where: str, result: Any, count: int) -> tuple[list[float], dict[str, list[float]]]:
    """Check the result of a reward and return (scores, metrics).

    The result is `count` numbers up to LARGEST_SCORE, or a pair of these numbers and a dict of metrics. Each metric is
    one number, or one per response. Raises UserError for anything else.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    scores, metrics = result if is_pair else (result, {})
    checked = {}
    for name, values in metrics.items():
        if name in RESERVED_METRICS:
            raise UserError(where, f"metric {name}, a name that the log has for the scores", "another name")
        # numpy's scalars and tensors without a dimension are single numbers too
        is_single = isinstance(values, numbers.Real) or getattr(values, "ndim", None) == 0
        checked[str(name)] = _numbers(f"{where}: metric {name}", [values] * count if is_single else values, count)
    return _numbers(where, scores, count), checked


def _numbers(where: str, values: Any, count: int) -> list[float]:
    try:
        if isinstance(values, UNORDERED):
            raise TypeError
        found = [float(value) for value in values]
    except OverflowError:
        raise UserError(where, "gave a number beyond the range of a float", "finite numbers") from None
    except (TypeError, ValueError, RuntimeError):  # the last one is torch's for a row of several numbers
        shown = " ".join(str(values).split())[:60]
        raise UserError(where, f"gave {type(values).__name__} {shown}", "a list of numbers") from None
    if len(found) != count:
        raise UserError(
            where, f"{counted(len(found), 'score')} for {counted(count, 'response')}", "one number per response"
        )
    for number, value in enumerate(found):
        if not abs(value) <= LARGEST_SCORE:  # nan too
            allowed = f"finite numbers from {-LARGEST_SCORE:g} to {LARGEST_SCORE:g}"
            raise UserError(where, f"score {value} for response {number + 1} of {count}", allowed)
    return found
