"""Flags of train_dpo and train_rm that contradict each other are refused before anything is loaded."""

import json

import pytest
from launch import ROOT
from transformers import Qwen3Config, Qwen3MoeConfig

from trainer.cli import train_dpo
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.names.loss_names import check_loss_names
from trainer.methods.load_balance import experts_per_token
from trainer.models.model_loading import load_tokenizer
from trainer.runs.flag_checks import check_flags
from trainer.runs.preference_runs import load_dpo

REFUSED = {
    "--precompute_ref_logps --loss kto": "--precompute_ref_logps with --loss kto: kto pairs prompts",
    "--precompute_ref_logps --ref_offload": "--ref_offload with --precompute_ref_logps: the reference is freed",
    "--precompute_ref_logps --loss simpo": "--precompute_ref_logps with --loss simpo: this loss has no reference. Remove the flag.",
    "--ref_offload --loss orpo": "--ref_offload with --loss orpo: ",
    "--ref_model m --loss orpo": "--ref_model m with --loss orpo: ",
    "--loss kto --train_batch_size 1 --micro_train_batch_size 1": "--train_batch_size 1 with --loss kto: ",
    "--loss kto --nll_loss_coef 0.5": "--nll_loss_coef 0.5 with --loss kto: ",
    "--desirable_weight 2": "--desirable_weight 2.0 with --loss dpo: only kto has single answers",
    "--simpo_gamma 0.7": "--simpo_gamma 0.7 with --loss dpo: ",
    "--label_key good": "--label_key good with --loss dpo: ",
    "--eval_steps 5": "--eval_steps 5 without --eval_dataset: nothing is evaluated",
    "--save_path model --no_save": "--save_path model with --no_save: no model is written",
    "--lr_scheduler linear --min_lr_ratio 0.2": "--min_lr_ratio 0.2 with --lr_scheduler linear: this schedule has no lowest rate",
    "--lr_scheduler constant --lr_warmup_ratio 0.1": "--lr_warmup_ratio 0.1 with --lr_scheduler constant: this schedule has no warm-up",
    "--save_path test": "--save_path: test holds no model",
    "--save_path setup.py": "--save_path: setup.py is a file",
    "--save_path m": "--save_path: m would replace --pretrain",
    "--save_path runs --output_dir runs/mine": "--save_path: runs would replace --output_dir",
    "--loss kto --eval_dataset d --best_metric_key eval_reward_margin": "--best_metric_key: eval_reward_margin, which no",
    "--label_smoothing 0.1": "--label_smoothing 0.1 with --loss dpo: ",
    "--loss robust": "--loss robust without --label_smoothing: ",
    "--loss dpo,kto": "--loss: dpo,kto",
    "--loss dpo,simpo": "--loss: dpo,simpo: only some of them have a reference",
    "--loss dpo,bco --loss_weights 1": "--loss_weights 1.0 with --loss dpo,bco",
    "--loss kto --loss_weights 1": "--loss_weights 1.0 with --loss kto",
    "--loss nca --f_divergence js": "--f_divergence js with --loss nca: ",
    "--loss kto --f_divergence js": "--f_divergence js with --loss kto: ",
    "--f_alpha 0.3": "--f_alpha 0.3 with --f_divergence reverse_kl: ",
}


def check(args) -> None:
    """The checks in the order of a run: the door asks for the names of losses first."""
    check_loss_names("train_dpo", args.preference.loss)
    method = train_dpo.method_of(args)
    check_flags(method.command, args, method.eval_metrics, **method.facts)


@pytest.mark.parametrize("flags", REFUSED)
def test_contradictions_are_named(flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    args, _ = train_dpo.parse(["--pretrain", "m", "--dataset", "d", *flags.split()])
    with pytest.raises(UserError) as error:
        check(args)
    assert str(error.value).startswith(REFUSED[flags])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    make_demo(str(folder))
    return folder


WHOLE = {"chosen": "1 2 = 3", "rejected": "1 2 = 4"}
SPLIT = {"q": "1 2 =", "chosen": " 3", "rejected": " 4"}
TURNS = {side: [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": side}] for side in WHOLE}
MEANS = {"--loss simpo": "--loss simpo", "--loss orpo": "--loss orpo", "--nll_loss_coef 0.5": "--nll_loss_coef"}


def load_pair(demo, row: dict, line: str):
    path = demo / "pairs_of_this_test.jsonl"
    path.write_text(json.dumps(row) + "\n")
    args, _ = train_dpo.parse(["--pretrain", "m", "--dataset", str(path), *line.split()])
    return load_dpo(args, load_tokenizer(str(demo / "model")), str(path), "train", "--dataset")[0][0]


@pytest.mark.parametrize("flags", MEANS)
def test_means_over_tokens_need_to_know_where_the_answer_begins(flags, demo):
    with pytest.raises(UserError) as error:
        load_pair(demo, WHOLE, flags)
    assert str(error.value).startswith(f"--prompt_key: missing with {MEANS[flags]}: ")
    for pair in (
        load_pair(demo, SPLIT, f"--prompt_key q {flags}"),
        load_pair(demo, {**SPLIT, "prompt": SPLIT["q"]}, flags),
        load_pair(demo, TURNS, flags),
    ):
        assert pair["chosen_mask"][:3] == [0, 0, 0] and 1 in pair["chosen_mask"]
    assert 0 not in load_pair(demo, WHOLE, "--loss ipo")["chosen_mask"][1:]  # sums, in which the prompt cancels


def test_a_balance_loss_needs_experts():
    assert experts_per_token(Qwen3MoeConfig(num_experts_per_tok=3)) == 3
    with pytest.raises(UserError, match="--aux_loss_coef: qwen3 does not return the logits of a router over experts"):
        experts_per_token(Qwen3Config())


def test_what_is_not_contradictory_is_accepted():
    for flags in (
        "",
        "--loss kto --desirable_weight 2 --ref_offload",
        "--precompute_ref_logps",
        "--loss simpo --simpo_gamma 1",
        "--lr_scheduler cosine_warmup_with_min_lr --min_lr_ratio 0.2",
        "--lr_scheduler constant --lr_warmup_ratio 0",
        "--save_path out --output_dir runs/mine",
    ):
        args, _ = train_dpo.parse(["--pretrain", "m", "--dataset", "d", *flags.split()])
        check(args)
