"""train_ppo on every kind of layout against the plain loop, on frozen rollouts of a really trained model on real prompts.

Three updates of GRPO and of PPO. The loss of a policy is a mean of terms as large as the advantages that all but cancel,
so its tolerance of 1e-5 is relative to the mean of |advantage|, which is about 1 (to |loss| where that is more); what
else is compared has the tolerances of test_parity.py. Each run also evaluates, so that weights go from every layout to the rollout engine, before the first step and after the last.
"""

import base64
import json
import math
import random
import re

import numpy as np
import pytest
import torch
from launch import FULL, ROOT, forked, read_rows, read_steps, train_many
from safetensors.torch import load_file
from test_parity import assert_same_tensors
from test_parity_preference import BACKENDS, LAYOUTS, make_mixture_of_experts
from test_ppo_teacher import make_teacher

ALGORITHMS = {
    "grpo": [
        "--advantage_estimator", "group_norm", "--loss_agg", "token", "--use_kl_loss", "--kl_estimator", "k3",
        "--init_kl_coef", "0.1", "--eps_clip_high", "0.28", "--tis_cap", "1.02", "--entropy_loss_coef", "0.01",
    ],
    "ppo": [
        "--advantage_estimator", "gae", "--loss_agg", "sequence", "--kl_estimator", "k1", "--init_kl_coef", "0.1",
        "--gamma", "0.99", "--lambd", "0.9", "--value_clip", "0.05", "--critic_learning_rate", "5e-4",
    ],
}  # fmt: skip
LORA = ["--lora_rank", "8", "--learning_rate", "2e-3"]
ALGORITHMS |= {"grpolora": [*ALGORITHMS["grpo"], *LORA], "ppolora": [*ALGORITHMS["ppo"], *LORA]}
CUT = ["--top_p", "0.9", "--top_k", "50", "--min_p", "0.01", "--mask_truncated"]
ALGORITHMS |= {"grpocut": [*ALGORITHMS["grpo"], *CUT], "ppocut": [*ALGORITHMS["ppo"], *CUT, "--bypass_mode"]}
ALGORITHMS |= {"grposhared": [*ALGORITHMS["grpo"], "--share_prompts"]}
ALGORITHMS |= {"grpomoe": [*ALGORITHMS["grpo"], "--aux_loss_coef", "0.3"]}
ALGORITHMS |= {"grporeplay": [*ALGORITHMS["grpo"], "--routing_replay"]}
# the advantages of scores and of a teacher
ALGORITHMS |= {"grpoteach": ["--advantage_estimator", "group_norm", "--init_kl_coef", "0.3", "--tis_cap", "1.02"]}
# distances from a teacher's whole distributions
ALGORITHMS |= {"kdjsd": ["--kd_loss", "jsd", "--kd_beta", "0.3", "--loss_agg", "sequence"]}
ALGORITHMS |= {"kdtop": ["--kd_loss", "reverse_kl", "--kd_top_k", "7"]}
# a teacher for each row, by its column, and all teachers together
ALGORITHMS |= {f"{name}key": [*ALGORITHMS[name], "--teacher_key", "domain"] for name in ("grpoteach", "kdjsd")}
ALGORITHMS |= {f"{name}mix": [*ALGORITHMS[name], "--teacher_weights", "0.3", "0.7"] for name in ("grpoteach", "kdtop")}
TEACHERS = {"grpoteach": "teacher", "kdjsd": "teacher", "kdtop": "teacher"}
TEACHERS |= dict.fromkeys(("grpoteachkey", "kdjsdkey"), "math=teacher,code=second")
TEACHERS |= dict.fromkeys(("grpoteachmix", "kdtopmix"), "teacher,second")
MIXTURES_OF = ("grpomoe", "grporeplay")
MESHES = ("dp2", "tp2", "sp2", "dp2-tp2")
FULL_GRID = [
    f"{algorithm}-{backend}-{mesh}" for algorithm in ("grpo", "ppo") for backend in BACKENDS for mesh in MESHES
]
# each backend, each mesh and each choice of an algorithm, in turn; `PARITY=full` runs all
SAMPLE = ["grpo-z1-sp2", "ppo-z3-dp2", "grpo-fsdp2-tp2", "ppo-fsdp2-dp2-tp2"]
GRID = FULL_GRID if FULL else SAMPLE
GRID += ["ppolora-z3-sp2", "grpocut-fsdp2-tp2", "ppocut-z3-sp2", "grpoteach-z3-dp2", "grposhared-fsdp2-tp2"]
GRID += ["kdjsd-z3-tp2", "kdtop-fsdp2-sp2"]
GRID += ["grpoteachkey-fsdp2-sp2", "kdjsdkey-z3-dp2", "grpoteachmix-z1-tp2", "kdtopmix-fsdp2-tp2"]
GRID += ["grpolora-fsdp2-tp2", "grpoteach-fsdp2-sp2", "grposhared-z1-dp2", "kdjsd-fsdp2-sp2"] if FULL else []
GRID += ["kdtop-fsdp2-tp2", "kdtop-z1-dp2"] if FULL else []
GRID += ["grpoteachkey-z3-dp2", "kdjsdkey-fsdp2-tp2", "kdtopmix-z1-dp2"] if FULL else []
GRID += ["grpolora-z1-sp2", "ppolora-fsdp2-dp2", "grpocut-z3-sp2", "ppocut-fsdp2-sp2"] if FULL else []
GRID += ["grposhared-z3-tp2", "kdtop-fsdp2-dp2-tp2"] if FULL else []
GRID += ["grposhared-fsdp2-dp2", "grposhared-fsdp2-dp2-tp2", "grposhared-z1-tp2", "grposhared-z3-dp2"] if FULL else []
GRID += ["ppocut-z1-dp2", "grpolora-z3-dp2", "grpocut-fsdp2-dp2", "grpocut-z1-tp2"] if FULL else []
MIXTURES = ["grpomoe-z3-dp2", *["grpomoe-fsdp2-sp2"] * FULL]
# on experts that were drawn at random, so that nothing is right by chance
REPLAYED = ["fsdp2-sp2", "fsdp2-ep2", "z1-tp2", *(["fsdp2-tp2", "z3-dp2"] if FULL else [])]
MIXTURES += [f"grporeplay-{layout}" for layout in REPLAYED]
LAYOUTS = LAYOUTS | {"ep2": (2, ["--expert_parallel_size", "2"])}
PROMPTS, EACH, ROLLOUTS, STEPS = 4, 2, 2, 3


def write_rollouts(path, shared_data, **truncation) -> None:
    """Rollouts of the untrained policy with scores drawn from a seed. Their log-probs are a little off, so that the
    importance weights of --tis_cap are not all 1."""
    from transformers import AutoTokenizer

    from trainer.model_folders.model_folder import SafetensorsFolder
    from trainer.rollout.engines.hf import HFEngine
    from trainer.rollout.engines.sampling import Sampling, sample_seed

    folder = str(shared_data / "models/stories260K-hf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = HFEngine(folder, tokenizer, dtype=torch.float32, device=torch.device("cpu"), batch_size=8)
    weights = SafetensorsFolder(folder)
    engine.update_weights((name, weights.read(name)) for name in engine.model.state_dict() if name in weights)
    questions = [json.loads(line)["question"] for line in (shared_data / "gsm8k/test.jsonl").read_text().splitlines()]
    prompts = [ids for ids in tokenizer(questions[:60])["input_ids"] if len(ids) < 150]
    generator, lines = random.Random(0), []
    for rollout in range(ROLLOUTS):
        for number in range(PROMPTS * EACH):
            prompt = prompts[rollout * PROMPTS + number // EACH]
            limit = 4 + 5 * (number % 4)  # responses of different lengths
            found = engine.generate(
                [prompt], Sampling(0.9, limit, (2,), **truncation), [sample_seed(0, rollout, number)]
            )[0]
            row = {"rollout": rollout, "number": number, "row": number // EACH, "prompt_ids": prompt}
            row |= {"response_ids": found.token_ids, "finished": found.finished, "label": None, "metrics": {}}
            row["log_probs"] = [value + generator.gauss(0, 0.05) for value in found.log_probs]
            row |= {"kept_ids": found.kept_ids, "finished": number % 3 > 0} if truncation else {}
            lines.append(json.dumps({**row, "score": generator.gauss(0, 1)}) + "\n")
    path.write_text("".join(lines))


def add_random_experts(path, target) -> None:
    """For the mixture of 2 layers, 4 experts and 2 of them for a token. The last token of a sample has none."""
    rows, generator = [json.loads(line) for line in path.read_text().splitlines()], np.random.default_rng(0)
    for row in rows:
        tokens = len(row["prompt_ids"]) + len(row["response_ids"]) - 1
        experts = generator.random((tokens, 2, 4)).argsort(-1)[..., :2].astype(np.int16)
        row["experts"] = [experts.shape, base64.b64encode(experts.tobytes()).decode()]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def command_line(name: str, folder, data) -> list[str]:
    """Flags of a run named as in GRID; "grpo-reference" is the plain loop's."""
    algorithm, *parts = name.split("-")
    flags = [
        "--pretrain",
        f"{folder}/mixture" if algorithm in MIXTURES_OF else f"{data}/models/stories260K-hf",
        "--dataset",
        f"{folder}/domains.jsonl" if algorithm.endswith("key") else f"{data}/gsm8k/test.jsonl",
        "--max_samples",
        "16",
    ]
    flags += ["--input_key", "question", "--label_key", "answer", "--prompt_max_len", "256", "--generate_max_len", "24"]
    flags += [
        "--rollouts_from",
        f"{folder}/frozen{'-cut' * algorithm.endswith('cut')}{'-experts' * (algorithm == 'grporeplay')}.jsonl",
    ]
    flags += ["--rollout_batch_size", str(PROMPTS)]
    flags += ["--n_samples_per_prompt", str(EACH), "--temperature", "0.9", "--train_batch_size", "4"]
    flags += ["--micro_train_batch_size", "2", "--max_steps", str(STEPS), "--learning_rate", "2e-4"]
    flags += ["--lr_scheduler", "constant", "--param_dtype", "fp32", *ALGORITHMS[algorithm]]
    flags += (
        ["--teacher", re.sub(r"\w+(?=,|$)", rf"{folder}/\g<0>", TEACHERS[algorithm])] if algorithm in TEACHERS else []
    )
    if parts != ["reference"]:
        _, layout = LAYOUTS["-".join(parts[1:])]
        flags += [*BACKENDS[parts[0]], *layout, "--check_replicas_every", "2", "--reward_func", "math"]
        flags += ["--eval_dataset", f"{data}/gsm8k/test.jsonl", "--eval_steps", "100"]
        flags += ["--packing_samples"] if parts[0] != "z1" and algorithm != "grposhared" else []
        flags += ["--gradient_checkpointing"] if algorithm == "grporeplay" else []
    run = f"{folder}/{name}"
    return ["train_ppo", *flags, "--output_dir", run, "--save_path", f"{run}/model", "--parity_dump", f"{run}/parity"]


def num_ranks(name: str) -> int:
    return LAYOUTS["-".join(name.split("-")[2:])][0]


def run_grid(names: list[str], folder, data) -> None:
    """The plain loops, then all runs of one number of ranks after the other."""
    write_rollouts(folder / "frozen.jsonl", data)
    write_rollouts(folder / "frozen-cut.jsonl", data, top_p=0.9, top_k=50, min_p=0.01)
    add_random_experts(folder / "frozen.jsonl", folder / "frozen-experts.jsonl")
    make_mixture_of_experts(folder / "mixture", data / "models/stories260K-hf")
    make_teacher(str(data / "models/stories260K-hf"), str(folder / "teacher"), noise=0.3)
    make_teacher(str(data / "models/stories260K-hf"), str(folder / "second"), noise=0.6)
    domains = [{"question": "One and one?", "answer": "2", "domain": name} for name in ("math", "code") * PROMPTS]
    (folder / "domains.jsonl").write_text("".join(json.dumps(row) + "\n" for row in domains))
    for algorithm in dict.fromkeys(name.split("-")[0] for name in names):
        line = command_line(f"{algorithm}-reference", folder, data)[1:]
        code, output = forked(1, str(ROOT / "test/ppo_reference.py"), *line)
        assert code == 0, output[-4000:]
    for ranks in (2, 4):
        lines = [command_line(name, folder, data) for name in names if num_ranks(name) == ranks]
        if lines:
            train_many(ranks, lines, folder, timeout=1800)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    folder = tmp_path_factory.mktemp("parity_ppo")
    run_grid([*GRID, *MIXTURES], folder, shared_data)
    return folder


def differences(run, reference) -> dict[str, float]:
    """The largest relative difference of each compared number over all steps; of the loss, see above."""
    steps, expected_steps = read_steps(run), read_steps(reference)
    assert len(steps) == len(expected_steps) == STEPS
    worst: dict[str, float] = {}
    for row, expected in zip(steps, expected_steps):
        for key in expected.keys() - {"step"}:
            scale = max(abs(expected[key]), row["advantage_abs"]) if key == "loss" else abs(expected[key])
            difference = abs(row[key] - expected[key]) / scale
            assert math.isfinite(difference), (row["step"], key)  # max() would pass over it
            worst[key] = max(worst.get(key, 0.0), difference)
    return worst


@pytest.mark.parametrize("name", [*GRID, *MIXTURES])
def test_fp32_run_equals_the_plain_loop(runs, name):
    reference = runs / f"{name.split('-')[0]}-reference"
    worst = differences(runs / name, reference)
    assert worst.pop("loss") <= 1e-5 and worst.pop("value_loss", 0.0) <= 1e-5, worst
    assert max(worst.values()) <= 1e-4, worst
    assert_same_tensors(runs / name, reference, "grads_step1", 1e-4)
    if "lora" not in name:
        assert_same_tensors(runs / name, reference, "weights_final", 1e-4)
        return
    # B starts at zero, so that its weights are Adam's steps alone; two elements of it have gradients of 1e-5 of the rest,
    # rounding errors to a good part, which Adam divides by their own size. So the adapter is compared as one vector.
    final, expected = (load_file(run / "parity/weights_final.safetensors") for run in (runs / name, reference))
    assert final.keys() == expected.keys()
    vector, wanted = (torch.cat([found[key].flatten().double() for key in expected]) for found in (final, expected))
    assert (vector - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("name", GRID)
def test_the_first_update_of_a_rollout_is_on_policy_to_the_bit(runs, name):
    """Two updates to a rollout: the ratio is 1 on the first, and on the second no longer."""
    rows = read_steps(runs / name)
    deviations = [row["ratio_deviation"] for row in rows]
    if name.startswith("ppocut"):  # --bypass_mode: the old policy is the engine, whose log-probs are a little off
        assert deviations[0] == pytest.approx(rows[0]["rollout_logprob_diff"], rel=0.1) and deviations[0] > 0.03, rows[
            0
        ]
        return
    assert deviations[0::2] == [0.0] * 2 and min(deviations[1::2]) > 1e-4, deviations


def saved_weights(folder, base) -> dict[str, torch.Tensor]:
    """Of a saved model; of a saved adapter, with its update added to the base model, alpha / rank being 2."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    tensors, adapter = load_file(base / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
    for name in [name for name in adapter if name.endswith("lora_A.weight")]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        tensors[f"{layer}.weight"] += 2 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
    return tensors


@pytest.mark.parametrize("name", GRID)
def test_the_engine_holds_the_trained_weights_bit_for_bit(runs, name, shared_data):
    """After the sync of the last step, by the checksum of what the run saved; and before the first, the pretrained ones."""
    from trainer.rollout.engines.checksum import Checksum

    rows = [row for row in read_rows(runs / name) if "eval_reward" in row]
    saved, tensors = Checksum(), saved_weights(runs / name / "model", shared_data / "models/stories260K-hf")
    for key, tensor in tensors.items():
        saved.add(key, tensor)
    assert [row["step"] for row in rows] == [0, STEPS]
    assert rows[-1]["weights_checksum"] == saved.hexdigest() != rows[0]["weights_checksum"]
    assert rows[-1]["sync_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
