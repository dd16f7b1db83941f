"""Evaluation: pass@k against its definition, groups, and the same answers on every layout."""

import itertools
import json
import statistics

import pytest
from launch import read_rows, train_many

from trainer.datasets.demos.demo import make_demo
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.evaluation import Evaluation, groups_of
from trainer.rollout.samples import Sample
from trainer.rollout.shares import pass_at, sizes_of_pass


@pytest.mark.parametrize("num_right", range(7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_right):
    answers = [1] * num_right + [0] * (6 - num_right)
    for k in range(1, 7):
        subsets = list(itertools.combinations(answers, k))
        assert pass_at(k, 6, num_right) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-15)


def test_the_sizes_of_pass_are_powers_of_two_and_the_number_of_answers():
    assert [sizes_of_pass(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_results_of_groups():
    prompts = [{"groups": ["set/a", "level/1"]}, {"groups": ["set/b", "level/1"]}, {"groups": ["set/b", "level/None"]}]
    scores = [1.0, -1.0, -1.0, -1.0, 1.0, 0.5]
    samples = [Sample(n, n // 2, [1], [2], [0.0], True, None, score) for n, score in enumerate(scores)]
    evaluation = Evaluation(prompts, Sampling(1.0, 8, ()), 2, 0.5, groups_of(prompts))
    facts = evaluation.facts(samples)
    assert facts["avg_at_2"] == facts["pass_at_1"] == statistics.mean([0.5, 0, 1])
    assert facts["pass_at_2"] == pytest.approx(2 / 3) and facts["reward"] == pytest.approx(-0.5 / 6)
    assert [facts[f"pass_at_2/{name}"] for name in ("set/a", "set/b", "level/1", "level/None")] == [1, 0.5, 0.5, 1]
    assert facts["reward/set/b"] == pytest.approx((-1 + 0.75) / 2)


REWARD = """
def reward_func(prompts, responses, labels):
    return [float(len(response) % 2) for response in responses]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without updates that matter (rate 1e-12), on one rank and on two."""
    folder = tmp_path_factory.mktemp("evaluation")
    make_demo(str(folder / "demo"))
    (folder / "odd.py").write_text(REWARD)
    for name, numbers in (("one", range(3)), ("two", range(10, 15))):
        rows = [{"q": f"sort {n}", "kind": {"level": n % 2}} for n in numbers]
        rows[1]["q"] *= 60  # too long: left out, and the groups of the others stay theirs
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["train_ppo", "--pretrain", f"{folder}/demo/model", "--reward_func", f"{folder}/odd.py", "--input_key", "q"]
    line += ["--dataset", f"{folder}/one.jsonl", "--eval_dataset", f"{folder}/one.jsonl,{folder}/two.jsonl"]
    line += [
        "--eval_samples",
        "3",
        "--eval_temperature",
        "0.9",
        "--eval_top_p",
        "0.8",
        "--eval_source_key",
        "kind.level",
    ]
    line += ["--eval_steps", "1", "--max_steps", "1", "--learning_rate", "1e-12", "--param_dtype", "fp32", "--no_save"]
    line += [
        "--prompt_max_len",
        "64",
        "--generate_max_len",
        "6",
        "--rollout_batch_size",
        "2",
        "--train_batch_size",
        "4",
    ]
    line += ["--n_samples_per_prompt", "2", "--micro_train_batch_size", "2", "--advantage_estimator", "dr_grpo"]
    line += ["--best_metric_key", "eval_pass_at_3", "--save_steps", "1"]
    for ranks in (1, 2):
        train_many(ranks, [[*line, "--output_dir", str(folder / f"ranks{ranks}")]], folder, timeout=200)
    return folder


def test_an_evaluation_is_the_same_on_every_layout_and_at_every_step(runs):
    files = [runs / f"ranks{ranks}/evaluations/step_{step}.jsonl" for ranks in (1, 2) for step in (0, 1)]
    assert len({file.read_text() for file in files}) == 1
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(18)) and len({row["response"] for row in rows}) > 6
    assert rows[0].keys() >= {"prompt", "label", "finished", "response_ids", "metrics"}
    of_rows = {0: ["set/one", "kind.level/0"], 2: ["set/one", "kind.level/0"], 3: ["set/two", "kind.level/0"]}
    of_rows |= {5: ["set/two", "kind.level/0"], 6: ["set/two", "kind.level/1"], 7: ["set/two", "kind.level/0"]}
    assert all(row["groups"] == of_rows[row["row"]] for row in rows)
    assert all(row["score"] == len(row["response"]) % 2 or not row["finished"] for row in rows)


def test_the_metrics_are_those_of_the_answers(runs):
    rows = [json.loads(line) for line in (runs / "ranks2/evaluations/step_1.jsonl").read_text().splitlines()]
    [first, last] = [row for row in read_rows(runs / "ranks2") if "eval_reward" in row]
    scores = [row["score"] for row in rows]
    assert last["eval_pass_at_1"] == pytest.approx(statistics.mean(scores)) == last["eval_avg_at_3"]
    groups = [scores[at : at + 3] for at in range(0, 18, 3)]
    assert last["eval_pass_at_3"] == pytest.approx(statistics.mean(map(max, groups)))
    assert last["eval_pass_at_3/set/two"] == pytest.approx(statistics.mean(map(max, groups[2:])))
    assert first["eval_pass_at_2"] == last["eval_pass_at_2"]
