"""--max_logprob_diff: an engine that samples from another model ends the run, also if each of its weights is right."""

import pytest
from launch import SHORT_ROLLOUTS, forked, read_steps

from trainer.datasets.demos.demo import make_demo

# the checksums of a sync are right, and then a value that the engine once derived from weights is an old one
STALE = """
from trainer.rollout.engines.hf import HFEngine

update = HFEngine.update_weights


def update_weights(self, tensors):
    found = update(self, tensors)
    self.model.lm_head.register_forward_hook(lambda module, inputs, logits: 30 * logits)
    return found


HFEngine.update_weights = update_weights


def reward(prompts, responses, labels):
    return [len(text) % 3 for text in responses]
"""


COMMANDS = {"train_ppo": ["--advantage_estimator", "group_norm"], "train_dpo": ["--online", "--label_key", "label"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stale_value_in_the_engine_ends_the_run_in_one_line(tmp_path, command):
    make_demo(str(tmp_path / "demo"))
    (tmp_path / "stale.py").write_text(STALE)
    line = [command, "--pretrain", f"{tmp_path}/demo/model", "--dataset", f"{tmp_path}/demo/prompts.jsonl"]
    line += [*SHORT_ROLLOUTS, "--no_save", "--n_samples_per_prompt", "4", "--max_steps", "2", "--param_dtype", "fp32"]
    line += ["--train_batch_size", "2", "--micro_train_batch_size", "2", *COMMANDS[command]]
    line += ["--reward_func", f"{tmp_path}/stale.py:reward", "--output_dir"]
    code, output = forked(1, "-m", f"trainer.cli.{line[0]}", *line[1:], f"{tmp_path}/ended")
    assert code != 0 and "--max_logprob_diff" in output and "differ by" in output, output[-2000:]
    code, output = forked(1, "-m", f"trainer.cli.{line[0]}", *line[1:], f"{tmp_path}/on", "--max_logprob_diff", "inf")
    assert code == 0, output[-2000:]
    assert read_steps(tmp_path / "on")[0]["rollout_logprob_diff"] > 1
