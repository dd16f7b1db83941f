"""Tokens stay with the rank that generated them, then go to the ranks that train them: what they send, hold and compute.

Ranks are real processes with gloo. Each generates six samples, whatever their number, with an engine that draws token ids
from its seed. So the tokens per rank are about the same at 2, 4 and 8 ranks, and so must be the bytes that it sends.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launch import forked

from trainer.datasets.batches.global_batches import GlobalBatchLoader
from trainer.distributed.mesh import build_meshes, start_process_group
from trainer.distributed.mesh_sizes import resolve_mesh_sizes
from trainer.methods import advantages as adv
from trainer.rollout import placement
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.generation import generate_samples
from trainer.rollout.micro_batches import SampleSet
from trainer.rollout.rollouts_file import RolloutsLog, as_row, read_rollouts
from trainer.rollout.samples import Sample
from trainer.rollout.scoring import TextScores, score_by_texts

EACH, GROUP = 6, 3
SPLIT = 4  # samples of a group of which ranks have parts


class DrawingEngine:
    def __init__(self, ranks_per_engine: int = 1):
        self.ranks_per_engine = ranks_per_engine

    def generate(self, prompts, sampling, seeds):
        found = []
        for seed in seeds:
            numbers = random.Random(seed)
            ids = [numbers.randrange(60000) for _ in range(numbers.randint(200, 400))]
            log_probs = torch.tensor([-numbers.random() for _ in ids]).tolist()  # fp32 numbers
            found.append(Completion(ids, log_probs, True, [[i, i + 1] for i in ids[:2]]))
        return found


class Words:
    """A tokenizer for people: a number is a word."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))

    def convert_ids_to_tokens(self, ids):
        return [str(id) for id in ids]


def whole_rollout(num_ranks: int) -> list:
    prompts = [{"prompt_ids": [7] * (20 + n), "row": n, "label": str(n)} for n in range(num_ranks * EACH // GROUP)]
    return generate_samples(DrawingEngine(), prompts, GROUP, Sampling(1.0, 400, ()), seed=1, rollout=0)


def reward(prompts, responses, labels, finished, columns):
    return [float(len(response) % 13) for response in responses], {}


def longest_of_group(prompts, responses, labels, finished, columns):
    """A reward that compares the responses of a group: how many of the others are shorter."""
    groups, lengths = columns["groups"], [len(response) for response in responses]
    assert all(groups.count(group) == SPLIT for group in groups) and all(label.isdigit() for label in labels)
    assert all(prompt.startswith("7 7") and response for prompt, response in zip(prompts, responses))
    pairs = [*zip(groups, lengths)]
    return [float(sum(other < own for group, other in pairs if group == mine)) for mine, own in pairs], {}


def advantages_of(samples: list, strategy) -> torch.Tensor:
    """Whitened advantages of the tokens of `samples` that are here, flat."""
    part = placement.Part(strategy, samples, None)
    mask = adv.rows_mask(part.lengths, part.width)
    scores = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
    log_probs = torch.tensor([p for s in part.samples for p in s.log_probs], dtype=torch.float64)
    options = adv.AdvantageOptions("reinforce_baseline", GROUP, gamma=0.99)
    penalty = adv.to_rows(log_probs, mask)
    found, _ = adv.estimate_advantages(
        options, scores, mask, penalty, places=part.places, total=lambda sums: part.share(sums).sum()
    )
    return found[mask]


def one_rank(folder: Path, tp: int) -> None:
    start_process_group(torch.device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = resolve_mesh_sizes(world, tp=tp)
    meshes = build_meshes(sizes, torch.device("cpu"))
    sent = {"moved": 0, "written": 0}
    exchange, send = dist.all_to_all_single, dist.send

    def counted_exchange(output, input, coming=None, sizes=None, **options):
        if sizes:  # not the exchange of the sizes themselves, 8 bytes for each rank
            sent["moved"] += sum(sizes) - sizes[rank]
        return exchange(output, input, coming, sizes, **options)

    def counted_send(tensor, *arguments, **options):
        sent["written"] += tensor.nbytes
        return send(tensor, *arguments, **options)

    dist.all_to_all_single, dist.send = counted_exchange, counted_send
    samples = whole_rollout(world)
    score_by_texts(TextScores(longest_of_group, Words(), (), frozenset({"groups"})), samples, SPLIT)
    by_group, sent["moved"] = [sample.score for sample in samples], 0
    score_by_texts(TextScores(reward, Words(), ()), samples)
    generated = sum(sample.size().tokens for sample in samples if sample.held.here)
    RolloutsLog(str(folder), Words()).write(0, samples, "link")
    options = {"batch_size": len(samples) // 2, "micro_batch_size": 1, "max_tokens": 900}
    plan = GlobalBatchLoader(SampleSet(samples, "token", 400), list, **options, dp_size=sizes.dp)
    places = placement.trained_by(meshes, plan)
    samples = placement.move(samples, places)
    assert [n for n, sample in enumerate(samples) if sample.held.here] == places[rank]
    held = sum(len(s.prompt_ids) + len(s.response_ids) + len(s.log_probs) for s in samples)

    def all_reduce(tensor):
        dist.all_reduce(tensor, group=meshes.loss.get_group())
        return tensor

    found = advantages_of(samples, SimpleNamespace(device=torch.device("cpu"), all_reduce=all_reduce))
    torch.save(
        {"places": places[rank], "samples": samples, "advantages": found, "held": held, "generated": generated, **sent}
        | {"by_group": by_group},
        folder / f"{rank}.pt",
    )
    dist.barrier()


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """{(ranks, tp): (what each rank found, the rollout as one process has it)}."""
    found = {}
    for ranks, tp in ((2, 1), (4, 1), (8, 1), (4, 2)):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}-{tp}")
        code, output = forked(ranks, __file__, str(folder), str(tp), timeout=100)
        assert code == 0, output[-3000:]
        start_process_group(torch.device("cpu"))
        whole = whole_rollout(ranks)
        score_by_texts(TextScores(longest_of_group, Words(), (), frozenset({"groups"})), whole, SPLIT)
        of_ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
        assert [sample.score for sample in whole] == of_ranks[0]["by_group"]
        score_by_texts(TextScores(reward, Words(), ()), whole)
        dist.destroy_process_group()
        found[ranks, tp] = of_ranks, whole, folder
    return found


def test_a_reward_gets_whole_groups_wherever_their_samples_are(launches):
    """On 2, 4 and 8 ranks each rank has the scores of one rank, which are those of a plain loop."""
    for of_ranks, whole, _ in launches.values():
        texts = [Words().decode(sample.response_ids) for sample in whole]
        groups = [texts[start : start + SPLIT] for start in range(0, len(texts), SPLIT)]
        expected = [float(sum(len(other) < len(own) for other in group)) for group in groups for own in group]
        assert len(set(expected)) > 1 and all(found["by_group"] == expected for found in of_ranks)


def test_each_sample_is_on_the_ranks_that_train_it_and_whole(launches):
    for (ranks, tp), (of_ranks, whole, folder) in launches.items():
        assert sorted(n for found in of_ranks for n in found["places"]) == sorted(list(range(len(whole))) * tp)
        for found in of_ranks:
            for n, (sample, expected) in enumerate(zip(found["samples"], whole)):
                assert (sample.score, sample.size()) == (expected.score, expected.size())
                if sample.held.here:
                    assert sample == expected or sample.label is None, (ranks, tp, n)
                    assert (sample.prompt_ids, sample.response_ids) == (expected.prompt_ids, expected.response_ids)
                    assert (sample.log_probs, sample.kept_ids) == (expected.log_probs, expected.kept_ids)
                else:
                    assert not (sample.prompt_ids or sample.response_ids or sample.log_probs or sample.kept_ids)
        with open(folder / "rollouts.jsonl") as file:
            rows = [json.loads(line) for line in file]
        assert [row["number"] for row in rows] == list(range(len(whole)))
        assert [(row["response_ids"], row["log_probs"], row["score"], row["label"]) for row in rows] == [
            (sample.response_ids, sample.log_probs, sample.score, sample.label) for sample in whole
        ]


def test_whitened_advantages_are_the_same_numbers_on_every_layout(launches):
    strategy = SimpleNamespace(device=torch.device("cpu"), all_reduce=lambda tensor: tensor)
    for of_ranks, whole, _ in launches.values():
        expected = advantages_of(whole, strategy).split([len(sample.log_probs) for sample in whole])
        for found in of_ranks:
            assert torch.equal(found["advantages"], torch.cat([expected[n] for n in found["places"]]))


def test_what_a_rank_sends_and_holds_does_not_grow_with_the_ranks(launches):
    """Gathering all samples on all ranks would send every token to 1, 3 and 7 ranks."""
    of_size = {}
    for ranks in (2, 4, 8):
        of_ranks = launches[ranks, 1][0]
        tokens = sum(found["generated"] for found in of_ranks)
        for found in of_ranks:
            # 4 bytes for an id and 4 for a log-prob, the sets of two tokens, and what is there once for each sample
            assert max(found["moved"], found["written"]) <= 8 * found["generated"] + 6 * 700
        of_size[ranks] = {
            "moved": sum(found["moved"] for found in of_ranks) / tokens,
            "written": sum(found["written"] for found in of_ranks[1:]) / sum(f["generated"] for f in of_ranks[1:]),
            "held": max(found["held"] for found in of_ranks),
        }
    for name, bound in (("moved", 10), ("written", 10), ("held", 6 * 820)):
        assert max(found[name] for found in of_size.values()) <= bound, of_size


def test_the_ranks_of_an_engine_share_its_samples(monkeypatch):
    """Two ranks of one engine get the same completions. Each keeps a half; no other rank gets them."""
    kept = []
    monkeypatch.setattr("trainer.rollout.generation.share", lambda mine: kept.append([s.number for s in mine]))
    monkeypatch.setattr("trainer.rollout.generation.gather_objects", lambda problem: [problem] * 4)
    prompts = [{"prompt_ids": [1], "row": 0, "label": None}]
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        generate_samples(DrawingEngine(2), prompts, 7, Sampling(1.0, 400, ()), seed=1, rollout=0)
    assert kept == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_rollout_from_a_file_needs_no_message(tmp_path, monkeypatch):
    samples = [Sample(n, n, [1, 2], [3 + n], [-0.5], True, "x", 1.0) for n in range(3)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(as_row(sample, 0, Words())) + "\n" for sample in samples))
    [read] = read_rollouts(str(path))
    assert read == samples and all(sample.held.here and sample.held.by is None for sample in read)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    moved = placement.move(read, [[0, 2]])
    assert [sample.held.here for sample in moved] == [True, False, True] and moved[2] == samples[2]
    assert all(sample.held.here for sample in read), "the rollout of the file stays as it is"


if __name__ == "__main__":  # a rank
    one_rank(Path(sys.argv[1]), int(sys.argv[2]))
