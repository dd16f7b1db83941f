"""A resume knows its run: each change of a flag, a model, a reward or the data is refused, told, or without effect."""

import io
import json
import os
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset
from launch import forked, read_rows, read_steps
from safetensors.torch import load_file, save_file

from trainer.checkpoints.run_identity import (
    EFFECT_OF,
    EFFECTS,
    FIXED,
    LATER,
    OBJECTIVE,
    OUTPUT,
    Identity,
    changes,
    check_allowed,
    sealed,
)
from trainer.cli import train_dpo, train_kd, train_ppo, train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.datasets.files import stream_rows
from trainer.datasets.files.stream_rows import contents_of_files
from trainer.entry import PlainStream
from trainer.errors import UserError, has_left_out, plain, without_secrets
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import check_secrets, flags_of, flat
from trainer.flags.rules import COMMANDS
from trainer.runs import run_record, run_training
from trainer.runs.outputs import write_config
from trainer.runs.rl import rl_run
from trainer.runs.run import Run

PARTS = {"versions": {"torch": "2.13.0"}, "kernels": {"attention": "sdpa"}}
MODEL_FIELDS = {  # another value of each is another model, although the shapes of its weights may be the same
    "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "hidden_act": "gelu",
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 48,
    "tie_word_embeddings": False, "attention_bias": True, "max_position_embeddings": 77, "attention_dropout": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity") / "demo"
    make_demo(str(folder))
    return folder


def record(command: str, content=None, parts=PARTS, **values) -> dict:
    flags = flat(COMMANDS[command]()) | values
    return sealed({"command": command, "flags": flags, "content": content or {}, **parts})


def other(value):
    """Another value of the same kind, or some text."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return [*value, 0.5] if isinstance(value, list) else f"{value}-other"


def compare(before: dict, now: dict, *allowed: str) -> list[str]:
    return [str(change) for change in changes("step_8", before, now, flat(COMMANDS[now["command"]]()), allowed)]


def test_every_flag_of_every_command_has_one_effect():
    known = {field.name for command in COMMANDS.values() for field, _ in flags_of(command)}
    named = Counter(flag for flags in EFFECTS.values() for flag in flags.split())
    assert known == set(named) and set(named.values()) == {1}


@pytest.mark.parametrize("command", COMMANDS)
def test_another_value_of_each_flag_is_refused_or_told_or_only_about_output(command):
    before = record(command)
    for name, value in before["flags"].items():
        now, effect = record(command, **{name: other(value)}), EFFECT_OF[name]
        if effect in (FIXED, OBJECTIVE):
            with pytest.raises(UserError, match=f"--{name}: .*step_8"):
                compare(before, now)
        else:
            told = compare(before, now)
            assert [line.split()[0] for line in told] == ([] if effect == OUTPUT else [name])
        if effect == OBJECTIVE:
            assert compare(before, now, name)[0].startswith(f"{name} ")
    assert compare(before, before) == []


def test_a_resume_with_other_bits_is_refused_with_exact_only():
    exact, plain = record("train_sft", exact=True, cpu_matmul="mkl"), record("train_sft")
    for flags in ({"cpu_matmul": "onednn"}, {"cpu_matmul": "mkl", "attn_implementation": "eager"}):
        now, name = record("train_sft", exact=True, **flags), list(flags)[-1]
        with pytest.raises(
            UserError, match=f"--{name}: {flags[name]} now, but step_8 .* --allow_change {name}: another"
        ):
            compare(exact, now)
        assert [line.split()[0] for line in compare(exact, now, name)] == [name]
        assert name in [line.split()[0] for line in compare(plain, record("train_sft", **flags))]  # no promise
    assert compare(exact, record("train_sft", exact=True, cpu_matmul="mkl", attn_implementation="sdpa")) == []  # auto's
    for before, now in ((exact, plain), (plain, exact)):
        with pytest.raises(UserError, match="--allow_change exact: another objective"):
            compare(before, now)
        assert len(compare(before, now, "exact")) == 2  # and cpu_matmul, which is told


@pytest.mark.parametrize("name", ["eval_steps", "evals_per_epoch"])
@pytest.mark.parametrize(
    "flags", [{"early_stopping_patience": 2}, {"load_best_model_at_end": True}, {"best_metric_key": "eval_loss"}]
)
def test_the_places_of_evaluations_are_told_where_they_decide_the_result(name, flags):
    for before, now in ((flags, flags), (flags, {}), ({}, flags)):
        told = compare(record("train_sft", **before), record("train_sft", **now, **{name: 5}))
        assert f"{name} nothing -> 5" in told
    assert compare(record("train_sft"), record("train_sft", **{name: 5})) == []


def test_what_is_told_and_refused_in_words():
    told = compare(record("train_sft", learning_rate=0.002), record("train_sft", learning_rate=0.9, max_steps=9))
    assert told == ["max_steps nothing -> 9", "learning_rate 0.002 -> 0.9"]
    older = record("train_sft", parts=PARTS | {"versions": {"torch": "2.12.0", "fla": "0.3"}})
    assert compare(older, record("train_sft")) == ["torch 2.12.0 -> 2.13.0", "fla 0.3 -> nothing"]
    with pytest.raises(UserError) as error:
        compare(record("train_dpo"), record("train_dpo", beta=0.3, loss="ipo"))
    assert str(error.value).endswith("--allow_change loss beta: another objective)"), error.value
    with pytest.raises(UserError, match="step_8 is of train_sft, not of train_rm"):
        compare(record("train_sft"), record("train_rm"))
    with pytest.raises(UserError, match=r"--lora_rank: step_8 was saved without --lora_rank"):
        compare(record("train_sft"), record("train_sft", lora_rank=8))
    without = record("train_sft")
    del without["flags"]["lora_dropout"]  # an older record: the flag had its default
    assert compare(sealed({k: v for k, v in without.items() if k != "blake2b"}), record("train_sft")) == []
    for name, found in (("betta", "no flag"), ("optim", "would not fit")):
        with pytest.raises(UserError, match=found):
            check_allowed([name], SFTArguments)
    streamed = {"streaming": True, "max_steps": 9}
    with pytest.raises(UserError, match="--max_len"):
        compare(record("train_sft", **streamed), record("train_sft", **streamed, max_len=64))


@pytest.mark.parametrize(
    ("command", "flags", "given"),
    [
        ("train_sft", {"lora_rank": 8}, {"lora_alpha": 16}),
        ("train_sft", {"lora_rank": 8, "target_modules": "q_proj,v_proj"}, {"target_modules": "v_proj, q_proj"}),
        ("train_sft", {"lora_rank": 8}, {"target_modules": "all-linear"}),
        ("train_dpo", {"loss": "dpo,ipo"}, {"loss_weights": [1.0, 1.0]}),
        ("train_dpo", {"beta": 1.0}, {"beta": 1}),
        ("train_kd", {}, {"kd_coef": 1.0}),
        ("train_kd", {"teacher_answers": True}, {"kd_coef": 0.0}),
        ("train_ppo", {"eps_clip": 0.3}, {"eps_clip_high": 0.3}),
        ("train_ppo", {}, {"reward_weights": [1.0]}),
    ],
)
def test_a_flag_given_with_the_value_that_it_has_anyway_is_no_change(command, flags, given):
    without, with_it = record(command, **flags), record(command, **flags | given)
    assert compare(without, with_it) == compare(with_it, without) == []
    [(name, value)] = given.items()
    another = [2.0, 3.0] if isinstance(value, list) else "k_proj" if isinstance(value, str) else value + 1
    try:
        assert [line.split()[0] for line in compare(without, record(command, **flags | {name: another}))] == [name]
    except UserError as error:
        assert error.where == f"--{name}"


def test_a_change_that_is_allowed_allows_what_follows_from_it():
    told = compare(record("train_ppo"), record("train_ppo", eps_clip=0.3), "eps_clip")
    assert told == ["eps_clip 0.2 -> 0.3"]


def test_another_field_of_the_model_is_refused_by_name(demo, tmp_path):
    before = record("train_sft", {"pretrain": {"config": run_record.config_of(str(demo / "model"), False)}})
    config = json.loads((demo / "model/config.json").read_text())
    for name, value in MODEL_FIELDS.items():
        assert config.get(name) != value, name
        (tmp_path / "config.json").write_text(json.dumps({**config, name: value} | {"layer_types": None}))
        now = {"pretrain": {"config": run_record.config_of(str(tmp_path), False)}}
        with pytest.raises(UserError, match=f"--pretrain config {name.split('_')[0]}"):
            compare(before, record("train_sft", now))
        assert compare(before, record("train_sft", now), "pretrain")
    harmless = {"_name_or_path": "x", "transformers_version": "4.0", "dtype": "float16", "use_cache": False}
    (tmp_path / "config.json").write_text(json.dumps(config | harmless))
    now = record("train_sft", {"pretrain": {"config": run_record.config_of(str(tmp_path), False)}})
    assert compare(before, now) == []


@pytest.mark.parametrize("limit", [run_record.HASHED_WHOLE, 0])
def test_other_frozen_weights_have_another_hash(demo, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(run_record, "HASHED_WHOLE", limit)
    shutil.copy(demo / "model/model.safetensors", tmp_path)
    first, weights = run_record.weights_hash(str(tmp_path)), load_file(tmp_path / "model.safetensors")
    assert first == run_record.weights_hash(str(demo / "model"))
    for name in weights:
        changed = dict(weights, **{name: weights[name] * 1.001 + 1e-4})
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        assert run_record.weights_hash(str(tmp_path)) != first, name


def test_frozen_models_by_command(demo, monkeypatch):
    """Each door says which models of its run stay as they are."""
    model, found = str(demo / "model"), []
    short = ("--prompt_max_len", "64", "--generate_max_len", "64")
    reward = ("--reward_func", "math", "--label_key", "answer", *short)
    online = ("--online", *reward, "--n_samples_per_prompt", "2")

    def note(args, method, is_demo=False):
        found.append(run_record.frozen_models(Run(method, args)))

    def frozen(door, *flags) -> list[str]:
        door.run(["--pretrain", model, "--dataset", str(demo / "sft.jsonl"), *flags])
        assert all(name in (None, model) for name in found[-1].values())
        return sorted(found[-1])

    monkeypatch.setattr(run_training, "train", note)
    monkeypatch.setattr(rl_run, "train", lambda args, is_demo=False, method=rl_run.POLICY: note(args, method))
    assert frozen(train_sft) == [] and frozen(train_sft, "--lora_rank", "4") == ["pretrain"]
    assert frozen(train_dpo) == ["ref_model"] and frozen(train_dpo, "--loss", "simpo") == []
    assert frozen(train_dpo, "--lora_rank", "4", "--ref_model", model) == ["pretrain", "ref_model"]
    assert frozen(train_dpo, *online, "--ref_model", model) == ["ref_model"]
    assert frozen(train_dpo, *online, "--loss", "simpo") == []
    assert frozen(train_ppo, *short, "--reward_pretrain", f"{model},{model}") == [
        "reward_pretrain",
        "reward_pretrain 2",
    ]
    assert frozen(train_ppo, *reward, "--init_kl_coef", "0.1", "--ref_model", model) == ["ref_model"]
    with_base = ["critic_pretrain", "pretrain"]
    assert frozen(train_ppo, *reward, "--lora_rank", "4") == with_base
    assert frozen(train_ppo, *reward, "--lora_rank", "4", "--critic_pretrain", model) == with_base
    assert frozen(train_ppo, *short, "--teacher", model) == ["teacher"]
    assert frozen(train_kd, "--teacher", f"{model}, {model}") == ["teacher", "teacher 2"]


def labels_of(samples: Dataset, last: str) -> Dataset:
    return Dataset.from_dict({"digest": samples["digest"], "label": ["a", last]})


def test_code_targets_and_streams_have_hashes(tmp_path):
    code = tmp_path / "reward.py"
    code.write_text("def reward_func(): ...")
    first = run_record.code_hash(f"math,{code}:other")
    code.write_text("def reward_func(): return 1")
    assert first != run_record.code_hash(f"math,{code}:other")
    named = run_record.code_hash(f"guess={code}")
    code.write_text("def reward_func(): return 2")
    assert named != run_record.code_hash(f"guess={code}") != run_record.code_hash(f"other={code}")
    for name, kind in (("own.py", ".py"), ("preprocessor_config.json", "preprocessor_config.json")):
        folder, hashes = tmp_path / kind, []
        folder.mkdir()
        for content in (None, "1", "2"):
            if content:
                (folder / name).write_text(content)
            hashes.append(run_record.files_hash(str(folder), lambda name, kind=kind: name.endswith(kind)))
        assert hashes[0] is None and len(set(hashes)) == 3
    labels = [Dataset.from_dict({"num_tokens": [1, 2], "label": label}) for label in (["a", "b"], ["a", "c"])]
    assert run_record.targets_hash(labels[0]) != run_record.targets_hash(labels[1])
    texts = [Dataset.from_dict({"digest": digests, "label": ["a", "b"]}) for digests in (["0a", "0b"], ["0a", "0c"])]
    facts = [
        {"eval_dataset": {"rows": run_record.rows_hash(samples)}} for samples in (*texts, labels_of(texts[0], "c"))
    ]
    before, *others = [record("train_sft", content) for content in facts]
    assert all(len(compare(before, other)) == 1 for other in others) and compare(before, before) == []
    assert compare(record("train_sft", {}), before) == [], "an older record"
    rows, stream = [json.dumps({"text": f"row {n:05d}"}) + "\n" for n in range(30_000)], tmp_path / "rows.jsonl"
    hashes = set()
    for order in (rows, rows[::-1], [*rows[:10], rows[11], rows[10], *rows[12:]]):
        stream.write_text("".join(order))
        hashes.add(contents_of_files(str(stream), "train")["files"])
    assert len(hashes) == 3


@pytest.mark.parametrize("is_large", [False, True])
def test_two_rows_of_a_stream_that_change_places_are_noticed_or_told(tmp_path, monkeypatch, is_large):
    """Far from the parts that are read of large files. The size stays, and the run says what is not compared."""
    monkeypatch.setattr(stream_rows, "HASHED_WHOLE", 1 << 20 if is_large else 1 << 30)
    stream, said = tmp_path / "rows.jsonl", []
    rows = [json.dumps({"text": f"row {n:06d}"}) + "\n" for n in range(200_000)]
    strategy = SimpleNamespace(print=said.append)
    run, known = (
        SimpleNamespace(setup=SimpleNamespace(strategy=strategy)),
        SimpleNamespace(dataset=str(stream), dataset_split="train"),
    )

    def facts(order: list[str], second: int) -> dict:
        stream.write_text("".join(order))
        os.utime(stream, (second, second))
        return {"dataset": run_record.stream_facts(run, known)}

    before, now = facts(rows, 0), facts([*rows[:7000], rows[7001], rows[7000], *rows[7002:]], 60)
    assert before["dataset"]["files"] == now["dataset"]["files"]
    if is_large:
        assert "of 1 file, a resume compares the name, the size, and parts" in said[0]
        told = ["dataset written 1970-01-01 00:00:00 -> 1970-01-01 00:01:00"]
        assert compare(record("train_sft", before), record("train_sft", now)) == told
    else:
        assert not said and facts(rows, 60) == before
        with pytest.raises(UserError, match="--dataset whole"):
            compare(record("train_sft", before), record("train_sft", now))
    older = {"dataset": {"files": before["dataset"]["files"]}}
    assert compare(record("train_sft", older), record("train_sft", now)) == []


CODE = {
    "reward.py": "import helper\nfrom kit import part\nimport json\ndef reward_func(): from lazy import it",
    "helper.py": "from deeper import a", "deeper.py": "import trainer.metrics", "kit/__init__.py": "", "kit/part.py": "from . import sub",
    "kit/sub.py": "import importlib\nimportlib.import_module('named')", "lazy.py": "", "named.py": "", "unused.py": "", "kit/unused.py": "",
    "pack/__init__.py": "", "pack/env.py": "from .tools import t\nfrom ..helper import a", "pack/tools.py": "import pack.inner.deep",
    "pack/inner/deep.py": "", "pack/other.py": "", "rules.txt": "",
}  # fmt: skip
NEEDED = {"helper.py", "deeper.py", "kit/__init__.py", "kit/part.py", "kit/sub.py", "lazy.py", "named.py"}
NEEDED_BY = {
    "reward.py": NEEDED, "reward.py:own": NEEDED, "math,reward.py": NEEDED, "a=reward.py": NEEDED, "unused.py": set(),
    "pack.env": {"env.py", "__init__.py", "tools.py", "inner/deep.py"}, "lazy": {"lazy.py"}, "a=lazy": {"lazy.py"},
    "json:loads": None, "math": None, "http://host/env": None, "gone.py": None,
}  # fmt: skip


@pytest.mark.parametrize("flag", ["reward_func", "env"])
@pytest.mark.parametrize("name", NEEDED_BY)
def test_a_change_of_a_file_that_code_needs_is_refused(tmp_path, monkeypatch, flag, name):
    """Another file in the folder, of the trainer or of a package does not count. The code never runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for path, text in CODE.items():
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_text(f"{text}\nraise SystemExit")

    def content() -> dict:
        return {flag: {"code": run_record.code_hash(name), "modules": run_record.modules_of(flag, name)}}

    first, needed = content(), NEEDED_BY[name]
    if flag == "reward_func" and ".py" not in name:  # only files are rewards
        needed = set()
    if needed is not None:
        assert set(first[flag]["modules"] or ()) == needed
    for path in CODE:
        (tmp_path / path).write_text("changed = 1")
        now, short = content(), path.removeprefix("pack/") if name == "pack.env" else path
        if short in (needed or ()):
            with pytest.raises(UserError, match=f"--{flag} modules .*--allow_change {flag}"):
                compare(record("train_ppo", first), record("train_ppo", now))
            assert compare(record("train_ppo", first), record("train_ppo", now), flag)
        elif path not in name:
            assert now == first, path
        (tmp_path / path).write_text(f"{CODE[path]}\nraise SystemExit")
    assert content() == first


@pytest.mark.parametrize("changed", ["a", "b"])
@pytest.mark.parametrize("flag", ["reward_func", "env"])
def test_files_of_one_name_in_two_folders_are_both_compared(tmp_path, flag, changed):
    names = []
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"value = '{folder}'")
        (tmp_path / folder / "code.py").write_text("import helper")
        names.append(f"{folder}={tmp_path / folder / 'code.py'}")

    def made() -> dict:
        modules = run_record.modules_of(flag, ",".join(names))
        return record("train_ppo", {flag: {"code": "same", "modules": modules}})

    before = made()
    assert compare(before, made()) == []
    for text in ("value = 'new'", "value = 'a'", "value = 'b'"):
        if text != f"value = '{changed}'":
            (tmp_path / changed / "helper.py").write_text(text)
            with pytest.raises(UserError, match=f"--{flag} modules helper.py.*--allow_change {flag}"):
                compare(before, made())


@pytest.mark.parametrize("fact", LATER)
def test_facts_of_a_model_folder_are_compared_where_a_record_has_them(fact):
    flag = "rollouts_from" if fact == "rows" else "pretrain"
    old, new = ({flag: {"config": {"a": 1}, fact: value}} for value in ([2], [7, 8]))
    with pytest.raises(UserError, match=f"--{flag} {fact}: 7 8 now, but step_8 was trained with 2"):
        compare(record("train_ppo", old), record("train_ppo", new))
    assert compare(record("train_ppo", old), record("train_ppo", new), flag) == [f"{flag} {fact} 2 -> 7 8"]
    older = {flag: {"config": {"a": 1}}}
    assert compare(record("train_ppo", older), record("train_ppo", new)) == []


def test_secrets_of_addresses_are_left_out_and_must_be_given_again():
    urls = "http://me:pa55@host:80/x,https://h/y?api_key=pa55&n=1"
    hidden = without_secrets({"remote_rm_url": urls, "engine_urls": [urls], "max_len": 3})
    assert "pa55" not in json.dumps(hidden) and hidden["max_len"] == 3
    assert hidden["remote_rm_url"] == "http://***@host:80/x,https://h/y?api_key=***&n=1"
    assert "pa55" not in str(UserError(f"--remote_rm_url {urls}", f"no answer of {urls}", urls))
    assert has_left_out(hidden["remote_rm_url"]) and not has_left_out(urls)
    with pytest.raises(UserError, match="Give the flag with the whole address"):
        check_secrets(hidden)
    same = "hf://datasets/me/set@main and https://host/a@b?n=1 and a@b.c"
    assert without_secrets(same) == same


SECRET_NAMES = (
    "pwd pass passwd password passphrase token key secret sig signature auth authorization credential credentials"
)
SECRET_NAMES += " api_key access-token X-Amz-Signature X-Amz-Security-Token PWD db_pass sas_token client_secret"


@pytest.mark.parametrize("name", SECRET_NAMES.split())
@pytest.mark.parametrize("mark", ["?", "?n=1&", "?n=1;", "#"])
def test_secret_parameters_of_an_address_are_masked_everywhere(name, mark):
    url = f"https://host/a{mark}{name}=pa55&m=2"
    hidden = f"https://host/a{mark}{name}=***&m=2"
    assert without_secrets({"urls": [url, (url,)]}) == {"urls": [hidden, [hidden]]}
    assert str(UserError(f"--remote_rm_url {url}", f"no answer of {url}")).count(hidden) == 2
    assert plain(f"{url}, and {url}") == f"{hidden}, and {hidden}" and has_left_out(hidden)


@pytest.mark.parametrize("name", ["n", "bypass", "keys_of", "passes", "model", "user", "page_tokens"])
def test_other_parameters_of_an_address_stay(name):
    assert plain(f"https://host/a?{name}=5&m=2") == f"https://host/a?{name}=5&m=2"


def test_control_characters_are_shown_not_sent():
    assert plain("a\x1b[2Jb\rc\td\n\u202ee é") == "a\\x1b[2Jb\\rc\td\n\\u202ee é"


def test_no_output_of_a_command_sends_control_characters():
    out = io.StringIO()
    stream = PlainStream(out)
    print("name \x1b]0;title\x07 of \x9b2J data", file=stream)
    stream.write("\r 50 %\x1b[A\n")  # a bar
    assert out.getvalue() == "name \\x1b]0;title\\x07 of \\x9b2J data\n\r 50 %\x1b[A\n"
    assert stream.closed is False


def test_a_resume_with_other_flags_writes_a_numbered_config(tmp_path):
    config = {"learning_rate": 1e-5, "output_dir": "a", "load_checkpoint": None, "betas": [0.9, 0.95], "name": "1e-5"}
    assert write_config(str(tmp_path), config, False) == "config.yaml"
    assert write_config(str(tmp_path), config | {"load_checkpoint": "latest"}, True) == "config.yaml"
    for number, rate in ((2, 0.9), (2, 0.9), (3, 1e-5)):
        assert write_config(str(tmp_path), config | {"learning_rate": rate}, True) == f"config.{number}.yaml"
    assert yaml.safe_load((tmp_path / "config.2.yaml").read_text())["learning_rate"] == 0.9


def test_an_older_checkpoint_is_compared_by_what_it_has():
    state = {"data": {"seed": 1, "data": "x"}, "arguments": {"lora_rank": None, "max_len": 128, "seed": 1}}
    flags = flat(SFTArguments()) | {"seed": 1, "max_len": 64}
    facts = {"seed": 1, "data": "x"}
    assert Identity({"flags": flags}).compare("step_8", state, facts) == []
    for change, found in (
        ({"seed": 2}, "--seed: 2 now, but step_8 was trained with 1"),
        ({"data": "y"}, "--dataset: other samples than step_8 was trained with: --max_len was 128, and is 64"),
    ):
        now = flags | {name: value for name, value in change.items() if name in flags}
        with pytest.raises(UserError, match=found):
            Identity({"flags": now}).compare("step_8", state, facts | change)
    with pytest.raises(UserError, match="saved without --lora_rank"):
        Identity({"flags": flags | {"lora_rank": 8}}).compare("step_8", state, facts)
    Identity({"flags": flags}, {}, ("max_len",)).compare("step_8", state, facts | {"data": "y"})


# --- real runs


def test_runs_on_changed_models_data_and_flags(demo, tmp_path):
    """An unchanged resume is bitwise the same. A clock that jumps, and a reordered stream, too, are cases of it."""

    def line(name: str, *more: str, model="model", data="sft.jsonl") -> list[str]:
        flags = ["--pretrain", str(demo / model), "--dataset", str(demo / data), "--apply_chat_template", "--no_save"]
        flags += ["--max_len", "128", "--max_samples", "40", "--train_batch_size", "4", "--micro_train_batch_size", "4"]
        return [*flags, "--param_dtype", "fp32", "--output_dir", str(tmp_path / name), "--max_steps", "4", *more]

    def resumed(name: str, run: str, *more: str, **kind) -> list[str]:
        return line(name, "--load_checkpoint", str(tmp_path / run / "checkpoints/step_2"), *more, **kind)

    eps = demo / "eps"
    shutil.copytree(demo / "model", eps)
    config = json.loads((eps / "config.json").read_text())
    (eps / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    base = demo / "base"
    shutil.copytree(demo / "model", base)
    weights = load_file(base / "model.safetensors")
    save_file({n: w + 0.01 for n, w in weights.items()}, base / "model.safetensors", {"format": "pt"})
    rows = (demo / "sft.jsonl").read_text().splitlines(keepends=True)
    (demo / "again.jsonl").write_text("".join(rows[::-1]))
    lora, stream = ("--lora_rank", "4"), ("--streaming", "--streaming_buffer", "16")
    save = ("--save_steps", "2")
    lines = {
        "full": line("full", *save),
        "adapter": line("adapter", *save, *lora),
        "streamed": line("streamed", *save, *stream, data="again.jsonl"),
        "same": resumed("same", "full"),
        "eps": resumed("eps", "full", model="eps"),
        "eps allowed": resumed("eps2", "full", "--allow_change", "pretrain", model="eps"),
        "base": resumed("base", "adapter", *lora, model="base"),
        "rate": resumed("rate", "full", "--learning_rate", "0.9"),
        "rank": resumed("rank", "full", *lora),
        "data": resumed("data", "full", "--max_len", "20"),
    }
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps(list(lines.values())))
    (demo / "again.jsonl").write_text("".join(rows[::-1]))
    _, output = forked(1, "-m", "trainer.compare.runs.many_runs", str(runs), timeout=300)
    errors = [text for text in output.splitlines() if text.startswith("error: ")]
    wanted = [
        "--pretrain config rms_norm_eps: 0.01 now",
        "--pretrain weights",
        "--lora_rank:",
        "--dataset: other samples",
    ]
    assert len(errors) >= len(wanted) and all(w in e for w, e in zip(wanted, errors)), errors
    assert read_steps(tmp_path / "same") and [r["loss"] for r in read_steps(tmp_path / "same")] == [
        r["loss"] for r in read_steps(tmp_path / "full")[2:]
    ]
    assert "changed since the checkpoint: learning_rate 5e-06 -> 0.9\n" in output
    [event] = [row for row in read_rows(tmp_path / "rate") if row.get("event") == "changed"]
    assert event["changes"] == {"learning_rate": [5e-6, 0.9]} and event["step"] == 2
    assert "pretrain config rms_norm_eps 1e-06 -> 0.01" in output
    (demo / "again.jsonl").write_text("".join(rows))
    runs.write_text(json.dumps([resumed("stream", "streamed", *stream, data="again.jsonl")]))
    _, output = forked(1, "-m", "trainer.compare.runs.many_runs", str(runs), timeout=100)
    assert "error: --dataset files:" in output, output[-3000:]
