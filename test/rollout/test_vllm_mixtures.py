"""Mixtures of experts in vLLM: weight updates, whole runs of train_ppo, and the folder that train_sft saves.

The tests run if vLLM is installed. test/run_vllm_tests.sh makes an environment for it.
"""

import contextlib
import importlib.util
import json
import os

import pytest
import torch
from launch import read_steps, torchrun

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: see test/run_vllm_tests.sh", allow_module_level=True)

from rollout.test_vllm_engine import MAX_LEN, PROMPTS, assert_same, shaken, stored
from rollout.test_vllm_server import serving
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.zoo_models import tiny_config
from trainer.compare.runs.launch import free_port
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.on_vllm.vllm import VLLMEngine
from trainer.rollout.engines.sampling import Sampling

OPTIONS = {"dtype": torch.float32, "device": torch.device("cpu"), "batch_size": 4}
GREEDY = Sampling(0.0, 16, ())
REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(map(ord, response)) % 7 / 7 for response in responses]
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    make_demo(str(folder))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module", autouse=True)
def runs(demo):
    """The steps of runs of two ranks. They end before this process sets up a process group."""
    make_model(demo, "qwen3_moe")
    begin = ["--pretrain", f"{demo}/qwen3_moe", "--param_dtype", "fp32", "--learning_rate", "1e-3", "--max_steps", "2"]
    begin += ["--micro_train_batch_size", "2", "--train_batch_size", "4", "--lr_scheduler", "constant"]
    layouts = {
        "ep2": ["--expert_parallel_size", "2"],
        "tp2": ["--tensor_parallel_size", "2"],  # one engine over both ranks: each has a half of each expert
        "zero3": ["--backend", "deepspeed", "--zero_stage", "3"],
        "server": ["--expert_parallel_size", "2", "--rollout_engine", "vllm_server", "--engine_urls"],
    }
    rollout = ["--rollout_engine", "vllm", "--reward_func", f"{demo}/reward.py", "--label_key", "label", "--no_save"]
    rollout += ["--dataset", f"{demo}/prompts.jsonl", "--advantage_estimator", "group_norm", "--prompt_max_len", "64"]
    rollout += ["--n_samples_per_prompt", "2", "--rollout_batch_size", "2", "--generate_max_len", "8"]
    found, port = {}, free_port()
    layouts["server"].append(f"http://127.0.0.1:{port}")
    for name, flags in layouts.items():
        flags = ["-m", "trainer.cli.train_ppo", *begin, *rollout, *flags, "--output_dir", f"{demo}/runs/{name}"]
        with serving(demo, port, model="qwen3_moe") if name == "server" else contextlib.nullcontext():
            code, output = torchrun(2, *flags, timeout=600)
        assert code == 0 and "Traceback" not in output, output[-6000:]
        found[name] = read_steps(demo / "runs" / name)
    sft = ["-m", "trainer.cli.train_sft", *begin, "--dataset", f"{demo}/sft.jsonl", "--apply_chat_template"]
    sft += ["--expert_parallel_size", "2", "--output_dir", f"{demo}/runs/sft", "--save_path", f"{demo}/trained"]
    code, output = torchrun(2, *sft, timeout=600)
    assert code == 0, output[-6000:]
    from trainer.distributed.mesh import start_process_group

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    start_process_group(torch.device("cpu"))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    yield found
    del os.environ["RANK"], os.environ["LOCAL_RANK"]


def make_model(demo, name: str, **changes):
    """Save a shaken tiny mixture under its name. Return it and the tokenizer."""
    tokenizer, config = AutoTokenizer.from_pretrained(demo / "model"), tiny_config(name)
    sizes = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 512, **sizes, **changes})
    model = shaken(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed=1)
    model.save_pretrained(demo / name)
    tokenizer.save_pretrained(demo / name)
    return model, tokenizer


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "glm4_moe"])
def test_tokens_are_those_of_the_embedded_engine_after_each_update(demo, name):
    model, tokenizer = make_model(demo, name)
    engine = VLLMEngine(str(demo / name), **OPTIONS, max_len=MAX_LEN)
    embedded, tokens = HFEngine(str(demo / name), tokenizer, **OPTIONS), []
    for _ in range(2):
        assert engine.update_weights(stored(model).items()) == embedded.update_weights(stored(model).items())
        found = engine.generate(PROMPTS, GREEDY)
        assert_same(found, embedded.generate(PROMPTS, GREEDY))
        tokens.append([completion.token_ids for completion in found])
        model = shaken(model, seed=2)
    assert tokens[0] != tokens[1]

    def one_bit_off():
        yield from stored(model).items()

        def flip(inside):
            experts = next(value for name, value in inside.named_parameters() if name.endswith("w2_weight"))
            experts.data.view(torch.int32)[3, 5, 7] ^= 1

        engine._llm.apply_model(flip)

    with pytest.raises(RuntimeError, match="not the weights that were sent"):
        engine.update_weights(one_bit_off())


def test_mixtures_that_cannot_be_checked_are_refused(demo):
    model, _ = make_model(demo, "mixtral")
    engine = VLLMEngine(str(demo / "mixtral"), **OPTIONS, max_len=MAX_LEN)
    with pytest.raises(UserError, match=r"--rollout_engine: vllm, which keeps .* in a form that cannot be checked"):
        engine.update_weights(stored(model).items())
    make_model(demo, "olmoe", intermediate_size=24)
    with pytest.raises(UserError, match=r"experts of 24 columns on a rank .*multiple of 32"):
        VLLMEngine(str(demo / "olmoe"), **OPTIONS, max_len=MAX_LEN)


@pytest.mark.parametrize("layout", ["ep2", "tp2", "zero3", "server"])
def test_train_ppo_samples_from_the_policy(runs, layout):
    rows = runs[layout]
    assert [row["step"] for row in rows] == [1, 2] and len({row["weights_checksum"] for row in rows}) == 2
    assert rows[0]["weights_checksum"] == runs["ep2"][0]["weights_checksum"]
    assert rows[0]["loss"] == pytest.approx(runs["ep2"][0]["loss"], rel=1e-5, abs=1e-6)
    assert all(row["rollout_logprob_diff_max"] < 1e-4 for row in rows)


def test_a_trained_mixture_loads_from_its_folder(demo):
    from vllm import LLM, SamplingParams

    names = set()
    for file in (demo / "trained").glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            names |= set(weights.keys())
    assert {f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down")} <= names
    model = AutoModelForCausalLM.from_pretrained(demo / "trained", dtype=torch.float32).eval()
    before = json.loads((demo / "qwen3_moe/config.json").read_text())["architectures"]
    assert json.loads((demo / "trained/config.json").read_text())["architectures"] == before
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    options |= {"distributed_executor_backend": "external_launcher", "max_model_len": MAX_LEN, "dtype": "float32"}
    fresh = LLM(str(demo / "trained"), **options)
    fresh.llm_engine.engine_core._finalizer.detach()
    engine = VLLMEngine(str(demo / "trained"), **OPTIONS, max_len=MAX_LEN)
    engine.update_weights(stored(model).items())
    copy = lambda model: {name: p.detach().clone() for name, p in model.named_parameters()}  # noqa: E731
    [expected], [found] = fresh.apply_model(copy), engine._llm.apply_model(copy)
    assert found.keys() == expected.keys() and any(name.endswith("w13_weight") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = fresh.generate(asked, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert list(output.outputs[0].token_ids) == ids[0, len(prompt) :].tolist()
