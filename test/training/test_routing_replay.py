"""--routing_replay: the experts that the rollout engine chose are those that training uses.

Parity of replayed experts with the plain loop on every kind of layout is in test_parity_ppo.py.
"""

import json
import sys
from itertools import pairwise

import pytest
import test_ppo_env
import torch
from launch import ROOT, read_steps, train_many
from transformers import AutoModelForCausalLM

from scripts.zoo_models import tiny_config
from trainer.cli.train_ppo import parse
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.models.layers.routing_replay import Routers
from trainer.rollout.rollouts_file import read_rollouts
from trainer.runs.rl.rl_checks import validate

sys.path.insert(0, str(ROOT / "scripts/bench"))
from routing_replay import command_line, make_model, mean_difference

REPLAY = ["--routing_replay"]
RUNS = {
    "fp32": [],
    "fp32-replay": REPLAY,
    "bf16": ["--param_dtype", "bf16"],
    "bf16-replay": [*REPLAY, "--param_dtype", "bf16"],
    "again": [*REPLAY, "--rollouts_from", "{folder}/fp32-replay/rollouts.jsonl"],
    "ahead": [*REPLAY, "--max_staleness", "1", "--tis_cap", "2"],
}


# episodes whose third turn reads a new history; some environments fail in `reset` or in a turn
ALSO_LOST = ["--env", "{folder}/lossy.py", "--max_failed_share", "0.9"]
EPISODES = {
    "plain": [],
    "replay": REPLAY,
    "lost": [*REPLAY, *ALSO_LOST],
    "frozen": [*REPLAY, "--rollouts_from", "{folder}/lost/rollouts.jsonl", "--packing_samples"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    folder = tmp_path_factory.mktemp("replay")
    make_model(folder / "model", shared_data / "models/stories260K-hf")
    lines = []
    for name, flags in RUNS.items():
        line = command_line(folder / "model", shared_data, folder / name)
        line += ["--max_samples", "16", "--generate_max_len", "16", "--stop", "u"]
        lines.append(["train_ppo", *line, *(flag.format(folder=folder) for flag in flags)])
    train_many(2, lines, folder, timeout=400)
    return folder


def test_with_the_same_numerics_replay_changes_no_bit(runs):
    plain, replayed, again = (read_steps(runs / name) for name in ("fp32", "fp32-replay", "again"))
    for key in ("loss", "grad_norm", "rollout_logprob_diff", "batch_hash", "ratio_deviation"):
        values = [row[key] for row in plain]
        assert values == [row[key] for row in replayed] == [row[key] for row in again], key
    assert len(plain) == 2 and all(row["grad_norm"] > 0 for row in plain)


def test_the_recorded_experts_are_those_of_a_plain_forward_pass(runs):
    model = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    samples = read_rollouts(str(runs / "fp32-replay/rollouts.jsonl"))[0]
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids[:-1]])
        with torch.no_grad():
            scores = model(ids, output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(model.config.num_experts_per_tok).indices for layer in scores], 1)
        assert torch.equal(sample.experts.long(), expected)
    assert len({len(sample.response_ids) for sample in samples}) > 1, "rows that ended early"


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    make_demo(str(folder / "demo"))
    make_model(folder / "demo/model", folder / "demo/model")
    (folder / "talker.py").write_text(test_ppo_env.TALKER)
    (folder / "lossy.py").write_text(test_ppo_env.LOSSY)
    lines = []
    for name, more in EPISODES.items():
        line = test_ppo_env.flags(folder, name, *test_ppo_env.GROUP, "--max_steps", "2")
        line += [flag.format(folder=folder) for flag in more]
        if name == "frozen":
            at = line.index("--env")
            del line[at : at + 2]
        lines.append(["train_ppo", *line])
    train_many(2, lines, folder, timeout=400)
    return folder


def test_an_episode_has_the_experts_with_which_each_token_was_first_read(episodes):
    model = AutoModelForCausalLM.from_pretrained(episodes / "demo/model", dtype=torch.float32)
    samples = read_rollouts(str(episodes / "replay/rollouts.jsonl"))[0]
    assert sum(len(sample.starts) for sample in samples) > 4
    for sample in samples:
        first, expected = len(sample.prompt_ids), []
        ids = sample.prompt_ids + sample.response_ids[: sample.turns[-1][1]]
        bounds = [0, *(first + start for start in sample.starts), len(ids)]
        for start, end in pairwise(bounds):
            with torch.no_grad():
                scores = model(torch.tensor([ids[start : end - 1]]), output_router_logits=True).router_logits
            expected.append(torch.stack([layer.topk(model.config.num_experts_per_tok).indices for layer in scores], 1))
            expected.append(torch.full_like(expected[-1][:1], -1))  # the engine never reads the last token of a history
        assert torch.equal(sample.experts.long(), torch.cat(expected[:-1]))


def test_replay_changes_no_bit_of_episodes_and_lost_ones_have_no_experts(episodes):
    for name, other in (("plain", "replay"), ("lost", "frozen")):
        steps, others = read_steps(episodes / name), read_steps(episodes / other)
        assert len(steps) == len(others) == 2
        for row, replayed in zip(steps, others):
            if name == "plain":
                keys = ("loss", "grad_norm", "rollout_logprob_diff", "batch_hash", "ratio_deviation")
                assert [row[key] for key in keys] == [replayed[key] for key in keys]
            assert replayed["loss"] == pytest.approx(row["loss"], abs=1e-6)
            assert replayed["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
    lost = [sample for each in read_rollouts(str(episodes / "lost/rollouts.jsonl")) for sample in each]
    assert any(sample.experts is None for sample in lost) and any(sample.experts is not None for sample in lost)
    assert all(sample.failed for sample in lost if sample.experts is None)


def test_in_bf16_the_log_probs_of_engine_and_training_are_closer(runs):
    without, replayed = (mean_difference(runs / name) for name in ("bf16", "bf16-replay"))
    assert replayed < 0.8 * without


def test_samples_drawn_ahead_bring_their_experts(runs):
    rows = [json.loads(line) for line in (runs / "ahead/rollouts.jsonl").read_text().splitlines()]
    assert all(row["experts"][0][0] == len(row["prompt_ids"]) + len(row["response_ids"]) - 1 for row in rows)
    assert len(read_steps(runs / "ahead")) == 2


OTHERS = [
    (["--rollout_engine", "vllm_server", "--engine_urls", "http://a:1"], "with --rollout_engine vllm_server"),
    (["--aux_loss_coef", "0.1"], "with --aux_loss_coef"),
    (["--compile"], "with --compile"),
    (["--sequence_parallel", "--tensor_parallel_size", "2"], "with --sequence_parallel"),
]


@pytest.mark.parametrize("flags, found", OTHERS)
def test_what_does_not_replay_is_refused(flags, found):
    line = ["--backend", "fsdp2", "--pretrain", "m", "--dataset", "d", "--reward_func", "math", "--label_key", "l"]
    args, _ = parse([*line, "--advantage_estimator", "reinforce", "--routing_replay", *flags])
    with pytest.raises(UserError, match=found):
        validate(args)


KINDS = (
    "qwen3_moe",
    "qwen3_5_moe_text",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "olmoe",
    "minimax_m2",
    "llama4_text",
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_router_is_recorded_and_replayed(kind):
    """The experts get the indices that were given, and the router's weights have gradients through their scores."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32).eval()
    ids, seen = torch.randint(5, 60, (2, 7)), []
    for block in (module for module in model.modules() if hasattr(module, "experts")):
        note = lambda _, args, kwargs: seen.append([v for v in (*args, *kwargs.values()) if not v.is_floating_point()])  # noqa: E731
        block.experts.register_forward_pre_hook(note, with_kwargs=True)
    routers = Routers(model, model.config)
    plain = model(ids, use_cache=False).logits
    routers.records = True
    model(ids, use_cache=False)
    recorded, routers.records = routers.take(), False
    assert recorded.shape == (14, routers.num_layers, routers.top_k)
    routers.use({"experts": recorded.unflatten(0, (2, 7)) + 1})
    assert torch.equal(model(ids, use_cache=False).logits, plain)

    other = (recorded + 1) % routers.num_experts
    other[-1] = -1  # the last token chooses by itself
    routers.use({"experts": other.unflatten(0, (2, 7)) + 1})
    seen.clear()
    logits = model(ids, use_cache=False).logits
    if kind != "llama4_text":  # there, each expert computes all tokens, and is not given indices
        for layer, [indices] in enumerate(seen):
            assert torch.equal(indices[:-1].short(), other[:-1, layer])
            assert indices[-1].min() >= 0
    assert (logits[0] - plain[0]).abs().max() > 1e-5 and torch.isfinite(logits).all()
    logits.logsumexp(-1).sum().backward()
    gates = [p for name, p in model.named_parameters() if ("router" in name or "gate." in name) and p.ndim == 2]
    assert gates and all(gate.grad is not None and gate.grad.norm() > 0 for gate in gates)
    routers.use({})
    assert torch.equal(model(ids, use_cache=False).logits, plain)


def test_models_and_recordings_that_do_not_fit_are_refused(runs, shared_data):
    dense = AutoModelForCausalLM.from_pretrained(shared_data / "models/stories260K-hf")
    with pytest.raises(UserError, match="llama has no router over experts"):
        Routers(dense, dense.config)
    model = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    routers, (layers, k) = Routers(model, model.config), (model.config.num_hidden_layers, 4)
    routers.check([torch.zeros(3, layers, k)])
    for wrong in (torch.zeros(3, layers + 1, k), torch.full((3, layers, k), model.config.num_experts)):
        with pytest.raises(UserError, match="rollouts with experts"):
            routers.check([wrong])
    with pytest.raises(UserError, match="do not choose by"):
        routers.take()
