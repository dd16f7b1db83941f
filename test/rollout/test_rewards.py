"""Rewards: answers are compared by value, and each failure of a reward function or server is reported in one line."""

import contextlib
import http.server
import importlib.util
import json
import math
import re
import subprocess
import sys
import threading
import time
import urllib.error
from fractions import Fraction

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from launch import run_process
from tiny_tokenizers import byte_tokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.errors import Failed, UserError
from trainer.flags.rl_flags import BUILT_IN_REWARDS
from trainer.methods.rollout_facts import rewards_by_group, sample_facts
from trainer.models.model_loading import load_tokenizer
from trainer.rollout import user_code
from trainer.rollout.rewards import formulas
from trainer.rollout.rewards.format_rewards import answer_reward, multiple_choice_reward
from trainer.rollout.rewards.math_reward import MOST_CHARACTERS, as_number, exact_match, final_answer, math_reward
from trainer.rollout.rewards.remote_rewards import remote_scorer
from trainer.rollout.rewards.reward_functions import (
    BUILT_IN,
    function_scorer,
    load_reward_function,
    load_reward_functions,
    wanted_columns,
    wanted_facts,
    weighted_scorer,
)
from trainer.rollout.samples import Sample
from trainer.rollout.scoring import TextScores, score_by_texts
from trainer.rollout.user_code import is_passing

ANSWERS = {
    "so 3 + 4 = 7\n#### 7": "7",
    "#### 1,234.50\n": "1,234.50",
    "first #### 3 then #### 4": "4",
    r"the answer is $\boxed{\frac{3}{4}}$ of 12": r"\frac{3}{4}",
    "there are 12 eggs and 5 are left": "5",
    "no number here": None,
    "": None,
}
SAME = [
    ("7", "7.0"),
    ("$1,234", "1234"),
    (r"\frac{3}{4}", "0.75"),
    ("50%", "0.5"),
    ("50%", "50"),
    ("-3", "-3"),
    ("x + 1", "x+1"),
]
DIFFERENT = [("7", "8"), ("-3", "3"), ("x", "7"), ("0.3333", "1/3"), (r"50\%", r"60\%")]


@pytest.mark.parametrize("text", ANSWERS)
def test_final_answers(text):
    assert final_answer(text) == ANSWERS[text]


@pytest.mark.parametrize(("found", "wanted"), SAME + DIFFERENT)
def test_answers_are_compared_by_value(found, wanted):
    assert math_reward([""], [f"#### {found}"], [wanted]) == [float((found, wanted) in SAME)]


FORMULAS = {
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"): 1.0,
    (r"\{2, 1\}", r"\{1, 2\}"): 1.0,
    ("x=7", "7"): 1.0,
    ("x + 2", "x + 1"): 0.0,
    ("[0, 1)", "[0, 1]"): 0.0,
    ("10^{10^{10^{10}}}", "x"): 0.0,  # sympy hangs on it
    ("1 + x", "x + 1"): 1.0,  # judged by the new process, after one hung
}


def test_formulas_are_compared_by_math_verify_where_it_is_installed():
    pytest.importorskip("math_verify")
    found, wanted = ([pair[side] for pair in FORMULAS] for side in (0, 1))
    assert math_reward(found, [f"\\boxed{{{text}}}" for text in found], wanted) == list(FORMULAS.values())


MATH_VERIFY = """
import os, time
def parse(text):
    return text
def verify(gold, answer):
    with open(os.environ["ASKED"], "a") as file:
        file.write(answer + "\\n")
    time.sleep(60 * answer.startswith("$hang") + 1.5 * (answer == "$slow$"))
    return gold == answer
"""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Formulas are compared by a stand-in of math-verify, which notes what it was asked in this file."""
    (tmp_path / "math_verify.py").write_text(MATH_VERIFY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setattr(formulas, "can_compare", lambda: True)
    monkeypatch.setattr(formulas.os, "cpu_count", lambda: 1)
    return tmp_path / "asked"


def test_hanging_formulas_cost_their_own_scores_only(asked, monkeypatch):
    """They come first, and take all the time. What only is slow gets its verdict at a second try. Equal pairs are asked once."""
    monkeypatch.setattr(formulas, "CALL_SECONDS", 14)
    pairs = [("slow", "slow"), *((f"hang{i}", "x") for i in range(3)), ("x", "y"), *[("z", "z")] * 3]
    assert formulas.equal_as_formulas(pairs) == [True] + [False] * 4 + [True] * 3
    once = ["$slow$", "$hang0$", "$hang1$", "$hang2$", "$x$", "$z$"]
    assert asked.read_text().split()[:8] == [*once, "$slow$", "$hang0$"]


def test_formulas_without_a_verdict_in_time_score_0_and_are_named(asked, monkeypatch, capsys):
    monkeypatch.setattr(formulas, "CALL_SECONDS", 4)
    assert formulas.equal_as_formulas([("x", "x"), ("hang", "x"), ("y", "y"), ("hung", "hung")]) == [
        True,
        False,
        True,
        True,
    ]
    assert "warning: 1 of 4 formulas had no verdict in time and score 0" in capsys.readouterr().out


def test_only_your_functions_have_a_time_limit(monkeypatch):
    """A built-in one would lose right answers to it, since a call has all answers of a rank."""
    monkeypatch.setitem(BUILT_IN, "math", lambda prompts, responses, labels: time.sleep(0.4) or [1.0])
    assert {*BUILT_IN} == {*BUILT_IN_REWARDS}
    for name in ("math", "own.py"):
        found = function_scorer(name, BUILT_IN["math"], timeout=0.1)([""], ["a"], ["b"], [True])[0]
        assert (found == [1.0]) == (name == "math"), found


def test_thoughts_are_not_answers():
    assert math_reward([""] * 2, ["\\boxed{7} </think> The answer is 8", "<think>8</think> 7"], ["7"] * 2) == [0.0, 1.0]
    for end in ("</seed:think>", "[/THINK]", "<|END_THINKING|>"):
        assert math_reward([""], [f"\\boxed{{7}} {end} 8"], ["7"]) == [0.0]
    letters = ["The answer is B </think> (C)", "<think>the answer is B</think> nothing"]
    assert multiple_choice_reward([""] * 2, letters, ["C", "B"]) == [1.0, 0.0]
    assert answer_reward([""], ["<answer>7</answer></think> 8"], ["7"]) == [0.0]


THOUGHT_TOKENS = {
    "[THINK]\\boxed{7}[/THINK]The answer is 8</s>": ["[THINK]", "[/THINK]"],
    "<|START_THINKING|>7<|END_THINKING|>8</s>": ["<|START_THINKING|>", "<|END_THINKING|>"],
    "<seed:think>7</seed:think>8</s>": ["<seed:think>", "</seed:think>"],
    "<|channel>thought 7<channel|>8</s>": ["<|channel>", "<channel|>"],
    "7</think>8</s>": ["</think>"],
    "<|channel|>analysis<|message|>\\boxed{7}<|end|><|start|>assistant<|channel|>final<|message|>8<|return|>": [
        *("<|channel|>", "<|message|>", "<|start|>")
    ],
}


@pytest.mark.parametrize("as_special", [True, False])
@pytest.mark.parametrize("text", THOUGHT_TOKENS)
def test_thoughts_are_not_answers_whatever_kind_of_token_ends_them(text, as_special):
    """Other special tokens are no part of the text. A stop token that is one of them would spoil an exact match."""
    tokenizer = byte_tokenizer(None, *(THOUGHT_TOKENS[text] if as_special else ()))
    if not as_special:
        tokenizer.add_tokens(THOUGHT_TOKENS[text])
    sample = Sample(0, 0, [0, 1], tokenizer.encode(text), [], True, "7")
    seen = []
    scorer = function_scorer("math", math_reward, timeout=60)
    TextScores(lambda *own: seen.append(own[1]) or scorer(*own), tokenizer, (1,)).score_mine([sample])
    assert sample.score == 0 and len(seen[0]) == 1, seen
    assert not re.search(r"</s>|<\|return\|>|<\|end\|>", seen[0][0]), seen
    sample.label = "8"
    TextScores(scorer, tokenizer, (1,)).score_mine([sample])
    assert sample.score == 1


def test_a_harmony_answer_is_the_text_of_the_final_channel():
    thoughts = "<|channel|>analysis<|message|>\\boxed{7}"
    texts = [
        thoughts,
        f"{thoughts}assistant<|channel|>final <|constrain|>json<|message|>7",
        "<|channel|>final<|message|>7",
    ]
    assert math_reward([""] * 3, texts, ["7"] * 3) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("installed", [False, True])
def test_without_math_verify_and_for_gsm8k_nothing_but_numbers_and_texts_count(installed, monkeypatch):
    """A label of GSM8K never starts another process, for any answer. Without the package, no label does."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found(name) if installed else None)
    label = "#### 7" if installed else "7"
    assert math_reward([""] * 3, [r"\boxed{x=7}", r"\boxed{7.0}", r"\boxed{7}"], [label] * 3) == [0.0, 1.0, 1.0]


@given(st.integers(-(10**9), 10**9), st.integers(1, 4))
def test_numbers_are_exact(value, digits):
    assert as_number(f"{value:,}") == value
    assert as_number(f"{value / 10**digits:.{digits}f}") == Fraction(f"{value / 10**digits:.{digits}f}")


NO_NUMBERS = ["1e99999", "1e-99999", "1/0", "3.5/2", "1_000", "nan", "7" * (MOST_CHARACTERS + 1)]


@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: text[:12])
def test_what_would_be_too_large_or_is_no_number_is_a_text(text):
    assert as_number(text) is None
    assert math_reward([""] * 2, [f"#### {text}"] * 2, ["#### 7", f"#### {text}"]) == [0.0, 1.0]


def test_a_monstrous_exponent_is_told_at_once():
    """In its own process, because Fraction would hang on it and let no other thread run."""
    code = "from trainer.rollout.rewards.math_reward import math_reward as f; print(f([''], ['#### 1e999999999'], ['#### 7']))"
    assert run_process([sys.executable, "-c", code], timeout=60) == (0, "[0.0]\n")


def test_exponents_signs_and_bare_points_are_numbers():
    numbers = {"1e3": 1000, "-2.5E-1": Fraction(-1, 4), "+3": 3, ".5": Fraction(1, 2), "7.": 7, "1e9999": 10**9999}
    assert {text: as_number(text) for text in numbers} == numbers


def test_every_reference_solution_of_gsm8k_is_right_and_its_neighbour_is_not(shared_data):
    rows = [json.loads(line) for line in (shared_data / "gsm8k/test.jsonl").read_text().splitlines()[:500]]
    labels = [row["answer"] for row in rows]
    assert all(as_number(final_answer(label)) is not None for label in labels)
    assert math_reward(labels, labels, labels) == [1.0] * len(labels)
    shifted = labels[1:] + labels[:1]
    wrong = math_reward(labels, shifted, labels)
    assert sum(wrong) < 0.1 * len(labels)
    bare = [label.rsplit("#### ", 1)[1] for label in labels]
    assert math_reward(labels, [f"The answer is {answer}." for answer in bare], labels) == [1.0] * len(labels)


def test_exact_match():
    assert exact_match(["", ""], [" 1 2 3\n", "1 3 2"], ["1 2 3", "1 2 3"]) == [1.0, 0.0]


FUNCTIONS = {
    "raise": ("    raise ValueError('no such\\nthing')", "raised ValueError: no such thing (line 2)"),
    "too few": ("    return [1.0]", "1 score for 2 responses"),
    "nan": ("    return [1.0, float('nan')]", "score nan for response 2 of 2"),
    "none": ("    return None", "gave NoneType"),
    "texts": ("    return ['good', 'bad']", "gave list ['good', 'bad']"),
    "bad metric": ("    return [1, 2], {'x': [1]}", "metric x: 1 score for 2 responses"),
    "pair of lists": ("    return [1, 2], [3, 4]", "gave tuple ([1, 2], [3, 4])"),
    "exit": ("    import sys\n    sys.exit('enough')", "raised SystemExit: enough (line 3)"),
    "pairs": ("    import torch\n    return torch.ones(2, 2)", "gave Tensor tensor([[1., 1.], [1., 1.]])"),
    "huge": (
        "    return [1e308, -1e308]",
        "score 1e+308 for response 1 of 2 (allowed: finite numbers from -1e+15 to 1e+15)",
    ),
    "one text": ("    return '10'", "gave str 10"),
    "a dict": ("    return {0: 1.0, 1: 0.5}", "gave dict {0: 1.0, 1: 0.5}"),
    "a set": ("    return {0.0, 1.0}", "gave set {0.0, 1.0}"),
    "std": ("    return [1, 2], {'std': 1}", "metric std, a name that the log has for the scores"),
}


def scorer_of(name: str, timeout: float):
    return function_scorer(name, load_reward_function(name), timeout)


def write_function(tmp_path, body: str) -> str:
    path = tmp_path / "reward.py"
    path.write_text(f"def reward_func(prompts, responses, labels):\n{body}\n")
    return str(path)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_reward_function_that_fails(case, tmp_path):
    body, expected = FUNCTIONS[case]
    score = scorer_of(write_function(tmp_path, body), timeout=0.5)
    with pytest.raises(UserError) as error:
        score(["a", "b"], ["c", "d"], [None, None], [True, True])
    assert expected in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_a_connection_that_fails_is_tried_again_and_then_each_response_alone(monkeypatch):
    monkeypatch.setattr(user_code, "PAUSES", (0.01, 0.02))
    calls = []

    def judge(prompts, responses, labels, level):
        calls.append(list(responses))
        if "bad" in responses or len(calls) < 2:
            raise ConnectionResetError("gone")
        return [float(len(r)) for r in responses], {"level": level}

    asked = ["p"] * 2, ["good", "fine!"], [None] * 2, [True] * 2, {"level": [1, 2]}
    score = function_scorer("judge", judge, 5.0)
    assert score(*asked) == ([4.0, 5.0], {"level": [1.0, 2.0]}) and len(calls) == 2
    calls.clear()
    asked = ["p"] * 3, ["good", "bad", "fine!"], [None] * 3, [True] * 3, {"level": [1, 2, 3]}
    scores, metrics = score(*asked)
    assert calls == [asked[1]] * 3 + [["good"], ["bad"], ["fine!"]] and (scores[0], scores[2]) == (4.0, 5.0)
    assert str(scores[1]).startswith("--reward_func judge: raised ConnectionResetError: gone")
    assert metrics["level"][0] == 1 and math.isnan(metrics["level"][1]) and metrics["level"][2] == 3
    exact = function_scorer("exact", lambda p, r, labels: [1.0] * len(r), 5.0)
    totals, _ = weighted_scorer({"judge": score, "exact": exact}, [1.0, 10.0])(*asked)
    assert totals[0] == 14.0 and isinstance(totals[1], Failed) and totals[2] == 15.0


def test_a_call_that_is_too_slow_costs_only_the_responses_that_are(tmp_path):
    """All at once, then each one alone: at most twice the limit, though two of nine hang."""
    calls = []

    def judge(prompts, responses, labels):
        calls.append(list(responses))
        time.sleep(30 * ("hangs" in responses))
        return [float(len(r)) for r in responses]

    responses = ["hangs", "a", "hangs", *("bb" for _ in range(6))]
    started = time.monotonic()
    scores, _ = function_scorer("judge", judge, 0.5)(["p"] * 9, responses, [None] * 9, [True] * 9)
    assert time.monotonic() - started < 3 and calls.count(responses) == 1 and len(calls) == 10
    assert scores[1] == 1.0 and scores[3:] == [2.0] * 6
    for failed in (scores[0], scores[2]):
        assert isinstance(failed, Failed) and "no result after 0.5 s" in str(failed)
    # a lazy result is read within the limit as well
    lazy = "    import time\n    return map(lambda text: time.sleep(9), responses)"
    [only], _ = scorer_of(write_function(tmp_path, lazy), 0.5)(["p"], ["r"], [None], [True])
    assert isinstance(only, Failed) and "no result after 0.5 s" in str(only)


def test_a_function_with_the_argument_groups_gets_whole_groups_also_when_each_is_tried_alone(monkeypatch):
    monkeypatch.setattr(user_code, "PAUSES", (0.01, 0.02))
    calls = []

    def best(prompts, responses, labels, groups):
        calls.append(groups)
        if "bad" in responses:
            raise ConnectionResetError("gone")
        longest = {g: max(len(r) for r, own in zip(responses, groups) if own == g) for g in groups}
        return [float(len(r) == longest[g]) for r, g in zip(responses, groups)]

    functions = {"best": best}
    assert wanted_facts(functions) == {"groups"} and wanted_columns(functions, ["groups"], "--dataset") == []
    asked = ["p"] * 4, ["a", "aa", "good", "bad"], [None] * 4, [True] * 4, {"groups": [7, 7, 8, 8]}
    scores, _ = function_scorer("best", best, 5.0)(*asked)
    assert scores[:2] == [0.0, 1.0] and all(isinstance(score, Failed) for score in scores[2:])
    assert calls == [[7, 7, 8, 8]] * 3 + [[7, 7], [8, 8]]


@pytest.mark.parametrize(
    "error, passing",
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (subprocess.TimeoutExpired("x", 1), False),
        (urllib.error.HTTPError("", 503, "busy", {}, None), True),
        (urllib.error.HTTPError("", 404, "not there", {}, None), False),
        (urllib.error.URLError("no route"), True),
        (httpx.ReadTimeout("late"), True),
        (httpx.HTTPStatusError("", request=None, response=httpx.Response(429)), True),
        (httpx.HTTPStatusError("", request=None, response=httpx.Response(401)), False),
        (requests.exceptions.ConnectTimeout(), True),
        (FileNotFoundError(), False),
        (KeyError("x"), False),
        (SystemExit(503), False),
    ],
)
def test_errors_that_may_pass_are_those_of_connections_limits_and_busy_servers(error, passing):
    assert is_passing(error) == passing


LAZY = {
    "return (1 / 0 for _ in responses)": "raised ZeroDivisionError: division by zero (line 4)",
    "return [1.0], {'m': (1 / 0 for _ in responses)}": "raised ZeroDivisionError: division by zero (line 4)",
    "return itertools.count()": "2 scores for 1 response",
    "return [10**400]": "gave a number beyond the range of a float",
}


@pytest.mark.parametrize("body", LAZY)
def test_a_lazy_or_a_huge_result_is_guarded_as_well(body, tmp_path):
    """A generator runs when it is read; that must happen inside the guard and its time limit."""
    lines = f"    import itertools\n    import time\n    {body}"
    score = scorer_of(write_function(tmp_path, lines), timeout=0.5)
    started = time.monotonic()
    with pytest.raises(UserError) as error:
        score(["p"], ["r"], [None], [True])
    assert LAZY[body] in str(error.value) and time.monotonic() - started < 5


def test_a_lazy_result_counts(tmp_path):
    score = scorer_of(write_function(tmp_path, "    return (len(text) for text in responses)"), timeout=5)
    assert score(["p", "p"], ["r", "rr"], [None, None], [True, True]) == ([1.0, 2.0], {})


def test_a_reward_function_gives_scores_and_metrics(tmp_path):
    singles = "'one': 1, 'np': numpy.float32(0.5), 'int': numpy.int64(2), '0d': torch.tensor(3.0), 'n': torch.ones(2)"
    body = f"    import numpy, torch\n    metrics = {{'label': [float(x) for x in labels], {singles}}}\n"
    body += "    return [len(r) for r in responses], metrics"
    score = scorer_of(write_function(tmp_path, body), timeout=60)  # the first call may import torch
    asked = ["", ""], ["a", "abc"], ["2", "3"], [True, False]
    expected = {
        "label": [2.0, 3.0],
        "one": [1.0] * 2,
        "np": [0.5] * 2,
        "int": [2.0] * 2,
        "0d": [3.0] * 2,
        "n": [1.0] * 2,
    }
    assert score(*asked) == ([1.0, 3.0], expected)
    assert score([], [], [], []) == ([], {})


def test_a_tuple_of_two_numbers_is_two_scores(tmp_path):
    score = scorer_of(write_function(tmp_path, "    return 0.5, 1"), timeout=5)
    assert score(["", ""], ["a", "b"], [None, None], [True, True]) == ([0.5, 1.0], {})


WANTS = {  # the signature of a reward function, and the extra arguments that it gets
    "prompts, responses, labels": [],
    "prompts, responses, labels, finished": ["finished"],
    "prompts, responses, labels, *, level, tests=None, other=None": ["level", "tests"],
    "prompts, responses, labels, **columns": ["finished", "id", "level", "tests"],
    "*texts": [],
}
COLUMNS = {"id": [7, 8], "level": ["low", "high"], "labels": [0, 0], "tests": [[1], []]}


@pytest.mark.parametrize("signature", WANTS)
def test_a_function_gets_the_columns_that_it_takes_and_whether_responses_ended(signature, tmp_path):
    (tmp_path / "reward.py").write_text(f"""
seen = {{}}
def reward_func({signature}):
    seen.update(locals())
    return [0.0, 0.0]
""")
    functions = load_reward_functions(str(tmp_path / "reward.py"))
    columns = wanted_columns(functions, list(COLUMNS), "--dataset")
    assert columns == [name for name in WANTS[signature] if name != "finished"]
    [(name, function)] = functions.items()
    texts = {"prompts": ["p", "q"], "responses": ["r", "s"], "labels": ["a", "b"]}
    function_scorer(name, function, 5)(*texts.values(), [True, False], {key: COLUMNS[key] for key in columns})
    seen = function.__globals__["seen"]
    seen |= seen.pop("columns", {})
    expected = {key: {**COLUMNS, "finished": [True, False]}[key] for key in WANTS[signature]}
    expected |= {"texts": tuple(texts.values())} if signature == "*texts" else texts
    assert {key: value for key, value in seen.items() if value is not None} == expected


def test_a_file_finds_the_modules_beside_it(tmp_path, monkeypatch):
    """At its top and within functions. What is installed comes before a module of its name."""
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "words_beside_a_reward.py").write_text("VALUE = 2.0")
    (tmp_path / "later_beside_a_reward.py").write_text("VALUE = 3.0")
    (tmp_path / "datasets.py").write_text("raise SystemError('in place of the package')")
    (tmp_path / "reward.py").write_text("""
import datasets
from words_beside_a_reward import VALUE
def reward_func(prompts, responses, labels):
    import later_beside_a_reward
    return [VALUE + later_beside_a_reward.VALUE]
""")
    [function] = load_reward_functions(str(tmp_path / "reward.py")).values()
    assert function([""], [""], [""]) == [5.0]


@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_two_files_do_not_share_a_module_of_one_name(tmp_path, monkeypatch, form):
    """Python keeps one module of a name, so the second file would run with that of the first."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "FOLDERS_OF_FILES", [])
    name = f"shared_by_name_{len(form)}"
    for folder, value in (("first", 1), ("same", 1), ("second", 2)):
        beside = tmp_path / folder / form.format(name)
        beside.parent.mkdir(parents=True)
        beside.write_text(f"VALUE = {value}")
        (tmp_path / folder / "reward.py").write_text(f"from {name} import VALUE")
    for folder in ("first", "same"):
        assert user_code.import_code(str(tmp_path / folder / "reward.py"), "--reward_func").VALUE == 1
    with pytest.raises(UserError, match=f"--reward_func: .*second/reward.py imports {name}, and .*first/{name}"):
        user_code.import_code(str(tmp_path / "second/reward.py"), "--reward_func")


def test_an_argument_that_is_no_column_is_named_before_the_first_step(tmp_path):
    (tmp_path / "reward.py").write_text("def reward_func(prompts, responses, labels, difficulty):\n    return [0]")
    with pytest.raises(UserError) as error:
        wanted_columns(load_reward_functions(str(tmp_path / "reward.py")), ["id", "level"], "--eval_dataset")
    assert error.value.found == "reward_func takes difficulty, which is no column of --eval_dataset"
    assert error.value.allowed == "finished, prompt_ids, response_ids, completion_ids, raw_responses, groups, id, level"


def test_several_functions_are_weighted_and_each_one_is_a_metric(tmp_path):
    (tmp_path / "short.py").write_text(
        "def reward_func(p, r, l, finished):\n    return [-len(x) for x in r], {'ended': finished}"
    )
    functions = load_reward_functions(f"exact_match, {tmp_path}/short.py")
    scorers = {name: function_scorer(name, f, 5) for name, f in zip(("exact_match", "short"), functions.values())}
    score = weighted_scorer(scorers, [2.0, 0.25])
    found = score(["p", "p"], ["7", "eight"], ["7", "8"], [True, False], {})
    assert found[0] == [2 - 0.25, -5 * 0.25]
    assert found[1] == {"exact_match": [1.0, 0.0], "short": [-1.0, -5.0], "short_ended": [1.0, 0.0]}
    assert score([], [], [], [], {})[0] == []
    with pytest.raises(UserError, match="--reward_weights: score"):
        weighted_scorer(scorers, [1e15, 1e15])(["p"], ["eight"], ["8"], [True], {})
    for wrong in (f"{tmp_path}/short.py,{tmp_path}/short.py", f"{tmp_path}/short.py,{tmp_path}/a/short.py"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a/short.py").write_text("def reward_func(p, r, l): return [0] * len(r)")
        with pytest.raises(UserError, match="--reward_func"):
            load_reward_functions(wrong)


def test_metrics_that_only_some_samples_have_are_averaged_over_those():
    samples = [
        Sample(number, number, [5], [6], [0.0], True, None, 1.0, metrics)
        for number, metrics in enumerate([{"a": 1.0}, {"b": 2.0, "a": 2.0}, {"b": 4.0}, {}])
    ]
    facts = sample_facts(samples)
    assert (facts["reward_a"], facts["reward_b"]) == (1.5, 3.0)


def test_percentiles_of_rewards_and_lengths_and_rewards_of_groups():
    scores, lengths = [0.0, 4.0, 1.0, 3.0, 2.0], [5, 1, 2, 3, 4]
    samples = [
        Sample(n, n, [5], [6] * length, [0.0] * length, True, None, score)
        for n, (score, length) in enumerate(zip(scores, lengths))
    ]
    facts = sample_facts(samples)
    # of five sorted values x, the p-th percentile is at place 4 p / 100: 0.4, 2 and 3.6
    assert [facts[f"reward_p{p}"] for p in (10, 50, 90)] == pytest.approx([0.4, 2.0, 3.6])
    assert [facts[f"response_length_p{p}"] for p in (10, 50, 90)] == pytest.approx([1.4, 3.0, 4.6])
    groups = {0: ["set/a", "topic/x"], 1: ["set/b", "topic/x"], 2: ["set/a", "topic/y"], 9: ["set/c"]}
    found = rewards_by_group(samples, groups)
    assert found == {"reward/set/a": 0.5, "reward/set/b": 4.0, "reward/topic/x": 2.0, "reward/topic/y": 1.0}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nowhere.py", "nowhere.py is not found"),
        ("/nowhere.py:own", "/nowhere.py is not found"),
        ("mathe", "mathe is not a Python file"),
    ],
)
def test_a_reward_function_that_is_not_there(name, found):
    with pytest.raises(UserError, match=f"^--reward_func: {found} .allowed: math, "):
        scorer_of(name, 1)


def test_a_file_without_the_function_or_with_an_error(tmp_path):
    path = tmp_path / "reward.py"
    found = {
        "x = 1\n": "has no function reward_func",
        "x =\n": r"imported: SyntaxError: invalid syntax \(reward.py, line 1\)( |$)(?!\(line)",
        "exit(0)\n": "imported: SystemExit",
    }
    for text, expected in found.items():
        path.write_text(text)
        with pytest.raises(UserError, match=expected):
            scorer_of(str(path), 1)


@contextlib.contextmanager
def server(answers: list):
    """A server that gives the `answers` to requests in turn: (status, body), raw bytes, or seconds of silence."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = answers[min(len(requests), len(answers)) - 1]
            if isinstance(answer, float):
                time.sleep(answer)
                answer = (200, "{}")
            with contextlib.suppress(OSError):  # the client may have closed the connection
                if isinstance(answer, bytes):
                    self.wfile.write(answer)
                    return
                self.send_response(answer[0])
                self.end_headers()
                self.wfile.write(answer[1].encode())

        def log_message(self, *_):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", requests
    finally:
        listening.shutdown()
        listening.server_close()


ASKED = ["p", "q"], ["r", "s"], [None, None], [True, True]
GOOD = (200, '{"rewards": [1, 2.5]}')


def test_a_reward_server_is_asked_with_texts():
    with server([GOOD]) as (url, requests):
        assert remote_scorer(url, 5, 0)(["p", "q"], ["r", "s"], ["1", None], [True, False]) == ([1.0, 2.5], {})
    asked = {"prompts": ["p", "q"], "responses": ["r", "s"], "labels": ["1", None], "finished": [True, False]}
    assert requests == [asked]


def test_a_server_may_tell_which_texts_it_cut():
    told = (200, '{"rewards": [1, 2.5], "truncated": [false, true]}')
    with server([told]) as (url, _):
        assert remote_scorer(url, 5, 0)(*ASKED) == ([1.0, 2.5], {"remote_rm_truncated": [0.0, 1.0]})
    for other in ("[true]", "[0, 1]", "true", '"no"', "null"):  # of a server that means something else
        with server([(200, f'{{"rewards": [1, 2.5], "truncated": {other}}}')]) as (url, _):
            assert remote_scorer(url, 5, 0)(*ASKED) == ([1.0, 2.5], {}), other
    parts = [(200, '{"rewards": [1], "truncated": [true]}')], [(200, '{"rewards": [2]}')]
    with server(parts[0]) as (first, _), server(parts[1]) as (second, _):
        _, metrics = remote_scorer(f"{first},{second}", 5, 0)(*ASKED)
        assert str(metrics) == "{'remote_rm_truncated': [1.0, nan]}"


TROUBLE = {
    "error": (500, ""),
    "garbage": (200, "garbage"),
    "too few": (200, '{"rewards": []}'),
    "list": (200, "[]"),
    "silence": 1.0,
    "cut": b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{",  # IncompleteRead
    "no http": b"hello\r\n",  # BadStatusLine
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
def test_trouble_is_tried_again_and_then_told(trouble):
    with server([trouble, trouble, GOOD]) as (url, requests):
        assert remote_scorer(url, 0.3, 2, pause=0.01)(*ASKED)[0] == [1.0, 2.5]
        assert len(requests) == 3
    with server([trouble]) as (url, requests):
        scores, _ = remote_scorer(url, 0.3, 1, pause=0.01)(*ASKED)
        assert all(isinstance(score, Failed) and "no usable answer after 1 try" in str(score) for score in scores)
        assert [len(request["prompts"]) for request in requests] == [2, 2, 1, 1] and "\n" not in str(scores[0])


def test_a_server_that_is_down():
    with server([GOOD]) as (url, _):
        pass
    for texts, tries in ((2, "1 try"), (1, "2 tries")):
        scores, _ = remote_scorer(url, 1, 1, pause=0.01)(*(column[:texts] for column in ASKED))
        assert len(scores) == texts
        assert all(re.match(f"--remote_rm_url .* no usable answer after {tries}: .*refused", str(s)) for s in scores)


def test_several_servers_share_a_call_and_stand_in_for_each_other():
    one = (200, '{"rewards": [1]}')
    with server([(500, "")]) as (url, _):
        pass  # nobody listens there any more
    with server([one]) as (first, of_first), server([(200, '{"rewards": [2]}')]) as (second, of_second):
        assert remote_scorer(f"{first}, {second}", 5, 0)(*ASKED)[0] == [1.0, 2.0]
        assert [request["prompts"] for request in (*of_first, *of_second)] == [["p"], ["q"]]
        assert remote_scorer(f"{url},{second}", 5, 0)(*ASKED)[0] == [2.0, 2.0], "the part of the one that is down"
        assert remote_scorer(f"{first},{second}", 5, 0)([], [], [], []) == ([], {})


def test_a_request_that_a_server_calls_wrong_is_not_sent_again():
    with server([(401, '{"error": "no key"}')]) as (url, requests):
        with pytest.raises(UserError, match=r"--remote_rm_url .* refuses the request: HTTPError: 401 no key"):
            remote_scorer(url, 5, 3)(*ASKED)
        assert len(requests) == 1
    one = (200, '{"rewards": [1]}')
    with server([(401, "")]) as (closed, asked), server([one, one]) as (good, _):  # another server takes its part
        assert remote_scorer(f"{closed},{good}", 5, 3)(*ASKED)[0] == [1.0, 1.0]
        assert len(asked) == 1
    with server([(429, ""), GOOD]) as (url, requests):
        assert remote_scorer(url, 5, 1, pause=0.01)(*ASKED)[0] == [1.0, 2.5]
    with pytest.raises(UserError, match="--remote_rm_url: x:1"):
        remote_scorer("http://a, x:1", 5, 3)


def test_any_stop_token_ends_a_response_and_neither_a_limit_nor_a_text_does(tmp_path, world):
    """A model may end its turns with another token than eos. Its generation config then names that token."""
    make_demo(str(tmp_path))
    tokenizer, told = load_tokenizer(str(tmp_path / "model")), []

    def scorer(prompts, responses, labels, finished, columns):
        told.extend(finished)
        return [0.0] * len(responses), {}

    ids = ([5, tokenizer.eos_token_id], [5, 6], [5, 7], [])
    samples = [Sample(n, n, [1], response, [0.0] * len(response), True, None) for n, response in enumerate(ids)]
    score_by_texts(TextScores(scorer, tokenizer, (tokenizer.eos_token_id, 6)), samples)
    assert told == [True, True, False, False] and [sample.score for sample in samples] == [0.0] * 4


def test_a_function_gets_ids_and_raw_texts_by_the_names_of_its_arguments(tmp_path):
    """What each argument holds is known beforehand: the ids of the samples, and their text with special tokens."""
    make_demo(str(tmp_path))
    (tmp_path / "own.py").write_text("""
seen = {}
async def reward_func(prompts, responses, labels, raw_responses, prompt_ids, response_ids=None):
    seen.update(texts=responses, raw=raw_responses, ids=[p + r for p, r in zip(prompt_ids, response_ids)])
    response_ids[0].clear()  # a function may change what it gets
    return [{"score": 1, "style": 0.5}, {"score": 0}]
""")
    functions = load_reward_functions(str(tmp_path / "own.py"))
    assert wanted_columns(functions, ["question"], "--dataset") == []
    [(name, function)] = functions.items()
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    eos = tokenizer.eos_token_id
    samples = [Sample(n, n, [1], [7, eos], [0.0] * 2, True, None) for n in range(2)]
    TextScores(function_scorer(name, function, 5), tokenizer, (eos,), wanted_facts(functions)).score_mine(samples)
    seen = function.__globals__["seen"]
    assert seen["ids"] == [[1, 7, eos]] * 2 and samples[0].response_ids == [7, eos]
    assert seen["raw"] == [text + tokenizer.eos_token for text in seen["texts"]]
    assert [(sample.score, sample.metrics) for sample in samples] == [(1.0, {"style": 0.5}), (0.0, {})]


DICTS = {
    "[{'right': 1, 'short': 0.5}, {'right': 0, 'short': 0.25}]": (
        [1.5, 0.25],
        {"right": [1.0, 0.0], "short": [0.5, 0.25]},
    ),
    "[{'score': 1, 'short': True}, {'score': 2, 'short': False}]": ([1.0, 2.0], {"short": [1.0, 0.0]}),
    "({'right': 2}, {'right': 3})": ([2.0, 3.0], {"right": [2.0, 3.0]}),
    "([{'right': 2}, {'right': 3}], {'words': 4})": ([2.0, 3.0], {"words": [4.0, 4.0], "right": [2.0, 3.0]}),
    "[{'score': 1}, 2]": ([1.0, 2.0], {}),
    "[{}, 1]": "response 1 of 2: gave the dict {}",
    "[1, {'std': 1}]": "response 2 of 2: gave the dict",
    "[1, {'score': 'good'}]": "response 2 of 2: score: gave list",
    "[1, {'right': float('nan')}]": "response 2 of 2: right: score nan",
    "[1, {'score': None}]": "gave None for response 2 of 2",
}


@pytest.mark.parametrize("result", DICTS)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_dict_of_a_response_names_its_score_or_the_parts_of_it(result, kind, tmp_path):
    (tmp_path / "own.py").write_text(f"{kind} reward_func(prompts, responses, labels):\n    return {result}")
    score = function_scorer("own.py", load_reward_function(str(tmp_path / "own.py")), 5)
    if isinstance(DICTS[result], str):
        with pytest.raises(UserError, match=re.escape(DICTS[result])):
            score(["p", "p"], ["a", "b"], [None, None], [True, True])
    else:
        assert score(["p", "p"], ["a", "b"], [None, None], [True, True]) == DICTS[result]


# --- functions of other trainers, built-in forms, None

TRL = "def reward(completions, prompts, answer, **kwargs):\n    return [float(c == a) for c, a in zip(completions, answer)]"
OPENRLHF = """
def reward_func(queries, prompts, labels, **kwargs):
    scores = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": scores, "scores": scores, "extra_logs": {"length": [len(query) for query in queries]}}
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}
"""

OURS = "def reward_func(ARGUMENTS):\n    return [float(r == a) for r, a in zip(responses, labels)]"

ASYNC = ((TRL, ":reward", {}), (OPENRLHF, "", {"length": [2.0, 2.0]}), (VERL, "", {"acc": [1.0, 0.0]}))


@pytest.mark.parametrize(
    ("code", "function", "metrics"),
    [
        (TRL, ":reward", {}),
        (OPENRLHF, "", {"length": [2.0, 2.0]}),
        (VERL, "", {"acc": [1.0, 0.0]}),
        (VERL, ":compute_score", {"acc": [1.0, 0.0]}),
        *((code.replace("def ", "async def "), name, metrics) for code, name, metrics in ASYNC),
        (OURS.replace("ARGUMENTS", "responses, labels"), "", {}),
        (OURS.replace("ARGUMENTS", "responses, labels, prompts"), "", {}),
        (OURS.replace("ARGUMENTS", "prompts, responses, **columns").replace("labels", "columns['labels']"), "", {}),
    ],
)
def test_functions_with_other_arguments_work_as_they_are(tmp_path, code, function, metrics):
    (tmp_path / "theirs.py").write_text(code)
    name = f"{tmp_path}/theirs.py{function}"
    functions = load_reward_functions(name)
    columns = {"answer": ["7", "8"], "data_source": ["gsm8k", "gsm8k"]}
    wanted = wanted_columns(functions, list(columns), "--dataset")
    given = {key: columns[key] for key in wanted}
    score = function_scorer(name, functions[name], 5)
    assert score(["p", "p"], ["7", "9"], ["7", "8"], [True, True], given) == ([1.0, 0.0], metrics)
    if function == ":reward":
        with pytest.raises(UserError, match="takes answer, which is no column"):
            wanted_columns(functions, ["question"], "--dataset")


def test_a_function_that_the_file_lacks_is_named(tmp_path):
    (tmp_path / "own.py").write_text("def reward_func(prompts, responses, labels):\n    return [0.0] * len(prompts)")
    with pytest.raises(UserError, match="has no function length"):
        load_reward_function(f"{tmp_path}/own.py:length")


def test_none_is_a_sample_of_another_function():
    def of(*scores):
        return lambda prompts, responses, labels: list(scores)

    texts = (["p", "p"], ["a", "b"], ["", ""], [True, True])
    scorers = {
        "one": function_scorer("one", of(1.0, None), 5, alone=False),
        "two": function_scorer("two", of(None, 3), 5, alone=False),
    }
    totals, parts = weighted_scorer(scorers, [2.0, 0.5])(*texts)
    assert totals == [2.0, 1.5] and parts == {
        "one": pytest.approx([1.0, math.nan], nan_ok=True),
        "two": pytest.approx([math.nan, 3.0], nan_ok=True),
    }
    with pytest.raises(UserError, match="gave None for response 2 of 2"):
        function_scorer("one", of(1.0, None), 5)(*texts)
    scorers["two"] = function_scorer("two", of(1.0, None), 5, alone=False)
    with pytest.raises(UserError, match="every function gave None for response 2"):
        weighted_scorer(scorers, [1.0, 1.0])(*texts)


@pytest.mark.parametrize(
    ("name", "response", "label", "score"),
    [
        ("format", "<think>\nwhy\n</think>\n<answer>7</answer>\n", None, 1),
        ("format", "<answer>7</answer>", None, 0),
        ("format", "<think>a</think><think>b</think><answer>7</answer>", None, 0),
        ("format", "<think>a</think><answer>7</answer> and more", None, 0),
        ("answer", "<answer>3</answer> no, <answer> 7.0 </answer>", "7", 1),
        ("answer", "7", "7", 0),
        ("answer", "<answer>8</answer>", "<answer>7</answer>", 0),
        ("multiple_choice", "I think so. The answer is (B).", "B", 1),
        ("multiple_choice", "A is wrong.\nSo Answer: C", "C", 1),
        ("multiple_choice", "<answer>D</answer>", "(D)", 1),
        ("multiple_choice", "A dog barks", "A", 0),
        ("multiple_choice", "The answer is A\nNo, the answer is B", "A", 0),
        ("multiple_choice", r"so \boxed{B}", "B", 1),
    ],
)
def test_built_in_forms(name, response, label, score):
    assert load_reward_function(name)(["p"], [response], [label]) == [score]


@pytest.mark.parametrize(
    ("response", "finished", "scores"),
    [
        (r"so \boxed{7.0}", True, (1, 1, 1, 1)),
        (r"so \boxed{7}", False, (1, 1, 0, 0)),
        ("so 7", True, (1, 0, 1, 0)),
        ("#### 7", False, (1, 0, 0, 0)),
        (r"\boxed{8} #### 7", True, (1, 0, 1, 0)),
        (r"\boxed{7} #### 8", True, (0, 1, 0, 1)),
        (r"\boxed{7} </think> 7", True, (1, 0, 1, 0)),
        (r"7 \boxed{}", True, (0, 0, 0, 0)),
        (r"\boxed{7", True, (1, 0, 1, 0)),
        ("", True, (0, 0, 0, 0)),
    ],
)
def test_math_reads_only_boxes_or_only_finished_responses(response, finished, scores):
    names = ("math", "math_boxed", "math_finished", "math_boxed_finished")
    scorers = [function_scorer(name, load_reward_function(name), 30) for name in names]
    assert tuple(own(["p"], [response], ["#### 7"], [finished])[0][0] for own in scorers) == scores
