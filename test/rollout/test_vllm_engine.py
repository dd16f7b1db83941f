"""Compare the vLLM engine with the embedded one and with plain forward passes. Run train_ppo on every kind of layout.

The tests run if vLLM is installed. test/run_vllm_tests.sh makes an environment for it.
"""

import importlib.util
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from launch import read_rows, read_steps, run_process, torchrun

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: see test/run_vllm_tests.sh", allow_module_level=True)

from rollout.test_truncation import plainly_kept
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.on_vllm.vllm import VLLMEngine
from trainer.rollout.engines.on_vllm.vllm_weights import weight_parts
from trainer.rollout.engines.sampling import Sampling, sample_seed
from trainer.rollout.engines.weight_stream import Update, WeightStream

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], [30, 31, 32, 33]]
SEEDS = [sample_seed(0, 0, number) for number in range(len(PROMPTS))]
MAX_LEN = 256  # two blocks of the cache, so that there are prefixes to share


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """Set up what the command sets up, see trainer/cli/ppo_roles.py."""
    from trainer.distributed.mesh import start_process_group

    os.environ.update(
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    )
    start_process_group(CPU)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
    yield
    del os.environ["RANK"]  # the runs that start below are not ranks of this group
    del os.environ["LOCAL_RANK"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "demo"
    make_demo(str(folder))
    return folder


def shaken(model, seed: int):
    """Make weights, norms and biases larger, so that no token follows from ties or from a factor of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def stored(model) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}


def make_engines(folder, model, tokenizer, batch_size: int = 8) -> tuple[VLLMEngine, HFEngine]:
    """Both engines, with the weights of `model`."""
    options = {"dtype": torch.float32, "device": CPU, "batch_size": batch_size}
    engine = VLLMEngine(str(folder), **options, max_len=MAX_LEN)
    embedded = HFEngine(str(folder), tokenizer, **options)
    assert engine.update_weights(stored(model).items()) == embedded.update_weights(stored(model).items())
    return engine, embedded


@pytest.fixture(scope="module")
def engines(demo):
    """(vLLM, embedded, model, tokenizer) of the demo model."""
    folder, tokenizer = demo / "model", AutoTokenizer.from_pretrained(demo / "model")
    model = shaken(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), seed=1)
    return *make_engines(folder, model, tokenizer), model, tokenizer


def assert_same(found, expected) -> None:
    """Check that tokens and ends are the same, and log-probs are within 1e-4."""
    for completion, other in zip(found, expected, strict=True):
        assert completion.token_ids == other.token_ids and completion.finished == other.finished
        difference = torch.tensor(completion.log_probs) - torch.tensor(other.log_probs)
        assert difference.abs().max() < 1e-4


# --- tokens and log-probs


def test_greedy_tokens_are_those_of_the_embedded_engine(engines):
    engine, embedded, _, _ = engines
    found = engine.generate(PROMPTS, Sampling(0.0, 24, (1,)))
    assert (
        len({token for completion in found for token in completion.token_ids}) > 8
    )  # the model does not repeat one token
    assert_same(found, embedded.generate(PROMPTS, Sampling(0.0, 24, (1,))))


@pytest.mark.parametrize("architecture", ["llama", "llama_bias", "qwen2", "mistral"])
def test_greedy_tokens_on_other_architectures(architecture, engines, tmp_path):
    """The vocabulary has 97 words, which vLLM pads. Models are tied and untied, with biases, with heads of 32."""
    config = CONFIGS[architecture]()
    config.head_dim, config.hidden_size, config.max_position_embeddings = 32, 256, 512
    model = shaken(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed=2)
    model.save_pretrained(tmp_path)
    engines[3].save_pretrained(tmp_path)
    engine, embedded = make_engines(tmp_path, model, engines[3])
    assert_same(engine.generate(PROMPTS, Sampling(0.0, 16, (1,))), embedded.generate(PROMPTS, Sampling(0.0, 16, (1,))))


def test_log_probs_are_of_the_distribution_at_the_temperature(engines):
    engine, _, model, _ = engines
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, Sampling(0.7, 16, ()), SEEDS)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
        log_probs = (logits / 0.7).log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)
        assert len(completion.token_ids) == 16 and not completion.finished


@pytest.mark.parametrize("cut", [(0.8, 40, 0.0), (1.0, 5, 0.0), (0.9, 60, 0.05)])
def test_the_tokens_that_are_drawn_from_and_their_probabilities(engines, cut):
    engine, _, model, _ = engines
    sizes = set()
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, Sampling(0.7, 16, (), (), *cut), SEEDS)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *found.token_ids]])).logits[0, len(prompt) - 1 : -1]
        assert len(found.kept_ids) == len(found.token_ids) == len(logits)
        for row, token, log_prob, ids in zip(logits, found.token_ids, found.log_probs, found.kept_ids):
            expected = plainly_kept((row / 0.7).double().softmax(-1).tolist(), *cut)
            assert set(ids) == expected.keys()
            assert math.exp(log_prob) == pytest.approx(expected[token], rel=1e-3)
            sizes.add(len(ids))
    assert sizes == {5} if cut[1] == 5 else len(sizes) > 3
    assert all(found.kept_ids == [] for found in engine.generate(PROMPTS, Sampling(0.0, 3, (), (), *cut)))


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(engines):
    engine, sampling = engines[0], Sampling(1.0, 16, (1,))
    before = torch.random.get_rng_state()
    together = engine.generate(PROMPTS, sampling, SEEDS)
    assert engine.generate(PROMPTS, sampling, SEEDS) == together  # bitwise
    tokens = [completion.token_ids for completion in together]
    assert [c.token_ids for c in engine.generate(PROMPTS[::-1], sampling, SEEDS[::-1])][::-1] == tokens
    assert engine.generate(PROMPTS[2:3], sampling, SEEDS[2:3])[0].token_ids == tokens[2]
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling, [s + 1 for s in SEEDS])] != tokens
    assert torch.equal(torch.random.get_rng_state(), before), "training draws from this generator"


def test_sampled_tokens_have_the_frequencies_of_the_model(engines):
    engine, _, model, _ = engines
    seeds = [sample_seed(0, 1, number) for number in range(1000)]
    first = [c.token_ids[0] for c in engine.generate([PROMPTS[0]] * 1000, Sampling(1.0, 1, ()), seeds)]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor(first), minlength=len(expected)) / 1000
    assert (found - expected).abs().max() < 4.5 * (expected * (1 - expected) / 1000).sqrt().max()


def test_stop_tokens_and_stop_texts_end_a_response(engines):
    engine, embedded, _, tokenizer = engines
    free = engine.generate(PROMPTS, Sampling(0.0, 24, ()))
    stop_id = free[0].token_ids[9]
    by_token = engine.generate(PROMPTS, Sampling(0.0, 24, (stop_id,)))
    assert by_token[0].finished and by_token[0].token_ids[-1] == stop_id and len(by_token[0].token_ids) <= 10
    assert_same(by_token, embedded.generate(PROMPTS, Sampling(0.0, 24, (stop_id,))))
    texts = [tokenizer.decode([token]) for token in free[1].token_ids]
    stop = next(text for text in texts if text.isprintable() and text.strip() and "\ufffd" not in text)
    by_text = engine.generate(PROMPTS, Sampling(0.0, 24, (), (stop,)))
    assert by_text[1].finished and stop in tokenizer.decode(by_text[1].token_ids)
    assert_same(by_text, embedded.generate(PROMPTS, Sampling(0.0, 24, (), (stop,))))


def test_models_that_vllm_refuses(engines, demo, tmp_path):
    options = {"dtype": torch.float32, "device": CPU, "batch_size": 4}
    with pytest.raises(UserError, match=r"--rollout_engine: vllm, which refuses .*max_model_len"):
        VLLMEngine(str(demo / "model"), **options, max_len=100_000)
    CONFIGS["llama"]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--rollout_engine: vllm on the CPU with heads of 8"):
        VLLMEngine(str(tmp_path), **options, max_len=64)


def test_nothing_to_generate(engines):
    assert engines[0].generate([], Sampling(1.0, 4, ())) == []


def test_each_prompt_may_have_its_own_limit(engines):
    engine, embedded, _, _ = engines
    whole = engine.generate(PROMPTS, Sampling(0.0, 12, ()))
    found = engine.generate(PROMPTS, Sampling(0.0, 12, ()), limits=[1, 12, 5, 9])
    assert [c.token_ids for c in found] == [c.token_ids[:n] for c, n in zip(whole, [1, 12, 5, 9])]
    assert_same(found, embedded.generate(PROMPTS, Sampling(0.0, 12, ()), limits=[1, 12, 5, 9]))


def test_episodes_are_those_of_the_embedded_engine(engines):
    """Of three turns, with and without a tool's answer. Log-probs are those of one pass over the whole conversation."""
    from trainer.rollout.envs.environments import Caller
    from trainer.rollout.envs.episodes import Environments, generate_episodes

    class Talker:
        def reset(self, task):
            return [{"role": "user", "content": "1 2"}]

        def step(self, response):
            return [{"role": "tool", "content": "3"}, {"role": "user", "content": str(len(response))}], 1.0, False

    engine, embedded, model, tokenizer = engines
    environments = Environments(lambda task: Talker(), Caller("--env x", 20, 4), "--env x", tokenizer, 3, 64)
    prompts = [{"row": 0, "label": None}]
    sampling = Sampling(0.7, 150, tuple(range(3, 60)))
    found, expected = (
        generate_episodes(environments, one, prompts, 4, sampling, seed=1, rollout=0) for one in (engine, engine)
    )
    assert found == expected and {len(sample.turns) for sample in found} >= {3}
    for sample in found:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            log_probs = (model(ids).logits[0] / 0.7).log_softmax(-1)
        places = [len(sample.prompt_ids) + place for place in sample.generated()]
        plain = [log_probs[place - 1, ids[0, place]].item() for place in places]
        assert sample.log_probs == pytest.approx(plain, abs=1e-4)
    greedy = Sampling(0.0, 150, tuple(range(3, 60)))
    found, expected = (
        generate_episodes(environments, one, prompts, 1, greedy, seed=1, rollout=0)[0] for one in (engine, embedded)
    )
    assert found.response_ids == expected.response_ids and found.turns == expected.turns


# --- weights


def test_an_update_leaves_nothing_of_the_older_weights(engines, demo):
    """Nothing is left in the cache of prefixes (the prompt fills a block of it) or in a packed copy."""
    engine, embedded, model, _ = engines
    prompts = [[token % 300 for token in range(start, start + 200)] for start in (1, 2)]
    other = shaken(AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32), seed=3)
    tokens = []
    for weights in (model, other, model):
        assert engine.update_weights(stored(weights).items()) == embedded.update_weights(stored(weights).items())
        found = engine.generate(prompts, Sampling(0.0, 12, ()))
        assert_same(found, embedded.generate(prompts, Sampling(0.0, 12, ())))
        tokens.append([completion.token_ids for completion in found])
    assert tokens[0] == tokens[2] != tokens[1]


def test_weights_are_bit_for_bit_those_that_vllm_reads_from_a_folder(engines, tmp_path):
    from vllm import LLM

    engine, _, model, tokenizer = engines
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "distributed_executor_backend": "external_launcher",
    }
    fresh = LLM(str(tmp_path), dtype="float32", max_model_len=64, **options)
    fresh.llm_engine.engine_core._finalizer.detach()
    copy = lambda model: {name: p.detach().clone() for name, p in model.named_parameters()}  # noqa: E731
    [found], [expected] = engine._llm.apply_model(copy), fresh.apply_model(copy)
    assert found.keys() == expected.keys() and "model.layers.0.self_attn.qkv_proj.weight" in found
    for name, tensor in expected.items():
        assert tensor.numel() and torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name


def test_the_parts_of_fused_weights_are_the_tensors_of_the_model(engines):
    engine, _, model, _ = engines
    [parts] = engine._llm.apply_model(weight_parts)
    assert parts.keys() == stored(model).keys()
    for name, tensor in stored(model).items():
        assert torch.equal(parts[name].cut(tensor), tensor) and torch.equal(parts[name].held(), tensor), name


def test_weights_that_do_not_arrive_are_noticed(engines):
    engine, _, model, _ = engines
    tensors = dict(stored(model))
    missing = dict(tensors)
    missing.pop("model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(RuntimeError, match="not the weights that were sent"):
        engine.update_weights(missing.items())

    def one_bit_off():
        yield from tensors.items()

        def flip(model):
            bits = model.get_parameter("model.layers.1.mlp.gate_up_proj.weight").data.view(torch.int32)
            bits[300, 5] ^= 1

        engine._llm.apply_model(flip)

    with pytest.raises(RuntimeError, match="not the weights that were sent"):
        engine.update_weights(one_bit_off())
    with pytest.raises(UserError, match=r"--rollout_engine: vllm, which keeps model\.experts"):
        engine.update_weights({"model.experts.weight": torch.zeros(2)}.items())
    engine.update_weights(tensors.items())


def received(model, tensors) -> dict:
    """What a worker of a server answers to these tensors, which come over a stream."""
    from trainer.rollout.engines.on_vllm.vllm_worker import WeightReceiver  # it imports vLLM

    torch.compiler.set_stance("default")
    stream, worker = WeightStream("127.0.0.1", 0, 0, 2), WeightReceiver()
    worker.rank, worker.device, worker.model_runner = 0, CPU, SimpleNamespace(get_model=lambda: model)
    worker.model_config, worker.parallel_config = SimpleNamespace(dtype=torch.float32), SimpleNamespace(world_size=1)
    with ThreadPoolExecutor(1) as pool:
        updates = (Update(name, tensor.contiguous()) for name, tensor in tensors)
        sent = pool.submit(stream.send, updates, lambda: None)
        found = worker.receive_trainer_weights(json.dumps(["127.0.0.1", stream.port, stream.token, False]))
        assert sent.result() > 0, "the sender comes to its end"
    assert worker.trainer_checksum == found.get("checksum", "")
    return found


def test_a_worker_says_why_it_takes_no_weights(engines):
    engine, _, model, _ = engines
    tensors = dict(stored(model))

    def wrong(**changes) -> str:
        [found] = engine._llm.apply_model(lambda inside: received(inside, (tensors | changes).items()))
        return found["refused"]

    assert wrong(**{"model.experts.weight": torch.zeros(2)}).startswith(
        "vllm, which keeps model.experts.weight in a form"
    )
    name = "model.layers.0.mlp.down_proj.weight"
    assert f" of {name}, and [7, 9] came" in wrong(**{name: torch.zeros(7, 9)})
    missing = {name: tensors.pop(name)}
    assert wrong() == "the rollout engine's weights are not the weights that were sent to it"
    [found] = engine._llm.apply_model(lambda inside: received(inside, (tensors | missing).items()))
    assert found["checksum"] == engine.update_weights((tensors | missing).items())[0]


# --- train_ppo

DENSE = """
def reward_func(prompts, responses, labels):
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
"""


@pytest.fixture(scope="module")
def run(demo, process_group):
    """`run(name, num_ranks, *flags)` gives the steps of a run of train_ppo. 0 ranks: without torchrun."""
    (demo / "dense.py").write_text(DENSE)
    line = ["-m", "trainer.cli.train_ppo", "--pretrain", f"{demo}/model", "--dataset", f"{demo}/prompts.jsonl"]
    line += ["--eval_dataset", f"{demo}/prompts_eval.jsonl", "--max_samples", "16", "--reward_func", f"{demo}/dense.py"]
    line += ["--label_key", "label", "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "2", "--no_save"]
    line += [
        "--rollout_batch_size",
        "4",
        "--train_batch_size",
        "4",
        "--micro_train_batch_size",
        "2",
        "--max_steps",
        "4",
    ]
    line += ["--prompt_max_len", "64", "--generate_max_len", "8", "--learning_rate", "1e-3", "--param_dtype", "fp32"]
    line += ["--eval_steps", "4"]

    def start(name: str, num_ranks: int, *flags: str) -> list[dict]:
        flags = [*line, "--output_dir", f"{demo}/{name}", *flags]
        saved = {name: os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK")}
        if num_ranks:
            code, output = torchrun(num_ranks, *flags, timeout=600)
        else:
            code, output = run_process([sys.executable, *flags], timeout=600)
        os.environ.update({name: value for name, value in saved.items() if value is not None})
        assert code == 0 and "Traceback" not in output, output[-6000:]
        return read_steps(demo / name)

    return start


def first_evaluation(folder) -> dict:
    return next(row for row in read_rows(folder) if "eval_reward" in row)


@pytest.fixture(scope="module")
def alone(run):
    """One rank, without torchrun."""
    return run("alone", 0, "--rollout_engine", "vllm")


def test_a_run_holds_the_weights_and_gives_the_greedy_answers_of_the_embedded_engine(alone, run, demo):
    embedded = run("embedded", 0, "--rollout_engine", "hf")
    assert [row["step"] for row in alone] == [1, 2, 3, 4]
    assert len({row["weights_checksum"] for row in alone}) == 2  # one for each rollout
    for row in alone:
        assert row["rollout_logprob_diff"] <= row["rollout_logprob_diff_max"] < 1e-4
        assert all(value == value and abs(value) != float("inf") for value in row.values() if isinstance(value, float))
    assert alone[0]["weights_checksum"] == embedded[0]["weights_checksum"]
    assert alone[0]["ratio_deviation"] == 0 and alone[0]["reward"] != embedded[0]["reward"]  # other random numbers
    found, expected = first_evaluation(demo / "alone"), first_evaluation(demo / "embedded")
    for key in ("step", "eval_reward", "eval_response_length", "weights_checksum"):
        assert found[key] == expected[key], key


LAYOUTS = {
    "fsdp2": ["--backend", "fsdp2"],
    "deepspeed": ["--backend", "deepspeed", "--zero_stage", "3"],
    "fsdp2-tp": ["--backend", "fsdp2", "--tensor_parallel_size", "2"],  # one engine over both ranks
    "fsdp2-wide": ["--backend", "fsdp2", "--engine_tensor_parallel_size", "2"],
    "fsdp2-tp-narrow": ["--backend", "fsdp2", "--tensor_parallel_size", "2", "--engine_tensor_parallel_size", "1"],
    "deepspeed-tp": ["--backend", "deepspeed", "--zero_stage", "1", "--tensor_parallel_size", "2"],
    "fsdp2-ring": ["--backend", "fsdp2", "--ring_attn_size", "2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_are_one(layout, alone, run):
    rows = run(layout, 2, "--rollout_engine", "vllm", *LAYOUTS[layout])
    assert rows[0]["weights_checksum"] == alone[0]["weights_checksum"]
    for row, expected in zip(rows, alone, strict=True):
        assert row["rollout_logprob_diff_max"] < 1e-4
        assert row["batch_hash"] == expected["batch_hash"], (
            "the samples must not depend on the engine that generates them"
        )
        assert row["reward"] == expected["reward"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)


def test_slices_have_the_checksum_of_the_full_weights(alone, run, demo):
    """From the second rollout on, ranks of an engine get only their slices. Training is the same, so are its weights."""
    narrow, wide = read_steps(demo / "fsdp2"), read_steps(demo / "fsdp2-wide")
    assert [row["weights_checksum"] for row in narrow] == [row["weights_checksum"] for row in wide]
    full, slices = narrow[-1]["sync_bytes"], wide[-1]["sync_bytes"]
    assert wide[0]["sync_bytes"] == full and full / 2 <= slices < 0.6 * full, "norms and padding are on both ranks"


def test_a_resumed_run_is_bitwise_the_undisturbed_one(run, demo):
    more = ["--rollout_engine", "vllm", "--lr_scheduler", "linear"]
    whole = run("whole", 2, *more, "--save_steps", "2")
    half = run("half", 2, *more, "--load_checkpoint", f"{demo}/whole/checkpoints/step_2")
    assert [row["step"] for row in half] == [3, 4]
    for row, expected in zip(half, whole[2:], strict=True):
        for key in ("loss", "grad_norm", "reward", "rollout_logprob_diff", "weights_checksum", "batch_hash"):
            assert row[key] == expected[key], (row["step"], key)


def test_bf16(run):
    rows = run("bf16", 0, "--rollout_engine", "vllm", "--param_dtype", "bf16")
    assert len(rows) == 4 and all(row["rollout_logprob_diff"] < 0.05 for row in rows)


def test_the_share_of_a_gpu_needs_one(demo, monkeypatch):
    monkeypatch.delenv("RANK"), monkeypatch.delenv("LOCAL_RANK")
    flags = ["--pretrain", f"{demo}/model", "--dataset", f"{demo}/prompts.jsonl", "--label_key", "label"]
    flags += ["--reward_func", "math", "--rollout_engine", "vllm", "--vllm_gpu_memory_utilization", "0.3"]
    flags += ["--device", "cpu", "--prompt_max_len", "64", "--generate_max_len", "8", "--output_dir", f"{demo}/share"]
    code, output = run_process([sys.executable, "-m", "trainer.cli.train_ppo", *flags])
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1, output[-3000:]
    assert "--vllm_gpu_memory_utilization 0.3 on the CPU: " in errors[0]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--temperature", "0.005"), ("--top_p", "0.9"), ("--min_p", "0.1"), ("--vllm_gpu_memory_utilization", "1")],
)
def test_flags_that_vllm_does_not_take(flag, value):
    from trainer.cli.train_ppo import parse
    from trainer.runs.rl.rl_checks import validate

    flags = ["--pretrain", "x", "--dataset", "x", "--reward_func", "format", "--rollout_engine", "vllm", flag, value]
    with pytest.raises(UserError) as error:
        validate(parse(flags)[0])
    assert error.value.where.split()[0] == flag, str(error.value)
