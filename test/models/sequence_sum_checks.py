"""Run by torchrun on 2 ranks: a loss of whole sequences, split over sp, has the gradients of the plain formula."""

import torch
import torch.distributed as dist

from trainer.datasets.batches.sequence_split import split_micro_batch
from trainer.entry import end_well
from trainer.models.losses.sequence_sums import counts_here, sum_by_sequence
from trainer.models.losses.token_losses import token_log_probs

dist.init_process_group("gloo")
group, rank = dist.group.WORLD, dist.get_rank()
torch.manual_seed(0)
weight = torch.randn(13, 7, dtype=torch.float64)  # a linear "model": embedding of 13 tokens to 7 logits
batch = {
    "input_ids": torch.randint(13, (2, 9)),
    "labels": torch.randint(7, (2, 9)),
    "sequence_ids": torch.tensor([[0] * 4 + [1] * 5, [2] * 6 + [3] * 3]),
}
batch["labels"][:, ::4] = -100


def loss_of(weight: torch.Tensor, part: dict, sp_group) -> torch.Tensor:
    log_probs = token_log_probs(weight[part["input_ids"]], part["labels"])
    sums = sum_by_sequence(log_probs, part["sequence_ids"], 4, sp_group)
    return counts_here(sp_group) * -torch.nn.functional.logsigmoid(sums[:2] - sums[2:]).sum()


plain = weight.clone().requires_grad_()
rows = plain[batch["input_ids"]].log_softmax(-1)
picked = rows.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0] * (batch["labels"] != -100)
expected = [picked[batch["sequence_ids"] == n].sum() for n in range(4)]
expected_loss = sum(-torch.log(torch.sigmoid(expected[n] - expected[n + 2])) for n in range(2))
expected_loss.backward()

mine = weight.clone().requires_grad_()
loss = loss_of(mine, split_micro_batch(batch, rank, 2), group)
loss.backward()
total, gradient = loss.detach().clone(), mine.grad.clone()
dist.all_reduce(total)
dist.all_reduce(gradient)  # what a strategy does: it sums over dp x sp
torch.testing.assert_close(total, expected_loss.detach(), rtol=1e-6, atol=0)
torch.testing.assert_close(gradient, plain.grad, rtol=1e-5, atol=1e-7)
assert (loss.item() != 0) == (rank == 0)  # counted once
print("sequence sums agree")
end_well()
