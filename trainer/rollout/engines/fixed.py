"""An engine for tests: it answers every prompt with the same token."""

from trainer.rollout.engines.checksum import Checksum
from trainer.rollout.engines.sampling import Completion


class FixedEngine:
    """Holds no weights, and gives each token the log-prob 0."""

    def __init__(self, token: int, dtype):
        self.token, self.dtype, self.routers, self.slices, self.ranks_per_engine, self.device = token, dtype, None, None, 1, "cpu"

    def update_weights(self, tensors) -> tuple[str, int]:
        held, num_bytes = Checksum(), 0
        for name, tensor in tensors:
            held.add(name, tensor)
            num_bytes += tensor.nbytes
        return held.hexdigest(), num_bytes

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def generate(self, prompts, sampling, seeds=(), limits=(), images=(), interrupted=lambda: False) -> list[Completion]:
        return [Completion([self.token] * 4, [0.0] * 4, False) for _ in prompts]
