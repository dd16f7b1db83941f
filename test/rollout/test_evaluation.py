"""Evaluation: pass@k against its definition, groups, and the same answers on every layout."""

import itertools
import json
import statistics

import pytest
from launch import forked, read_rows, train_many
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.evaluation import Evaluation, groups_of
from trainer.rollout.samples import Sample
from trainer.rollout.shares import QUANTILE, mean_and_interval, pass_at, sizes_of_pass
from trainer.runs.rl.evaluation_checks import checked
from trainer.runs.rl.evaluation_run import notes_of


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


# --- the command


def test_intervals():
    """Wilson's ends solve (p - share)^2 = z^2 p (1 - p) / n. A bootstrap is near the normal interval of many values."""
    found = mean_and_interval([1.0] * 7 + [0.0] * 13)
    for end in (found.low, found.high):
        assert (end - 0.35) ** 2 == pytest.approx(QUANTILE**2 * end * (1 - end) / 20)
    assert found.interval == "wilson" and mean_and_interval([0.0] * 5).low == 0.0 < mean_and_interval([0.0] * 5).high
    values = [n % 10 / 10 for n in range(400)]
    found, half = mean_and_interval(values), QUANTILE * statistics.pstdev(values) / 20
    assert found.interval == "bootstrap" and found == mean_and_interval(values)
    assert [found.low, found.high] == pytest.approx([0.45 - half, 0.45 + half], abs=0.004)


def test_evaluate_says_what_failed_and_what_is_not_read_as_meant():
    samples = [Sample(n, n, [1], [2], [0.0], True, None, score, failed=failed)
               for n, (score, failed) in enumerate([(2.0, ""), (-1.0, ""), (0.0, "u: 503")])]  # fmt: skip
    failed, outside = notes_of(samples, None)
    assert failed == "warning: 1 of 3 samples failed and are left out: u: 503"
    assert outside.startswith("warning: 2 of 3 scores are not from 0 to 1, which pass_at_1 take")
    graded = [Sample(n, n, [1], [2], [0.0], True, None, score) for n, score in enumerate([0.9, 0.1])]
    assert notes_of(graded, None)[0].startswith("warning: the best of 2 scores is 0.9, but pass_at_1 take 1 for right")
    assert not notes_of(graded, (0.0, 0.9))
    assert notes_of(samples[:2], (-1, 2)) == notes_of(samples[1:2], None) == []


LETTERS = """
def reward_func(prompts, responses, labels):
    return [float("e" in response[-4:]) for response in responses]
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory, shared_data):
    """An evaluation of stories260K on two ranks, greedy and fp32, and its flags."""
    folder = tmp_path_factory.mktemp("command")
    model, stories = (
        shared_data / "models/stories260K-hf",
        ("Once upon a time", "Lily saw a big", "The dog ran to", "Tom was"),
    )
    rows = [{"start": text, "kind": text[0]} for text in (*stories, "A very little")]
    (folder / "stories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.py").write_text(LETTERS)
    line = ["--pretrain", str(model), "--dataset", f"{folder}/stories.jsonl", "--input_key", "start"]
    line += ["--reward_func", f"{folder}/letters.py", "--eval_source_key", "kind", "--param_dtype", "fp32"]
    line += ["--generate_max_len", "20", "--prompt_max_len", "64", "--output_dir", str(folder / "out")]
    code, output = forked(2, "-m", "trainer.cli.evaluate", *line, timeout=120)
    assert code == 0, output[-3000:]
    return folder, model, line, output


def test_the_answers_of_evaluate_are_those_of_a_plain_loop(command):
    folder, path, _, output = command
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    rows = [json.loads(line) for line in (folder / "out/answers.jsonl").read_text().splitlines()]
    scores = []
    for row, asked in zip(rows, (folder / "stories.jsonl").read_text().splitlines(), strict=True):
        ids = tokenizer(json.loads(asked)["start"], return_tensors="pt").input_ids
        answer = model.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :].tolist()
        assert row["response_ids"] == answer
        scores.append(float("e" in tokenizer.decode(answer, skip_special_tokens=True)[-4:]))
    assert [row["score"] for row in rows] == scores and 0 < sum(scores) < 5, "the scores differ"
    found = json.loads((folder / "out/evaluation.json").read_text())
    whole = found["results"]["all"]
    assert whole["pass_at_1"]["mean"] == pytest.approx(sum(scores) / 5) and whole["prompts"] == 5
    assert found["results"]["kind/T"]["pass_at_1"]["mean"] == pytest.approx((scores[2] + scores[3]) / 2)
    assert whole["pass_at_1"]["interval"] == "wilson" and found["flags"]["eval_dataset"].endswith("stories.jsonl")
    shown = next(line for line in output.splitlines() if line.startswith("all "))
    assert f"{sum(scores) / 5:.4f} [{whole['pass_at_1']['low']:.4f}, {whole['pass_at_1']['high']:.4f}]" in shown


def test_evaluate_refuses_in_one_line(command):
    folder, _, line, _ = command
    cases = {
        f"--output_dir: {folder}/out holds another evaluation": line,
        "--eval_samples 4 without --eval_temperature": [*line, "--eval_samples", "4"],
        "--reward_func: missing": [*line[:6], "--output_dir", f"{folder}/new"],
        "--pretrain: missing": line[2:],
        "--eval_top_p: 1.5": [*line, "--eval_temperature", "1", "--eval_top_p", "1.5"],
    }
    for start, flags in cases.items():
        with pytest.raises(UserError) as error:
            checked(flags)
        assert str(error.value).startswith(start)
    with pytest.raises(UserError, match="train_sft"):
        checked([*line, "--max_len", "5"])
