"""Reward functions that were written for other trainers or in another order, known by the names of their arguments."""

import asyncio
import inspect
import numbers
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

OURS = ("prompts", "responses", "labels")


def adapted(function: Callable) -> Callable:
    """`function`, or a wrapper that is called like ours: (prompts, responses, labels, and more by name).

    TRL: f(completions, prompts, columns by name). OpenRLHF: f(queries, prompts, labels), where a query is prompt and response;
    it returns a dict with `rewards`. verl: f(data_source, solution_str, ground_truth, extra_info) for one response.
    Ours, where one of the three is left out or stands at another place: f(responses, labels).
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function that is not written in Python
        return function
    if "completions" in parameters:
        called = _by_name(function, parameters, "completions")
        return _with_signature(called, parameters, without=("prompts", "completions", "labels"))
    if "queries" in parameters:
        return _with_signature(_of_openrlhf(function, parameters), parameters, without=("queries", "prompts", "labels"))
    if "solution_str" in parameters:
        return _with_signature(_of_verl(function), parameters, without=("solution_str", "ground_truth"), optional=True)
    if not _takes_ours_in_order(list(parameters.values())):
        return _with_signature(_by_name(function, parameters, "responses"), parameters, without=OURS)
    return function


def _takes_ours_in_order(parameters: list[Parameter]) -> bool:
    """Whether a call with three values by position gives each of OURS its own."""
    kinds = [parameter.kind for parameter in parameters]
    places = {parameter.name: place for place, parameter in enumerate(parameters)}
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    has_three = Parameter.VAR_POSITIONAL in kinds or sum(kind in by_place for kind in kinds) >= len(OURS)
    return has_three and all(places.get(name, place) == place for place, name in enumerate(OURS))


def _by_name(function: Callable, parameters, name_of_responses: str) -> Callable:
    def call(prompts, responses, labels, **more):
        given = {"prompts": prompts, name_of_responses: responses, "labels": labels} | more
        return function(**_accepted(given, parameters))

    return call


def _of_openrlhf(function: Callable, parameters) -> Callable:
    def call(prompts, responses, labels, **more):
        queries = [prompt + response for prompt, response in zip(prompts, responses)]
        result = function(**_accepted({"queries": queries, "prompts": prompts, "labels": labels} | more, parameters))
        return _then(result, read)

    def read(result):
        if not isinstance(result, dict) or "rewards" not in result:
            return result
        return result["rewards"], dict(result.get("extra_logs") or {})

    return call


def _of_verl(function: Callable) -> Callable:
    def call(prompts, responses, labels, **more):
        results = []
        for place, (response, label) in enumerate(zip(responses, labels)):
            own = {name: values[place] for name, values in more.items()}
            results.append(function(**{"data_source": "", **own, "solution_str": response, "ground_truth": label}))
        return _then(_all(results) if any(map(inspect.isawaitable, results)) else results, read)

    def read(results):
        if not all(isinstance(result, dict) and "score" in result for result in results):
            return results
        shared = [name for name in results[0] if all(_is_number(result.get(name)) for result in results)]
        metrics = {name: [float(result[name]) for result in results] for name in shared if name != "score"}
        return [result["score"] for result in results], metrics

    return call


def _then(result: Any, read: Callable) -> Any:
    """`read(result)`; of an async function's result, a coroutine of it."""

    async def later() -> Any:
        return read(await result)

    return later() if inspect.isawaitable(result) else read(result)


async def _all(results: list) -> list:
    return await asyncio.gather(*results)


def _accepted(given: dict[str, Any], parameters) -> dict[str, Any]:
    takes_any = any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters.values())
    return given if takes_any else {name: value for name, value in given.items() if name in parameters}


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real)


def _with_signature(call: Callable, parameters, without: tuple[str, ...], optional: bool = False) -> Callable:
    """`call` with a signature that tells which columns it needs: the arguments of the other trainer's function.

    `optional`: rows without those columns are served too, as with verl's data_source.
    """
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in OURS]
    named = [
        p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in without
    ]
    own = [
        Parameter(p.name, Parameter.KEYWORD_ONLY, default=None if optional and p.name == "data_source" else p.default)
        for p in named
    ]
    rest = [p for p in parameters.values() if p.kind == p.VAR_KEYWORD and not optional]
    call.__signature__ = Signature([*first, *own, *rest])
    return call
