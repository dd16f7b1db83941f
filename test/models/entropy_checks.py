"""Run by torchrun on 2 ranks: log-probs, entropies, distances from a teacher and gradients, with a split vocabulary."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.distributed.sharded_tensors import whole as whole_tensor
from trainer.entry import end_well
from trainer.methods.teacher_loss import teacher_distances
from trainer.models.losses import token_losses
from trainer.models.losses.distances import Distance
from trainer.models.losses.token_losses import token_entropies, token_log_probs

# default chunks of 6 tokens, from 13 words: from the 7 and 6 words of the ranks, chunks would be 11 and 13 tokens
token_losses.CHUNK_BYTES = 4 * 13 * 6
mesh = init_device_mesh("cpu", (2,))
for vocab in (12, 13):  # 13 words: 7 and 6 on the two ranks
    torch.manual_seed(0)
    whole = torch.randn(2, 9, vocab)
    labels = torch.randint(vocab, (2, 9))
    labels[:, ::4] = -100
    keep = labels != -100
    weights = torch.randn(2, 9)

    plain = whole.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=plain / 0.7)
    expected = distribution.entropy() * keep, distribution.log_prob(labels.clamp(min=0)) * keep
    (expected[0] * weights + expected[1]).sum().backward()

    split = distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_()
    alone = whole.clone().requires_grad_()
    for logits, chunk in ((split, 5), (alone, 5), (split.detach(), None), (alone.detach(), None)):
        logits.requires_grad_().grad = None
        entropies = token_entropies(logits, labels, chunk_tokens=chunk, temperature=0.7)
        log_probs = token_log_probs(logits, labels, chunk_tokens=chunk, temperature=0.7)
        (entropies * weights + log_probs).sum().backward()
        torch.testing.assert_close(entropies, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(log_probs, expected[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(whole_tensor(logits.grad), plain.grad, rtol=1e-5, atol=1e-6)

# 3 words on 2 ranks: a rank has fewer columns than top_k
for vocab, name, top_k in ((13, "jsd", None), (13, "kl", 5), (12, "reverse_kl", None), (3, "jsd", 2), (12, "jsd", 99)):
    torch.manual_seed(1)
    model, teacher = 3 * torch.randn(2, 2, 9, vocab)
    labels = torch.randint(vocab, (2, 9)).index_fill(1, torch.arange(0, 9, 4), -100)
    alone, split = model.clone().requires_grad_(), distribute_tensor(model, mesh, [Shard(2)]).requires_grad_()
    kind = Distance(name, 0.3, top_k)
    expected = teacher_distances(alone, teacher, labels, 2.0, kind)
    found = teacher_distances(split, distribute_tensor(teacher, mesh, [Shard(2)]), labels, 2.0, kind)
    assert expected.shape == labels.shape and not expected[labels == -100].any()
    (3 * expected).sum().backward()
    (3 * found).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole_tensor(split.grad), alone.grad, rtol=1e-5, atol=1e-7)
print("entropies agree")
end_well()
