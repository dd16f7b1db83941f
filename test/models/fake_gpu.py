"""Every loss on fake tensors of a device that is not the CPU, run by test_fake_gpu.py. Prints "ok NAME" for each.

torch's fake tensors compute shapes, dtypes and devices, and no numbers. An operation on tensors of two devices raises, as
on a GPU. So does one whose result the host must know, and here a copy that would wait. The device is torch's place for
those of other makers.
"""

import functools
import itertools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from transformers.initialization import no_init_weights

from trainer.datasets.batches.global_batches import to_device
from trainer.datasets.batches.packing import collate_packed, collate_padded
from trainer.datasets.samples.preference import collate_pairs
from trainer.datasets.samples.unpaired import collate_unpaired
from trainer.entry import end_well
from trainer.methods.dpo import make_preference_loss
from trainer.methods.kto import make_kto_loss
from trainer.methods.rm import make_reward_loss
from trainer.methods.roles import make_policy_loss, make_value_loss
from trainer.methods.sft import sft_loss
from trainer.models.attention.varlen import register_varlen_attention
from trainer.models.layers.model_call import remember_call
from trainer.models.losses import token_losses
from trainer.models.losses.policy_loss import POLICY_LOSSES, PolicyOptions
from trainer.models.losses.preference_loss import PAIR_LOSSES, REWARD_LOSSES, PreferenceOptions
from trainer.models.reward import return_token_scores
from trainer.rollout.micro_batches import collate_samples

DEVICE = torch.device("privateuseone", 0)
CONFIG = Qwen3Config(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, num_labels=1,
)  # fmt: skip
CHUNKS = {"": 2**27, " in chunks": 2**13}  # bytes of fp32 logits at a time
LENGTHS = (9, 17)


def make_model(kind, packed: bool):
    with no_init_weights(), torch.device(DEVICE):
        model = kind._from_config(CONFIG, attn_implementation="varlen" if packed else "sdpa", dtype=torch.bfloat16)
    remember_call(model)
    return model


class NoBlockingCopies(TorchDispatchMode):
    """Raises for a copy between host and device that waits for its end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            waits = source.device != out.device and not (kwargs or {}).get("non_blocking", args[2:] == (True,))
            assert not waits, f"a copy from {source.device} to {out.device} waits"
        return out


def sample(length: int) -> dict:
    return {"input_ids": list(range(3, 3 + length)), "loss_mask": [0, 0, *[1] * (length - 2)]}


def policy_sample(number: int) -> dict:
    length = LENGTHS[number]
    facts = {"response_length": length - 2, "offset": number * (LENGTHS[0] - 2), "number": number, "loss_weight": 1.0}
    return sample(length) | facts


def pair(row: int) -> dict:
    sides = {f"{side}_{key}": sample(LENGTHS[row])[name] for side in ("chosen", "rejected")
             for key, name in (("ids", "input_ids"), ("mask", "loss_mask"))}  # fmt: skip
    return sides | {"row": row, "margin": 0.5}


def on_device(mode: FakeTensorMode, batch: dict) -> dict:
    """A fake copy of a micro-batch of the loader on DEVICE. What the loader leaves on the host stays real."""

    def moved(name: str, value):
        if isinstance(value, dict):
            return on_device(mode, value)
        is_moved = isinstance(value, torch.Tensor) and name != "cu_seqlens_host"
        return mode.from_tensor(value).to(DEVICE) if is_moved else value

    return {name: moved(name, value) for name, value in batch.items()}


def with_policy_values(batch: dict, sets: bool) -> dict:
    """What PPO adds to micro-batches between generation and training."""
    names = ("advantages", "returns", "old_values", "old_log_probs", "ref_log_probs", "tis_weights", "chosen")
    batch |= {name: torch.zeros(batch["labels"].shape, dtype=torch.float64) for name in names}
    if sets:
        batch["kept_sets"] = torch.stack([batch["kept"], torch.ones_like(batch["kept"])])
    return batch


def runs_of(mode: FakeTensorMode, packed: bool, chunks: str, every_loss: bool) -> dict[str, tuple]:
    """{name: (kind of model, loss function, micro-batch)}"""
    host = torch.device("cpu")
    of_texts = (collate_packed if packed else collate_padded)([*map(sample, LENGTHS)], pad_token_id=0)
    of_pairs = to_device(collate_pairs([pair(0), pair(1)], 0, packed), host)
    answers = [sample(length) | {"label": length < 10, "start": 2} for length in LENGTHS]
    answers = [answer | {"previous": answers[0]} for answer in answers]
    of_answers = to_device(collate_unpaired(answers, 0, packed, 64), host)
    of_samples = to_device(collate_samples([policy_sample(0), policy_sample(1)], 0, packed), host)
    of_samples = with_policy_values(of_samples, sets=not chunks)
    with mode:
        reference = make_model(Qwen3ForCausalLM, packed).requires_grad_(False)
        sums = mode.from_tensor(torch.ones(2, dtype=torch.float64)).to(DEVICE)
    policy, kto = (
        {"kl_estimator": "k3", "value_clip": 0.2},
        make_kto_loss(0.1, 1, 1, reference, None),
    )
    runs = {
        "sft": (Qwen3ForCausalLM, sft_loss, to_device(of_texts, host)),
        "kto": (Qwen3ForCausalLM, functools.partial(kto.loss, sums=sums, num_targets=2), of_answers),
        "kto, first pass": (Qwen3ForCausalLM, lambda *call: kto.first_pass(*call).unbind(), of_answers),
        "value": (Qwen3ForSequenceClassification, make_value_loss(PolicyOptions(**policy), None), of_samples),
    }
    for name in PAIR_LOSSES if every_loss else ("dpo",):
        loss = make_preference_loss(PreferenceOptions(loss=name, beta=0.1), reference, None)
        runs[f"preference {name}"] = (Qwen3ForCausalLM, loss, of_pairs)
    for name in REWARD_LOSSES if every_loss else ("sigmoid",):
        runs[f"reward {name}"] = (Qwen3ForSequenceClassification, make_reward_loss(name, None), of_pairs)
    for name in POLICY_LOSSES if every_loss else ("gspo",):
        loss = make_policy_loss(PolicyOptions(loss=name, **policy), lambda: 0.1, lambda: 0.01, None, lambda *_: None)
        runs[f"policy {name}"] = (Qwen3ForCausalLM, loss, of_samples)
    return runs


def main() -> None:
    _setup_privateuseone_for_python_backend(rename="gpu")
    register_varlen_attention()
    for packed, (chunks, token_losses.CHUNK_BYTES) in itertools.product((False, True), CHUNKS.items()):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for name, (kind, loss_fn, batch) in runs_of(mode, packed, chunks, not packed and not chunks).items():
            with mode:
                model = make_model(kind, packed)
                if kind is Qwen3ForSequenceClassification:
                    return_token_scores(model)
                batch = on_device(mode, batch)
                with NoBlockingCopies():
                    loss, count, *_ = loss_fn(model, batch)
                    assert loss.device == count.device == DEVICE, (loss.device, count.device)
                    loss.backward()
                assert {p.grad.device for p in model.parameters() if p.grad is not None} == {DEVICE}
            print(f"ok {name}{' packed' * packed}{chunks}", flush=True)


if __name__ == "__main__":
    main()
    end_well()  # at interpreter shutdown, a thread of torch can abort the process
