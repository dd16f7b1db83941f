"""Samples that an environment or a server lost: the run goes on as if they had not been sampled, up to a share."""

import contextlib
import http.server
import json
import math
import statistics
import threading
from types import SimpleNamespace

import pytest
import torch
from launch import SHORT_ROLLOUTS, read_rows, read_steps, torchrun, train_many
from plain_policy import GROUP, LENGTHS, SCORES, Table, arguments, clipped, found_loss, log_probs, make_samples

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.methods import advantages as adv
from trainer.methods.ranked_pairs import PairSet, best_and_worst
from trainer.methods.rollout_facts import group_facts, sample_facts
from trainer.models.model_loading import load_tokenizer
from trainer.rollout.evaluation import Evaluation
from trainer.rollout.rollouts_file import as_row, sample_of
from trainer.rollout.samples import Sample
from trainer.rollout.scoring import check_failed, response_text

LOST = {2, 3, 5}  # of the eight samples: half of a group, and one of the other
KEPT = [n for n in range(8) if n not in LOST]


def samples_with_losses() -> list[Sample]:
    samples = make_samples()
    for n in LOST:
        samples[n].failed, samples[n].score = "http://x: no answer", math.nan
    return samples


def whitened(of_tokens: list[list[float]]) -> list[list[float]]:
    every = [value for own in of_tokens for value in own]
    return [
        [(v - statistics.fmean(every)) / math.sqrt(statistics.pvariance(every) + 1e-8) for v in o] for o in of_tokens
    ]


def expected_advantages(estimator: str, values: torch.Tensor) -> list[list[float]]:
    """Of the tokens of each sample that is kept. Only kept samples occur in it."""
    found = []
    for n in KEPT:
        group = [SCORES[m] for m in KEPT if m // GROUP == n // GROUP]
        mean = statistics.fmean(group)
        one = {
            "group_norm": (SCORES[n] - mean) / (statistics.stdev(group) + 1e-6),
            "dr_grpo": SCORES[n] - mean,
            "reinforce_baseline": SCORES[n] - mean,
            "rloo": (SCORES[n] - mean) * len(group) / (len(group) - 1),
            "maxrl": (SCORES[n] - mean) / (mean or 1.0),
        }.get(estimator, SCORES[n])
        own = [one] * LENGTHS[n]
        if estimator == "gae":  # lambda and gamma are 1
            own = [SCORES[n] - value for value in values[sum(LENGTHS[:n]) : sum(LENGTHS[: n + 1])].tolist()]
        found.append(own)
    return whitened(found) if estimator in ("gae", "reinforce", "reinforce_baseline") else found


@pytest.mark.parametrize("loss_agg", ["token", "sequence"])
@pytest.mark.parametrize(
    "estimator", ["group_norm", "dr_grpo", "rloo", "maxrl", "reinforce", "reinforce_baseline", "gae"]
)
def test_the_loss_is_that_of_the_batch_without_them(estimator, loss_agg):
    old, policy, samples = Table(2, 0.0), Table(5, 0.3), make_samples()
    values = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    total = 0.0
    for n, advantages in zip(KEPT, expected_advantages(estimator, values)):
        ratio = (log_probs(policy, samples[n]) - log_probs(old, samples[n])).exp()
        terms = sum(clipped(r, a, 0.2, 0.2) for r, a in zip(ratio, advantages))
        total += terms / (LENGTHS[n] if loss_agg == "sequence" else 1)
    count = len(KEPT) if loss_agg == "sequence" else sum(LENGTHS[n] for n in KEPT)
    line = ["--advantage_estimator", estimator, "--policy_loss", "ppo", "--eps_clip", "0.2", "--loss_agg", loss_agg]
    found = found_loss(arguments(*line), old, policy, values=values, samples=samples_with_losses())
    assert found.item() == pytest.approx(-total.item() / count, abs=1e-9)
    found.backward()
    gradient = policy.table.grad.clone()
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    lost = {token for n in LOST for token in [samples[n].prompt_ids[-1], *samples[n].response_ids[:-1]]}
    kept = {token for n in KEPT for token in [samples[n].prompt_ids[-1], *samples[n].response_ids[:-1]]}
    assert all((gradient[token] == 0).all() for token in lost - kept)


def test_a_sample_that_is_left_alone_in_its_group_has_the_advantage_0():
    scores = torch.tensor([2.0, math.nan, math.nan, math.nan, 1.0, 3.0], dtype=torch.float64)
    for name in adv.GROUP_ESTIMATORS:
        found = adv.compare_in_groups(scores, name, 3)
        assert found[:4].tolist() == [0, 0, 0, 0] and found[4] < 0 < found[5]
    assert adv.groups_in_range(scores, 3, 0.0, 4.0).tolist() == [False, True]
    moments, whole = adv.RunningMoments(), adv.RunningMoments()
    moments.update(scores)
    whole.update(scores[~scores.isnan()])
    assert moments == whole


def test_metrics_pairs_evaluations_and_files_know_them():
    samples = samples_with_losses()
    scores = [SCORES[n] for n in KEPT]
    facts = sample_facts(samples)
    assert facts["reward"] == pytest.approx(statistics.fmean(scores)) and facts["failed_fraction"] == 3 / 8
    assert facts["reward_std"] == pytest.approx(statistics.pstdev(scores))
    assert facts["response_length"] == statistics.fmean(LENGTHS[n] for n in KEPT)
    options = SimpleNamespace(advantages=adv.AdvantageOptions("rloo", GROUP), reward_range=None)
    assert group_facts(samples, options) == {"groups_all_right": 0, "groups_all_wrong": 0, "groups_equal": 0}
    pairs = best_and_worst(samples, GROUP)
    assert pairs == [(0, 1), (6, 4)]
    for sample in samples[:GROUP]:
        sample.failed = "gone"
    lost = PairSet(samples, best_and_worst(samples, GROUP))
    assert (lost["num_loss_tokens"], lost["margin"]) == ([0, 1], [0.0, 1.0])
    row = json.loads(json.dumps(as_row(samples[0], 0, None), allow_nan=False))
    assert row["score"] is None and sample_of(row).failed == "gone" and math.isnan(sample_of(row).score)
    evaluation = Evaluation([{}, {}], None, num_each=GROUP)
    values = evaluation.values_of(samples)
    assert values["reward"][1] == pytest.approx(1 / 3) and values["avg_at_4"][1] == values["pass_at_1"][1]
    assert values["pass_at_1"][1] == pytest.approx(1 / 3) and math.isnan(values["pass_at_4"][1])
    assert evaluation.facts(samples)["reward"] == pytest.approx(1 / 3)  # of the prompt with answers


@pytest.mark.parametrize(
    ("lost", "count", "most", "ends"),
    [
        (1, 2, 0.1, False),
        (1, 4, 0.0, True),
        (2, 8, 0.1, True),
        (2, 20, 0.1, False),
        (3, 20, 0.1, True),
        (4, 4, 1.0, True),
    ],
)
def test_a_share_ends_the_run_but_not_one_sample(lost, count, most, ends):
    samples = [Sample(n, n, [1], [2], [0.0], True, None, failed="u: 503" * (n < lost)) for n in range(count)]
    with (
        pytest.raises(UserError, match=rf"u: 503: so {lost} of {count} samples failed")
        if ends
        else contextlib.nullcontext()
    ):
        check_failed(samples, most)


# --- a server that cannot score some texts


@contextlib.contextmanager
def picky_server():
    """It answers 503 while a response has 5, 10 and so on characters, and else gives the length modulo 4."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            responses = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["responses"]
            self.send_response(503 if any(len(text) % 5 == 0 for text in responses) else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"rewards": [len(text) % 4 for text in responses]}).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


LONGEST = """
def reward_func(prompts, responses, labels, groups):
    longest = {group: max(len(r) for r, own in zip(responses, groups) if own == group) for group in groups}
    return [float(len(response) == longest[group]) for response, group in zip(responses, groups)]
"""


def test_a_run_goes_on_when_a_server_answers_503_for_some_texts(tmp_path):
    """On two ranks. The rollouts say which samples failed, and training on that file again has the same losses.

    In the same launch, a function that compares the responses of a group, which both ranks have parts of.
    """
    (tmp_path / "longest.py").write_text(LONGEST)
    make_demo(str(tmp_path / "demo"))
    line = ["train_ppo", "--pretrain", f"{tmp_path}/demo/model", "--dataset", f"{tmp_path}/demo/prompts.jsonl"]
    line += [*SHORT_ROLLOUTS, "--max_samples", "8", "--no_save", "--n_samples_per_prompt", "4", "--max_steps", "4"]
    line += ["--train_batch_size", "8", "--micro_train_batch_size", "2"]
    line += ["--advantage_estimator", "group_norm", "--param_dtype", "fp32", "--learning_rate", "1e-3"]
    with picky_server() as url:
        asked = ["--remote_rm_url", url, "--remote_rm_retries", "0"]
        most = [*line, *asked, "--max_failed_share", "0.6"]
        own = [*most, "--output_dir", f"{tmp_path}/own"]
        ahead = [*most, "--max_staleness", "1", "--tis_cap", "2", "--output_dir", f"{tmp_path}/ahead"]
        again = [*line, "--rollouts_from", f"{tmp_path}/own/rollouts.jsonl", "--output_dir", f"{tmp_path}/again"]
        split = [
            *line,
            "--rollout_batch_size",
            "3",
            "--train_batch_size",
            "12",
            "--reward_func",
            f"{tmp_path}/longest.py",
        ]
        grouped = [*split, "--max_steps", "2", "--output_dir", f"{tmp_path}/grouped"]
        grouped_ahead = [*split, "--max_staleness", "1", "--tis_cap", "2", "--output_dir", f"{tmp_path}/grouped_ahead"]
        train_many(2, [own, ahead, again, grouped, grouped_ahead], tmp_path, timeout=280)
        code, output = torchrun(
            2, "-m", "trainer.cli.train_ppo", *line[1:], *asked, "--output_dir", f"{tmp_path}/ended", timeout=120
        )
    tokenizer = load_tokenizer(f"{tmp_path}/demo/model")
    for name in ("own", "ahead"):
        rows = [json.loads(text) for text in (tmp_path / name / "rollouts.jsonl").read_text().splitlines()]
        for row in rows:
            sent = len(response_text(tokenizer, row["prompt_ids"], row["response_ids"]))
            assert ("failed" in row) == (sent % 5 == 0) and row["score"] == (sent % 4 if sent % 5 else None)
        lost = [row for row in rows if "failed" in row]
        assert len(rows) == 32 and 0 < len(lost) < 16 and "503" in lost[0]["failed"]
        steps = read_steps(tmp_path / name)
        assert len(steps) == 4 and all(math.isfinite(row["loss"]) for row in steps)
        first = [row for row in rows if row["rollout"] == 0]
        assert steps[0].get("failed_fraction", 0) == sum("failed" in row for row in first) / 16
    for name in ("grouped", "grouped_ahead"):
        rows = [json.loads(text) for text in (tmp_path / name / "rollouts.jsonl").read_text().splitlines()]
        lengths = [len(response_text(tokenizer, row["prompt_ids"], row["response_ids"])) for row in rows]
        groups = [lengths[start : start + 4] for start in range(0, len(rows), 4)]
        expected = [float(length == max(group)) for group in groups for length in group]
        assert len(rows) >= 24 and [row["score"] for row in rows] == expected
        assert not (tmp_path / name / "ahead").exists()
    for key in ("loss", "grad_norm", "reward"):
        assert [row[key] for row in read_steps(tmp_path / "own")] == [
            row[key] for row in read_steps(tmp_path / "again")
        ]
    errors = [text for text in output.splitlines() if text.startswith("error: ")]
    assert (
        code != 0
        and len(errors) == 1
        and f"--remote_rm_url {url}: no usable answer after 1 try: HTTPError: 503" in errors[0]
    )
    assert "of 16 samples failed; --max_failed_share is 0.1" in errors[0]
    assert read_rows(tmp_path / "ended")
