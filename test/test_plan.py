"""`plan`: bytes are those that a fake process group counts, activations those that layers save, and commands can run."""

import functools
import json
from collections import Counter

import pytest
import torch
import transformers
from launch import ROOT, in_fork
from peft import LoraConfig, get_peft_model
from plan_counts import CASES, EXPERTS, MODEL, TOKENS
from plan_models import COMMANDS, CONFIGS, PAGE, block, meta_model

from trainer.cli import plan
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.preference_flags import DPOArguments
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rules import refuse
from trainer.models.lora import default_targets
from trainer.models.losses.token_losses import GPU_CHUNK_BYTES
from trainer.planning import auto_layout
from trainer.planning import layout_plan as plan_report
from trainer.planning.plan_inputs import Machine, Work, machine_of
from trainer.planning.plan_memory import Layout, needs, pinned_bytes, saved_bytes_per_token, sizes_of, with_adapter
from trainer.planning.plan_traffic import Sent, step_seconds, traffic
from trainer.planning.predicted_memory import predict
from trainer.runs.features import chosen_layout


@pytest.fixture(scope="module", autouse=True)
def plans():
    """The plan of 256 GPUs takes long. The page and the commands ask for the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_report, "make_plan", functools.cache(plan_report.make_plan))
        yield


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """{name: {group size: bytes that rank 0 sent in a step}}"""
    folder = tmp_path_factory.mktemp("counts")
    code, output = in_fork(str(ROOT / "test/plan_counts.py"), str(folder), timeout=300)
    assert code == 0, output[-4000:]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    return {name: {int(size): found for size, found in sent.items()} for name, _, _, sent in lines}


@pytest.mark.parametrize("name", [name for name in CASES if "fp32" not in name])  # plan's weights are bf16
def test_sent_bytes_are_those_of_the_fake_group(counted, name):
    backend, options, num_ranks, num_micro = CASES[name]
    tp, replicas = options.get("tensor_parallel_size", 1), options.get("dp_replicate_size", 1)
    once = options.get("reduce_once", False)
    more = {"tp": tp, "ep": options.get("expert_parallel_size", 1), "reduce_once": once}
    layout = Layout(backend, options["zero_stage"], replicas, num_ranks // tp // replicas, **more)
    config = transformers.Qwen3MoeConfig(**EXPERTS) if "experts" in name else transformers.LlamaConfig(**MODEL)
    with torch.device("meta"):
        sizes = sizes_of(transformers.AutoModelForCausalLM.from_config(config))
    expected = Counter()
    for sent in traffic(layout, sizes, TOKENS, num_micro):
        expected[sent.size] += sent.bytes
    assert counted[name].keys() == expected.keys()
    for size, found in counted[name].items():
        assert found == pytest.approx(expected[size], rel=0.01), (size, found, expected[size])


def test_replicas_and_reduce_once_send_gradients_once(counted):
    """With 8 micro-batches: replicas 8 times less than per micro-batch, and --reduce_once a reduction in place of 8."""
    p = 225_728
    assert counted["fsdp2-3-hsdp"][4] == pytest.approx(2 * 4 * p / 8 * 3 / 4, rel=0.01)
    assert counted["fsdp2-3-once"][8] == pytest.approx((8 * 2 * 2 + 4) * p * 7 / 8, rel=0.01)
    assert counted["deepspeed-1-fp32-gloo"][4] == pytest.approx((4 + 4) * p * 3 / 4, rel=0.01)


@pytest.mark.parametrize("name", [name for name in CASES if "experts" in name])
def test_experts_send_no_more_than_their_share(counted, name):
    """Counted by hand, per micro-batch: two gatherings in bf16 and a reduction in fp32 of the share of a rank of ep, and four
    all-to-alls of the tokens of each layer."""
    _, options, ranks, micro_batches = CASES[name]
    ep = options.get("expert_parallel_size", 1)
    hidden, layers, chosen = EXPERTS["hidden_size"], EXPERTS["num_hidden_layers"], EXPERTS["num_experts_per_tok"]
    experts = layers * 128 * 3 * hidden * EXPERTS["moe_intermediate_size"]
    rest = 2 * 16384 * hidden + hidden + layers * (4 * hidden * 512 + 128 * hidden + 2 * hidden + 2 * 64)
    least = 8 * (experts / ep * (1 - ep / ranks) + rest * (1 - 1 / ranks))
    least += 4 * 2 * layers * TOKENS * chosen * hidden * (1 - 1 / ep)
    assert 0.9 <= sum(counted[name].values()) / (micro_batches * least) <= 1.1


def saved_bytes(kind, config) -> float:
    """Bytes per token that a second and third layer save for backward, counted by the tensors themselves."""
    found = []
    for config.num_hidden_layers in (1, 3):
        model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        saved = {}

        def note(tensor, saved=saved, own=own):
            if tensor.untyped_storage().data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.model(input_ids=torch.arange(256)[None], use_cache=False)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
    return (found[1] - found[0]) / 2 / 256


COMMON = {"vocab_size": 600, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.parametrize(
    ("name", "options"), [("Llama", {}), ("Qwen3", {"head_dim": 32}), ("Qwen3Moe", {"head_dim": 32, **MOE})]
)
def test_activations_are_the_tensors_that_layers_save(name, options):
    kind, config = getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")
    config = config(**COMMON, num_key_value_heads=2, **options)
    with torch.device("meta"):
        expected = saved_bytes_per_token(sizes_of(kind(config)))
    assert saved_bytes(kind, config) == pytest.approx(expected, rel=0.05)


def test_memory_is_the_measured_formula_and_activations():
    """The formula of weights and states is held to real runs in strategies/test_host_memory.py."""
    s = sizes_of(meta_model("qwen3-8b"))
    assert s.num_params == 8_190_735_360  # as the model card says: 8.2 billion
    base = predict("fsdp2", 3, "bf16", 8, s.num_params, s.largest_layer)
    none, few, many = (needs(Layout("fsdp2", 3, dp_shard=8), s, tokens) for tokens in (0, 1000, 4000))
    assert (none.load, none.save) == (base.load, base.state) and none.step == base.step
    held = 16 * s.num_params / 8  # weights, states and the gradients of earlier micro-batches, in fp32
    # the loss of 1000 tokens is small against two gathered layers, in bf16, and the gradient of one, in both dtypes
    work = 10 * s.largest_layer + 4000 * s.vocab
    assert few.step == pytest.approx(held + 1000 * 36 * saved_bytes_per_token(s) + work)
    # that of 4000 tokens is computed in chunks
    loss = 3 * GPU_CHUNK_BYTES + 4 * s.vocab * s.hidden
    work = 10 * s.largest_layer + 4000 * 4 * s.mlp_width
    assert many.step == pytest.approx(held + 4000 * 36 * saved_bytes_per_token(s) + loss + work)


def test_an_adapter_has_the_parameters_that_peft_gives_it():
    model, rank = (
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32)),
        4,
    )
    s = with_adapter(sizes_of(model), model, rank)
    targets = default_targets(model)
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
    assert s.adapter_params == adapted.get_nb_trainable_parameters()[0] > 0
    assert s.adapter_width == rank * len(targets) == 7 * rank
    whole = needs(Layout("fsdp2", 3, dp_shard=8), sizes_of(model), 1000)
    assert needs(Layout("fsdp2", 3, dp_shard=8), s, 1000).step < whole.step


def test_a_plan_of_lora_trains_what_the_trainer_takes():
    """AutoTP of DeepSpeed takes no adapter, and the command has the flag."""
    name, *rest = plan.parse(["qwen3-8b", "--gpus", "4", "--lora_rank", "8"])
    machine, _, work, _ = rest
    choices = plan_report.make_plan(meta_model("qwen3-8b"), machine, work)
    tp = [choice for choice in choices if choice.layout.backend == "deepspeed" and choice.layout.tp > 1]
    assert tp and all("--lora_rank" in choice.problem for choice in tp) and not any(c.layout.offload for c in choices)
    assert "--lora_rank 8 " in plan_report.command(choices[0].layout, machine, work, name, None)
    with pytest.raises(UserError, match="--lora_rank: -1"):
        plan.parse(["m", "--gpus", "8", "--lora_rank", "-1"])


def test_plain_attention_in_fp32_keeps_all_pairs_of_tokens():
    """Two samples of 1000 tokens have 2 x 1000 x 1000 pairs for each of 32 heads."""
    s = sizes_of(meta_model("qwen3-8b"))
    options = {"dtype": "fp32", "accumulates": False}
    short, long = (needs(Layout("fsdp2", 3, dp_shard=8), s, 2000, **options, length=n).step for n in (1, 1000))
    assert long - short == pytest.approx((36 + 2) * 4 * 32 * 2000 * (1000 - 1))


@pytest.mark.parametrize(
    ("layout", "bytes_of_one"),
    [
        (Layout("fsdp2", 3, dp_shard=8), 2 / 8),  # bf16, sharded
        (Layout("deepspeed", 3, dp_shard=8), 2 / 8),
        (Layout("deepspeed", 2, dp_shard=8), 2),  # bf16, whole
    ],
)
def test_frozen_models_are_in_memory_while_a_run_trains_and_saves(layout, bytes_of_one):
    s = sizes_of(meta_model("qwen3-8b"))
    none, two = (needs(layout, s, 1000, num_frozen=count) for count in (0, 2))
    for phase in ("step", "save"):
        assert getattr(two, phase) - getattr(none, phase) == pytest.approx(2 * bytes_of_one * s.num_params)
    assert (two.load, two.host) == (none.load, none.host)
    assert plan.parse(["m", "--gpus", "8", "--frozen_models", "2"])[3] == Work(128, 1, 4096, num_frozen=2)
    with pytest.raises(UserError, match="--frozen_models: -1"):
        plan.parse(["m", "--gpus", "8", "--frozen_models", "-1"])


def test_offloaded_weights_and_gradients_are_rounded_up_to_powers_of_two():
    """The sum of a plain loop. test_cuda_build.py compares it with what the CUDA build pins."""
    model, rounded = meta_model("qwen3-8b"), 0
    for parameter in model.parameters():
        size = 1
        while size < 4 * parameter.numel() / 8:
            size *= 2
        rounded += size
    s = sizes_of(model)
    assert pinned_bytes(s, 8) == rounded > 4 * s.num_params / 8
    found = needs(Layout("fsdp2", 3, dp_shard=8, offload=True), s, 1000)
    assert found.host == pytest.approx(3 * rounded + 8 * s.num_params / 8)  # the third: gradients of a micro-batch


def test_sizes_of_a_mixture_of_experts():
    s = sizes_of(meta_model("deepseek-v3"))
    assert s.num_params == pytest.approx(671e9, rel=0.001) and s.active_params == pytest.approx(37.5e9, rel=0.01)
    assert s.expert_params == 58 * 256 * 3 * 7168 * 2048


def test_time_of_a_step_by_hand():
    s = sizes_of(meta_model("llama-70b"))
    machine = Machine(16, 2, 80e9, 1e12, 4e14, 3e11, 4e10, 2e10)
    layout = Layout("fsdp2", 3, dp_shard=16, checkpointing=True)
    flops = (6 * s.num_params + 6 * 80 * 8192 * 4096) * 4096
    assert step_seconds(layout, s, machine, 4096, 1, 4096) == pytest.approx(flops * 4 / 3 / 4e14)
    inside, across = Sent("tp", 1, 8, 1, False), Sent("replicas", 1, 2, 8, False)
    assert inside.rate(machine) == 3e11 and across.rate(machine) == 4e10
    assert Sent("gradients", 1, 16, 1, True).rate(machine) == 3e11  # eight cards of 40 GB/s, but NVLink limits


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_the_page_says_what_the_command_says(number):
    assert block(COMMANDS[number]) in PAGE.read_text(), "run python test/plan_models.py"


def test_commands_are_accepted_by_the_trainer():
    """The three best layouts, with flags that train_sft and the strategy accept."""
    _, machine, _, work, _ = plan.parse(COMMANDS[4].split())
    assert work == Work(256, 1, 4096)
    choices = [c for c in plan_report.make_plan(meta_model("deepseek-v3"), machine, work, None) if not c.problem][:3]
    assert len(choices) == 3
    for choice in choices:
        line = plan_report.command(choice.layout, machine, work, "deepseek-v3")
        flags = line.split("trainer.cli.train_sft ")[1].split()
        parsed = parse_arguments(SFTArguments, "train_sft", flags)
        assert parsed.layout.expert_parallel_size == choice.layout.ep and parsed.layout.zero_stage == 3
    for flags in ("--rollout_engine hf --max_staleness 1", "--rollout_engine vllm", COMMANDS[5].split("--gpus 8 ")[1]):
        _, machine, _, work, rollouts = plan.parse(["qwen3-8b", "--gpus", "8", *flags.split()])
        line = plan_report.command(Layout("fsdp2", 3, dp_shard=8), machine, work, "qwen3-8b", rollouts)
        parsed = parse_arguments(PPOArguments, "train_ppo", line.split("trainer.cli.train_ppo ")[1].split())
        refuse("train_ppo", parsed)
        assert parsed.rollout.rollout_engine == rollouts.engine and parsed.rollout.generate_max_len == 4096 - 512


def test_layout_auto_takes_the_first_layout_that_the_flags_allow(tmp_path, monkeypatch):
    """`--layout auto` on 8 and 1 GPUs of 80 GB: the first row of the page, or the next one that other flags allow."""
    CONFIGS["qwen3-8b"].save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "8")
    batch = ["--train_batch_size", "128", "--micro_train_batch_size", "1", "--max_len", "4096", "--packing_samples"]
    flags = ["--pretrain", str(tmp_path), "--dataset", "d", "--layout", "auto", *batch, "--param_dtype", "bf16"]

    def choose(*more: str, gpus: int = 8, kind=SFTArguments) -> tuple[dict, str]:
        args = parse_arguments(kind, "command", [*flags, *more])
        kinds = {SFTArguments: ("train_sft", 1, False), DPOArguments: ("train_dpo", 2, True)}
        command, *work = kinds[kind]
        model, machine = meta_model("qwen3-8b"), machine_of(gpus)
        check = functools.partial(chosen_layout.check_layout, args, command)
        return auto_layout.first_choice(model, machine, chosen_layout.work_of(args, *work), check)

    found, line = choose()
    assert found == plan_report.layout_flags(Layout("fsdp2", 3, dp_shard=8))
    assert line.startswith("--layout auto: fsdp2 3, dp 8: 60.2 GB on each rank, which has 72; 917 GB sent a step")
    assert line.endswith("The flags: --backend fsdp2 --zero_stage 3")
    short, line = choose("--max_len", "512")
    assert short["reduce_once"] and "reduce once" in line, "memory is left for whole gradients"
    assert not choose("--max_len", "512", "--reduce_dtype", "bf16")[0]["reduce_once"], "FSDP2 refuses the two together"
    assert choose("--sequence_parallel")[0]["tensor_parallel_size"] > 1, "it would do nothing without tp"
    pairs, _ = choose(kind=DPOArguments)
    assert pairs["ring_attn_size"] > 1 or pairs["gradient_checkpointing"], "two sequences and a reference need more"
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match=r"--layout: auto: no layout fits; the smallest, .*: step needs"):
        choose("--max_len", "131072", gpus=1)
    for more, found in (
        (["--zero_stage", "2"], "--zero_stage 2 with --layout auto"),
        (["--load_in_4bit", "--lora_rank", "8"], "--layout auto with --load_in_4bit"),
    ):
        with pytest.raises(UserError, match=found):
            refuse("train_sft", parse_arguments(SFTArguments, "train_sft", [*flags, *more]))


def test_the_command_and_its_errors(tmp_path):
    CONFIGS["qwen3-8b"].save_pretrained(tmp_path)
    code, output = in_fork("-m", "trainer.cli.plan", str(tmp_path), "--gpus", "8")
    assert code == 0 and "8.19 billion parameters" in output and "--backend fsdp2" in output, output
    assert "WARNING" not in output
    for model, flags, message in (
        (tmp_path, ["--gpus", "7", "--nodes", "2"], "--gpus: 7 is not a multiple"),
        (tmp_path, ["--gpus", "0"], "--gpus: 0"),
        (tmp_path / "none", ["--gpus", "8"], "MODEL: .*/none is not found"),
    ):
        with pytest.raises(UserError, match=message):
            plan.run([str(model), *flags])


def test_samples_beyond_the_positions_of_a_model_are_refused_or_warned_about(tmp_path, capsys):
    """As in training: learned positions end, rotary ones go on untrained, and a rollout needs positions for all tokens."""
    sizes = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=1024)
    learned = transformers.GPT2Config(vocab_size=600, n_embd=64, n_layer=2, n_head=4)  # 1024 positions
    scaled = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, max_position_embeddings=1024,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    )  # fmt: skip
    for name, config in (("rotary", llama), ("learned", learned), ("scaled", scaled)):
        config.save_pretrained(tmp_path / name)
    found = "999999 tokens, more than the model's 1024 positions"
    with pytest.raises(UserError, match=rf"--max_len: {found} \(allowed: up to 1024\)"):
        plan.run([f"{tmp_path}/learned", "--gpus", "1", "--max_len", "999999"])
    for name, length, warns in (
        ("rotary", 999999, True),
        ("rotary", 1024, False),
        ("learned", 1024, False),
        ("scaled", 4096, False),
    ):
        plan.run([f"{tmp_path}/{name}", "--gpus", "1", "--max_len", str(length)])
        output = capsys.readouterr().out
        assert ("WARNING: --max_len: " in output) == warns and "layouts fit" in output, (name, length)
        assert not warns or output.startswith(f"WARNING: --max_len: {found}")
    for name in ("rotary", "learned"):
        with pytest.raises(UserError, match="--max_len: 1025 tokens of a prompt and its response, more than"):
            plan.run([f"{tmp_path}/{name}", "--gpus", "1", "--max_len", "1025", "--rollout_engine", "hf"])
