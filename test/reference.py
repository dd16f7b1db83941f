"""The plain loop that parity is measured against: one process, one sample per forward pass, fp32.

    python test/reference.py <the flags of train_sft>

A transformers model, an optimizer of torch and this file: no strategy, no wrapper, no packing, no padding, no collectives. It
takes the flags of train_sft and ignores those that only choose a layout. It shares with the trainer the parsing of flags
and the reading of data (which have tests of their own), the names of the layers that LoRA adapts, and nothing of the
training.
"""

import hashlib
import json
import math
import os
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from types import SimpleNamespace

from schedules import schedule

from trainer.cli.train_sft import parse
from trainer.datasets.batches.global_batches import epoch_order
from trainer.datasets.conversations.templates import load_chat_template
from trainer.flags.parse_flags import flat
from trainer.runs.flag_checks import rate_of
from trainer.runs.run_data import load_sft as load_data


def sample_loss(model, sample: dict) -> torch.Tensor:
    """Sum of -log p over the loss tokens of one sample: logits at t predict token t + 1."""
    input_ids, loss_mask = torch.tensor([sample["input_ids"]]), torch.tensor(sample["loss_mask"]).bool()
    logits = model(input_ids=input_ids, use_cache=False).logits[0, :-1].float()
    losses = F.cross_entropy(logits, input_ids[0, 1:], reduction="none")
    return losses[loss_mask[1:]].sum()


def balance_loss(model, batch: list[dict]) -> torch.Tensor:
    """transformers' own, of all tokens of the batch."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    inputs = [torch.tensor([sample["input_ids"]]) for sample in batch]
    logits = [model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits for ids in inputs]
    layers = tuple(torch.cat(layer) for layer in zip(*logits))
    return load_balancing_loss_func(layers, layers[0].shape[-1], model.config.num_experts_per_tok)


def record_choices(model) -> list[tuple[torch.Tensor, list[int]]]:
    """For each mixture of experts: the bias of its router, and a list that gets each chosen expert of each token."""
    found = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            block = model.get_submodule(name.removesuffix(".experts"))
            [bias] = [tensor for key, tensor in block.named_buffers() if "e_score_correction_bias" in key]
            chosen: list[int] = []
            module.register_forward_hook(
                lambda _, args, output, chosen=chosen: chosen.extend(args[1].flatten().tolist())
            )
            found.append((bias, chosen))
    assert found
    return found


def move_biases(choices: list[tuple[torch.Tensor, list[int]]], rate: float) -> None:
    """Wang et al. 2024, algorithm 1: up for an expert with less than its share of the tokens, down for one with more."""
    for bias, chosen in choices:
        for expert in range(len(bias)):
            excess = chosen.count(expert) * len(bias) - len(chosen)
            bias[expert] -= rate * ((excess > 0) - (excess < 0))
        chosen.clear()


def quantization(args) -> dict:
    """4-bit NormalFloat with quantized scales, for --load_in_4bit."""
    if not args.load_in_4bit:
        return {}
    four_bit = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {"quantization_config": BitsAndBytesConfig(**four_bit), "device_map": {"": "cpu"}}


def add_lora(model, args, task_type: str = "CAUSAL_LM"):
    """peft's own model, its matrices A drawn again as peft draws them, but from the seed alone; or peft's loaded model."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if args.lora_adapter:
        return PeftModel.from_pretrained(model, args.lora_adapter, is_trainable=True)

    from trainer.models.lora import default_targets

    targets = args.target_modules.split(",") if args.target_modules else default_targets(model)
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha or 2 * args.lora_rank,
        target_modules=targets,
        target_parameters=["experts.down_proj", "experts.gate_up_proj"] if args.lora_experts else None,
        exclude_modules=["score"],
        use_dora=args.use_dora,
        use_rslora=args.use_rslora,
        task_type=task_type,
    )
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(args.seed)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
    return model


def trained(model) -> list[tuple[str, torch.nn.Parameter]]:
    """(name as the trainer has it, parameter) of all that is trained."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [(n.removeprefix("base_model.model.").replace(".modules_to_save.default", ""), p) for n, p in named]


def stored_buffers(model) -> dict[str, torch.Tensor]:
    """The buffers of a model folder, such as the biases that balance experts: training leaves them as they are."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor.float() for name, tensor in model.state_dict().items() if name not in parameters}


def svd_orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """What five rounds of Muon's polynomial make of a matrix: of its singular values, in fp64."""
    matrix = matrix.double()
    u, s, v = torch.linalg.svd(matrix / matrix.norm().clamp(min=1e-30), full_matrices=False)  # 0 stays 0
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@torch.no_grad()
def muon_step(matrices: list, momenta: dict, lr: float, weight_decay: float) -> None:
    """Liu et al. 2025, equation 4, with Nesterov momentum 0.95."""
    for matrix in matrices:
        momenta[matrix] = 0.95 * momenta.get(matrix, 0.0) + 0.05 * matrix.grad
        update = svd_orthogonalized(0.05 * matrix.grad + 0.95 * momenta[matrix])
        matrix.copy_(matrix * (1 - lr * weight_decay) - lr * 0.2 * max(matrix.shape) ** 0.5 * update)


def numbers_of_8_bits(signed: bool) -> torch.Tensor:
    """Dettmers 2016: 0, 1 and 254 numbers between them, 2^e or 2^(e+1) of the decade below 10^(e-6), with either sign or none."""
    found = [0.0, 1.0]
    for e in range(7):
        count = 2**e if signed else 2 ** (e + 1)
        positive = [(0.1 + 0.9 * (i + 0.5) / count) * 10 ** (e - 6) for i in range(count)]
        found += positive + [-number for number in positive] * signed
    assert len(found) == 256
    return torch.tensor(found)


@torch.no_grad()
def round_to_8_bits(tensor: torch.Tensor, signed: bool) -> None:
    """Each element becomes the nearest of 256 multiples of the largest in its block: up to 256 elements of a row."""
    numbers = numbers_of_8_bits(signed)
    for row in tensor:
        for block in row.split(256):
            distances = (block[:, None] / block.abs().max().clamp(min=1e-38) - numbers).abs()
            if not signed:
                distances[:, 0] = torch.where(block == 0, 0.0, torch.inf)
            block.copy_(numbers[distances.argmin(1)] * block.abs().max())


def round_moments(moments: dict) -> None:
    """What 8-bit AdamW keeps of AdamW's state of a matrix: of the second moment, the root is rounded."""
    round_to_8_bits(moments["exp_avg"], signed=True)
    round_to_8_bits(moments["exp_avg_sq"].sqrt_(), signed=False)
    moments["exp_avg_sq"].square_()


def dump(tensors: dict, folder: str, name: str) -> None:
    os.makedirs(folder, exist_ok=True)
    save_file({key: value.detach().clone() for key, value in tensors.items()}, f"{folder}/{name}.safetensors")


def main(argv: list[str]) -> None:
    groups, is_demo = parse(argv)
    args = SimpleNamespace(**flat(groups))
    args.learning_rate = rate_of("train_sft", args.learning_rate, args.lora_rank)
    if is_demo:
        from trainer.datasets.demos.demo import make_demo

        make_demo("demo")
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    load_chat_template(args.tokenizer_chat_template, tokenizer)
    samples, _ = load_data(groups, tokenizer, args.dataset, args.dataset_split, "--dataset")
    model = AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32, **quantization(args))

    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa, the default of transformers, drops the soft cap without a word
    if args.lora_rank or args.lora_adapter:
        model = add_lora(model, args)
    model.eval()  # gradients as ever, and no dropout, whatever rates the model's config has
    for layer in model.modules():
        if hasattr(layer, "quant_state"):  # in eval mode on a CPU, bitsandbytes takes a kernel that rounds to bf16
            layer.train()
    choices = record_choices(model) if args.expert_bias_update_rate else []
    named = trained(model)
    decayed = [parameter for _, parameter in named if parameter.ndim >= 2]
    others = [parameter for _, parameter in named if parameter.ndim < 2]
    matrices, momenta = [], {}
    if args.optim == "muon":
        linear = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
        matrices = [parameter for name, parameter in named if ".layers." in name and id(parameter) in linear]
        decayed = [parameter for parameter in decayed if all(parameter is not matrix for matrix in matrices)]
        assert matrices
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if args.optim == "adafactor":
        optimizer = torch.optim.Adafactor(groups, lr=args.learning_rate)
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=tuple(args.adam_betas), eps=args.adam_eps)
    in_8_bits = []
    if args.optim == "adamw_8bit":
        large = [(name, tensor) for name, tensor in named if tensor.ndim == 2 and tensor.numel() >= 4096]
        in_8_bits = [matrix for name, matrix in large if matrix.shape[1] >= 64 and "embed" not in name]
    per_epoch = math.ceil(len(samples) / args.train_batch_size)
    total_steps = args.max_steps or args.max_epochs * per_epoch
    scheduler = schedule(args, optimizer, total_steps)

    os.makedirs(args.output_dir, exist_ok=True)
    with open(os.path.join(args.output_dir, "metrics.jsonl"), "w") as log:
        log.write(json.dumps({"event": "start", "config": vars(args), "mesh": None, "versions": {}}) + "\n")
        for step in range(1, total_steps + 1):
            epoch, index = divmod(step - 1, per_epoch)
            order = epoch_order(len(samples), args.seed, epoch, shuffle=not args.no_shuffle)
            batch = [samples[i] for i in order[index * args.train_batch_size : (index + 1) * args.train_batch_size]]
            num_loss_tokens = sum(sum(sample["loss_mask"][1:]) for sample in batch)
            loss = 0.0
            for sample in batch:
                mean_part = sample_loss(model, sample) / num_loss_tokens
                mean_part.backward()
                loss += mean_part.item()
            if args.aux_loss_coef:
                balance = args.aux_loss_coef * balance_loss(model, batch)
                balance.backward()
                loss += balance.item()
            if step == 1 and args.parity_dump:
                dump({name: p.grad for name, p in named if p.grad is not None}, args.parity_dump, "grads_step1")
            max_norm = args.max_norm or math.inf
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
            row = {"step": step, "epoch": epoch, "loss": loss, "grad_norm": grad_norm, "tokens": num_loss_tokens}
            digests = "".join(sample["digest"] for sample in batch).encode()
            row["batch_hash"] = hashlib.blake2b(digests, digest_size=8).hexdigest()
            row["lr"] = scheduler.get_last_lr()[0]
            muon_step(matrices, momenta, row["lr"], args.weight_decay)
            optimizer.step()
            for matrix in in_8_bits:
                round_moments(optimizer.state[matrix])
            scheduler.step()
            move_biases(choices, args.expert_bias_update_rate)
            model.zero_grad()
            log.write(json.dumps(row) + "\n")
            print(f"step {step}/{total_steps} | loss {loss:.9g} | grad_norm {grad_norm:.9g}", flush=True)
        log.write(json.dumps({"event": "end", "steps": total_steps}) + "\n")
    if args.parity_dump:
        buffers = {} if args.lora_rank else stored_buffers(model)
        dump(dict(named) | buffers, args.parity_dump, "weights_final")


if __name__ == "__main__":
    main(sys.argv[1:])
