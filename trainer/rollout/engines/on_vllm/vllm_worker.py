"""What our vLLM servers do in addition to vLLM: they receive weights from a trainer.

vLLM mixes the class into its worker (`--worker-extension-cls`), and its endpoint /collective_rpc calls the methods. vLLM
starts its workers as new processes, and each imports this file before it builds the model. vLLM offers no other moment to
prepare for weights that change. So the end of this file does it.
"""

import json
import secrets
from typing import Optional

import torch
from vllm.platforms import current_platform

from trainer.errors import UserError
from trainer.rollout.engines.on_vllm.vllm_cpu import (
    check_drafts_by_their_own_settings,
    communicate_by_gloo,
    keep_plain_weights,
    use_plain_embeddings,
)
from trainer.rollout.engines.on_vllm.vllm_experts import check_experts
from trainer.rollout.engines.on_vllm.vllm_weights import WrongWeights, load_checked
from trainer.rollout.engines.weight_stream import WeightStream


class WeightReceiver:
    """A part of vLLM's worker, so `self` is a worker of vLLM."""

    trainer_id = secrets.token_hex(8)  # of this process
    trainer_checksum = ""  # of the weights that it holds now; empty until a trainer has sent some
    trainer_weights: Optional[dict[str, torch.Tensor]] = None  # in host memory, if a trainer sends changes

    def facts_for_trainer(self) -> dict:
        config = self.model_config
        dtype, size = str(config.dtype).removeprefix("torch."), self.parallel_config.world_size
        facts = {"dtype": dtype, "max_len": config.max_model_len, "vocab_size": config.get_vocab_size()}
        drafts = getattr(self.vllm_config.speculative_config, "num_speculative_tokens", 0)
        facts |= {"workers": size, "speculative_tokens": drafts}
        return {**facts, "checksum": self.trainer_checksum, "id": self.trainer_id}

    def receive_trainer_weights(self, source: str) -> dict:
        """Load the tensors of a stream. `source` is JSON of its host, port and token, and whether to keep the tensors.

        Returns {"checksum", "bytes"}, or {"refused": why} if it cannot hold these tensors.
        """
        host, port, token, keeps = json.loads(source)
        model = self.model_runner.get_model()
        size, self.trainer_checksum = 1 + self.parallel_config.world_size, ""
        stream = WeightStream(host, port, 1 + self.rank, size, token)
        self.trainer_weights = (self.trainer_weights or {}) if keeps else None
        tensors = stream.received(self.trainer_weights)
        try:
            if self.device.type == "cpu":
                use_plain_embeddings(model)
                check_experts(model)
            checksum, num_bytes = load_checked(model, tensors, self.model_config.dtype)
        except (UserError, WrongWeights) as error:
            for _ in tensors:  # the sender and the other workers go on to the end
                pass
            return {"refused": error.found if isinstance(error, UserError) else str(error)}
        self.trainer_checksum = checksum
        return {"checksum": checksum, "bytes": num_bytes}


if current_platform.is_cpu():
    keep_plain_weights()
    communicate_by_gloo()
    check_drafts_by_their_own_settings()
    torch.compiler.set_stance("force_eager")  # vLLM's function that ranks log-probs would take a C++ compiler a minute
