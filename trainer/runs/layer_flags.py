"""What the flags change in the layers of a loaded model: recomputation, rotary embeddings, packed documents, split sequences."""

from trainer.flags.rl_flags import RolloutArguments


def change_layers(args, model, sp_group, strategy) -> None:
    """Change the layers of `model`. `sp_group` are the ranks that split each sequence, or None."""
    from trainer.models.layers.rotary_lengths import fit_rotary

    tp_group = strategy.meshes.root["tp"].get_group() if args.tensor_parallel_size > 1 else None
    if args.gradient_checkpointing or args.selective_checkpointing:
        from trainer.models.layers.activations import recompute_layers

        recompute_layers(model, selective=args.selective_checkpointing)
        if args.activation_offload:
            from trainer.models.layers.activation_offload import offload_layer_inputs

            offload_layer_inputs(model)
    rolls_out = isinstance(args, RolloutArguments)
    longest = args.prompt_max_len + args.generate_max_len if rolls_out else args.max_len
    fit_rotary(model, longest=longest, rolls_out=rolls_out, packed=args.packing_samples, is_split=sp_group is not None)
    if args.packing_samples or sp_group:
        from trainer.models.attention.choice import fit_attention
        from trainer.models.layers.recurrent_layers import restart_at_documents

        fit_attention(model, is_split=sp_group is not None)
        restart_at_documents(model, sp_group, tp_group)
    elif tp_group is not None:
        from trainer.models.layers.recurrent_layers import share_heads

        share_heads(model, tp_group)
