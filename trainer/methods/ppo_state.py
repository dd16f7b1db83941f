"""The parts of a train_ppo run: the options of its algorithm, its roles, its state between rollouts, and all together."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Optional

from trainer.methods import advantages as adv
from trainer.models.losses.policy_loss import PolicyOptions
from trainer.rollout.asynchronous import RolloutsAhead
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.evaluation import Evaluation
from trainer.rollout.prompt_order import PromptOrder
from trainer.rollout.resumed_rollouts import history_after, link_of
from trainer.rollout.rollouts_file import RolloutsLog
from trainer.rollout.sample_pages import SamplePages
from trainer.rollout.samples import Sample
from trainer.rollout.timeline import Timeline
from trainer.training.checkpointing import Checkpoints
from trainer.training.ema import WeightAverage
from trainer.training.loop import LossFunction


@dataclass(frozen=True)
class PPOOptions:
    """The algorithm of a run."""

    advantages: adv.AdvantageOptions
    policy: PolicyOptions
    sampling: Sampling
    seed: int
    num_epochs: int = 1  # passes over each rollout
    kl_estimator: str = "k1"
    kl_in_rewards: bool = False
    kl_in_score: bool = False  # the KL of the whole response, before scores are compared
    kl_target: Optional[float] = None
    kl_horizon: int = 10000
    bypass_mode: bool = False  # the log-probs of the rollout engine are the old ones
    tis_cap: Optional[float] = None
    tis_level: str = "token"
    tis_floor: float = 0.0
    mask_range: Optional[tuple[float, float]] = None  # of the ratio that --tis_mask tests; None: no mask
    mask_level: str = "token"
    rollout_kl_max: Optional[float] = None  # responses above it have no loss
    rollout_kl_estimator: str = "k3"
    cov_share: float = 2e-4  # clip_cov and kl_cov: the share of tokens that they choose
    cov_range: tuple[float, float] = (1.0, 5.0)  # clip_cov: of covariances
    top_entropy_quantile: Optional[float] = None  # the share of tokens with a loss
    rejected_leave: bool = False  # the mean of the loss, as in verl; else they count in it with loss 0
    normalize_reward: bool = False
    reward_clip_range: Optional[tuple[float, float]] = None
    overlong_buffer_len: int = 0
    overlong_penalty_factor: float = 1.0
    filtering_range: Optional[tuple[float, float]] = None  # of mean scores, for dynamic filtering
    reward_range: Optional[tuple[float, float]] = None  # scores of a wrong and of a right response; None: not told
    turn_rewards: bool = False  # each turn of an episode has its own reward; else their sum is at the last token
    rewards_apart: tuple[tuple[str, float], ...] = ()  # gdpo: the name and weight of each reward
    max_logprob_diff: float = math.inf  # between engine and training, in the mean of a rollout; more end the run
    num_episodes: Optional[int] = None  # dynamic filtering ends after this number of passes over the prompts
    freezing_actor_steps: int = 0
    positive_nll_coef: float = 0.0  # of the log-likelihood of right responses
    entropy_target: Optional[float] = None  # in nats; the coefficient of the entropy in the loss is adapted towards it
    entropy_coef_delta: float = 0.005
    entropy_coef_max: float = 1.0


@dataclass
class EntropyCoef:
    """The coefficient of the entropy in the loss, adapted step by step (He et al. 2025, Skywork-OR1, arXiv 2505.22312).

    It grows after a step whose mean entropy of a token is at most the target, and else shrinks. It counts only after a step of
    such low entropy. As in TRL, the entropy is that of the step before, so the first step has no bonus.
    """

    value: float = 0.0
    last: Optional[float] = None  # the mean entropy of the last step, in nats

    def now(self, options: PPOOptions) -> float:
        """The coefficient of this step. Without a target it is constant."""
        target = options.entropy_target
        return self.value if target is None or (self.last is not None and self.last <= target) else 0.0

    def after_step(self, entropy: float, options: PPOOptions) -> dict[str, float]:
        """The metrics of a step with this mean entropy. One that is not finite changes nothing."""
        if options.entropy_target is None:
            return {}
        used = {"entropy_coef": self.now(options)}
        if math.isfinite(entropy):
            self._adapt(entropy, options)
        return used

    def _adapt(self, entropy: float, options: PPOOptions) -> None:
        change = options.entropy_coef_delta if entropy <= options.entropy_target else -options.entropy_coef_delta
        self.value, self.last = min(max(self.value + change, 0.0), options.entropy_coef_max), entropy


@dataclass
class Roles:
    """The models of a run. `score(samples, group_size)` sets the score of every sample, the same on every rank (collective)."""

    actor: tuple  # (model, optimizer, scheduler), prepared
    score: Callable[[list[Sample], int], None]
    max_failed_share: float = 0.0  # of the samples of a rollout or an evaluation; more end the run
    engine: object = None  # None if rollouts come from a file and nothing is evaluated
    environment: object = None  # an `episodes.Environments`, which also gives the scores
    critic: Optional[tuple] = None
    references: tuple = ()  # the reference, or the teachers; None is the actor without its adapter
    average: Optional[WeightAverage] = None  # of the actor's weights
    routers: object = None  # of the actor, with --routing_replay: a `routing_replay.Routers`
    offload_actor_optimizer: bool = False  # while responses are generated
    offload_critic: bool = False  # while responses are generated
    ahead: Optional[RolloutsAhead] = None  # with --max_staleness; it uses the engine
    synced_step: Optional[int] = None  # the engine holds the weights of this step
    sync_facts: dict = field(default_factory=dict)  # metrics of that sync


@dataclass
class RLState:
    """What a run remembers between rollouts, except its models. A checkpoint stores it as the position in the data."""

    prompts: PromptOrder
    kl_coef: float
    rollout: int = 0
    # --max_staleness with --dynamic_filtering: batches of prompts beyond one for each rollout. So batches have numbers,
    # rollout + refills, which decide the random numbers of their samples
    refills: int = 0
    prompts_drawn: int = 0  # by dynamic filtering
    prompts_kept: int = 0
    moments: adv.RunningMoments = field(default_factory=adv.RunningMoments)
    entropy: EntropyCoef = field(default_factory=EntropyCoef)  # with --entropy_target
    facts: dict = field(default_factory=dict)  # flags that a resumed run may not change: a position depends on them
    # `origin`, and `histories` of the newest versions of the weights: see `rollout.resumed_rollouts`
    origin: str = ""
    histories: dict[int, str] = field(default_factory=lambda: {0: ""})
    num_histories: int = 1

    def coefs(self, options: PPOOptions) -> tuple[Callable[[], float], Callable[[], float]]:
        """Functions to the coefficients of the KL and of the entropy in the loss of the present step."""
        return lambda: self.kl_coef, lambda: self.entropy.now(options)

    def link(self) -> str:
        """The mark of samples that the present weights generate."""
        return link_of(self.histories[self.rollout], self.origin)

    def go_on(self, samples: list[Sample]) -> None:
        """Note that the weights are trained on these samples. The next rollout begins."""
        self.histories[self.rollout + 1] = history_after(self.link(), samples)
        self.histories = dict(sorted(self.histories.items())[-self.num_histories :])
        self.rollout += 1

    def state_dict(self) -> dict:
        position = self.prompts.position()
        counts = {"prompts_drawn": self.prompts_drawn, "prompts_kept": self.prompts_kept}
        counts |= {"rollout": self.rollout, "histories": list(self.histories.items())}
        counts |= {"refills": self.refills} if self.refills else {}
        counts |= {"entropy": asdict(self.entropy)} if self.entropy.last is not None else {}
        return position | counts | {"kl_coef": self.kl_coef, "moments": asdict(self.moments)}

    def load_state_dict(self, state: dict) -> None:
        self.prompts.go_to(state)
        self.rollout, self.kl_coef = state["rollout"], state["kl_coef"]
        self.moments = adv.RunningMoments(**state["moments"])
        # older checkpoints, and runs without --entropy_target, do not have the following
        self.entropy = EntropyCoef(**state["entropy"]) if "entropy" in state else self.entropy
        self.histories = dict(map(tuple, state.get("histories", [(self.rollout, "")])))
        self.refills = state.get("refills", 0)
        self.prompts_drawn, self.prompts_kept = state.get("prompts_drawn", 0), state.get("prompts_kept", 0)

    def is_used_up(self, num_episodes: Optional[int]) -> bool:
        """Whether all passes over the prompts are done. None means that there is no limit."""
        return num_episodes is not None and self.prompts.episode >= num_episodes

    def fingerprint(self) -> dict:
        prompts = self.prompts
        own = {"seed": prompts.seed, "shuffle": prompts.shuffle, "data": prompts.digest()}
        own |= {"curriculum": prompts.curriculum} if prompts.curriculum != "none" else {}
        return {**own, "rollout_batch_size": prompts.batch_size, **self.facts}


Recorded = Optional[Callable[[RLState], Optional[list[Sample]]]]  # the samples of the next rollout, if they are known


@dataclass
class PPORun:
    """The parts of one run. Logs exist on rank 0 only.

    `make_batches(samples, episode)` returns this rank's global batches, and the samples with tokens where they are trained.
    """

    strategy: object
    roles: Roles
    state: RLState
    options: PPOOptions
    make_batches: Callable[[list[Sample], int], tuple[list, list[Sample]]]
    checkpoints: Checkpoints
    sp_group: object = None
    recorded: Recorded = None  # by --rollouts_from, or generated before a resume
    evaluation: Optional[Evaluation] = None
    answers_log: Optional[Callable[[int, list[Sample]], None]] = None  # (step, answers of an evaluation)
    rollouts_log: Optional[RolloutsLog] = None
    pages: Optional[SamplePages] = None
    timeline: Optional[Timeline] = None
    groups: dict[int, list[str]] = field(default_factory=dict)  # the names of the groups of a prompt's row
    change_loss: Optional[Callable[[LossFunction], LossFunction]] = None  # of the policy
    updates: Optional[Callable] = None  # in place of `policy_updates`, with its parameters
