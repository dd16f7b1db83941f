"""`--ref_model`: a model whose ids mean other tokens is refused before data is read. RL has its teacher under that flag."""

from trainer.distributed.collectives import rank_0_first
from trainer.models.model_loading import resolve_adapted_model
from trainer.runs.feature import Feature
from trainer.runs.run_setup import check_vocabulary, tokenizer_folder


def check_reference(run) -> None:
    """Raise UserError for a reference with another vocabulary than the policy: it could not read the policy's tokens."""
    name, flag = run.flags.ref_model, "--teacher" if run.flags.teacher else "--ref_model"
    place = rank_0_first(lambda: resolve_adapted_model(name, flag))
    check_vocabulary(run.setup, name, tokenizer_folder(*place), flag, "a model with the same one")


REFERENCE = Feature("reference", lambda run: run.flags.ref_model, before_data=check_reference)
