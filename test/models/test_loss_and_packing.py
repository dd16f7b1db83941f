"""The loss and the packed forward pass, compared with formulas that are written out here."""

import math

import pytest
import torch
from torch.distributed.utils import _to_kwargs
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen3Config, SchedulerType

from trainer.datasets.batches.packing import IGNORE, collate_packed, collate_padded, model_inputs, shifted_labels
from trainer.errors import UserError
from trainer.flags.common_flags import SCHEDULES
from trainer.methods.sft import sft_loss
from trainer.models.attention.attention_call import document_bounds
from trainer.models.attention.choice import resolve_attention
from trainer.models.losses.token_losses import causal_lm_logits, token_log_probs
from trainer.optimizers.build import build_scheduler

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "gemma": lambda: GemmaConfig(**SMALL),
    "mistral with a window of 7": lambda: MistralConfig(**SMALL, sliding_window=7),
}


def sample(ids: list[int], first_target: int) -> dict:
    return {"input_ids": ids, "loss_mask": [int(i >= first_target) for i in range(len(ids))]}


def test_labels_are_shifted_before_anything_is_cut():
    assert shifted_labels([5, 6, 7], [0, 0, 1]) == [IGNORE, 7, IGNORE]
    packed = collate_packed([sample([5, 6, 7], 1), sample([8, 9], 1)], pad_token_id=0)
    assert packed["labels"].tolist() == [[6, 7, IGNORE, 9, IGNORE]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["cu_seqlens"].tolist() == [0, 3, 5]
    padded = collate_padded([sample([5, 6, 7], 1), sample([8, 9], 1)], pad_token_id=0)
    assert padded["labels"].tolist() == [[6, 7, IGNORE], [9, IGNORE, IGNORE]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_bounds_of_documents_stay_on_the_host_where_fsdp2_moves_a_call_to_the_gpu():
    """The meta device stands for the GPU: its values cannot be read."""
    inputs = model_inputs(collate_packed([sample([5, 6, 7], 1), sample([8, 9], 1)], pad_token_id=0))
    [moved] = _to_kwargs((), inputs, torch.device("meta"), False)[1]
    assert moved["input_ids"].is_meta and moved["cu_seqlens"].is_meta
    assert document_bounds(moved["cu_seqlens_host"]) == [0, 3, 5]


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
def test_an_empty_micro_batch_adds_nothing_and_gives_zero_gradients(collate):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    batch = collate([], pad_token_id=0)
    loss, count = sft_loss(model, batch)
    loss.backward()
    assert loss.item() == 0 and count.item() == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_token_loss_is_the_sum_of_minus_log_softmax():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    labels[0, 3:] = IGNORE
    expected = -sum(
        math.log(math.exp(logits[r, t, labels[r, t]]) / sum(math.exp(x) for x in logits[r, t].tolist()))
        for r in range(2)
        for t in range(5)
        if labels[r, t] != IGNORE
    )
    total = -token_log_probs(logits, labels).sum()
    assert (labels != IGNORE).sum() == 8
    assert total.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_get_the_logits_and_gradients_they_get_alone(name):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    packed_model = AutoModelForCausalLM.from_config(config, attn_implementation=resolve_attention("sdpa", packed=True))
    alone_model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    alone_model.load_state_dict(packed_model.state_dict())
    samples = [sample(torch.randint(0, 64, (n,)).tolist(), 1) for n in (1, 2, 9, 23, 40)]
    batch = collate_packed(samples, pad_token_id=0)
    logits = causal_lm_logits(packed_model, batch)
    loss = -token_log_probs(logits, batch["labels"]).sum()
    loss.backward()
    start = 0
    for row in samples:
        ids = torch.tensor([row["input_ids"]])
        expected = alone_model(ids).logits
        torch.testing.assert_close(logits[:, start : start + ids.shape[1]], expected, rtol=1e-4, atol=1e-5)
        start += ids.shape[1]
        if ids.shape[1] > 1:
            torch.nn.functional.cross_entropy(expected[0, :-1], ids[0, 1:], reduction="sum").backward()
    for (key, parameter), other in zip(packed_model.named_parameters(), alone_model.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-5, msg=key)


def test_padding_changes_no_logits():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())
    samples = [sample(torch.randint(0, 64, (n,)).tolist(), 1) for n in (3, 17)]
    logits = causal_lm_logits(model, collate_padded(samples, pad_token_id=0))
    for row, ids in enumerate(item["input_ids"] for item in samples):
        expected = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(logits[row, : len(ids)], expected, rtol=1e-4, atol=1e-5)


def rates_of(name: str, total_steps: int, warmup_ratio: float, warmup_steps: int | None = None) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"total_steps": total_steps, "warmup_ratio": warmup_ratio, "min_lr_ratio": 0.2}
    options["warmup_steps"] = warmup_steps
    scheduler, rates = build_scheduler(name, optimizer, **options), []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_all_schedules_of_transformers_that_need_no_metric_are_names_of_the_flag():
    assert {*SCHEDULES, "reduce_lr_on_plateau", "greedy"} == {kind.value for kind in SchedulerType}


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_a_warm_up_begins_above_0(name):
    """Step i of n has i/(n+1) of the peak, and the step after them the peak, also if all steps are of the warm-up."""
    rates = rates_of(name, total_steps=50, warmup_ratio=0.1)
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0], rel=1e-3) and min(rates) > 0
    assert rates_of(name, 50, 0.5, warmup_steps=5) == rates and rates_of(name, 50, 0.1, 0) == rates_of(name, 50, 0.0)
    assert rates_of(name, total_steps=1, warmup_ratio=0.03) == [0.5]
    assert rates_of(name, total_steps=3, warmup_ratio=1.0) == pytest.approx([0.25, 0.5, 0.75])


def test_a_schedule_whose_rates_are_all_0_is_refused():
    """This one begins its cosine one step late, so it ends at 0 in a run of one step without warm-up."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"warmup_ratio": 0.0, "min_lr_ratio": 0.0}
    with pytest.raises(
        UserError, match=r"--lr_scheduler: cosine_warmup_with_min_lr has a rate of 0 in every step of 1"
    ):
        build_scheduler("cosine_warmup_with_min_lr", optimizer, total_steps=1, **options)
    for name in SCHEDULES:
        for steps in (1, 2, 3) if name != "cosine_warmup_with_min_lr" else (2, 3):
            build_scheduler(name, torch.optim.AdamW(optimizer.param_groups[0]["params"]), total_steps=steps, **options)
    assert rates_of(name, total_steps=20, warmup_ratio=0.0)[0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "linear", "constant", "warmup_stable_decay", "cosine"])
def test_schedules_warm_up_and_end_where_they_should(name):
    rates = rates_of(name, total_steps=100, warmup_ratio=0.1)
    assert max(rates) == pytest.approx(1.0)
    if name != "constant":
        assert rates[0] <= 0.2 and rates[10] == pytest.approx(1.0)
        floor = 0.2 if name in ("cosine_with_min_lr", "warmup_stable_decay") else 0.0
        assert rates[-1] == pytest.approx(floor, abs=0.1) and min(rates[10:]) >= floor - 1e-9
