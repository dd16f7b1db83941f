"""The parts of `train_rm` and `train_dpo`: pairs and single answers from the flags, the losses and their reference."""

from typing import Optional

from trainer.comma_separated import names_in
from trainer.datasets.samples.parts import WHOLE
from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.errors import UserError
from trainer.flags.names.loss_names import check_names_in
from trainer.flags.preference_flags import PreferenceArguments
from trainer.methods.dpo import make_preference_loss
from trainer.methods.kto import make_kto_loss
from trainer.models.losses.preference_loss import PAIR_LOSSES, PairLoss, PreferenceOptions
from trainer.runs.run_data import load_sets_of, text_options, tokenized
from trainer.runs.run_models import frozen_model

# --- data


def load_pairs(args, tokenizer, names: str, split: str, flag: str, part=WHOLE, mean_flag=None):
    """Return (tokenized pairs, ledger) of --dataset or --eval_dataset. With margins if --margin_key names a column."""

    def options_of(args):
        options = text_options(args.data) | {"max_len": args.length.max_len, **vars(args.pairs)}
        scored = "reward" in vars(args)
        margin_key = args.reward.margin_key if scored else None
        stops = {} if scored else {"allow_no_stop": args.preference.allow_no_stop}
        return options | {"margin_key": margin_key, "mean_flag": mean_flag, "scored": scored, **stops}

    rows = load_sets_of(args, args.batch.seed, options_of, names, split, flag)
    return tokenized(args, tokenizer, rows, tokenize_preference, options_of, flag, part)


def load_dpo(args, tokenizer, names: str, split: str, flag: str, part=WHOLE):
    """Return (samples, ledger) of `train_dpo`: single answers with kto, else pairs."""
    loss = args.preference.loss
    if loss == "kto":
        return load_unpaired(args, tokenizer, names, split, flag, part)
    # losses without a reference compare means over the answer's tokens
    mean_flag = "--nll_loss_coef" if args.preference.nll_loss_coef else None
    mean_flag = mean_flag if needs_reference(loss) else f"--loss {loss}"
    return load_pairs(args, tokenizer, names, split, flag, part, mean_flag=mean_flag)


def load_unpaired(args, tokenizer, names: str, split: str, flag: str, part=WHOLE):
    """Return (tokenized answers, ledger) of rows with single answers, or of pairs split into single answers."""
    rows = load_sets_of(args, args.batch.seed, answer_options, names, split, flag)
    return tokenized(args, tokenizer, rows, tokenize_unpaired, answer_options, flag, part)


def answer_options(args):
    """What `tokenize_unpaired` takes from the flags of a run, or of one set."""
    answers = {"completion_key": args.answers.completion_key, "label_key": args.answers.label_key}
    answers |= {"allow_no_stop": args.preference.allow_no_stop}
    return text_options(args.data) | {"max_len": args.length.max_len, **vars(args.pairs), **answers}


# --- losses of train_dpo, with and without --online


def losses_of(loss: str) -> list[PairLoss]:
    """The losses of pairs that --loss names. kto is none of them. Raises UserError for a name that is no loss."""
    names = [] if loss == "kto" else names_in(loss)
    check_names_in(PAIR_LOSSES, "--loss", names)
    return [PAIR_LOSSES[name] for name in names]


def needs_reference(loss: str) -> bool:
    """Whether --loss compares with a reference model."""
    return loss == "kto" or any(found.needs_reference for found in losses_of(loss))


def check_losses(flags: PreferenceArguments) -> dict:
    """Raise UserError for a name or a constant that does not fit. Returns facts for the table of rules."""
    losses = losses_of(flags.loss)
    if len({loss.needs_reference for loss in losses}) > 1:
        raise UserError("--loss", f"{flags.loss}: only some of them have a reference", "losses of one kind")
    if flags.label_smoothing >= 0.5:
        raise UserError("--label_smoothing", str(flags.label_smoothing), "a number below 0.5")
    return {
        "loss_names": tuple(names_in(flags.loss)),
        "loss_has_reference": needs_reference(flags.loss),
        "loss_has_smoothing": any(loss.has_label_smoothing for loss in losses),
        "loss_has_divergence": bool(losses) and all(loss.of_margin for loss in losses),
    }


def pair_loss(flags: PreferenceArguments, reference, sp_group, sampled: bool = False):
    """The loss of pairs that the flags name. For `reference` and `sampled`, see `make_preference_loss`."""
    options = PreferenceOptions(
        flags.loss,
        flags.beta,
        flags.label_smoothing,
        flags.simpo_gamma,
        flags.nll_loss_coef,
        weights=tuple(flags.loss_weights) if flags.loss_weights else None,
        f_divergence=flags.f_divergence,
        f_alpha=flags.f_alpha,
    )
    return make_preference_loss(options, reference, sp_group, flags.precompute_ref_logps, sampled)


def make_dpo_loss(run):
    """The loss function of `train_dpo`, with the reference model if it needs one of its own."""
    flags, answers, sp_group = run.args.preference, run.args.answers, run.setup.sp_group
    # with a new adapter, its base is the reference, unless --ref_model names another model
    has_reference = needs_reference(flags.loss) and not flags.precompute_ref_logps
    lora = run.args.lora
    needs_model = has_reference and (flags.ref_model or lora.lora_adapter or not lora.lora_rank)
    reference = load_reference(run) if needs_model else None
    if flags.loss == "kto":
        weights = answers.desirable_weight, answers.undesirable_weight
        return make_kto_loss(flags.beta, *weights, reference, sp_group)
    return pair_loss(flags, reference, sp_group)


# --- the reference model


def frozen_models(run) -> dict[str, Optional[str]]:
    """The reference model as a frozen model of the run, if the loss compares with one."""
    flags = run.args.preference
    return {"ref_model": flags.ref_model} if needs_reference(flags.loss) else {}


def load_reference(run):
    """The reference model, frozen and sharded like the policy."""
    flags, strategy = run.args.preference, run.setup.strategy
    if flags.ref_offload and strategy.device.type == "cpu":
        strategy.print("--ref_offload: the device is the CPU, so the reference is already in host memory")
    flag = "--ref_model" if flags.ref_model else "--pretrain"
    folder, adapter = run.references[0]
    reference = run.load(folder, flag, trained=False, adapter=adapter)
    return frozen_model(run.setup, reference, flags.ref_offload)
