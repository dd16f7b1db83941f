"""Environments of the package `verifiers` run unchanged, token for token. Run by scripts/check_verifiers.sh."""

import pytest

pytest.importorskip("verifiers")

import torch.distributed as dist
import verifiers as vf
from conversations import TURNS, Script, byte_tokenizer, environments, sampling_of
from datasets import Dataset

from trainer.datasets.samples.prompts import COLUMN
from trainer.errors import UserError
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.verifiers_env import from_verifiers


@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def play(env, tokenizer, name: str, texts: list[str], row: dict, max_turns: int = 4):
    """An episode in which the engine writes the texts. Returns the sample and the ids of the texts."""
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt = {"row": 0, "label": None, "prompt_ids": [1], **{COLUMN + key: value for key, value in row.items()}}
    envs, sampling = environments(from_verifiers(env), tokenizer, max_turns), sampling_of(tokenizer, name, 4000)
    [sample] = generate_episodes(envs, Script(turns), [prompt], 1, sampling, seed=0, rollout=0)
    return sample, turns


def calculator(**options):
    """Their environment with a tool, as their users write it."""

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first one
            b: the second one
        """
        return a + b

    async def right(completion, answer) -> float:
        return float(answer in completion[-1]["content"])

    data = Dataset.from_list([{"question": "How much is 2 + 3?", "answer": "5"}])
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(tools=[add], dataset=data, rubric=rubric, system_prompt="Use tools.", **options)


@pytest.mark.parametrize("name", TURNS)
def test_an_environment_with_a_tool(name):
    env, tokenizer = calculator(max_turns=4), byte_tokenizer(name)
    sample, turns = play(env, tokenizer, name, TURNS[name], env.get_dataset()[0])
    assert [sample.response_ids[start:end] for start, end in sample.turns] == turns
    assert sample.score == 1.0 and sample.finished
    assert sample.metrics == {"right": 1, "num_turns": 2, "total_tool_calls": 1, "add_calls": 1}
    text = tokenizer.decode(sample.prompt_ids + sample.response_ids)
    assert "Add two numbers." in text and "Use tools." in text and text.count("It is 5.") == 1


def test_limits_of_both_sides():
    """Theirs ends the episode with a score; ours cuts it, and then it has none."""
    tokenizer, texts = byte_tokenizer("qwen3"), [TURNS["qwen3"][0]] * 4
    env = calculator(max_turns=2)
    sample, _ = play(env, tokenizer, "qwen3", texts, env.get_dataset()[0])
    assert len(sample.turns) == 2 and sample.finished and sample.metrics["add_calls"] == 2
    env = calculator(max_turns=9)
    sample, _ = play(env, tokenizer, "qwen3", texts, env.get_dataset()[0], max_turns=3)
    assert len(sample.turns) == 3 and not sample.finished and sample.score == 0


def test_a_tool_that_fails_and_messages_that_change():
    env, tokenizer = calculator(max_turns=4), byte_tokenizer("qwen3")
    wrong = TURNS["qwen3"][0].replace('"b": 3', '"c": 3')
    sample, _ = play(env, tokenizer, "qwen3", [wrong, TURNS["qwen3"][1]], env.get_dataset()[0])
    assert sample.score == 1 and "unexpected keyword" in tokenizer.decode(sample.response_ids)
    changed = calculator(max_turns=4)

    async def shortened(state):
        asked = len(state["trajectory"]) > 0
        return [*state["prompt"][asked:], *([{"role": "user", "content": "again"}] * asked)]

    changed.get_prompt_messages = shortened
    with pytest.raises(UserError, match="step raised ValueError: the environment changes earlier messages"):
        play(changed, tokenizer, "qwen3", TURNS["qwen3"], env.get_dataset()[0])


def test_reasoning_gym():
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

    env, tokenizer = (
        ReasoningGymEnv("basic_arithmetic", num_train_examples=5, num_eval_examples=2),
        byte_tokenizer("qwen3"),
    )
    for row in env.get_dataset():
        right = env.rg_dataset[int(row["answer"])]["answer"]
        for text, score in ((right, 1.0), ("no", 0.0)):
            sample, _ = play(env, tokenizer, "qwen3", [f"<answer>{text}</answer><|im_end|>"], row)
            assert sample.score == score and sample.finished
