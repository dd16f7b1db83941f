"""`--exact` in a run: single samples as micro-batches, exact sums of losses, and a test that this machine keeps bits."""

from trainer.exact.exact_gradients import add_within_modules_first
from trainer.exact.exact_sums import with_exact_sums
from trainer.exact.self_test import ask_for_fixed_kernels, self_test, shapes_of, test_shapes
from trainer.flags.parse_flags import with_flags
from trainer.model_parallel.tensor_parallel import split_layers
from trainer.models.cpu_matmul import chosen
from trainer.runs.feature import Feature


def run_single_samples(run) -> None:
    """Make each sample a micro-batch of its own, without padding. Only so does no neighbour change its gradient.

    Auto takes MKL for all products: with oneDNN for large ones, a row would depend on the number of rows.
    """
    ask_for_fixed_kernels()
    fixed = {"micro_train_batch_size": 1, "max_tokens_per_micro_batch": None, "packing_samples": False}
    fixed |= {"cpu_matmul": "mkl"} if run.args.layout.cpu_matmul == "auto" else {}
    run.args = with_flags(run.args, **fixed)


def hold_rollouts_to_bits(run) -> None:
    """Also end the run at the first sample without a score, and at any difference between engine and training.

    A sample that is left out for its time would make the speed of a rank decide what is trained. Samples of --rollouts_from
    are the same on every layout, and their recorded log-probs enter no loss: they may be those of another model.
    """
    run_single_samples(run)
    run.args = with_flags(run.args, max_failed_share=0.0)
    if not run.args.rollout.rollouts_from:
        run.args = with_flags(run.args, max_logprob_diff=0.0)


def check_machine(run) -> None:
    rolls_out = run.setup.rolls_out  # a decoded token is a row of its own
    self_test(rolls_out or run.setup.sp_group is not None, rolls_out, chosen())
    run.setup.strategy.print("exact: each sample is a micro-batch of its own; flags about micro-batches change nothing")
    run.setup.strategy.print(f"exact: --cpu_matmul is {run.args.layout.cpu_matmul}; auto becomes mkl")
    if rolls_out and not run.args.rollout.rollouts_from:
        run.setup.strategy.print(
            "exact: --max_failed_share and --max_logprob_diff are 0, so nothing is left out or drifts"
        )
    run.setup.strategy.print(
        "exact: one thread for each rank; OMP_NUM_THREADS changes nothing, since MKL's bits need it"
    )


def fix_sums(run) -> None:
    """Fix the order of sums in backward, also in the layers of an adapter, and sum losses exactly."""
    fix_order(run)
    run.loss_fn = with_exact_sums(run.loss_fn)


def fix_order(run) -> None:
    """Also test the shapes of this model, which are known now."""
    rolls_out = run.setup.rolls_out
    shapes = shapes_of(run.model, split_layers(run.model))
    test_shapes(shapes, rolls_out or run.setup.sp_group is not None, rolls_out, chosen())
    add_within_modules_first(run.model)


def sum_policy_loss(run) -> None:
    run.ppo.change_loss = with_exact_sums


def decode_exactly(run) -> None:
    run.engine_options["hf"]["exact"] = True


EXACT = Feature(
    "exact",
    lambda run: run.args.layout.exact,
    before_setup=run_single_samples,
    before_data=check_machine,
    with_loss=fix_sums,
)
EXACT_RL = Feature(
    "exact",
    lambda run: run.args.layout.exact,
    before_setup=hold_rollouts_to_bits,
    before_data=check_machine,
    with_data=decode_exactly,
    with_model=fix_order,
    with_loss=sum_policy_loss,
)
