"""vLLM reads prompts with images as the hf engine and as training do: a tiny Qwen3-VL, also after its tower has changed.

The tests run if vLLM is installed. test/run_vllm_tests.sh makes an environment for it.
"""

import copy
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import vision_models
from launch import read_steps, torchrun

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: see test/run_vllm_tests.sh", allow_module_level=True)

from transformers import AutoModelForImageTextToText, AutoTokenizer

from trainer.datasets.images.image_batches import ImageCollate
from trainer.datasets.images.image_processor import load_processor, process_images
from trainer.errors import UserError
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.on_vllm.vllm import VLLMEngine
from trainer.rollout.engines.on_vllm.vllm_images import content_hash, runs_of
from trainer.rollout.engines.sampling import Sampling

CPU = torch.device("cpu")
SIZES = [(24, 16), (16, 16), (40, 12), (20, 32)]
PICTURES = [vision_models.drawn(number, size) for number, size in enumerate(SIZES)]
# the pictures of each prompt, and its text; one picture stands at several places
ASKED = [((0,), "What is it?"), ((), "No image."), ((1, 2), "Two"), ((3, 0, 2), "Look"), ((2,), "Alone"), ((), "Text")]
GREEDY = Sampling(0.0, 16, ())


def make_folder(folder) -> str:
    """A Qwen3-VL whose heads are large enough for vLLM on CPU. Like the demo's, its file does not say `mrope_interleaved`."""
    spec = vision_models.KINDS["qwen3_vl"] = copy.deepcopy(vision_models.KINDS["qwen3_vl"])
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    spec["text"] |= {"head_dim": 32, "rope_parameters": rope}
    return vision_models.make_folder("qwen3_vl", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    kept = vision_models.KINDS["qwen3_vl"]
    yield make_folder(tmp_path_factory.mktemp("vllm_images") / "model")
    vision_models.KINDS["qwen3_vl"] = kept


@pytest.fixture(scope="module")
def engines(folder):
    """(vLLM, embedded, model, processor)."""
    from trainer.distributed.mesh import start_process_group

    os.environ.update(
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    )
    start_process_group(CPU)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = load_processor(folder, tokenizer)
    collate = ImageCollate(processor)
    collate.use(model)

    def images_of(numbers):
        return collate.tensors_of([[PICTURES[number] for number in numbers]])

    def read_images(ids, mask, nested):
        return collate.prompt_arguments(ids, mask, [[PICTURES[number] for number in numbers] for numbers in nested])

    options = {"dtype": torch.float32, "device": CPU, "batch_size": 8}
    engine = VLLMEngine(folder, **options, max_len=256, images_of=images_of, processor=processor)
    own = {"auto_class": AutoModelForImageTextToText, "read_images": read_images}
    yield engine, HFEngine(folder, tokenizer, **options, **own), model, processor
    del os.environ["RANK"]  # the runs that start below are not ranks of this group
    del os.environ["LOCAL_RANK"]


def prompt_ids(processor, numbers, text: str) -> list[int]:
    shown = process_images(processor, [[PICTURES[number] for number in numbers]])[1] if numbers else []
    marked = "".join(f"<|vision_start|>{one}<|vision_end|>" for one in shown)
    whole = f"<|im_start|>user\n{marked}{text}<|im_end|>\n<|im_start|>assistant\n"
    return processor.tokenizer(whole, add_special_tokens=False)["input_ids"]


def assert_same_answers(engines) -> list:
    """Sync both engines, and check greedy tokens, and log-probs also against a plain forward pass of the model."""
    engine, embedded, model, processor = engines
    stored = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    assert any("visual.merger" in name for name in stored) and any("visual.blocks" in name for name in stored)
    assert engine.update_weights(stored.items()) == embedded.update_weights(stored.items())
    prompts, images = [prompt_ids(processor, *asked) for asked in ASKED], [numbers for numbers, _ in ASKED]
    found = engine.generate(prompts, GREEDY, images=images)
    for one, other in zip(found, embedded.generate(prompts, GREEDY, images=images), strict=True):
        assert one.token_ids == other.token_ids and len(one.token_ids) == 16
    for prompt, numbers, one in zip(prompts, images, found, strict=True):
        ids = torch.tensor([[*prompt, *one.token_ids]])
        tensors = process_images(processor, [[PICTURES[number] for number in numbers]])[0] if numbers else {}
        types = (ids == model.config.image_token_id).long()
        with torch.no_grad():
            logits = model(ids, mm_token_type_ids=types, **tensors).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, rtol=0, atol=1e-4)
    return found


def test_greedy_tokens_and_log_probs_with_images(engines):
    before = assert_same_answers(engines)
    assert len({token for completion in before for token in completion.token_ids}) > 8
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # the pictures stay, so outputs that vLLM kept from the older tower would be wrong
        for parameter in engines[2].model.visual.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    after = assert_same_answers(engines)
    changed = [one.log_probs != other.log_probs for one, other in zip(before, after, strict=True)]
    assert changed == [bool(numbers) for numbers, _ in ASKED]


def test_image_tokens_that_do_not_fit_the_images_are_refused(engines):
    engine, _, _, processor = engines
    ids = prompt_ids(processor, (0,), "What?")
    cut = ids[: ids.index(processor.image_token_id)] + ids[ids.index(processor.image_token_id) + 1 :]
    for prompt, numbers in ((cut, (0,)), (ids, (0, 1)), (prompt_ids(processor, (), "What?"), (0,))):
        with pytest.raises(UserError, match=r"vllm: a prompt with runs of .* image tokens for images of"):
            engine.generate([prompt], GREEDY, images=[numbers])


def test_a_kind_that_is_not_tested_is_refused(tmp_path):
    other = vision_models.make_folder("gemma3", tmp_path)
    with pytest.raises(UserError, match="vllm with images and a gemma3, which is not compared"):
        options = {"dtype": torch.float32, "device": CPU, "batch_size": 1, "max_len": 64}
        VLLMEngine(other, **options, images_of=dict, processor=object())


def test_runs_and_names_of_images():
    assert runs_of([7, 5, 5, 7, 5], 5) == [(1, 2), (4, 1)] and runs_of([1, 2], 5) == []
    one = {"a": torch.zeros(2, 3), "b": torch.ones(1, dtype=torch.int64)}
    others = [one | {"a": torch.zeros(3, 2)}, one | {"a": -torch.zeros(2, 3)}, one | {"b": torch.zeros(1)}]
    assert content_hash(dict(one)) == content_hash(one) and len({content_hash(x) for x in [one, *others]}) == 4


def test_the_log_probs_of_a_run_are_those_of_training(folder, tmp_path):
    """FSDP2 on two ranks, each with an engine. The tower trains."""
    rows = [json.loads(line) for line in Path(vision_models.write_rows(tmp_path)).read_text().splitlines()]
    asked = [{"messages": row["messages"][:1], "images": row["images"]} for row in rows]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    reward = "def reward_func(prompts, responses, labels):\n    return [float(len(set(r))) for r in responses]\n"
    (tmp_path / "reward.py").write_text(reward)
    command = (
        f"--backend fsdp2 --pretrain {folder} --dataset {tmp_path}/prompts.jsonl --input_key messages "
        f"--apply_chat_template --reward_func {tmp_path}/reward.py --advantage_estimator group_norm "
        "--n_samples_per_prompt 2 --rollout_batch_size 8 --train_batch_size 16 --micro_train_batch_size 4 "
        "--micro_rollout_batch_size 8 --prompt_max_len 128 --generate_max_len 8 --param_dtype fp32 --max_steps 2 "
        f"--learning_rate 1e-2 --lr_scheduler constant --lr_warmup_ratio 0 --freeze_vision false --no_save --rollout_engine vllm --output_dir {tmp_path}/run"
    )
    code, output = torchrun(2, "-m", "trainer.cli.train_ppo", *command.split())
    assert code == 0 and "Traceback" not in output, output[-6000:]
    steps = read_steps(tmp_path / "run")
    assert len(steps) == 2 and len({step["weights_checksum"] for step in steps}) == 2
    assert max(step["rollout_logprob_diff_max"] for step in steps) < 1e-4
