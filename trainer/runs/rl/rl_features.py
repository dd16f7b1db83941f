"""The list of features of RL, in the order in which a run applies them."""

import functools

from trainer.datasets.batches import shared_prompts
from trainer.datasets.images.image_batches import WORKERS
from trainer.errors import UserError
from trainer.flags.names.presets import describe_preset
from trainer.methods.load_balance import experts_per_token, with_batch_balance_loss
from trainer.methods.teacher_loss import make_on_policy_loss
from trainer.metrics import counted
from trainer.model_folders.model_folder import read_config
from trainer.models.attention import prompt_tree
from trainer.models.layers.routing_replay import Routers
from trainer.models.losses.distances import Distance
from trainer.models.model_bounds import bounds_of
from trainer.rollout import rollouts_file
from trainer.rollout.resumed_rollouts import AheadFiles, ResumedRollouts, find_resumed
from trainer.rollout.sample_pages import SamplePages
from trainer.rollout.timeline import Timeline
from trainer.runs.feature import Feature
from trainer.runs.features.adapter import MERGED_BASE, adapt, check_targets
from trainer.runs.features.best_model import BEST_MODEL
from trainer.runs.features.certify import CERTIFICATE
from trainer.runs.features.exact import EXACT_RL
from trainer.runs.features.expert_balance import check_experts
from trainer.runs.features.hub import HUB
from trainer.runs.features.image_runs import freeze_vision, images_of, use_images
from trainer.runs.features.rates import RATES
from trainer.runs.features.reference import REFERENCE
from trainer.runs.rl.rl_critic import CRITIC
from trainer.runs.rl.rl_engines import build_environments, rollouts_ahead
from trainer.runs.rl.rl_options import sampling_of
from trainer.runs.rl.rl_rewards import check_reward_models
from trainer.runs.rl.rl_teachers import TEACHERS
from trainer.training.ema import WeightAverage

# --- what the policy is and reads


def print_preset(run) -> None:
    run.setup.strategy.print(describe_preset(run.args))


def read_images(run) -> None:
    """Let prompts have images: in the micro-batches, in every model, and in the engine."""
    images = images_of(run)
    use_images(run, images)
    run.collate_rollout, run.loader_options = images.rows_of_rollout, {"num_workers": WORKERS}
    run.more_stops = images.image_tokens()
    run.engine_options["hf"] |= {"auto_class": run.auto_class, "read_images": images.read_prompts}
    run.engine_options["vllm"] |= {"images_of": images.tensors_of_prompt, "processor": images.collate.processor}


def send_deltas(run) -> None:
    run.engine_options["vllm_server"]["deltas"] = True


def share_prompts(run) -> None:
    """Train each prompt once, with all its responses."""
    run.collate_rollout, run.sizes_to_plan = shared_prompts.collate_shared, shared_prompts.sizes_to_plan
    run.model_changes.append(prompt_tree.share_prompts)


def read_frozen(run) -> None:
    """Read the rollouts of --rollouts_from. Raises UserError if they do not fit this run or its model."""
    args, bounds = run.args, bounds_of(run.setup.folder, run.setup.trust_remote_code)
    frozen, size = rollouts_file.read_rollouts(args.rollout.rollouts_from, bounds), args.rollout.n_samples_per_prompt
    if not frozen:
        raise UserError(
            "--rollouts_from", f"{args.rollout.rollouts_from} holds no rollout", "a rollouts.jsonl of train_ppo"
        )
    for sample in (sample for samples in frozen for sample in samples):
        if bool(sample.kept_ids) != sampling_of(args).truncates:
            found = (
                f"{args.rollout.rollouts_from} was made {'with' if sample.kept_ids else 'without'} truncated sampling"
            )
            raise UserError("--top_p, --top_k, --min_p", found, "the values of the run that made the rollouts")
        if args.rollout.routing_replay and sample.experts is None and not sample.failed:
            found = f"{args.rollout.rollouts_from} was made without it"
            raise UserError("--routing_replay", found, "rollouts with it, or leave it out")
    if args.advantage.turn_rewards and any(len(s.turns) != len(s.turn_rewards) for each in frozen for s in each):
        found = f"{args.rollout.rollouts_from} lacks the rewards of turns"
        raise UserError("--turn_rewards", found, "rollouts with --env of this version, or leave it out")
    odd = next((len(samples) for samples in frozen if len(samples) % size), None)
    if odd is not None:
        found = f"{size} with a rollout of {counted(odd, 'sample')} in {args.rollout.rollouts_from}"
        raise UserError("--n_samples_per_prompt", found, "the value of the run that made the rollouts")
    run.frozen = frozen


def train_frozen(run) -> None:
    run.ppo.recorded = rollouts_file.frozen(run.frozen)


# --- what the roles are


def record_experts(run) -> None:
    run.engine_options["hf"]["record_experts"] = True


def replay_experts(run) -> None:
    """Let training send each token to the experts of its rollout. Frozen rollouts must have them."""
    run.roles.routers = Routers(run.roles.actor[0], run.model.config)
    if run.frozen:
        found = (sample.experts for samples in run.frozen for sample in samples)
        run.roles.routers.check(experts for experts in found if experts is not None)


def keep_average(run) -> None:
    run.roles.average = WeightAverage(run.setup.strategy, *run.roles.actor[:2], run.args.advantage.ema_beta)


def talk(run) -> None:
    run.roles.environment = build_environments(run)


def generate_ahead(run) -> None:
    run.roles.ahead = rollouts_ahead(run)


# --- what the algorithm does besides


def balance_experts(run) -> None:
    """Add the load-balancing loss to that of the policy."""
    top_k = experts_per_token(read_config(run.setup.folder, run.args.model.trust_remote_code))
    coef = run.args.experts.aux_loss_coef
    run.ppo.change_loss = functools.partial(with_batch_balance_loss, aux_loss_coef=coef, top_k=top_k)


def compare_distributions(run) -> None:
    """Replace the loss of the policy by the distance of its distributions from those of the teacher."""
    flags, temperature = run.args.kl, run.args.rollout.temperature
    distance = Distance(flags.kd_loss, flags.kd_beta, flags.kd_top_k)
    options = {"teachers": run.roles.references, "temperature": temperature, "distance": distance}
    run.ppo.change_loss = functools.partial(make_on_policy_loss, **options)


def resume_rollouts(run) -> None:
    """Let a resumed run train the rollouts that it has generated after its checkpoint."""
    args, ahead, found = run.args, run.roles.ahead, ResumedRollouts()
    has_all = not args.rollout.dynamic_filtering  # else rollouts.jsonl lacks the prompts that were filtered out
    if args.checkpoint.load_checkpoint is not None and has_all:
        found = find_resumed(run.output_dir, run.ppo.state, args.rollout.n_samples_per_prompt)
    if found:
        run.setup.strategy.print(
            f"rollouts {min(found)} to {max(found)} were generated before the resume: they are trained as they are"
        )
    if ahead:
        later = getattr(
            run.roles.score, "takes_groups", False
        )  # in the files, samples without scores lack their columns
        ahead.files = AheadFiles(run.output_dir) if has_all and not later else None
        ahead.resumed = found
    else:
        run.ppo.recorded = found


def write_pages(run) -> None:
    if run.setup.strategy.is_rank_0():
        run.ppo.pages = SamplePages(run.output_dir, run.setup.tokenizer, run.args.rollout.sample_pages)


def write_timeline(run) -> None:
    run.ppo.timeline = Timeline(run.output_dir)


RL_FEATURES = (
    EXACT_RL,
    RATES,
    REFERENCE,
    CRITIC,
    Feature("preset", lambda run: run.args.advantage.preset, before_data=print_preset),
    Feature("images", lambda run: run.has_images, with_data=read_images, with_model=freeze_vision),
    Feature("deltas", lambda run: run.args.rollout.sync_deltas, with_data=send_deltas),
    Feature("shared prompts", lambda run: run.args.rollout.share_prompts, with_data=share_prompts),
    Feature(
        "frozen rollouts", lambda run: run.args.rollout.rollouts_from, before_data=read_frozen, with_loss=train_frozen
    ),
    MERGED_BASE,
    Feature("adapter", lambda run: run.args.lora.lora_rank, before_data=check_targets, with_model=adapt),
    Feature(
        "routers", lambda run: run.args.rollout.routing_replay, with_data=record_experts, with_roles=replay_experts
    ),
    Feature("average", lambda run: run.args.advantage.ema_beta is not None, with_roles=keep_average),
    Feature("environment", lambda run: run.args.environment.env, with_roles=talk),
    Feature("staleness", lambda run: run.args.rollout.max_staleness, with_roles=generate_ahead),
    Feature(
        "balance", lambda run: run.args.experts.aux_loss_coef, before_data=check_experts, with_loss=balance_experts
    ),
    Feature("reward models", lambda run: run.args.scores.reward_pretrain, before_data=check_reward_models),
    Feature("distance", lambda run: run.args.kl.kd_loss, with_loss=compare_distributions),
    TEACHERS,
    Feature("resumed rollouts", lambda run: not run.args.rollout.rollouts_from, with_logs=resume_rollouts),
    Feature("sample pages", lambda run: run.args.rollout.sample_pages, with_logs=write_pages),
    Feature("timeline", lambda run: run.args.rollout.timeline, with_logs=write_timeline),
    BEST_MODEL,
    CERTIFICATE,
    HUB,
)
