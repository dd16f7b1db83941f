"""The judge, against a local server that speaks the OpenAI protocol."""

import contextlib
import http.server
import json
import math
import re
import threading
import time

import pytest

from trainer import limits
from trainer.errors import Failed, UserError
from trainer.flags.rl_flags import ScoreArguments
from trainer.rollout.rewards.judge import (
    Cache,
    Judge,
    JudgeOptions,
    facts_of_judge,
    read_request,
    read_rubric,
    rewards_need_labels,
    values_of,
)
from trainer.rollout.rewards.judge_modes import MODES
from trainer.rollout.rewards.reward_functions import GROUPS, weighted_scorer
from trainer.runs.rl.rl_checks import judge_options


def said(text, usage=(30, 5)) -> tuple[int, str]:
    counts = dict(zip(("prompt_tokens", "completion_tokens"), usage))
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": counts})


def by_length(content: str) -> tuple[int, str]:
    """The judge of these tests: the score is the number of letters of the response."""
    return said(f"It is short. Score: {len(re.search('<r>(.*?)</r>', content, re.DOTALL)[1])}")


@contextlib.contextmanager
def server(answer=by_length, seconds: float = 0.0, headers: dict | None = None):
    """(address, requests, most requests at a time) of a server: `answer(content)` gives (status, body)."""
    requests, running, most, lock = [], [0], [0], threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
                requests.append((self.path, self.headers.get("Authorization"), body))
            time.sleep(seconds)
            status, text = answer(body["messages"][0]["content"])
            with lock:
                running[0] -= 1
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/v1", requests, most
    finally:
        listening.shutdown()
        listening.server_close()


def judge(url: str, folder, **more) -> Judge:
    options = {"rubric": "<p>{prompt}</p><r>{response}</r><l>{label}</l>", "retries": 2, "timeout": 5.0} | more
    return Judge(JudgeOptions(url, "big", **options), str(folder), pause=0.01)


def asked(*responses: str) -> tuple:
    count = len(responses)
    return ["p"] * count, [*responses], ["{response}"] * count, [True] * count, {}


def test_scores_costs_and_requests(tmp_path):
    with server(seconds=0.1) as (url, requests, most):
        own = judge(url, tmp_path, key="secret", concurrency=4, request={"max_tokens": None, "seed": 3})
        texts = [f"{'x' * n}" for n in range(9)] + ["{label}", "xx"]
        started = time.monotonic()
        scores, costs = own(*asked(*texts))
        assert scores == pytest.approx([len(text) / 10 for text in texts])
        assert most[0] == 4 and time.monotonic() - started < 0.9, "10 requests of 0.1 s, four at a time"
    assert len(requests) == 10 and costs["requests"] == [1.0] * 10 + [0.0], "equal requests are sent once"
    assert costs["prompt_tokens"] == [30.0] * 10 + [0.0] and costs["completion_tokens"] == [5.0] * 10 + [0.0]
    for path, key, body in requests:
        assert path == "/v1/chat/completions" and key == "Bearer secret" and "secret" not in json.dumps(body)
        assert body.keys() == {"model", "messages", "temperature", "seed"} and body["model"] == "big"
    contents = {body["messages"][0]["content"] for _, _, body in requests}
    assert "<p>p</p><r>{label}</r><l>{response}</l>" in contents, "a text brings no place of its own"
    assert own(*asked()) == ([], {name: [] for name in costs})


def test_the_cache_is_in_the_run_folder_and_bounded(tmp_path):
    with server() as (url, requests, _):
        first = judge(url, tmp_path)(*asked("a", "bb"))
        again, costs = judge(url, tmp_path)(*asked("bb", "a", "ccc"))
        assert (first[0], again) == ([0.1, 0.2], [0.2, 0.1, 0.3]) and costs["requests"] == [0.0, 0.0, 1.0]
        judge(url, tmp_path, request={"seed": 1})(*asked("a"))
        assert len(requests) == 4, "another request is another entry"
        other = judge(url, tmp_path, request={"seed": 1}, score_range=(0.0, 20.0))(*asked("a"))
        assert other[0] == [0.05] and len(requests) == 5, "a score of another range is no score of this one"
        judge(url, tmp_path / "off", cached=0)(*asked("a"))
        assert not (tmp_path / "off").exists()
    cache = Cache(str(tmp_path / "small"), 0, 3)
    for number in range(20):
        cache.put(str(number), (number / 20,))
    lines = (tmp_path / "small" / "0.jsonl").read_text().splitlines()
    assert len(lines) <= 6 and cache.get("16") is None and cache.get("19") == (0.95,)
    with open(tmp_path / "small" / "1.jsonl", "w") as file:
        file.write('["of rank 1", 0.5]\n["nan", NaN]\n["large", 7]\n{"torn')
    found = Cache(str(tmp_path / "small"), 0, 30)
    assert [found.get(name) for name in ("19", "of rank 1", "nan", "large")] == [(0.95,), (0.5,), None, None]
    (tmp_path / "small" / "1.jsonl").write_text("".join(f'["{name}", 0.25]\n' for name in ("19", "x", "y")))
    assert Cache(str(tmp_path / "small"), 0, 3).get("19") == (0.95,), "a rank has its own scores first"


TROUBLE = {
    "busy": (503, "", "HTTPError: 503"),
    "slow down": (429, "", "HTTPError: 429"),
    "garbage": (200, "garbage", "no JSON"),
    "another form": (200, "[]", "TypeError"),
    "no choices": (200, '{"choices": []}', "IndexError"),
    "no score": (*said("It is good."), "no line `Score: N`"),
    "no text": (*said(None), "no line `Score: N`"),
    "beyond": (*said("Score: 11"), "a score of 11, which is not from 0 to 10"),
    "below": (*said("Score: -1"), "a score of -1"),
}


@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
def test_trouble_costs_its_sample_only(trouble, tmp_path):
    status, text, told = trouble
    left = [2]

    def answer(content):
        if "<r>bad</r>" in content or ("<r>late</r>" in content and left[0] > 0):
            left[0] -= "late" in content
            return status, text
        return by_length(content)

    with server(answer) as (url, requests, _):
        scores, costs = judge(url, tmp_path)(*asked("good", "bad", "late"))
    assert scores[0] == 0.4 and scores[2] == 0.4, "the third try is good"
    assert isinstance(scores[1], Failed) and told in str(scores[1]) and "after 3 tries" in str(scores[1])
    assert "\n" not in str(scores[1]) and costs["requests"] == [1.0, 3.0, 3.0] and len(requests) == 7


def test_deadlines_sizes_redirects_and_refusals(tmp_path, monkeypatch):
    with server(seconds=0.5) as (url, _, _):
        [score], _ = judge(url, tmp_path, timeout=0.1, retries=0)(*asked("a"))
        assert "after 1 try: TimeoutError: no whole answer within 0.1 s" in str(score)
    with server(lambda _: (200, " " * (2 << 20))) as (url, _, _):
        monkeypatch.setitem(limits._raised, "answer_mb", 1)
        [score], _ = judge(url, tmp_path, retries=0)(*asked("a"))
        monkeypatch.delitem(limits._raised, "answer_mb")
        assert "an answer of more than 1 MB" in str(score)
    with server(lambda _: (302, ""), headers={"Location": "http://127.0.0.1:1/"}) as (url, _, _):
        [score], _ = judge(url, tmp_path, retries=0)(*asked("a"))
        assert "redirects to http://127.0.0.1:1/, which is not followed" in str(score)
    with server(lambda _: (400, '{"error": "too long"}')) as (url, requests, _):
        [score], _ = judge(url, tmp_path)(*asked("a"))
        assert "refuses the request: HTTPError: 400 too long" in str(score) and len(requests) == 1
    told = pytest.raises(UserError, match=r"--judge_url .* refuses the request: HTTPError: 401 no key")
    with server(lambda _: (401, '{"error": "no key"}')) as (url, _, _), told:
        judge(url, tmp_path)(*asked("a"))


def test_a_judge_is_one_of_several_functions(tmp_path):
    def answer(content):
        return (503, "") if "<r>bad</r>" in content else by_length(content)

    def lengths(*arguments):
        return [float(len(text)) for text in arguments[1]], {}

    with server(answer) as (url, _, _):
        scorers = {"length": lengths, "judge": judge(url, tmp_path, retries=0)}
        totals, parts = weighted_scorer(scorers, [1.0, 10.0])(*asked("four", "bad"))
    assert totals[0] == 8.0 and isinstance(totals[1], Failed)
    assert parts["judge"] == pytest.approx([0.4, math.nan], nan_ok=True)
    assert parts["length"] == pytest.approx([4.0, math.nan], nan_ok=True)
    assert parts["judge_prompt_tokens"] == [30.0, 0.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 0.7), ("**Score:** 7.5/10", 0.75), ("score = 0", 0.0), ("<think>Score: 1</think> Score: 9", 0.9),
        ("A score: 2 would be harsh.\nScore: 8", 0.8), ("Score: [10]", 1.0),
    ],
)  # fmt: skip
def test_the_last_score_of_a_text_counts(text, score):
    assert values_of(json.loads(said(text)[1]), (0.0, 10.0), MODES["alone"], 1) == pytest.approx((score,))
    assert values_of(json.loads(said("Score: -1")[1]), (-5.0, 5.0), MODES["alone"], 1) == pytest.approx((0.4,))


def test_an_answer_that_was_cut_has_no_score():
    answer = json.loads(said("Score: 1")[1])
    answer["choices"][0]["finish_reason"] = "length"
    with pytest.raises(ValueError, match="an answer that was cut"):
        values_of(answer, (0.0, 10.0), MODES["alone"], 1)


def test_wrong_files_keys_and_arguments_are_refused(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("Grade it.")
    for call, told in (
        (lambda: read_rubric(str(tmp_path / "none.txt")), "none.txt: No such file"),
        (lambda: read_rubric(str(tmp_path / "empty.txt")), "has no {response}, which --judge_mode alone needs"),
        (lambda: read_request("[1]"), "--judge_args"),
        (lambda: read_request('{"model": "x"}'), "other keys than model"),
        (lambda: judge_options(ScoreArguments(judge_url="x", judge_model="m")), "--judge_url: x"),
        (lambda: judge_options(ScoreArguments(judge_url="http://x,http://y", judge_model="m")), "one address"),
        (lambda: judge_options(ScoreArguments(judge_url="http://me:pa55@x", judge_model="m")), "a user or a password"),
        (
            lambda: judge_options(ScoreArguments(judge_url="http://x", judge_key_env="sk-secret")),
            "the environment variable of that name holds no key",
        ),
        (
            lambda: judge_options(ScoreArguments(judge_url="http://x", judge_key_env="NO_SUCH_KEY")),
            "NO_SUCH_KEY holds no",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            call()
    monkeypatch.setenv("MY_KEY", "abc")
    options = judge_options(ScoreArguments(judge_url="http://x", judge_model="m", judge_key_env="MY_KEY"))
    assert options.key == "abc" and "abc" not in repr(options) and options.rubric == MODES["alone"].rubric
    (tmp_path / "own.txt").write_text("{response} {label}")
    assert (
        rewards_need_labels("judge", str(tmp_path / "own.txt"))
        and not rewards_need_labels("judge", None)
        and rewards_need_labels("math,judge", None)
    )


# --- judges that compare

FIRST, SECOND = (re.compile(rf"<response {n}>\n(.*?)\n</response {n}>", re.DOTALL) for n in (1, 2))
SHOWN = re.compile(r"<response (\d)>\n(.*?)\n</response \1>", re.DOTALL)


def compared(*groups: str) -> tuple:
    """The arguments of a judge for groups of one-letter responses, one text a group."""
    responses = [*"".join(groups)]
    columns = {GROUPS: [7 + number for number, group in enumerate(groups) for _ in group]}
    prompts = [f"p{number}" for number in columns[GROUPS]]
    return prompts, responses, [None] * len(responses), [True] * len(responses), columns


def later_letter(content: str) -> tuple[int, str]:
    """The judge of pairs: the later letter wins, and no case matters."""
    one, two = FIRST.search(content)[1], SECOND.search(content)[1]
    if "!" in (one, two):
        return 503, ""
    return said(f"Winner: {0 if one.lower() == two.lower() else 1 if one.lower() > two.lower() else 2}")


def by_letter(content: str) -> tuple[int, str]:
    """The judge of groups: b is 1, c is 2, and so on."""
    return said("Winner? Scores: " + ", ".join(str(ord(text) - ord("a")) for _, text in SHOWN.findall(content)))


def test_a_pair_has_a_winner_and_a_score_is_the_share_of_wins(tmp_path):
    with server(later_letter) as (url, requests, _):
        own = judge(url, tmp_path, mode="pairs", rubric=None)
        scores, costs = own(*compared("bdac", "aaB", "xx", "AaC"))
        wins = [1 / 3, 1, 0, 2 / 3]  # by hand: of a, b, c and d
        assert scores == pytest.approx([*wins, 0, 0, 1, 0.5, 0.5, 0.25, 0.25, 1.0])
        assert len(requests) == 6 + 1 + 0 + 3, "equal responses are shown once"
        assert sum(costs["requests"]) == pytest.approx(10) and sum(costs["prompt_tokens"]) == pytest.approx(300)
        again, costs = judge(url, tmp_path, mode="pairs", rubric=None)(*compared("acdb"))
        assert again == pytest.approx([0, 2 / 3, 1, 1 / 3]) and sum(costs["requests"]) == 0, (
            "another order, and no request"
        )


def test_the_order_of_responses_comes_from_their_texts_alone(tmp_path):
    letters = "abcdefghijklmnop"
    with server(later_letter) as (url, requests, _):
        judge(url, tmp_path / "one", mode="pairs", rubric=None)(*compared(letters))
        judge(url, tmp_path / "two", mode="pairs", rubric=None)(*compared(letters[::-1]))
    bodies = [body["messages"][0]["content"] for *_, body in requests]
    assert len(bodies) == 240 and len(set(bodies)) == 120, "each pair has one order, whatever the rollout's order is"
    first = [FIRST.search(body)[1] for body in bodies[:120]]
    counts = [first.count(letter) for letter in letters]  # of 15 each, so 7.5 +- 1.9
    assert min(counts) >= 1 and max(counts) <= 14 and 40 < sum(a < "i" for a in first) < 80
    with server(by_letter) as (url, requests, _):
        for folder, group in (("three", "dbca"), ("four", "acdb")):
            scores, _ = judge(url, tmp_path / folder, mode="group", rubric=None)(*compared(group))
            assert scores == pytest.approx([(ord(letter) - ord("a")) / 10 for letter in group])
    assert requests[0] == requests[1]


def test_a_group_is_graded_in_one_request(tmp_path):
    with server(by_letter) as (url, requests, _):
        scores, costs = judge(url, tmp_path, mode="group", rubric=None)(*compared("badb", "k"))
        assert scores == pytest.approx([0.1, 0.0, 0.3, 0.1, 1.0]) and len(requests) == 2
        assert sum(costs["requests"]) == pytest.approx(2) and costs["requests"][3] == 0, "b was shown once"
        assert any("Grade 3 responses" in body["messages"][0]["content"] for *_, body in requests)
    for text, told in (
        ("Scores: 1, 2", "2 scores for 3 responses"),
        ("Score: 1", "no line `Scores: N, N`"),
        ("Scores: 1, 2, 11", "a score of 11, which is not from 0 to 10"),
    ):
        with server(lambda _, text=text: said(text)) as (url, *_):
            failed, _ = judge(url, tmp_path, mode="group", rubric=None, retries=0, cached=0)(*compared("abc", "a"))
        assert all(isinstance(score, Failed) and told in str(score) for score in failed[:3])
    text = json.loads(said("Scores: 1, 2\nScores: [4, 5,6]")[1])
    assert values_of(text, (4.0, 6.0), MODES["group"], 3) == (0.0, 0.5, 1.0)


def test_a_pair_without_an_answer_is_left_out(tmp_path):
    with server(later_letter) as (url, *_):
        scores, _ = judge(url, tmp_path, mode="pairs", rubric=None, retries=0)(*compared("ab!", "!c", "cd"))
    assert scores[:2] == [0.0, 1.0] and scores[5:] == [0.0, 1.0]
    assert all(isinstance(scores[at], Failed) and "503" in str(scores[at]) for at in (2, 3, 4))


def test_texts_bring_no_place_and_a_rubric_has_those_of_its_mode(tmp_path):
    (tmp_path / "own.txt").write_text("{prompt}: {first} or {second}? {label} {unknown}")
    rubric = read_rubric(str(tmp_path / "own.txt"), "pairs")
    with server(lambda _: said("Winner: 0")) as (url, requests, _):
        columns = {GROUPS: [0, 0]}
        judge(url, tmp_path, mode="pairs", rubric=rubric)(
            ["p"] * 2, ["{second}", "{label}"], ["L"] * 2, [True] * 2, columns
        )
    assert requests[0][2]["messages"][0]["content"] in (
        "p: {second} or {label}? L {unknown}",
        "p: {label} or {second}? L {unknown}",
    )
    with pytest.raises(UserError, match=r"own.txt has no \{responses\}, which --judge_mode group needs"):
        read_rubric(str(tmp_path / "own.txt"), "group")
    assert facts_of_judge("math, judge", "pairs") == {GROUPS} and not facts_of_judge("judge", "alone")
    assert not facts_of_judge("math", "group")
