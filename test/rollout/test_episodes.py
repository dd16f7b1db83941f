"""Episodes with an environment: token for token what was generated is trained, and what an environment may do wrong."""

import asyncio
import json
import math
import random
import time
from dataclasses import replace
from urllib.error import HTTPError

import pytest
import torch
from conversations import ARGUMENTS, ASKED, TOOLS, TURNS, Script, byte_tokenizer, environments, sampling_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_model

from trainer.datasets.batches.packing import IGNORE
from trainer.datasets.conversations.tool_formats import tool_calls
from trainer.datasets.conversations.turns import continuation_ids
from trainer.datasets.samples.prompts import COLUMN
from trainer.errors import Failed, UserError
from trainer.methods.rollout_facts import sample_facts
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.envs import environments as environments_module
from trainer.rollout.envs import episodes
from trainer.rollout.envs.environments import Caller, Source, Step, load_environment, read_sources
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.long_answers import LEFT_OUT, LongAnswers
from trainer.rollout.envs.one_episode import ENDS
from trainer.rollout.micro_batches import SampleSet, collate_samples
from trainer.rollout.rollouts_file import as_row, read_rollouts, sample_of
from trainer.rollout.samples import Sample

pytestmark = pytest.mark.usefixtures("world")


class Calculator:
    """Answers a call of its tool, and rewards the next turn for the sum."""

    tools = TOOLS

    def reset(self, task):
        self.turn, self.task, self.metrics = 0, task, {}
        return ASKED

    async def step(self, response):
        self.turn += 1
        if self.turn == 1 and response.tool_calls == [{"name": "add", "arguments": ARGUMENTS}]:
            return [{"role": "tool", "name": "add", "content": str(self.task["sum"])}], 0.25, False
        self.metrics = {"turns": self.turn}
        return float("5." in response), True


class Talker:
    """Goes on whatever the model says, with a tool's answer or words in turn."""

    tools = TOOLS

    def reset(self, task):
        self.turn = 0
        return ASKED

    def step(self, response):
        self.turn += 1
        role = {"role": "tool", "name": "add"} if self.turn % 2 else {"role": "user"}
        return [{**role, "content": f"{self.turn}\n\nthe next"}], 0.5, False


class Recorder:
    """A real engine that notes what it was asked and what it generated."""

    ranks_per_engine = 1

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    def generate(self, prompts, sampling, seeds, limits):
        found = self.engine.generate(prompts, sampling, seeds, limits)
        self.calls += [(list(p), c.token_ids, limit) for p, c, limit in zip(prompts, found, limits, strict=True)]
        return found


PROMPT = {"row": 0, "label": "5", "prompt_ids": [1], COLUMN + "sum": 5, COLUMN + "nested": [1]}


@pytest.mark.parametrize("name", TURNS)
def test_an_episode_is_the_conversation_that_the_template_shows(name):
    """The engine writes the turns as the model would. Then all ids are those of the whole conversation in the template."""
    tokenizer = byte_tokenizer(name)
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TURNS[name]]
    engine = Script(turns)
    [sample] = generate_episodes(
        environments(Calculator, tokenizer), engine, [PROMPT], 1, sampling_of(tokenizer, name), seed=0, rollout=0
    )
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = {"role": "tool", "name": "add", "content": "5", "tool_call_id": "call00000"}
    whole = [*ASKED, called, told, {"role": "assistant", "content": "It is 5."}]
    expected = tokenizer.apply_chat_template(whole, tools=TOOLS, tokenize=False).rstrip("\n")
    found = tokenizer.decode(sample.prompt_ids + sample.response_ids)
    if name == "qwen3":  # the template shows the empty thoughts of the last turn only; the model wrote them twice
        expected = expected.replace("assistant\n<tool_call>", "assistant\n<think>\n\n</think>\n\n<tool_call>")
    assert found == expected
    assert sample.score == 1.25 and sample.finished and sample.metrics == {"turns": 2.0}
    assert [sample.response_ids[start:end] for start, end in sample.turns] == turns
    assert len(sample.log_probs) == sum(map(len, turns)) < len(sample.response_ids)
    assert len({seed for _, [seed], _ in engine.asked}) == 2, "each turn draws its own numbers"


@pytest.mark.parametrize("name", TURNS)
def test_trained_ids_are_generated_ids(name, tmp_path):
    """Of a model that writes anything, in any tokenization. Every token of every turn, and nothing else, has a loss."""
    tokenizer = byte_tokenizer(name)
    model = make_model("qwen3")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), tokenizer, dtype=torch.float32, device=torch.device("cpu"), batch_size=3)
    engine.update_weights(model.state_dict().items())
    recorder = Recorder(engine)
    stops = sampling_of(tokenizer, name).stop_ids
    sampling = Sampling(1.0, 200, (*range(5, 12), *stops))  # so that turns end
    samples = generate_episodes(
        environments(Talker, tokenizer, max_turns=3), recorder, [PROMPT], 8, sampling, seed=3, rollout=1
    )
    assert [sample.number for sample in samples] == list(range(8)) and len({len(s.turns) for s in samples}) > 1
    generated = {(tuple(prompt), tuple(ids)) for prompt, ids, _ in recorder.calls}
    rebuilt = set()
    for sample in samples:
        for start, end in sample.turns:
            before = sample.prompt_ids + sample.response_ids[:start]
            rebuilt.add((tuple(before), tuple(sample.response_ids[start:end])))
        assert len(sample.response_ids) <= 200 and sample.score == 0.5 * len(sample.turns)
        assert not sample.finished, "the environment never ended it"
    assert rebuilt == generated and len(recorder.calls) == sum(len(sample.turns) for sample in samples)
    dataset = SampleSet(samples, "token", 200)
    ids = [token for s in samples for start, end in s.turns for token in s.response_ids[start:end]]
    for packed in (False, True):
        batch = collate_samples([dataset[i] for i in range(8)], tokenizer.pad_token_id, packed)
        trained = batch["labels"] != IGNORE
        assert batch["labels"][trained].tolist() == ids
        assert batch["response_index"][trained].tolist() == list(range(dataset.num_response_tokens))
        assert ((batch["loss_weights"] > 0) == trained).all()
    # log-probs of the engine are those of the model over the whole conversation, at the places that are trained
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            log_probs = model(ids).logits[0].log_softmax(-1)
        places = [len(sample.prompt_ids) + place for place in sample.generated()]
        plain = [log_probs[place - 1, ids[0, place]].item() for place in places]
        assert sample.log_probs == pytest.approx(plain, abs=1e-4)
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(as_row(sample, 0, tokenizer)) + "\n" for sample in samples))
    assert read_rollouts(str(file)) == [samples]


def test_a_stop_token_takes_the_place_of_the_templates(tmp_path):
    """Whatever ended the turn, the next one has one end of turn before it, and no second one."""
    tokenizer = byte_tokenizer("qwen3")
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    pad = tokenizer.pad_token_id
    for written, stops, expected in (
        ([65, end], (end,), [65, end]),
        ([65, pad], (end, pad), [65, pad]),
        ([65], (end,), [65, end]),
    ):
        engine = Script([written] * 2)
        [sample] = generate_episodes(
            environments(Talker, tokenizer, max_turns=2),
            engine,
            [PROMPT],
            1,
            Sampling(0.0, 300, stops),
            seed=0,
            rollout=0,
        )
        newline = tokenizer("\n")["input_ids"]
        assert sample.response_ids[: len(expected) + 2] == [*expected, *newline, start]
        assert sample.response_ids[sample.turns[0][0] : sample.turns[0][1]] == written


def run_one(make, turns=2, **options):
    tokenizer = byte_tokenizer("qwen3")
    ids = tokenizer("hi<|im_end|>")["input_ids"]
    own = {name: options.pop(name) for name in ("lockstep", "long_answers", "last_turn_text") if name in options}
    envs = replace(environments(make, tokenizer, max_turns=turns, **options), **own)
    return generate_episodes(envs, Script([ids] * 9), [PROMPT], 2, sampling_of(tokenizer, "qwen3"), seed=0, rollout=0)


def broken(answer, **members):
    def step(self, response):
        return answer(response) if callable(answer) else answer

    return type("Broken", (), {"reset": lambda self, task: ASKED, "step": step, **members})


async def never(response):
    await asyncio.sleep(60)


WRONG = {
    "step raised ZeroDivisionError: division by zero": broken(lambda response: 1 / 0),
    "step raised SystemExit": broken(lambda response: exit(3)),
    "step, row 1: returned str yes": broken("yes"),
    "step, row 1: returned tuple (False, 1.0)": broken((False, 1.0)),  # a reward at the place of `done`
    "step, row 1: returned tuple ([{'role'": broken((ASKED, True)),
    "step, row 1: is not done and gives no messages": broken((1.0, False)),
    "step, row 1: reward: score nan": broken((float("nan"), True)),
    "step, row 1: messages message 1: no role": broken([{"content": "x"}]),
    "reset, row 1: messages: a string": broken((1.0, True), reset=lambda self, task: "hello"),
    "reset, row 1: the messages do not end": broken((1.0, True), reset=lambda self, task: []),
}


@pytest.mark.parametrize("expected", WRONG)
def test_an_environment_that_fails_gives_one_line(expected):
    with pytest.raises(UserError) as error:
        run_one(WRONG[expected], timeout=0.5)
    assert str(error.value).startswith("--env x.py: ") and expected.strip() in str(error.value)
    assert "\n" not in str(error.value)


def beginnings(outcomes: list, **members):
    """An environment whose calls of `reset`, of all episodes together, have these outcomes in turn."""

    def reset(self, task):
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    return broken((1.0, True), reset=reset, **members)


FAILED = {
    "step: no result after 0.5 s": lambda: broken(lambda response: time.sleep(3)),
    "step: no result after 0.5 s ": lambda: broken(never),
    "step raised ConnectionResetError: gone": lambda: broken(lambda r: _raise(ConnectionResetError("gone"))),
    "step raised HTTPError: HTTP Error 503: busy": lambda: broken(
        lambda r: _raise(HTTPError("", 503, "busy", {}, None))
    ),
    "reset raised KeyError: 'answer'": lambda: broken((1.0, True), reset=lambda self, task: task["answer"]),
    "reset: no result after 0.5 s": lambda: broken((1.0, True), reset=lambda self, task: time.sleep(3)),
    "reset, row 1: messages of": lambda: broken(
        (1.0, True), reset=lambda self, task: [{"role": "user", "content": "x" * 5000}]
    ),
}


def _raise(error):
    raise error


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("expected", FAILED)
def test_a_failure_that_may_pass_costs_its_sample_only(expected, lockstep, monkeypatch):
    monkeypatch.setattr(episodes, "PAUSES", (0.01, 0.02))
    samples = run_one(FAILED[expected](), timeout=0.5, lockstep=lockstep)
    for sample in samples:
        assert sample.failed.startswith("--env x.py: ") and expected.strip() in sample.failed, sample.failed
        assert math.isnan(sample.score) and len(sample.log_probs) == len(sample.generated()) > 0 and sample.prompt_ids
        assert read_back(sample).failed == sample.failed


def read_back(sample):
    return sample_of(json.loads(json.dumps(as_row(sample, 0, None), allow_nan=False)))


@pytest.mark.parametrize("lockstep", [False, True])
def test_reset_is_tried_three_times_with_a_new_environment_each_time(lockstep, monkeypatch):
    monkeypatch.setattr(episodes, "PAUSES", (0.01, 0.02))
    made, closed, hurt = [], [], ConnectionRefusedError("down")
    members = {"__init__": lambda self: made.append(self), "close": lambda self: closed.append(self)}
    outcomes = [hurt] * 4 + [ASKED, hurt]  # of two episodes: both fail twice, then one goes well
    good, bad = sorted(run_one(beginnings(outcomes, **members), lockstep=lockstep), key=lambda s: bool(s.failed))
    assert (good.score, good.failed) == (1.0, "") and "reset raised ConnectionRefusedError: down" in bad.failed
    assert not outcomes and len(made) == 6 and set(map(id, closed)) == set(map(id, made)) and len(closed) == 6


@pytest.mark.parametrize("lockstep", [False, True])
def test_after_an_error_every_environment_is_closed(lockstep):
    made, closed = [], []

    def step(response):
        if len(made) == 2:
            made.append("error")
            raise ZeroDivisionError
        return [{"role": "user", "content": "more"}]

    members = {"__init__": lambda self: made.append(self), "close": lambda self: closed.append(self)}
    with pytest.raises(UserError, match="ZeroDivisionError"):
        run_one(broken(step, **members), lockstep=lockstep)
    assert len(closed) == 2


def test_calls_that_hang_hold_up_no_others():
    """With one call at a time: the threads of hanging calls are no longer counted."""
    call = Caller("--env x.py", 0.2, 1)
    found = call("step", [lambda: time.sleep(5), lambda: time.sleep(5), lambda: 7])
    assert [isinstance(value, Failed) for value in found] == [True, True, False] and found[2] == 7


def test_an_async_call_that_blocks_all_others_ends_the_run(monkeypatch):
    monkeypatch.setattr(environments_module, "SPARE_SECONDS", 0.1)

    async def blocks():
        time.sleep(2)

    with pytest.raises(UserError, match="step: no result after"):
        Caller("--env x.py", 0.2, 4)("step", [blocks, lambda: 7])


def test_what_an_environment_may_do():
    closed = []
    ended = run_one(broken((2, True), close=lambda self: closed.append(1)))
    assert [sample.score for sample in ended] == [2.0, 2.0] and len(closed) == 2
    assert all(sample.finished and len(sample.turns) == 1 for sample in ended)
    endless = run_one(broken(lambda r: [{"role": "user", "content": "more"}]), turns=3)
    assert all(len(sample.turns) == 3 and sample.score == 0 and not sample.finished for sample in endless)
    tasks = []

    def reset(self, task):
        tasks.append(task)
        task["nested"].append(2)
        return ASKED

    run_one(broken((1, True), reset=reset))
    assert tasks == [{"sum": 5, "nested": [1, 2]}] * 2, "each one has its own copy of the row"


def test_an_environment_knows_how_many_turns_are_left_and_the_model_reads_of_the_last_one():
    left = []
    make = broken(lambda response: left.append(response.turns_left) or [{"role": "user", "content": "more"}])
    for sample in run_one(make, turns=3, last_turn_text="Answer now.", lockstep=True):
        *_, first, last = byte_tokenizer("qwen3").decode(sample.response_ids).split("user\n")
        assert first.startswith("more<|im_end|>") and last.startswith("more\n\nAnswer now.<|im_end|>")
    assert left == [2, 2, 1, 1, 0, 0]


DIGITS = "0123456789" * 100  # of one token each


def answers_with(text):
    return broken(lambda response: [{"role": "user", "content": text}])


@pytest.mark.parametrize("keep, most", [("start", None), ("end", None), ("both", None), ("start", 100)])
def test_a_long_answer_is_cut_to_half_of_the_room_or_to_its_limit(keep, most):
    """Every character of it is one token, so the number of those that are kept is known beforehand."""
    tokenizer = byte_tokenizer("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    nothing = continuation_ids(tokenizer, ASKED, [{"role": "user", "content": LEFT_OUT}], stop_token=end)
    for sample in run_one(answers_with(DIGITS), long_answers=LongAnswers(keep, most)):
        (_, first), (second, _) = sample.turns
        kept = min((400 - first) // 2, most or 400) - len(nothing)
        start = {"start": kept, "end": 0, "both": kept - kept // 2}[keep]
        shown = DIGITS[:start] + LEFT_OUT + DIGITS[len(DIGITS) - (kept - start) :]
        expected = continuation_ids(tokenizer, ASKED, [{"role": "user", "content": shown}], stop_token=end)
        assert sample.response_ids[first:second] == expected and len(expected) == len(nothing) + kept
        assert sample.end == "turns" and sample.metrics == {"answers_cut": 1.0}


def test_the_cause_of_each_end_is_recorded():
    unfinished = Script([[65]])
    unfinished.generate = lambda prompts, *_: [Completion([65], [-1.0], False) for _ in prompts]
    tokenizer = byte_tokenizer("qwen3")
    [cut] = generate_episodes(
        environments(answers_with("more"), tokenizer),
        unfinished,
        [PROMPT],
        1,
        sampling_of(tokenizer, "qwen3"),
        seed=0,
        rollout=0,
    )
    found = {
        "done": run_one(broken((1.0, True)))[0],
        "turns": run_one(answers_with("more"))[0],
        "answer": run_one(answers_with(DIGITS))[0],
        "tokens": cut,
        "lost": run_one(broken(Step()))[0],
    }
    assert {sample.end: name for name, sample in found.items()} == {end: end for end in ENDS}
    assert [name for name, sample in found.items() if sample.finished] == ["done"]
    assert all(read_back(sample).end == name for name, sample in found.items())
    facts = sample_facts([replace(found[name], score=1.0) for name in ("done", "turns", "turns", "lost")])
    assert {name: facts[name] for name in facts if name.startswith("end_")} == {
        "end_done": 0.25,
        "end_lost": 0.25,
        "end_turns": 0.5,
    }
    # an answer beyond its limit ends the episode too, however much room there is
    assert run_one(answers_with(DIGITS[:50]), long_answers=LongAnswers("none", 40))[0].end == "answer"


@pytest.mark.parametrize(
    "arguments, by_name, expected",
    [
        (("a.py", None), False, {"": Source("a.py")}),
        (("a.py:Game", "{size: 3, name: x}"), False, {"": Source("a.py:Game", {"size": 3, "name": "x"})}),
        (("a=x.py, b=y:Z", '{"b": {"k": [1]}}'), True, {"a": Source("x.py"), "b": Source("y:Z", {"k": [1]})}),
        (("a.py", None), True, "NAME=FILE"),
        (("a=x.py,a=y.py", None), True, "NAME=FILE"),
        (("a=x.py", "{c: {}}"), True, "no environment c in --env"),
        (("a=x.py", "{a: 3}"), True, "a: 3"),
        (("a.py", "[1]"), False, "--env_args: [1] (allowed: a mapping"),
        (("a.py", "{a: 2020-01-01}"), False, "not JSON serializable"),
        (("a.py", "{a: "), False, "--env_args: {a: : while parsing"),
    ],
)
def test_several_environments_and_their_arguments(arguments, by_name, expected):
    if isinstance(expected, dict):
        assert read_sources(*arguments, by_name) == expected
        return
    with pytest.raises(UserError) as error:
        read_sources(*arguments, by_name)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_arguments_that_an_environment_does_not_take_are_refused_before_the_run(tmp_path):
    body = "    def reset(self, task): pass\n    def step(self, response): pass\n"
    (tmp_path / "sized.py").write_text(f"class Environment:\n    def __init__(self, size): self.size = size\n{body}")
    name = str(tmp_path / "sized.py")
    Source(name, {"size": 3}).check()
    assert Source(name, {"size": 3}).make().size == 3
    for arguments in ({}, {"size": 3, "other": 4}):
        with pytest.raises(UserError, match="--env_args: "):
            Source(name, arguments).check()


def test_an_environment_in_the_form_of_gymnasium():
    class Guess:
        def reset(self, *, seed=None, options=None):
            self.left = options["sum"] - 3
            return f"{self.left} left", {}

        def step(self, action):
            self.left -= 1
            return f"{self.left} left", 0.5, self.left == 0, False, {"heard": action}

    for sample in run_one(Guess, turns=4):
        assert sample.score == 1.0 and sample.finished and len(sample.turns) == 2
        text = byte_tokenizer("qwen3").decode(sample.prompt_ids + sample.response_ids)
        assert text.count("<|im_start|>user\n2 left<|im_end|>") == text.count("<|im_start|>user\n1 left<|im_end|>") == 1


def test_tools_that_an_async_reset_finds():
    class Late:
        async def reset(self, task):
            self.tools = TOOLS
            return ASKED

        def step(self, response):
            return 1, True

    assert "Add two numbers." in byte_tokenizer("qwen3").decode(run_one(Late)[0].prompt_ids)


def test_where_environments_come_from(tmp_path):
    path = tmp_path / "env.py"
    text = "class Environment:\n    def reset(self, task): pass\n    def step(self, response): pass\nOTHER = 3\n"
    path.write_text(text + "def other(): return Environment()\n")
    assert (
        load_environment(str(path)).__name__ == "Environment" and load_environment(f"{path}:other").__name__ == "other"
    )
    for name, expected in {
        f"{path}:OTHER": "has no OTHER",
        str(tmp_path / "no.py"): "is no file",
        "no_such_module_anywhere": "is no file",
        "json": "has no Environment or make_environment",
        "json:JSONDecoder": "has no method reset",
    }.items():
        with pytest.raises(UserError, match=expected):
            load_environment(name)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"cannot be imported: ZeroDivisionError: .*line 1"):
        load_environment(str(tmp_path / "broken.py"))


def test_calls_of_tools_are_read_from_the_formats_of_models():
    call = {"name": "add", "arguments": ARGUMENTS}
    for texts in TURNS.values():
        assert tool_calls(texts[0]) == [call] and tool_calls(texts[1]) == []
    constrained = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}<|call|>'
    assert tool_calls("<|channel|>analysis<|message|>Hm {}<|end|><|start|>assistant" + constrained) == [call]
    two = '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b"}</tool_call><tool_call>{</tool_call>'
    *good, malformed = tool_calls(two)
    assert [found["name"] for found in good] == ["a", "b"] and "not valid JSON" in malformed["error"]
    assert tool_calls('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]</s>') == [call]
    assert tool_calls('<|python_tag|>{"name": "add", "parameters": "{\\"a\\": 2, \\"b\\": 3}"}<|eom_id|>') == [call]


@given(st.text())
def test_no_text_breaks_the_reading_of_calls(text):
    assert isinstance(tool_calls(f"<tool_call>{text}</tool_call>{text}"), list)


def test_frozen_rollouts_with_turns_that_do_not_fit_are_refused(tmp_path):
    sample = Sample(0, 0, [1], [2, 3, 4, 5], [-1.0, -1.0], True, None, score=1.0, turns=[[0, 1], [3, 4]])
    assert sample.generated() == [0, 3]
    row = as_row(sample, 0, None)
    file = tmp_path / "rollouts.jsonl"
    for turns, good in (([[0, 1], [3, 4]], True), ([[0, 1]], False), ([[0, 1], [3, 9]], False)):
        file.write_text(json.dumps(row | {"turns": turns}) + "\n")
        if good:
            assert read_rollouts(str(file)) == [[sample]]
        else:
            with pytest.raises(UserError, match="line 1"):
                read_rollouts(str(file))


class Waiter:
    """Calls of very different times, as those of tools over a network. `scale` 0: all at once."""

    scale, turns = 1.0, 6

    def reset(self, task):
        self.turn, self.delays = 0, iter(())
        return ASKED

    async def step(self, response):
        if not self.turn:  # only now it is known which episode this is
            self.delays = iter(delays_of(int(response.raw[:2])))
        self.turn += 1
        await asyncio.sleep(self.scale * next(self.delays))
        if self.turn == self.turns:
            return len(response) / 8, True
        return [{"role": "user", "content": f"{self.turn}: {response[:9]}"}], 0.5, False


def delays_of(number: int) -> list[float]:
    numbers = random.Random(number)
    return [numbers.expovariate(1 / 0.3) for _ in range(Waiter.turns)]


class Talkative:
    """An engine whose tokens depend on the tokens before and on the seed, as those of a model do."""

    ranks_per_engine = 1

    def __init__(self, tokenizer):
        self.tokenizer, self.sizes = tokenizer, []

    def generate(self, prompts, sampling, seeds, limits):
        time.sleep(0.01)
        self.sizes.append(len(prompts))
        found = []
        for prompt, seed in zip(prompts, seeds):
            text = f"{seed % 32:02d} {hash((tuple(prompt), seed)) % 10**6}" + "x" * (seed % 5)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            found.append(Completion([*ids, self.tokenizer.eos_token_id], [-1.0 / len(ids)] * (len(ids) + 1), True))
        return found


def test_an_episode_does_not_wait_for_others(monkeypatch):
    """The time is that of the slowest episode alone, and the samples are those of the lockstep."""
    tokenizer = byte_tokenizer("qwen3")
    prompts, sampling = [{**PROMPT, "row": row} for row in range(32)], sampling_of(tokenizer, "qwen3", most=2000)
    made = environments(Waiter, tokenizer, max_turns=8)
    call = Caller("--env x.py", 20.0, 64)
    freely, together = (replace(made, call=call, lockstep=lockstep) for lockstep in (False, True))
    slowest = max(sum(delays_of(number)) for number in range(32))
    for _ in range(3):  # a busy machine may hold up a try
        engine, started = Talkative(tokenizer), time.monotonic()
        samples = generate_episodes(freely, engine, prompts, 1, sampling, seed=5, rollout=2)
        seconds = time.monotonic() - started
        if seconds < 1.2 * slowest:
            break
    assert seconds < 1.2 * slowest, f"{seconds:.2f} s; the slowest alone {slowest:.2f} s"
    assert sum(engine.sizes) == 32 * 6 and len(engine.sizes) > 6
    monkeypatch.setattr(Waiter, "scale", 0.0)
    expected = generate_episodes(together, Talkative(tokenizer), prompts, 1, sampling, seed=5, rollout=2)
    assert samples == expected and all(len(sample.turns) == 6 and sample.finished for sample in samples)
    quick = Talkative(tokenizer)
    assert generate_episodes(freely, quick, prompts, 1, sampling, seed=5, rollout=2) == expected
    assert len(quick.sizes) < 32, "episodes that are ready soon after the first one share its batch"


def test_an_error_of_one_episode_ends_all_of_them(monkeypatch):
    class Odd(Waiter):
        async def step(self, response):
            return 1 / (int(response.raw[:2]) % 4), True

    tokenizer = byte_tokenizer("qwen3")
    for lockstep in (False, True):
        made = replace(environments(Odd, tokenizer), lockstep=lockstep)
        with pytest.raises(UserError, match="step raised ZeroDivisionError"):
            generate_episodes(
                made, Talkative(tokenizer), [PROMPT] * 8, 1, sampling_of(tokenizer, "qwen3"), seed=0, rollout=0
            )
