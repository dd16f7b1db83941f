"""Histories that an environment replaces: the engine reads the new one only, and each generated token is trained once."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from conversations import ASKED, TOOLS, TURNS, Script, byte_tokenizer, environments, sampling_of

from trainer.datasets.batches.packing import IGNORE
from trainer.errors import UserError
from trainer.rollout.envs.env_process import ProcessEnvironment
from trainer.rollout.envs.environments import History, Source, read_step
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.long_answers import LongAnswers
from trainer.rollout.envs.one_episode import ANSWER, DONE
from trainer.rollout.micro_batches import SampleSet, collate_samples
from trainer.rollout.rollouts_file import as_row, read_rollouts

pytestmark = pytest.mark.usefixtures("world")

SEARCH = [{"type": "function", "function": {"name": "search", "description": "Find texts.", "parameters": {}}}]
FOR_AGENT = [{"role": "system", "content": "You search."}, {"role": "user", "content": "Find the rule of sums. " * 60}]
COMPACT = [*ASKED, {"role": "assistant", "content": "I asked."}, {"role": "user", "content": "Found: 2 + 3 = 5."}]
MORE = {"role": "user", "content": "Think again."}
PROMPT = {"row": 0, "label": None, "prompt_ids": [1]}
# the second turn grows, the third is of a sub-agent with another tool, the fourth reads a shortened history
RESEARCHER = f"""
from trainer.rollout.envs.environments import History

class Environment:
    tools = {TOOLS!r}

    def reset(self, task):
        self.turn = 0
        return {ASKED!r}

    def step(self, response):
        self.turn += 1
        self.tools = {SEARCH!r} if self.turn == 2 else {TOOLS!r}
        history = {{2: {FOR_AGENT!r}, 3: {COMPACT!r}}}.get(self.turn)
        return (1.0, True) if self.turn == 4 else [{MORE!r}] if history is None else (History(history), 0.5)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("histories") / "researcher.py"
    path.write_text(RESEARCHER)
    return Source(str(path))


def play(make, name="qwen3", most=3000, **options):
    """(the sample, the texts that the engine read, the ids of a turn)."""
    tokenizer = byte_tokenizer(name)
    turn = tokenizer(TURNS[name][1])["input_ids"]
    engine = Script([turn] * 9)
    envs = replace(environments(make, tokenizer, max_turns=6, timeout=65.0), **options)
    [sample] = generate_episodes(envs, engine, [PROMPT], 1, sampling_of(tokenizer, name, most), seed=0, rollout=0)
    return sample, [read for [read], _, _ in engine.asked], turn


def prompt_of(name: str, messages: list[dict], tools: list[dict]) -> list[int]:
    tokenizer = byte_tokenizer(name)
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("name", TURNS)
def test_the_engine_reads_the_newest_history_and_every_turn_is_trained_once(name, lockstep, source):
    sample, read, turn = play(source.make, name, lockstep=lockstep)
    opening = prompt_of(name, ASKED, TOOLS)
    assert read[0] == opening and read[1][: len(opening) + len(turn)] == opening + turn
    assert read[2:] == [prompt_of(name, FOR_AGENT, SEARCH), prompt_of(name, COMPACT, TOOLS)]
    assert sample.end == DONE and sample.score == 2.0 and sample.turn_rewards == [0.0, 0.5, 0.5, 1.0]
    texts = [read[1] + turn, read[2] + turn, read[3] + turn]
    assert sample.prompt_ids + sample.response_ids == [*texts[0], *texts[1], *texts[2]]
    assert sample.starts == [end for _, end in sample.turns[1:3]] and sample.size().histories == 3
    row = SampleSet([sample], "token", 3000)[0]
    for packed in (False, True):
        batch = collate_samples([row, row | {"number": 1, "offset": row["response_length"]}], 0, packed)
        bounds = batch["cu_seqlens"].tolist() if packed else []
        rows = [batch["input_ids"][0, i:j] for i, j in pairwise(bounds)] if packed else batch["input_ids"]
        assert [ids.tolist()[: len(text)] for ids, text in zip(rows, texts * 2, strict=True)] == texts * 2
        places = [batch["position_ids"][0, i:j] for i, j in pairwise(bounds)] if packed else batch["position_ids"]
        assert all(ids.tolist() == list(range(len(ids))) for ids in places)
        trained = batch["labels"] != IGNORE
        assert batch["labels"][trained].tolist() == turn * 8
        assert batch["response_index"][trained].tolist() == list(range(8 * len(turn)))
        assert batch["sequence_ids"][trained].tolist() == [0] * 4 * len(turn) + [1] * 4 * len(turn)
        assert ((batch["loss_weights"] > 0) == trained).all() and batch["is_last"].sum() == 2


def test_a_sandbox_gives_histories_and_their_tools_too(source):
    here, read_here, _ = play(source.make)
    sandboxed, read, _ = play(lambda: ProcessEnvironment(source, 2048, 60.0))
    assert read == read_here and sandboxed.starts == here.starts
    assert sandboxed.response_ids == here.response_ids and sandboxed.turn_rewards == here.turn_rewards


def test_a_history_without_room_ends_the_episode_or_is_cut(source):
    whole, read, _ = play(source.make)
    room = whole.starts[0] + len(read[2])  # no token left for the turn
    sample, _, _ = play(source.make, most=room)
    assert sample.end == ANSWER and sample.starts == [] and len(sample.turns) == 2
    sample, read, _ = play(source.make, most=room, long_answers=LongAnswers("start"))
    assert sample.starts[0] == whole.starts[0] and sample.end == DONE
    assert "[...]" in byte_tokenizer("qwen3").decode(read[2])


def test_rollouts_keep_histories(source, tmp_path):
    sample, _, _ = play(source.make)
    path, row = tmp_path / "rollouts.jsonl", as_row(sample, 0, None)
    path.write_text(json.dumps(row) + "\n")
    assert read_rollouts(str(path)) == [[sample]]
    for starts in ([0], sample.starts[::-1], sample.starts[:1] * 2, [sample.starts[0] + 1], ["x"], 3):
        path.write_text(json.dumps(row | {"starts": starts}) + "\n")
        with pytest.raises(UserError, match="line 1"):
            read_rollouts(str(path))


def test_a_history_ends_with_a_message_that_the_model_answers():
    for messages in ([], [*ASKED, {"role": "assistant", "content": "5"}], [{"content": "no role"}]):
        with pytest.raises(UserError):
            read_step((History(messages), 0.5))
    assert read_step(History(COMPACT)).messages == COMPACT
