"""Rules for the flags that say what a row becomes. What is known of the rows is known when they are read."""

from types import SimpleNamespace
from typing import Any

from trainer.flags.common_flags import DataArguments, SFTDataArguments
from trainer.flags.layout_rules import ONE
from trainer.flags.rule import UNKNOWN, Rule, first_broken

REMOVE = "Remove the flag."
ADD_EVALUATION = "Add --eval_dataset or --eval_fraction, or remove the flag."


def has_evaluation(f) -> bool:
    """Whether a run evaluates. `f` has the flags of data."""
    return bool(f.eval_dataset or f.eval_fraction)


# fmt: off
DATA_RULES = (
    Rule("apply_chat_template output_key multiturn train_on allow_no_stop input_template system", lambda f: f.pretrain_mode, "with --pretrain_mode",
         "plain text has no prompt, no answer and no turns", ONE),
    Rule("input_template", lambda f: f.apply_chat_template, "with --apply_chat_template",
         "the chat template is the text around a prompt", ONE),
    Rule("input_template", lambda f: f.has_conversations, "with rows of conversations",
         "the chat template is the text around a prompt", REMOVE),
    Rule("input_template", lambda f: f.has_prompts is False, "without a column of prompts",
         "the answers are whole texts", "Add --prompt_key, or remove the flag."),
    Rule("multiturn train_on", lambda f: f.has_conversations is False, "without conversations",
         "a row with one answer has no other turn", "Add --apply_chat_template, or remove the flag."),
    Rule("train_on", lambda f: f.multiturn, "with --multiturn", "it means --train_on all", ONE, values=("last",)),
)
# fmt: on


def refuse_for_rows(**known: Any) -> None:
    """Raise UserError for the first of DATA_RULES that is broken. `known` are values of its flags, and facts of rows."""
    defaults = vars(DataArguments()) | vars(SFTDataArguments())
    error = first_broken(DATA_RULES, known, defaults, SimpleNamespace(**{**UNKNOWN, **defaults, **known}))
    if error:
        raise error
