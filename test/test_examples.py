"""examples/grpo_loop.py is one page, learns on both backends, computes GRPO, and gives the same model on 1 and 2 ranks."""

import importlib.util
import json
import re
import statistics

import pytest
import torch
from launch import ROOT, forked
from transformers import AutoModelForCausalLM

from trainer.datasets.demos.demo import make_demo

SCRIPT = ROOT / "examples" / "grpo_loop.py"
NUM_ROLLOUTS = 16
# Runs the example in the folder argv[1], with other constants argv[2].
DRIVER = f"""
import json, os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import grpo_loop
os.chdir(sys.argv[1])
vars(grpo_loop).update(json.loads(sys.argv[2]))
grpo_loop.run_command(grpo_loop.main, sys.argv[3:])
"""


@pytest.fixture(scope="module")
def grpo_loop():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("grpo_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewards(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"^rollout \d+ \| reward (\S+) ", output, re.MULTILINE)]


def test_it_is_one_page():
    assert len(SCRIPT.read_text().splitlines()) <= 150


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_the_reward_rises(backend, tmp_path):
    flags = ["--backend", backend, "--num_rollouts", str(NUM_ROLLOUTS), "--output_dir", "out"]
    code, output = forked(2, str(SCRIPT), *flags, cwd=tmp_path, timeout=500)
    assert code == 0, output[-4000:]
    found = rewards(output)
    assert len(found) == NUM_ROLLOUTS
    first, last = statistics.mean(found[:3]), statistics.mean(found[-3:])
    assert last > first + 0.05, f"{backend}: {found}"
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("demo/model", "out/model"))
    assert type(after) is type(before) and after.dtype == torch.float32
    assert all(not a.equal(b) for a, b in zip(after.parameters(), before.parameters()))


def test_one_rank_and_two_give_the_same_model(tmp_path):
    driver, updates = tmp_path / "driver.py", []
    driver.write_text(DRIVER)
    constants = {"WARM_UP_STEPS": 8, "NUM_PROMPTS": 5, "BATCH_SIZE": 20, "MICRO_BATCH_SIZE": 8}
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        flags = ["--num_rollouts", "2", "--output_dir", "out"]
        code, output = forked(num_ranks, str(driver), str(folder), json.dumps(constants), *flags)
        assert code == 0, output[-4000:]
        pairs = [AutoModelForCausalLM.from_pretrained(folder / name) for name in ("demo/model", "out/model")]
        before, after = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in pairs)
        updates.append(after - before)
    difference = ((updates[0] - updates[1]).norm() / updates[0].norm()).item()
    assert difference < 1e-3, f"the sum of all updates on 1 and on 2 ranks: {difference:.1e} apart"


def test_the_gradient_is_that_of_the_formula(grpo_loop, tmp_path):
    """Two groups of three answers: scores to advantages to a clipped loss, token by token, in plain Python and autograd."""
    make_demo(str(tmp_path / "demo"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo/model", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    scores, rows, total = [0.0, 0.5, 1.0, 0.25, 0.25, 1.0], [], 0.0
    advantages = grpo_loop.compare_in_groups(torch.tensor(scores).double(), "group_norm", 3).tolist()
    num_clipped = 0
    for number, score in enumerate(scores):
        group = scores[number // 3 * 3 :][:3]
        advantage = (score - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        prompt, response = (torch.randint(3, 290, (n,), generator=generator).tolist() for n in (4 + number, 2 + number))
        log_probs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        drift = (
            torch.rand(len(response), generator=generator) - 0.5
        ).tolist()  # of the log-probs since they were sampled
        old = []
        for place, token in enumerate(response):
            log_prob = log_probs[len(prompt) + place - 1, token]
            old.append(log_prob.item() - drift[place])
            ratio = torch.exp(log_prob - old[-1])
            if (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8):
                num_clipped += 1  # a constant: no gradient
            else:
                total = total - ratio * advantage
        rows.append(grpo_loop.as_row(prompt, response, old, advantages[number]))
    total.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    grpo_loop.grpo_loss(model, grpo_loop.collate(rows, pad_token_id=0)).backward()
    assert num_clipped > 2
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


@pytest.mark.parametrize(("answer", "expected"), [("1 3 7 9", 1.0), ("1 3 9", 0.5), ("1 3 7 9 9", 0.8), ("", 0.0)])
def test_the_reward(grpo_loop, answer, expected):
    assert grpo_loop.reward(answer, "1 3 7 9") == expected
