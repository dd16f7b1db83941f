"""The critic of --critic_pretrain: what it must be is checked before the prompts are read."""

from trainer.distributed.collectives import rank_0_first
from trainer.models.model_loading import resolve_adapted_model
from trainer.models.reward import HEAD, read_source
from trainer.runs.feature import Feature
from trainer.runs.run_setup import check_vocabulary, tokenizer_folder

FLAG = "--critic_pretrain"


def check_critic(run) -> None:
    """Raise UserError for a critic that cannot score tokens, or with another vocabulary than the policy."""
    name, remote_code = run.args.critic.critic_pretrain, run.args.model.trust_remote_code
    source, adapter = rank_0_first(lambda: resolve_adapted_model(name, FLAG))
    read_source(source, remote_code, HEAD.removesuffix(".weight"), FLAG)
    check_vocabulary(run.setup, name, tokenizer_folder(source, adapter), FLAG, "a model with the same one")


CRITIC = Feature("critic", lambda run: run.flags.critic_pretrain, before_data=check_critic)
