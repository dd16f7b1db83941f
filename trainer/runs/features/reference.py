"""`--ref_model`: a model whose ids mean other tokens is refused before data is read. RL has its teacher under that flag."""

from trainer.runs.feature import Feature
from trainer.runs.run_setup import check_vocabulary, tokenizer_folder


def check_reference(run) -> None:
    """Raise UserError for a reference with another vocabulary than the policy: it could not read the policy's tokens."""
    name, flag = run.flags.ref_model, "--teacher" if run.flags.teacher else "--ref_model"
    check_vocabulary(run.setup, name, tokenizer_folder(*run.reference), flag, "a model with the same one")


REFERENCE = Feature("reference", lambda run: run.flags.ref_model, before_data=check_reference)
