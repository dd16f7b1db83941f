"""The number of ranks along each axis of the mesh, and the batches that fit them. It imports no torch."""

from dataclasses import dataclass

from trainer.errors import UserError
from trainer.metrics import counted

MICRO_BATCH_SIZE = 8  # without --micro_train_batch_size, at most


@dataclass(frozen=True)
class MeshSizes:
    """Number of ranks along each mesh axis. tp is the innermost axis."""

    dp_replicate: int
    dp_shard: int
    sp: int
    tp: int

    @property
    def dp(self) -> int:
        """Number of different slices of the global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.sp * self.tp


def resolve_mesh_sizes(world_size: int, *, dp_replicate: int = 1, sp: int = 1, tp: int = 1) -> MeshSizes:
    """Return the mesh sizes of `world_size` ranks. dp_shard is `world_size` / (`dp_replicate` * `sp` * `tp`).

    8 ranks with sp 2 and tp 2 give (dp_replicate 1, dp_shard 2, sp 2, tp 2).

    Raises:
        UserError: `world_size` is not a multiple of `dp_replicate * sp * tp`.
    """
    unit = dp_replicate * sp * tp
    if world_size % unit:
        raise UserError(
            "--dp_replicate_size * --ring_attn_size * --tensor_parallel_size",
            f"{dp_replicate} * {sp} * {tp} = {unit} does not divide the number of ranks, {world_size}",
            f"a multiple of {counted(unit, 'rank')}: trainer COMMAND --nproc {unit}, or torchrun --nproc_per_node {unit}",
        )
    return MeshSizes(dp_replicate, world_size // unit, sp, tp)


def check_expert_ranks(ep: int, sizes: MeshSizes) -> None:
    """Raise UserError unless `ep` divides the ranks that shard the weights."""
    fsdp = sizes.dp_shard * sizes.sp
    if fsdp % ep:
        found = f"{ep} does not divide the {counted(fsdp, 'rank')} that shard the weights (dp_shard x sp)"
        fits = ", ".join(str(size) for size in range(1, fsdp + 1) if fsdp % size == 0)
        raise UserError("--expert_parallel_size", found, fits)


def default_micro_batch_size(train_batch_size: int, dp: int) -> int:
    """The largest micro-batch of up to 8 samples that divides the samples of each of `dp` ranks: for 20 on 2 ranks, 5."""
    sizes = range(1, MICRO_BATCH_SIZE + 1)
    return max((size for size in sizes if train_batch_size % (size * dp) == 0), default=1)


def validate_batch_sizes(train_batch_size: int, micro_batch_size: int, dp: int) -> None:
    """Raise UserError unless each of `dp` ranks gets the same number of whole micro-batches."""
    if train_batch_size % (micro_batch_size * dp) == 0:
        return
    per_rank = train_batch_size // dp
    fits = [size for size in range(1, per_rank + 1) if train_batch_size % (size * dp) == 0]
    allowed = (
        f"--micro_train_batch_size {', '.join(map(str, fits))}"
        if fits
        else f"a --train_batch_size that is a multiple of {dp}"
    )
    raise UserError(
        "--train_batch_size",
        f"{train_batch_size} is not a multiple of --micro_train_batch_size {micro_batch_size} "
        f"times {dp} data-parallel ranks",
        allowed,
    )
