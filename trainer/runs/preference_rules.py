"""The losses of `train_dpo`, with and without --online: checks of their flags, and the loss function that they give."""

from trainer.errors import UserError
from trainer.flags.preference_flags import DPOArguments


def needs_reference(args: DPOArguments) -> bool:
    from trainer.models.losses.preference_loss import PAIR_LOSSES, loss_names

    return args.loss == "kto" or any(PAIR_LOSSES[name].needs_reference for name in loss_names(args.loss))


def validate_losses(args: DPOArguments) -> list[str]:
    """The names of --loss. Raises UserError for a name, a weight or a constant that does not fit."""
    from trainer.models.losses.preference_loss import PAIR_LOSSES, loss_names

    if args.loss == "kto":
        names, losses = ["kto"], []
    else:
        names = loss_names(args.loss)
        unknown = next((name for name in names if name not in PAIR_LOSSES), None)
        if unknown is not None:
            allowed = ", ".join((*PAIR_LOSSES, "kto"))
            raise UserError("--loss", args.loss, allowed if len(names) == 1 else allowed.removesuffix(", kto"))
        losses = [PAIR_LOSSES[name] for name in names]
    if args.loss_weights is not None and len(args.loss_weights) != len(losses):
        raise UserError(
            "--loss_weights", f"{len(args.loss_weights)} with --loss {args.loss}", "one for each loss of pairs"
        )
    if len({loss.needs_reference for loss in losses}) > 1:
        raise UserError("--loss", f"{args.loss}: only some of them have a reference", "losses of one kind")
    smoothed = any(loss.has_label_smoothing for loss in losses)
    if (args.label_smoothing > 0) != smoothed or args.label_smoothing >= 0.5:
        found = f"{args.label_smoothing} with --loss {args.loss}"
        raise UserError(
            "--label_smoothing", found, "above 0 and below 0.5 with --loss cdpo or robust, 0 with any other"
        )
    if args.f_divergence != "reverse_kl" and not all(loss.of_margin for loss in losses or [PAIR_LOSSES["nca"]]):
        fit = [name for name, loss in PAIR_LOSSES.items() if loss.of_margin]
        raise UserError("--f_divergence", f"{args.f_divergence} with --loss {args.loss}", f"--loss {', '.join(fit)}")
    return names


def make_loss(args: DPOArguments, config, reference, sp_group):
    from trainer.methods.dpo import make_preference_loss
    from trainer.methods.kto import make_kto_loss
    from trainer.models.losses.preference_loss import PreferenceOptions

    def balanced(loss_fn):
        if not args.aux_loss_coef:
            return loss_fn
        from trainer.methods.load_balance import experts_per_token, with_batch_balance_loss

        return with_batch_balance_loss(loss_fn, args.aux_loss_coef, experts_per_token(config))

    if args.loss == "kto":
        return balanced(make_kto_loss(args.beta, args.desirable_weight, args.undesirable_weight, reference, sp_group))
    options = PreferenceOptions(
        args.loss,
        args.beta,
        args.label_smoothing,
        args.simpo_gamma,
        args.nll_loss_coef,
        weights=tuple(args.loss_weights) if args.loss_weights else None,
        f_divergence=args.f_divergence,
        f_alpha=args.f_alpha,
    )
    return balanced(make_preference_loss(options, reference, sp_group, args.precompute_ref_logps))
