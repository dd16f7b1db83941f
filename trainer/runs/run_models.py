"""The models of a run.

A model is changed in this order. `load_model`: dropout off, fp8, recomputed and offloaded layers, rotary tables, attention
and mixers of packed or split rows. Then runs/features/adapter.py puts an adapter on it. `shard_model`: compiled layers and
optimizer. At last `strategy.prepare` shards over tp and dp x sp.
"""

import contextlib
from collections.abc import Iterator
from typing import Optional

import torch

from trainer.distributed import heartbeat
from trainer.distributed.collectives import wait_for_all
from trainer.errors import UserError
from trainer.flags.common_flags import LayoutArguments, ModelArguments, OptimizerArguments
from trainer.metrics import counted
from trainer.model_folders import model_folder
from trainer.model_folders.folder_names import find_weights, weights_size
from trainer.model_parallel.expert_parallel import validate_expert_widths
from trainer.models.attention.choice import fit_attention, validate_model
from trainer.models.layers.activation_offload import offload_layer_inputs
from trainer.models.layers.activations import recompute_layers
from trainer.models.layers.compiled import compile_layers
from trainer.models.layers.float8 import use_float8
from trainer.models.layers.recurrent_layers import restart_at_documents, share_heads
from trainer.models.layers.rotary_lengths import fit_rotary
from trainer.models.layers.vision import set_learning_rate
from trainer.models.model_bounds import refuse_encoder
from trainer.models.model_loading import check_code, check_tokens, disable_dropout, has_sdpa, load_fault
from trainer.optimizers.build import build_scheduler
from trainer.planning.model_page import model_page
from trainer.runs.run_setup import Setup
from trainer.strategies.options import excluded_flags

LOAD_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextlib.contextmanager
def weights_left_out(are_replaced: bool) -> Iterator[None]:
    """Inside, no weights are read if a checkpoint will replace them.

    It sets a global of `model_folder`, as ZeRO 3 reads weights in `strategy.load_model` and the others in `prepare`.
    """
    model_folder.left_out = are_replaced
    try:
        yield
    finally:
        model_folder.left_out = False


def load_model(
    flags: ModelArguments, setup: Setup, folder: str, auto_class, flag: str = "--pretrain", trained: bool = True,
    adapter: Optional[str] = None,
):  # fmt: skip
    """Load the model of `folder`, which `flag` named, and change its layers. `trained`: a checkpoint has its weights.

    `adapter` is the folder of an adapter whose update is added to the weights.
    """
    find_weights(folder, flag)
    strategy, attention, remote_code = setup.strategy, setup.attention, flags.trust_remote_code
    check_code(folder, flag, remote_code)
    refuse_encoder(folder, auto_class, remote_code, flag)
    if attention == "sdpa" and not has_sdpa(folder, auto_class, remote_code):
        if flags.attn_implementation == "sdpa":
            raise UserError("--attn_implementation", f"sdpa, which the model of {folder} does not have", "auto, eager")
        attention = "eager"
        strategy.print(f"attention of {folder}: eager, since transformers has no sdpa for this model")
    if setup.attention not in ("sdpa", "eager"):
        validate_model(folder, remote_code, setup.attention, setup.is_packed, auto_class)
    is_replaced = trained and setup.resumes
    if not is_replaced:
        shown = (
            flags.pretrain if flag == "--pretrain" else folder
        )  # the model with a new head is in a folder of the run
        strategy.print(f"loading {flag} {shown}: {weights_size(folder) / 1e6:,.1f} MB")
    try:
        with weights_left_out(is_replaced):
            options = {"attn_implementation": attention, "trust_remote_code": remote_code, "adapter": adapter}
            model = strategy.load_model(folder, auto_class, **options)
    except UserError:
        raise
    except LOAD_ERRORS as error:
        raise load_fault(folder, auto_class, remote_code, flag, error) from error
    model.name_or_path = folder  # as from_pretrained does; a saved model has the names of this folder
    vocab_size = model.config.get_text_config().vocab_size
    if len(setup.tokenizer) > vocab_size:
        check_tokens(setup.tokenizer, vocab_size, folder, flag)
    if unread := model_folder.check_weights(model, folder, flag):
        names = ", ".join(unread[:3]) + ", ..." * (len(unread) > 3)
        strategy.print(
            f"warning: {counted(len(unread), 'tensor')} of {folder} without a place in the trained model: {names}"
        )
    if strategy.device.type == "cuda" and strategy.param_dtype != torch.float32:
        validate_expert_widths(model, flag)
    disable_dropout(model)
    change_layers(flags, setup, model)
    return model


def change_layers(flags: ModelArguments, setup: Setup, model) -> None:
    """Change the layers of a loaded model: what backward recomputes, rotary tables, packed and split rows."""
    strategy, is_split = setup.strategy, setup.sp_group is not None
    tp_group = strategy.meshes.root["tp"].get_group() if strategy.sizes.tp > 1 else None
    if flags.fp8:
        use_float8(model, flags.fp8, strategy.device)
    if flags.gradient_checkpointing or flags.selective_checkpointing:
        recompute_layers(model, selective=flags.selective_checkpointing)
        if flags.activation_offload:
            offload_layer_inputs(model)
    fit_rotary(model, longest=setup.longest, rolls_out=setup.rolls_out, packed=setup.is_packed, is_split=is_split)
    if setup.is_packed or is_split:
        fit_attention(model, is_split=is_split)
        restart_at_documents(model, setup.sp_group, tp_group)
    elif tp_group is not None:
        share_heads(model, tp_group)


def shard_model(
    flags: ModelArguments, optim: OptimizerArguments, layout: LayoutArguments, setup: Setup, model, total_steps: int,
    tower_lr: Optional[float] = None,
):  # fmt: skip
    """Compile the layers of a loaded model, build its optimizer and schedule, and shard all three.

    Returns (model, optimizer, scheduler), as `strategy.prepare` gives them. `tower_lr`: peak rate of the vision tower.
    """
    strategy = setup.strategy
    if flags.print_model and strategy.is_rank_0():
        shown = {"tp": strategy.sizes.tp, "sp": strategy.sizes.sp, "use_hf_tp_plan": layout.use_hf_tp_plan}
        shown |= {"sequence_parallel": layout.sequence_parallel, "trust_remote_code": flags.trust_remote_code}
        shown["excluded"] = excluded_flags(layout.backend, strategy.options, strategy.device.type == "cpu")
        print(model_page(model, strategy.param_dtype, **shown), flush=True)
    if flags.compile:
        compile_layers(model)
    # before `prepare`, which points it at the sharded parameters
    optimizer = strategy.create_optimizer(
        model, lr=optim.learning_rate, betas=optim.adam_betas, eps=optim.adam_eps, weight_decay=optim.weight_decay
    )
    if tower_lr:
        set_learning_rate(optimizer, model, tower_lr)
    ends = {"warmup_ratio": optim.lr_warmup_ratio, "min_lr_ratio": optim.min_lr_ratio}
    ends["warmup_steps"] = optim.warmup_steps
    scheduler = build_scheduler(optim.lr_scheduler, optimizer, total_steps=total_steps, **ends)
    with weights_left_out(setup.resumes):
        prepared = strategy.prepare((model, optimizer, scheduler))
    wait_for_all()  # some ranks read their weights later than others; NCCL would wait ten minutes only
    if layout.heartbeat_timeout:
        heartbeat.watch(prepared[0], layout.heartbeat_timeout)
    return prepared


def frozen_model(setup: Setup, model, offload: bool = False):
    """A loaded model, frozen and sharded like the policy. `offload`: its weights wait in host memory."""
    return setup.strategy.prepare(model.eval().requires_grad_(False), offload=offload)
