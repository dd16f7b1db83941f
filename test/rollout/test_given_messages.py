"""What an environment has told the model stays. One that rewrites the history is refused, and trains nothing wrong."""

import copy

import pytest
from conversations import ASKED, TOOLS, Script, byte_tokenizer, environments, sampling_of

from trainer.errors import UserError
from trainer.rollout.envs.environments import Step
from trainer.rollout.envs.episodes import generate_episodes

pytestmark = pytest.mark.usefixtures("world")

SYSTEM, QUESTION = ASKED
MORE, SUMMARY = {"role": "user", "content": "more"}, {"role": "user", "content": "so far: nothing"}
STAY = "(allowed: only new messages, or a History, which replaces all)"


class Keeper:
    """Keeps its conversation as many environments do: a list that grows. The third turn is the last one."""

    tools = TOOLS

    def __init__(self):
        self.history, self.turn = [dict(SYSTEM), dict(QUESTION)], 0

    def reset(self, task):
        return self.history

    def step(self, response):
        self.turn += 1
        if self.turn == 3:
            self.history.clear()  # of no harm at the end
            return 1.0, True
        self.history += [{"role": "assistant", "content": str(response)}, dict(MORE)]
        return self.given()

    def given(self):
        return [self.history[-1]]


def keeper(given, **members):
    return type("Changed", (Keeper,), {"given": given, **members})


def edits(self):
    self.history[1]["content"] = "another question"
    return [dict(MORE)]


def drops(self):
    del self.history[1:]
    return [dict(MORE)]


def edits_a_later_one(self):
    if self.turn == 2:
        self.first["content"] = "forget it"
    self.first = {"role": "user", "content": "remember this"}
    return [self.first], 0.5


def other_tools(self):
    self.tools[0]["function"]["description"] = f"Multiply numbers {self.turn} times."
    return [dict(MORE)]


CHANGED, AGAIN = f"step, row 1: changes messages or tools that it gave before {STAY}", "gives the first messages again"
REWRITES = {
    "an edit": (keeper(edits), CHANGED),
    "a drop": (keeper(drops), CHANGED),
    "an edit of a later message": (keeper(edits_a_later_one), CHANGED),
    "other tools": (keeper(other_tools, tools=copy.deepcopy(TOOLS)), CHANGED),
    "the whole history": (keeper(lambda self: self.history), "gives a message of the assistant"),
    "a compaction": (keeper(lambda self: [dict(SYSTEM), dict(SUMMARY)]), f"step, row 1: {AGAIN} {STAY}"),
    "a compaction that keeps the question": (keeper(lambda self: [*ASKED, dict(SUMMARY)]), f"{AGAIN} {STAY}"),
    "no system text": (
        keeper(lambda self: [dict(QUESTION), dict(SUMMARY)], reset=lambda self, task: [dict(QUESTION)]),
        f"{AGAIN} {STAY}",
    ),
}


def play(make, lockstep=False):
    tokenizer = byte_tokenizer("qwen3")
    script = Script([tokenizer("hi<|im_end|>")["input_ids"]] * 9)
    envs = environments(make, tokenizer)
    object.__setattr__(envs, "lockstep", lockstep)
    prompt = {"row": 0, "label": None, "prompt_ids": [1]}
    [sample] = generate_episodes(envs, script, [prompt], 1, sampling_of(tokenizer, "qwen3"), seed=0, rollout=0)
    return sample, tokenizer


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("name", REWRITES)
def test_a_rewritten_history_is_one_line(name, lockstep):
    make, expected = REWRITES[name]
    with pytest.raises(UserError) as error:
        play(make, lockstep)
    assert str(error.value).startswith("--env x.py: step") and expected in str(error.value)
    assert "\n" not in str(error.value)


def used_again(self):
    self.message = getattr(self, "message", {"role": "user"})
    self.message["content"] = f"turn {self.turn}"
    return [self.message]


@pytest.mark.parametrize(
    "given",
    [Keeper.given, used_again, lambda self: [dict(QUESTION)], lambda self: [dict(MORE), dict(QUESTION)]],
    ids=["a list that grows", "an object used again", "a repeated question", "two messages"],
)
def test_an_environment_that_only_adds_goes_on(given):
    sample, tokenizer = play(keeper(given))
    assert sample.score == 1.0 and len(sample.turns) == 3
    written = tokenizer("hi<|im_end|>")["input_ids"]
    assert [sample.response_ids[start:end] for start, end in sample.turns] == [written] * 3


def test_a_sandbox_that_rewrites_loses_its_episode_only():
    class Sandbox(Keeper):
        def lose(self):
            return Step()

    sample, _ = play(type("Rewrites", (Sandbox,), {"given": lambda self: [dict(SYSTEM), dict(SUMMARY)]}))
    assert sample.end == "lost" and len(sample.turns) == 1
