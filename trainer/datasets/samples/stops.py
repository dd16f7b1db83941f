"""The check that some sample trains a token that ends an answer."""

from trainer.errors import UserError

NO_STOP = "no sample trains a stop token, so the model may never end an answer"
NO_END = "the chat template ends the last answer of a row with none"
NO_STOP_CURE = "--tokenizer_chat_template with one that does, or --allow_no_stop to train as it is"


def check_stops(counts: dict[str, int], all_cut: bool, flag: str, allowed: bool) -> list[str]:
    """The warning for samples of which none trains a stop token: the model would learn answers without an end.

    Raises: UserError if the template is the cause, unless `allowed`. `all_cut`: --max_len is, as in long texts of --pretrain_mode.
    """
    if counts["num_stop_trained"] or not counts["num_samples"]:
        return []
    if all_cut:
        return [f"WARNING: {NO_STOP}; --max_len cuts all samples: raise it"]
    if not allowed:  # GLM: the mark of the next role ends a turn
        raise UserError(flag, f"{NO_STOP}: {NO_END}", NO_STOP_CURE)
    return [f"WARNING: {NO_STOP}: {NO_END}"]
