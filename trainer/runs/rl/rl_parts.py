"""What a run of RL is: a method, and the parts that grow around it."""

import collections
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from trainer.comma_separated import named_models
from trainer.methods.ppo_state import PPOOptions, PPORun, Roles
from trainer.rollout.prompt_order import PromptOrder
from trainer.runs.run import Run


def frozen_models(run: "RLRun") -> dict[str, Optional[str]]:
    """The frozen models of a run of RL: teacher, reward models, reference, and the base of a critic with an adapter."""
    kl, args = run.args.kl, run.args
    found = named_models("teacher", kl.teacher, kl.teacher_key) | named_models(
        "reward_pretrain", args.scores.reward_pretrain
    )
    if kl.init_kl_coef and not kl.teacher:
        found["ref_model"] = kl.ref_model
    if args.lora.lora_rank and args.advantage.advantage_estimator == "gae":
        found["critic_pretrain"] = args.critic.critic_pretrain
    return found


@dataclass(frozen=True)
class RLMethod:
    """What a command brings to a run of RL. Another command than train_ppo shares the rollouts and the reward."""

    command: str
    make_batches: Callable  # (run) to `make_batches(samples, episode)`, the batches that the updates take
    make_updates: Callable = lambda run: None  # (run) to the `updates` of a PPORun; None: those of the policy
    per_prompt: Optional[int] = None  # a batch counts so many of each prompt; None: its responses
    frozen_models: Callable = frozen_models  # as in `Method`
    rules: str = "train_ppo"  # the command in the table of rules
    own_flags: Any = None  # of that command, which the run folder records; None: those of the run


@dataclass
class RLRun(Run):
    """A run of RL as it grows. Features change it at fixed places; see `feature.Feature`."""

    more_stops: tuple[int, ...] = ()  # tokens that end a response, besides eos
    engine_options: dict[str, dict] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(dict)
    )  # by engine
    loader_options: dict = dataclasses.field(default_factory=dict)  # of the batches of a rollout
    collate_rollout: Optional[Callable] = None  # in place of that of texts; see `collate_samples`
    sizes_to_plan: Optional[Callable] = None  # from samples to the sizes that micro-batches are planned by
    functions: dict[str, Callable] = dataclasses.field(default_factory=dict)  # of the reward
    frozen: Optional[list] = None  # rollouts of --rollouts_from
    order: Optional[PromptOrder] = None
    options: Optional[PPOOptions] = None
    roles: Optional[Roles] = None
    ppo: Optional[PPORun] = None

    @property
    def own_flags(self):
        """The flags that the run folder records."""
        return self.method.own_flags or self.args
