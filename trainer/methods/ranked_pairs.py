"""Online DPO (Guo et al. 2024): each prompt gives one pair, the best and the worst of the policy's own answers to it."""

import functools
from collections.abc import Callable

from trainer.methods.rollout_facts import check_log_probs, sample_facts
from trainer.rollout.micro_batches import RowSet
from trainer.rollout.samples import Sample
from trainer.training.loop import inspect_gradients, train_step


def best_and_worst(samples: list[Sample], group_size: int) -> list[tuple[int, int]]:
    """The positions (chosen, rejected) in each group of adjacent samples. With equal scores, the first sample counts.

    Samples that failed are no candidates. Without others, the pair is twice the first sample.
    """
    whole = [range(start, start + group_size) for start in range(0, len(samples), group_size)]
    groups = [[place for place in group if not samples[place].failed] or group[:1] for group in whole]

    def score(place: int) -> float:
        return samples[place].score

    return [(max(group, key=score), min(group, key=score)) for group in groups]


def is_tie(chosen: Sample, rejected: Sample) -> bool:
    """Whether a pair has no preference: equal scores, or the same tokens."""
    return chosen.score == rejected.score or chosen.size().digest == rejected.size().digest


class PairSet(RowSet):
    """The pairs of a rollout. Only pairs with tokens here have all
    values of a row. A tie has no loss, and the mean does not count it."""

    def __init__(self, samples: list[Sample], pairs: list[tuple[int, int]]):
        self._rows = []
        for places in pairs:
            both = [samples[place] for place in places]
            sizes = [sample.size() for sample in both]
            row = {
                "num_tokens": sum(size.tokens for size in sizes),
                "num_loss_tokens": int(not is_tie(*both)),
                "digest": "".join(size.digest for size in sizes),
                "row": both[0].row,
                "margin": 0.0 if is_tie(*both) else both[0].score - both[1].score,
            }
            for side, sample in zip(("chosen", "rejected"), both):
                if sample.held.here:
                    row[f"{side}_ids"], row[f"{side}_mask"] = sample.ids_and_mask()
                    row[f"engine_{side}"] = sum(sample.log_probs)
            self._rows.append(row)


def pair_facts(samples: list[Sample], group_size: int) -> dict[str, float]:
    """Metrics of the pairs of a rollout: the share of ties, and the mean difference of scores of the others."""
    pairs = [(samples[chosen], samples[rejected]) for chosen, rejected in best_and_worst(samples, group_size)]
    margins = [chosen.score - rejected.score for chosen, rejected in pairs if not is_tie(chosen, rejected)]
    return {"tied_pairs": 1 - len(margins) / len(pairs), "score_margin": sum(margins) / max(len(margins), 1)}


def make_pair_updates(loss_fn: Callable, group_size: int) -> Callable:
    """The updates of `ppo.PPORun`, on the pairs of a rollout."""

    def updates(run, loop, log, progress, samples: list[Sample], episode: int, facts: dict) -> None:
        actor = run.roles.actor
        batches, _ = run.make_batches(samples, episode)
        facts |= sample_facts(samples) | pair_facts(samples, group_size)
        for number, batch in enumerate(batches * run.options.num_epochs):
            inspect = None
            if progress.step == 0:
                inspect = functools.partial(inspect_gradients, run.strategy, actor[0], loop.parity_dump)
            row = train_step(run.strategy, *actor, batch, loss_fn, progress, inspect)
            difference = row.pop("rollout_logprob_diff", None)
            if number == 0 and difference is not None:  # after a step, the policy is another one
                facts["rollout_logprob_diff"] = difference
                check_log_probs(difference, run.options.max_logprob_diff)
            log.after_step(actor[0], {**row, "mfu": None, **facts}, batch, note=f" | reward {facts['reward']:.4f}")
            if progress.step == loop.total_steps:
                break

    return updates
