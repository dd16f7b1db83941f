"""Images in rows that are split over ranks. Every rank embeds all images of its rows, and keeps those of its own tokens."""

import torch

PLACES = "image_places"  # an argument of the model's call


def take_own_images(model) -> None:
    """Let `model` put the right embeddings at the image tokens of this rank's part of each row, in place.

    transformers puts the embeddings of all images at the image tokens that it sees, in order. Its call now needs
    `image_places`, (rows, tokens): the token's number among the image tokens of all whole rows, -1 for other tokens.
    Gradients of the embeddings are sums over the ranks, as those of all weights.
    """
    held: dict[str, torch.Tensor] = {}
    inner = model.base_model

    def remember(module, args, kwargs):
        held[PLACES] = kwargs.pop(PLACES)
        return args, kwargs

    def own(features) -> torch.Tensor:
        features = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
        places = held[PLACES]
        return features.flatten(0, -2)[places[places >= 0]]

    inner.register_forward_pre_hook(remember, with_kwargs=True)
    if hasattr(inner, "inputs_merger"):  # Idefics3, SmolVLM: it counts the blocks of whole images

        def merge(input_ids, inputs_embeds, image_hidden_states):
            mask = (held[PLACES] >= 0)[..., None]
            return inputs_embeds.masked_scatter(mask, own(image_hidden_states).to(inputs_embeds.dtype))

        inner.inputs_merger = merge
        return
    embed = inner.get_image_features

    def own_features(*args, **kwargs):
        output = embed(*args, **kwargs)
        output.pooler_output = [own(output.pooler_output)]
        if output.get("deepstack_features") is not None:  # Qwen3-VL adds more embeddings in its first layers
            output.deepstack_features = [[own(features)] for features in output.deepstack_features]
        return output

    inner.get_image_features = own_features
