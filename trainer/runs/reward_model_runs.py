"""The parts of `train_rm`: the model with a new head, its loss, and the statistics of its scores."""

import os

import torch
from matplotlib.figure import Figure

from trainer.datasets.conversations.turn_ends import ENDS_WITH_EOS
from trainer.datasets.samples.preference import ENDED
from trainer.distributed.collectives import rank_0_alone
from trainer.flags.names.loss_names import check_names_in
from trainer.methods.rm import evaluation_scores, make_reward_loss
from trainer.metrics import counted
from trainer.model_folders.model_folder import unwrapped
from trainer.models.losses.preference_loss import REWARD_LOSSES
from trainer.models.reward import make_initial_reward_model, read_source, return_token_scores
from trainer.runs.feature import Feature


def check_source(run) -> None:
    """Raise UserError, before data is read, for a model that cannot score, or without the head of --value_head_prefix."""
    options = (run.args.model.trust_remote_code, run.args.reward.value_head_prefix)
    read_source(run.setup.folder, *options, "--pretrain")


SOURCE = Feature("source of a reward model", lambda run: not run.args.lora.merge_adapter, before_data=check_source)


def initial_folder(run) -> str:
    """Write the model of --pretrain with a reward head into the run folder (rank 0). Returns its folder."""
    args, initial = run.args, os.path.join(run.open(), "initial")
    options = (args.batch.seed, args.model.trust_remote_code, args.reward.value_head_prefix)
    rank_0_alone(lambda: make_initial_reward_model(run.setup.folder, initial, *options))
    return initial


def make_loss(run):
    """The reward loss, of a model that returns a score for each token. The tokenizer notes how answers end."""
    flags = run.args.reward
    kept, num_ended = run.setup.tokenizer.init_kwargs, run.ledger.counts.get(ENDED)
    if num_ended or ENDS_WITH_EOS in kept:  # saved with the model, for those who score with it
        kept[ENDS_WITH_EOS] = bool(num_ended)
    return_token_scores(run.model, flags.compute_fp32_loss)
    check_names_in(REWARD_LOSSES, "--loss", [flags.loss])
    return make_reward_loss(flags.loss, run.setup.sp_group, flags.center_rewards_coef)


def note_scores(run) -> None:
    """Write statistics of the evaluation's scores into the config, and a plot of them into the run folder."""
    if not run.eval_loader:
        return
    strategy = run.setup.strategy
    scores = evaluation_scores(strategy, run.model, run.eval_loader, run.eval_samples, run.setup.sp_group)
    config = unwrapped(run.model).config
    config.reward_mean, config.reward_std = scores.mean().item(), scores.std(correction=0).item()
    if strategy.is_rank_0():
        plot_scores(*scores.unbind(1), os.path.join(run.output_dir, "reward_histogram.png"))


def plot_scores(chosen: torch.Tensor, rejected: torch.Tensor, path: str) -> None:
    """Write a PNG file with histograms of both sides' scores (n,) over the same bins, and with their means."""
    figure = Figure(figsize=(7, 4))  # not by pyplot: no global state, no display
    axes = figure.add_subplot()
    low, high = torch.cat([chosen, rejected]).aminmax()
    bins = torch.linspace(low.item(), max(high.item(), low.item() + 1e-6), 41).tolist()
    for name, scores, color in (("chosen", chosen, "tab:green"), ("rejected", rejected, "tab:red")):
        axes.hist(scores.tolist(), bins=bins, alpha=0.5, color=color, label=f"{name}, mean {scores.mean().item():.3g}")
        axes.axvline(scores.mean().item(), color=color, linewidth=1)
    accuracy = (chosen > rejected).double().mean().item()
    axes.set(
        xlabel="reward", ylabel="answers", title=f"{counted(len(chosen), 'evaluation pair')}, accuracy {accuracy:.3f}"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
