"""Log-probs and entropies of a policy by chunks of logits: the same numbers, and never (tokens, vocabulary) at once."""

from collections import Counter

import pytest
import torch
from largest_tensor import LargestTensor
from launch import ROOT, in_fork
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.methods.roles import make_policy_loss
from trainer.models.losses import token_losses
from trainer.models.losses.policy_loss import PolicyOptions

VOCAB, TOKENS = 997, 64


def make_model():
    torch.manual_seed(0)
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCAB, **small))


def make_batch() -> dict:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=generator)
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    labels[:, :5] = -100
    values = {name: torch.randn(2, TOKENS, generator=generator).double() for name in ("advantages", "ref_log_probs")}
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **values}
    batch["position_ids"] = torch.arange(TOKENS)[None].expand(2, -1)
    batch["old_log_probs"] = -torch.rand(2, TOKENS, generator=generator).double() - 6.5
    return batch | {
        "loss_weights": torch.ones(2, TOKENS).double(),
        "sequence_ids": torch.arange(2)[:, None].expand(2, TOKENS),
    }


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_a_policy_loss_by_chunks_needs_no_tensor_of_tokens_times_vocabulary(monkeypatch, entropy_coef):
    results, views, model = [], [], make_model()
    model.register_forward_hook(lambda _module, _inputs, output: views.append(output.logits._is_view()))
    loss_fn = make_policy_loss(
        PolicyOptions(kl_estimator="k3"), lambda: 0.1, lambda: entropy_coef, None, lambda *_: None
    )
    for chunk_bytes in (2**27, 4 * VOCAB * 8):
        monkeypatch.setattr(token_losses, "CHUNK_BYTES", chunk_bytes)
        model.zero_grad()
        with LargestTensor() as largest:
            total, _, metrics = loss_fn(model, make_batch())
            total.backward()
        values = {name: metric.total for name, metric in metrics.items()}
        results.append((total.detach(), values, {n: p.grad.clone() for n, p in model.named_parameters()}, largest.most))
    (total, values, grads, most), (found_total, found_values, found_grads, found_most) = results
    assert not any(views)  # FSDP2 warns of a model that returns a view
    assert most >= 2 * (TOKENS - 5) * VOCAB, "the plain route has all logits"
    assert found_most <= max(8 * VOCAB, model.lm_head.weight.numel()), "a chunk of 8 rows, or a weight"
    assert found_total.item() == pytest.approx(total.item(), rel=1e-6)
    for name in values:
        assert float(found_values[name]) == pytest.approx(float(values[name]), rel=1e-5, abs=1e-6), name
    for name, grad in grads.items():
        assert (found_grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


class Calls(TorchDispatchMode):
    """Counts the operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_has_gradient", [False, True])
def test_one_log_softmax_gives_the_bits_of_two(temperature, dtype, entropy_has_gradient):
    generator = torch.Generator().manual_seed(2)
    logits = 5 * torch.randn(3, 9, 31, generator=generator)
    labels = torch.randint(31, (3, 9), generator=generator)
    labels[:, :2] = token_losses.IGNORE
    kept, results = token_losses.places_of_labels({"labels": labels}), []

    def apart(logits, labels, temperature, kept, entropy_has_gradient):
        options = {"chunk_tokens": labels.numel(), "temperature": temperature, "kept": kept}
        log_probs = token_losses.token_log_probs(logits, labels, **options)
        with torch.set_grad_enabled(entropy_has_gradient):
            return log_probs, token_losses.token_entropies(logits, labels, **options)

    for function in (apart, token_losses.log_probs_and_entropies):
        given = logits.to(dtype).requires_grad_()
        with Calls() as calls:
            log_probs, entropies = function(given, labels, temperature, kept, entropy_has_gradient)
        ((log_probs * log_probs.detach()).sum() + entropies.sum()).backward()
        results.append((log_probs.detach(), entropies.detach(), given.grad, calls.counts))
        assert entropies.requires_grad == entropy_has_gradient
    assert (results[0][0] != 0).sum() == (labels != token_losses.IGNORE).sum()
    for expected, found in zip(results[0][:3], results[1][:3]):
        assert torch.equal(expected, found)
    counts = [found["aten._log_softmax.default"] for *_, found in results]
    assert counts == [2, 2 if entropy_has_gradient else 1]
    assert (results[1][3]["aten.div.Tensor"] == 0) == (temperature == 1), "a division by 1 copies"


def test_layouts_give_the_same_numbers_by_chunks(tmp_path):
    code, output = in_fork(str(ROOT / "test/models/policy_value_checks.py"), str(tmp_path))
    assert code == 0 and output.count("ok ") == 5, output[-4000:]
