"""The losses and gradients of train_ppo against TRL's GRPOTrainer: same weights, samples and scores, fp32, one process.

Five steps, two to a rollout, so that every second one is off-policy and clips: the losses within 1e-5 of the mean
|advantage| (a policy loss is a mean of terms of that size that all but cancel), gradients of step 1 and weights after the
last step within 2e-5 and 1e-4 of their norm. Where a convention differs, the case says so and accounts for it.
"""

import importlib.util
import json

import pytest
import torch
from launch import read_steps, train_many, train_many_with_trl
from safetensors.torch import load_file
from test_parity_ppo import EACH, PROMPTS, write_rollouts

STEPS = 4
GROUP_MEAN = ["--advantage_estimator", "dr_grpo"]  # less the mean of its group, and no division: `scale_rewards="none"`
CLIP, THEIR_CLIP = ["--eps_clip", "0.02", "--eps_clip_high", "0.03"], {"epsilon": 0.02, "epsilon_high": 0.03}
KL = ["--use_kl_loss", "--kl_estimator", "k3", "--init_kl_coef", "0.1"]
THEIR_KL = {
    "beta": 0.1,
    "use_bias_correction_kl": False,
}  # by default, TRL multiplies k3 by the ratio of policies: --kl_unbiased
TARGET = 1.405  # nats; the entropies of the first four steps are above, below, above and below
# name: (the trainer's flags, TRL's options, file of rollouts)
CASES = {
    # a mean over responses of means over tokens. TRL divides by std + 1e-4, we by std + 1e-6: scores large enough
    "grpo": (["--advantage_estimator", "group_norm", "--loss_agg", "sequence", *CLIP], {"loss_type": "grpo", "scale_rewards": "group", **THEIR_CLIP}, "large"),
    "grpo-kl": ([*GROUP_MEAN, "--loss_agg", "sequence", *CLIP, *KL], {"loss_type": "grpo", **THEIR_CLIP, **THEIR_KL}, "plain"),
    # the ratio of policies in front of k3, which is TRL's default
    "grpo-kl-unbiased": (
        [*GROUP_MEAN, "--loss_agg", "sequence", *CLIP, *KL, "--kl_unbiased"], {"loss_type": "grpo", **THEIR_CLIP, "beta": 0.1, "use_bias_correction_kl": True}, "plain",
    ),
    # a mean over the tokens of the global batch: TRL's `dapo` on any number of micro-batches, its `bnpo` on one
    "dapo-kl": ([*GROUP_MEAN, "--loss_agg", "token", *CLIP, *KL], {"loss_type": "dapo", **THEIR_CLIP, **THEIR_KL}, "plain"),
    # TRL's entropy bonus is a mean over tokens whatever the loss, ours weighs tokens as the loss does: the same here
    "bnpo": (
        [*GROUP_MEAN, "--loss_agg", "token", *CLIP, "--entropy_loss_coef", "0.01"], {"loss_type": "bnpo", "entropy_coef": 0.01, **THEIR_CLIP}, "plain",
    ),
    # the weight of the entropy: 0, 0, 0.011, 0, 0.011
    "adaptive-entropy": (
        [
            *GROUP_MEAN, "--loss_agg", "token", *CLIP, "--entropy_loss_coef", "0.011",
            "--entropy_target", str(TARGET), "--entropy_coef_delta", "0.01", "--entropy_coef_max", "0.012",
        ],
        {
            "loss_type": "bnpo", "entropy_coef": 0.011, "use_adaptive_entropy": True, "entropy_target": TARGET,
            "entropy_coef_delta": 0.01, "entropy_coef_max": 0.012, **THEIR_CLIP,
        }, "plain",
    ),
    # sums over tokens / --generate_max_len; TRL never leaves the division by the std away by itself
    "dr_grpo": ([*GROUP_MEAN, "--loss_agg", "fixed_length", *CLIP], {"loss_type": "dr_grpo", **THEIR_CLIP}, "plain"),
    "dr_grpo-kl": ([*GROUP_MEAN, "--loss_agg", "fixed_length", *CLIP, *KL], {"loss_type": "dr_grpo", **THEIR_CLIP, **THEIR_KL}, "plain"),
    "gspo": (
        [*GROUP_MEAN, "--policy_loss", "gspo", "--loss_agg", "sequence", *CLIP], {"loss_type": "grpo", "importance_sampling_level": "sequence", **THEIR_CLIP}, "plain",
    ),
    # TRL bounds the weight from above alone, by epsilon_high itself: ours by 1 + --eps_clip_high, and at 0 from below
    "cispo": (
        [*GROUP_MEAN, "--policy_loss", "cispo", "--loss_agg", "token", "--eps_clip", "1", "--eps_clip_high", "0.03"], {"loss_type": "cispo", "epsilon_high": 1.03}, "plain",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The folder with <case>/ours and <case>/trl."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("trl_grpo")
    write_rollouts(folder / "plain.jsonl", shared_data)
    rows = [json.loads(line) for line in (folder / "plain.jsonl").read_text().splitlines()]
    large = [json.dumps({**row, "score": 1e5 * row["score"]}) + "\n" for row in rows]
    (folder / "large.jsonl").write_text("".join(large))
    ours, theirs = [], []
    for name, (flags, options, data) in CASES.items():
        argv = ["train_ppo", "--pretrain", str(shared_data / "models/stories260K-hf"), *flags, "--no_save"]
        argv += ["--dataset", str(shared_data / "gsm8k/test.jsonl"), "--input_key", "question", "--max_samples", "8"]
        argv += [
            "--prompt_max_len",
            "256",
            "--generate_max_len",
            "24",
            "--rollouts_from",
            str(folder / f"{data}.jsonl"),
        ]
        argv += ["--rollout_batch_size", str(PROMPTS), "--n_samples_per_prompt", str(EACH), "--temperature", "0.9"]
        argv += ["--train_batch_size", str(PROMPTS * EACH), "--micro_train_batch_size", "2", "--max_epochs", "2"]
        argv += ["--max_steps", str(STEPS), "--param_dtype", "fp32", "--max_norm", "0", "--learning_rate", "2e-4"]
        argv += ["--lr_scheduler", "constant", "--lr_warmup_ratio", "0", "--parity_dump", f"{folder}/{name}/ours"]
        ours.append([*argv, "--output_dir", f"{folder}/{name}/ours"])
        options = {"scale_rewards": "none", "beta": 0.0, **options}
        theirs.append({"argv": [*argv, "--output_dir", f"{folder}/{name}/trl"], "trl": "GRPO", "options": options})
    train_many(1, ours, folder, timeout=900)
    train_many_with_trl(theirs, folder)
    return folder


def worst_difference(path, expected_path) -> float:
    """Of all tensors, relative to the norm of each."""
    found, expected = load_file(path), load_file(expected_path)
    assert expected
    return torch.stack([(found[key] - tensor).norm() / tensor.norm() for key, tensor in expected.items()]).max().item()


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_trl(runs, name):
    rows, expected = read_steps(runs / name / "ours"), json.loads((runs / name / "trl/losses.json").read_text())
    assert len(rows) == len(expected) == STEPS
    differences = [abs(row["loss"] - loss) / row["advantage_abs"] for row, loss in zip(rows, expected)]
    assert all(difference <= 1e-5 for difference in differences), differences
    assert worst_difference(runs / name / "ours/grads_step1.safetensors", runs / name / "trl/grads.safetensors") <= 2e-5
    assert (
        worst_difference(runs / name / "ours/weights_final.safetensors", runs / name / "trl/weights.safetensors")
        <= 1e-4
    )
    assert [row["ratio_deviation"] > 0 for row in rows] == [False, True, False, True]
    assert rows[1]["clip_fraction"] > 0.02, "a run that clips nothing compares half of the loss"


def test_the_weight_of_the_entropy_follows_its_target(runs):
    """It is 0 after a step of large entropy, and before the first one."""
    rows = read_steps(runs / "adaptive-entropy/ours")
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0, 0, 0.011, 0])
