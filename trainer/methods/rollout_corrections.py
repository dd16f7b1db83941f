"""Corrections of the loss, because the engine sampled with other log-probs than those of training."""

import numpy as np
import torch
import torch.nn.functional as F

from trainer.datasets.batches.packing import IGNORE
from trainer.methods import advantages as adv
from trainer.methods.ppo_state import PPOOptions
from trainer.methods.roles import denominator
from trainer.methods.rollout_facts import rollout_log_probs_of
from trainer.rollout.engines.sampling import sample_seed
from trainer.rollout.micro_batches import spread
from trainer.rollout.placement import Part


def importance_corrections(
    part: Part, mask: torch.Tensor, flat: dict, options: PPOOptions
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(Weights, rejections): factors of the loss of each token, because the engine sampled with other log-probs.

    Both are flat vectors by their metric. A rejection is 0 for a rejected token, else 1. Tokens of small entropy are
    rejected too, if options say so.
    """
    weights, kept = {}, {}
    if options.top_entropy_quantile is not None:
        bound = entropy_bound(part, adv.to_rows(flat["old_entropies"], mask), options.top_entropy_quantile)
        kept["kept_by_entropy"] = (flat["old_entropies"] >= bound).double()
    if options.tis_cap is None and options.rollout_kl_max is None:
        return weights, kept
    sampled, trained = rollout_log_probs_of(part), flat["old_log_probs"]
    log_ratio = adv.to_rows(trained - sampled, mask)
    if options.tis_cap is not None:
        limits = options.tis_level, options.tis_cap, options.tis_floor
        weights["tis_weight"] = adv.importance_weights(log_ratio, mask, *limits)[mask]
    if options.mask_range is not None:
        within = adv.within_ratios(log_ratio, mask, options.mask_level, options.mask_range)
        kept["kept_by_tis_mask"] = within[mask].double()
    if options.rollout_kl_max is not None:
        rows = adv.to_rows(sampled, mask), adv.to_rows(trained, mask)
        near = adv.within_kl(*rows, mask, options.rollout_kl_estimator, options.rollout_kl_max)
        kept["kept_by_rollout_kl"] = (near[:, None] & mask)[mask].double()
    return weights, kept


def entropy_bound(part: Part, entropies: torch.Tensor, share: float) -> float:
    """The entropy that this share of all tokens of the rollout reaches (all-reduce over dp x sp of a number per token).

    `entropies` (n, T) are those of the rows of `part`. Wang et al. 2025, Beyond the 80/20 rule (arXiv 2506.01939),
    equation 5: a rollout is the batch here. TRL takes the bound of a micro-batch instead.
    """
    of_all = part.share(entropies)[adv.rows_mask(part.all_lengths, part.width) & part.counted[:, None]]
    return float(np.quantile(of_all.numpy(), 1 - share))


def add_likelihood_of_right(part: Part, batches: list, is_right: torch.Tensor, coef: float) -> None:
    """Set `nll_weights` (rows, tokens) of -log p: `coef` times the mean over the tokens of right responses (all-reduce).

    VAPO (Yue et al. 2025, arXiv 2504.05118), equation 10. `is_right` (samples,) is of the whole rollout, and the mean is of
    each batch. Tokens without a loss do not count.
    """
    counts = []
    for batch in batches:
        for micro_batch in batch.micro_batches:
            numbers, labels = micro_batch["sample_numbers"], micro_batch["labels"]
            of_samples = F.pad(is_right.to(labels.device)[numbers].double(), (0, 1))  # a micro-batch may have no sample
            of_tokens = of_samples[micro_batch["sequence_ids"]] * (labels != IGNORE)
            micro_batch["nll_weights"] = of_tokens * (micro_batch["loss_weights"] > 0)
        counts.append(sum(micro_batch["nll_weights"].sum() for micro_batch in batch.micro_batches))
    for batch, count in zip(batches, part.total(torch.stack(counts)).tolist()):
        for micro_batch in batch.micro_batches:
            micro_batch["nll_weights"] *= coef * batch.num_targets / max(count, 1)


def leave_out(part: Part, batches: list, kept: torch.Tensor, mask: torch.Tensor, loss_agg: str) -> None:
    """Only the tokens `kept` (n, T) count in the mean of each loss (two all-reduces over dp x sp)."""
    spread(batches, "kept_weights", adv.weights_of_kept(kept, mask, loss_agg)[mask])
    keeps_any = part.share(kept.any(1)) > 0
    for batch in batches:
        for micro_batch in batch.micro_batches:
            micro_batch["loss_weights"] = micro_batch["loss_weights"] * micro_batch.pop("kept_weights")
            here = keeps_any.to(micro_batch["has_loss"].device)[micro_batch["sample_numbers"]]
            micro_batch["has_loss"] = micro_batch["has_loss"] & here
    counts = [
        sum(denominator(micro_batch, loss_agg, part.sp_group) for micro_batch in batch.micro_batches)
        for batch in batches
    ]
    for batch, count in zip(batches, part.total(torch.stack(counts)).tolist()):
        batch.num_targets = int(count)


# --- tokens whose log-prob and advantage vary together
#
# Cui et al. 2025, The entropy mechanism of RL (arXiv 2505.22617), section 4. The covariance of a token is
# (log p - mean log p) (A - mean A). verl takes the means of a micro-batch, and the log-probs of the update. Here both are
# those of the whole rollout under the old policy, so that the choice does not depend on the layout.

COVARIANCE_LOSSES = ("clip_cov", "kl_cov")  # of --policy_loss


def chosen_here(part: Part, mask: torch.Tensor, flat: dict, options: PPOOptions, rollout: int) -> torch.Tensor:
    """1 for chosen tokens, else 0: a flat vector, fp64 (all-reduce over dp x sp of two numbers per token)."""
    values = part.share(adv.to_rows(torch.stack([flat["old_log_probs"], flat["advantages"]], 1), mask))
    is_token = adv.rows_mask(part.all_lengths, part.width) & part.counted[:, None]
    chosen = torch.zeros(is_token.shape, dtype=torch.float64)
    chosen[is_token] = chosen_tokens(*values[is_token].T, options, rollout).double()
    return chosen[part.places][mask]


def chosen_tokens(log_probs: torch.Tensor, advantages: torch.Tensor, options: PPOOptions, rollout: int) -> torch.Tensor:
    """(tokens,) True for a share of a rollout's tokens, at least one token.

    kl_cov takes the largest covariances, and of equal ones the first. clip_cov takes some with a covariance inside
    `cov_range`, at random by the seed.
    """
    covariances = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    if options.policy.loss == "kl_cov":
        order = covariances.argsort(descending=True, stable=True)
    else:
        low, high = options.cov_range
        inside = ((covariances > low) & (covariances < high)).nonzero().flatten()
        generator = torch.Generator().manual_seed(sample_seed(options.seed, rollout, -1))
        order = inside[torch.randperm(len(inside), generator=generator)]
    chosen = torch.zeros(covariances.shape, dtype=torch.bool)
    chosen[order[: max(1, int(options.cov_share * len(covariances)))]] = True
    return chosen
