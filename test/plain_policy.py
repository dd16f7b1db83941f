"""A policy that is a table of logits (next token by this token), eight responses to two prompts, and the trainer's loss of them.

The old policy, the policy and the reference are different tables. Samples have one to six tokens, in two micro-batches, one
of them packed.
"""

import statistics
from types import SimpleNamespace

import torch

from trainer.cli.train_ppo import parse
from trainer.methods.ppo import add_advantages, add_log_probs
from trainer.methods.ppo_state import EntropyCoef, RLState
from trainer.methods.roles import make_policy_loss
from trainer.rollout.micro_batches import SampleSet, collate_samples
from trainer.rollout.placement import Part
from trainer.rollout.samples import Sample
from trainer.runs.rl.rl_checks import validate
from trainer.runs.rl.rl_options import ppo_options

WORDS, GROUP, MAX_LEN = 11, 4, 6
LENGTHS, SCORES = [1, 6, 3, 6, 2, 5, 6, 4], [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.0]
CUT = [1, 6]  # the responses that the limit of tokens cut


class Table(torch.nn.Module):
    """A model whose logits depend on the last token only."""

    def __init__(self, seed: int, size: float):
        super().__init__()
        start, step = (torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(s)) for s in (0, seed))
        self.table = torch.nn.Parameter(start + size * step)

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.table[input_ids])

    def get_output_embeddings(self):
        return torch.nn.Identity()  # no linear head, so no chunks


def make_samples() -> list[Sample]:
    ids = torch.randint(WORDS, (8, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return [
        Sample(n, n // GROUP, row[:2], row[2 : 2 + LENGTHS[n]], [0.0] * LENGTHS[n], n not in CUT, None, SCORES[n])
        for n, row in enumerate(ids)
    ]


def arguments(*flags: str):
    line = ["--pretrain", "m", "--dataset", "d", "--reward_func", "format", "--n_samples_per_prompt", str(GROUP)]
    return parse([*line, "--generate_max_len", str(MAX_LEN), *flags])[0]


def found_loss(args, old, policy, reference=None, values=None, samples=None) -> torch.Tensor:
    """The loss of the trainer's own phases: log-probs, advantages, loss."""
    results, num_targets = found_results(args, old, policy, reference, values, samples)
    return sum(total for total, _, _ in results) / num_targets


def found_metrics(args, old, policy) -> dict[str, float]:
    """The metrics of the loss, as means over tokens."""
    results, _ = found_results(args, old, policy)
    names = [name for name, value in results[0][2].items() if value.count is not None]
    sums = {name: [metrics[name] for _, _, metrics in results] for name in names}
    return {name: (sum(m.total for m in own) / sum(m.count for m in own)).item() for name, own in sums.items()}


def found_results(args, old, policy, reference=None, values=None, samples=None) -> tuple[list, int]:
    validate(args)
    samples, options = samples or make_samples(), ppo_options(args, (0,))
    sizes = args.rollout.generate_max_len, args.advantage.mask_truncated, args.rollout.n_samples_per_prompt
    rows = SampleSet(samples, args.advantage.loss_agg, *sizes, args.advantage.advantage_estimator == "scalerl")
    parts = [
        collate_samples([rows[n] for n in part], 0, packed) for part, packed in (([0, 1, 2], 0), ([3, 4, 5, 6, 7], 1))
    ]
    batch = SimpleNamespace(micro_batches=parts, num_targets=sum(rows["num_loss_tokens"]))
    strategy = SimpleNamespace(device=torch.device("cpu"), all_reduce=lambda tensor: tensor)
    roles = SimpleNamespace(
        routers=None, actor=(old,), references=(reference,) if args.kl.init_kl_coef else (), critic=None
    )
    state = RLState(None, args.kl.init_kl_coef, entropy=EntropyCoef(args.advantage.entropy_loss_coef))
    part = Part(strategy, samples, None)
    flat = add_log_probs(strategy, roles, [batch, batch], options, part)  # two: off-policy
    if args.advantage.advantage_estimator == "gae":
        flat["old_values"] = values
    add_advantages([batch], samples, part, flat, state, options)
    loss_fn = make_policy_loss(options.policy, *state.coefs(options), None, lambda *_: None)
    results = [loss_fn(policy, part) for part in parts]
    assert sum(int(count) for _, count, _ in results) == batch.num_targets
    return results, batch.num_targets


# --- the papers, one response at a time


def log_probs(model: Table, sample: Sample) -> torch.Tensor:
    before = [sample.prompt_ids[-1], *sample.response_ids[:-1]]
    return model.table.log_softmax(-1)[before, sample.response_ids].double()


def clipped(ratio, advantage: float, low: float, high: float):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def group_of(n: int, scores=SCORES) -> list[float]:
    return scores[n // GROUP * GROUP : (n // GROUP + 1) * GROUP]


def normed(n: int, scores=SCORES) -> float:
    """DeepSeekMath, section 4.1.2; also DAPO equation 9, GSPO equation 6."""
    return (scores[n] - statistics.fmean(group_of(n, scores))) / (statistics.stdev(group_of(n, scores)) + 1e-6)
