"""A list of sets under `dataset:`: each set is read by itself, by its own columns and flags, and all are one run."""

import collections
import json

import datasets
import numpy as np
import pytest
import yaml
from shape_reference import DATA, FOLDER, SHAPES, expected, tokenizer_of
from tiny_tokenizers import byte_tokenizer as bytes_with
from tiny_tokenizers import template

from trainer.cli import train_dpo, train_ppo, train_rm, train_sft
from trainer.cli.prepare_data import PrepareArguments
from trainer.datasets.samples.bounds import Bounds
from trainer.datasets.samples.preparation import prepare_rows
from trainer.datasets.samples.prepared import OPTIONS
from trainer.datasets.samples.prompts import columns_of
from trainer.errors import UserError
from trainer.flags.parse_flags import flat, parse_arguments
from trainer.rollout.rewards.reward_functions import load_reward_functions
from trainer.runs.flag_checks import check_flags
from trainer.runs.preference_runs import load_dpo, load_pairs
from trainer.runs.rl.rl_run import load_data
from trainer.runs.run_data import files_in_errors, load_sets_of, load_sft, options_of_sft, part_of, with_files

PPO = ["--reward_func", "exact_match"]


def byte_tokenizer():
    return bytes_with(template("<|im_end|>"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parsed(command, config: dict, folder, *flags: str):
    """The flags of a run with a file of --config."""
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    found = command.parse(["--pretrain", "x", "--config", str(folder / "run.yaml"), *flags])
    return found[0] if isinstance(found, tuple) else found


def load(command, args, tokenizer, is_evaluation=False):
    """(samples, ledger) of --dataset."""
    named = args.data.dataset, args.data.dataset_split, "--dataset", part_of(args.data, args.batch.seed, is_evaluation)
    if command is train_ppo:
        return load_data(args, tokenizer, *named, functions=load_reward_functions(args.scores.reward_func))
    loader = {train_sft: load_sft, train_dpo: load_dpo, train_rm: load_pairs}[command]
    return loader(args, tokenizer, *named)


OF_TASK = {"sft": (train_sft, []), "pairs": (train_dpo, []), "answer": (train_dpo, ["--loss", "kto"])}
OF_TASK |= {"prompt": (train_ppo, ["--reward_func", "exact_match", "--teacher", "t"])}


@pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
@pytest.mark.parametrize("task", OF_TASK)
def test_all_public_shapes_of_a_command_are_one_run(task, tmp_path):
    """Each set of the list is one shape, with the flags of that shape. What each row means is written by hand."""
    found = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in SHAPES}
    shapes = {name: shape for name, shape in found.items() if shape["task"] == task}
    entries, wants, places = [], [], []
    for name, shape in shapes.items():
        own = {flag: value for flag, value in shape["flags"].items() if flag != "drop_answer"}
        if own.pop("needs_labels", False):  # a reward would ask all sets for labels
            own["label_key"] = next(f"{name}.ground_truth" for name in shape["rows"][0] if name.startswith("reward"))
        entries.append({"path": write(tmp_path / f"{name}.jsonl", shape["rows"]), **own})
        wants += shape["want"]
        first, each = len(set(places)), len(shape["want"]) // len(shape["rows"])  # kto makes two answers of a pair
        places += [first + number // each for number in range(len(shape["want"]))]
    command, flags = OF_TASK[task]
    args = parsed(command, {"dataset": entries}, tmp_path, *flags)
    if task == "prompt":
        args.scores.reward_func = None
    samples, ledger = load(command, args, tokenizer_of("BPE", has_tools=True))
    assert len(samples) == len(wants) == ledger["num_samples"] and list(samples["row"]) == places
    for sample, want in zip(samples, wants, strict=True):
        if task == "pairs":
            for side, turns in want.items():
                assert (sample[f"{side}_ids"], sample[f"{side}_mask"]) == expected("BPE", turns), side
        elif task == "prompt":
            labels = [text for role, text, _ in want if role == "label"]
            assert sample["prompt_ids"] == expected("BPE", [t for t in want if t[0] != "label"], opened=True)[0]
            assert sample["label"] == (labels[0] if labels else None)
        else:
            assert (sample["input_ids"], sample["loss_mask"]) == expected("BPE", want)
    for name in shapes:
        assert any(f"{name}.jsonl: " in line for line in ledger.lines)


TEXTS = [(f"What is {n} + {n}?", f"It is {2 * n}.") for n in range(6)]
USER, ANSWER = ("user", 0), ("assistant", 1)


def as_turns(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_three_shapes_are_the_rows_of_one_canonical_file(tmp_path):
    """alpaca, messages, and prompt with completion under names of one set: the same ids and masks."""
    alpaca = [{"instruction": q, "input": "", "output": a} for q, a in TEXTS[:2]]
    talks = [{"messages": as_turns(q, a), "output": 7} for q, a in TEXTS[2:4]]  # a column of another type
    named = [{"q": q, "a": a, "messages": "no talk"} for q, a in TEXTS[4:]]
    names = ["alpaca", "talks", "named"]
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in zip(names, (alpaca, talks, named))]
    own = {"input_key": "q", "output_key": "a", "apply_chat_template": True}
    args = parsed(train_sft, {"dataset": [paths[0], {"path": paths[1]}, {"path": f"{paths[2]}#1", **own}]}, tmp_path)
    check_flags("train_sft", args, ("eval_loss",))
    tokenizer = byte_tokenizer()
    samples, ledger = load(train_sft, args, tokenizer)
    whole = write(tmp_path / "whole.jsonl", [{"messages": as_turns(q, a)} for q, a in TEXTS[:5]])
    wanted, _ = load(train_sft, parsed(train_sft, {"dataset": whole}, tmp_path), tokenizer)
    for name in wanted.column_names:
        assert list(samples[name]) == list(wanted[name]), name
    assert ledger.lines[:3] == [
        f"2 of them: {paths[0]}: alpaca rows: instruction -> user, output -> assistant",
        f"2 of them: {paths[1]}: conversation rows: messages -> turns",
        f"1 of them: {paths[2]}#1: rows: q -> user, a -> assistant",
    ]


def test_lists_that_evaluate_are_read_alike_and_a_prepared_list_is_the_list(tmp_path):
    paths = [write(tmp_path / "talks.jsonl", [{"messages": as_turns(*pair)} for pair in TEXTS[:3]])]
    paths.append(write(tmp_path / "named.jsonl", [{"q": q, "a": a} for q, a in TEXTS[3:]]))
    own = {"input_key": "q", "output_key": "a", "apply_chat_template": True}
    entries = [{"path": paths[0], "weight": 3}, {"path": paths[1], "weight": 2, **own}]
    config = {"dataset": entries, "eval_dataset": [paths[0], {"path": paths[1], **own}], "max_eval_samples": 2}
    args, tokenizer = parsed(train_sft, config, tmp_path), byte_tokenizer()
    trained, _ = load(train_sft, args, tokenizer)
    evaluated, ledger = load_sft(args, tokenizer, args.data.eval_dataset, "train", "--eval_dataset")
    assert [tokenizer.decode(ids).count(TEXTS[n][1]) for n, ids in zip((0, 1, 3, 4), evaluated["input_ids"])] == [1] * 4
    assert ledger["num_rows"] == 4 and "2 of them: " in ledger.lines[0]

    config = {"dataset": entries, "pretrain": "x", "output_dir": "y", "seed": args.batch.seed}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    given = parse_arguments(PrepareArguments, "prepare_data", ["--config", str(tmp_path / "run.yaml")])

    def options_of(args):
        found = options_of_sft(args)
        return {name: found[name] for name in OPTIONS} | {"max_len": 2048, "train_on": "last"}

    rows = load_sets_of(given, args.batch.seed, options_of, given.data.dataset, "train", "--dataset")
    sizes = {"bounds": Bounds(1000), "rows_per_part": 2, "num_proc": 1}
    prepare_rows(rows, tokenizer, str(tmp_path / "tokens"), options_of(given), **sizes)
    prepared, _ = load(train_sft, parsed(train_sft, {"dataset": str(tmp_path / "tokens")}, tmp_path), tokenizer)
    for name in trained.column_names:
        assert list(prepared[name]) == list(trained[name]), name
    mixed = [{"path": str(tmp_path / "tokens")}, {"path": paths[1], **own}]  # tokens and texts are one run
    both, _ = load(train_sft, parsed(train_sft, {"dataset": mixed}, tmp_path), tokenizer)
    assert len(both) == len(trained) + 3


def test_margins_come_from_the_columns_of_their_set(tmp_path):
    rows = [row | {"gap": 2} for row in pairs_of(TEXTS[:2])]
    paths = [write(tmp_path / f"{name}.jsonl", [row | more for row in rows])
             for name, more in (("a", {}), ("b", {"margin": 0.5}), ("c", {"gap": 2}))]  # fmt: skip
    entries = [paths[0], {"path": paths[1], "margin_key": "margin"}, {"path": paths[2], "margin_key": "gap"}]
    samples, _ = load(train_rm, parsed(train_rm, {"dataset": entries}, tmp_path), byte_tokenizer())
    assert list(samples["margin"]) == [0, 0, 0.5, 0.5, 2, 2]


def test_an_own_system_text_is_that_of_its_set(tmp_path):
    path = write(tmp_path / "talks.jsonl", [{"messages": as_turns(*TEXTS[0])}])
    entries = [{"path": path}, {"path": path, "system": "Be short."}, {"path": path, "system": None}]
    args, tokenizer = parsed(train_sft, {"dataset": entries, "system": "Be kind."}, tmp_path), byte_tokenizer()
    texts = [tokenizer.decode(ids) for ids in load(train_sft, args, tokenizer)[0]["input_ids"]]
    assert ["Be kind." in texts[0], "Be short." in texts[1], "Be" in texts[2]] == [True, True, False]


def split_folder(folder) -> str:
    """A folder with TEXTS[:4] in two files of its split train, and TEXTS[4:] in test."""
    for name, pairs in (("train-0", TEXTS[:1]), ("train-1", TEXTS[1:4]), ("test", TEXTS[4:])):
        folder.mkdir(exist_ok=True)
        write(folder / f"{name}.jsonl", [{"messages": as_turns(*pair)} for pair in pairs])
    return str(folder)


def test_each_set_has_its_own_split_and_number_of_rows(tmp_path):
    folder, other = split_folder(tmp_path / "talks"), write(tmp_path / "other.jsonl", [{"text": n} for n in "abcd"])
    entries = [{"path": folder, "split": "test", "max_samples": 1}, {"path": folder}, {"path": folder, "split": "test"}]
    entries.append({"path": other, "max_samples": None})
    config = {"dataset": entries, "max_samples": 2, "max_eval_samples": 3}
    config["eval_dataset"] = [{"path": folder, "max_samples": 4}, {"path": folder, "split": "test"}]
    args, tokenizer = parsed(train_sft, config, tmp_path), byte_tokenizer()
    samples, ledger = load(train_sft, args, tokenizer)
    found = [tokenizer.decode(ids) for ids in samples["input_ids"]]
    wanted = [TEXTS[n][1] for n in (4, 0, 1, 4, 5)] + list("abcd")
    assert len(found) == len(wanted) and all(want in text for want, text in zip(wanted, found, strict=True))
    assert f"3 of them: {folder} split test: conversation rows: messages -> turns" in ledger.lines
    evaluated, _ = load_sft(args, tokenizer, args.data.eval_dataset, "train", "--eval_dataset")
    found = [tokenizer.decode(ids) for ids in evaluated["input_ids"]]
    assert [TEXTS[n][1] in text for n, text in enumerate(found)] == [True] * 6
    again = parsed(train_sft, {k: v for k, v in flat(args).items() if v is not None}, tmp_path)
    assert flat(again) == flat(args)


def test_errors_name_the_file_of_the_split(tmp_path):
    """Also of a set that is read with the others, where rows are counted together."""
    folder, data = split_folder(tmp_path / "talks"), tmp_path / "talks/train-1.jsonl"
    entries = [{"path": folder, "split": "test", "max_samples": 1}, {"path": folder, "max_samples": 3}]
    args = parsed(train_sft, {"dataset": entries}, tmp_path)
    named = args.data, args.batch.seed, args.data.dataset, args.data.dataset_split, "--dataset"
    assert with_files("--dataset row 4: x", *named) == f"--dataset {data} row 2: x"
    assert with_files(f"--dataset {folder} row 3", *named) == f"--dataset {data} row 2"
    assert with_files(f"--dataset {folder} split test row 1", *named) == f"--dataset {folder} split test row 1"
    write(data, [{"messages": as_turns(*TEXTS[1])}, {"messages": [{"role": "nobody", "content": "x"}]}])
    with pytest.raises(UserError, match=r"train-1\.jsonl row 2: .*nobody"), files_in_errors(*named):
        load(train_sft, args, byte_tokenizer())


def pairs_of(texts) -> list[dict]:
    return [{"prompt": as_turns(q, a)[:1], "chosen": a, "rejected": f"not {a}"} for q, a in texts]


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_pairs_of_other_columns_are_those_of_one_file(loss, tmp_path):
    """kto makes two answers of each pair, and takes sets of single answers between them."""
    first, last = pairs_of(TEXTS[:2]), [{"q": q, "good": a, "bad": f"not {a}"} for q, a in TEXTS[2:]]
    paths = [write(tmp_path / "first.jsonl", first), write(tmp_path / "last.jsonl", last)]
    own = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad", "apply_chat_template": True}
    args = parsed(train_dpo, {"dataset": [paths[0], {"path": paths[1], **own}]}, tmp_path, "--loss", loss)
    check_flags("train_dpo", args, ("eval_loss",))
    tokenizer = byte_tokenizer()
    samples, _ = load(train_dpo, args, tokenizer)
    whole = write(tmp_path / "whole.jsonl", pairs_of(TEXTS))
    wanted, _ = load(train_dpo, parsed(train_dpo, {"dataset": whole}, tmp_path, "--loss", loss), tokenizer)
    for name in wanted.column_names:
        assert list(samples[name]) == list(wanted[name]), name
    if loss == "kto":
        single = [{"q": q, "a": text, "good": text == a} for q, a in TEXTS[2:] for text in (a, f"not {a}")]
        own = {"prompt_key": "q", "completion_key": "a", "label_key": "good", "apply_chat_template": True}
        entries = [paths[0], {"path": write(tmp_path / "single.jsonl", single), **own}]
        args = parsed(train_dpo, {"dataset": entries}, tmp_path, "--loss", loss)
        found, _ = load(train_dpo, args, tokenizer)
        assert all(list(found[name]) == list(wanted[name]) for name in wanted.column_names if name != "row")
        assert list(found["row"]) == [0, 0, 1, 1, *range(2, 10)]
        args.data.eval_fraction = 0.5  # both answers of a pair are in one part; the text of a single one decides
        parts = [load(train_dpo, args, tokenizer, last)[0] for last in (False, True)]
        assert sum(len(part) for part in parts) == 12
        assert not set(parts[0]["row"]) & set(parts[1]["row"])


def test_labels_of_prompts_come_from_the_columns_of_their_set(tmp_path):
    verl = [{"prompt": as_turns(q, a)[:1], "reward_model": {"ground_truth": a}} for q, a in TEXTS[:3]]
    named = [{"question": q, "answer": a, "level": 3} for q, a in TEXTS[3:]]
    entries = [
        {"path": write(tmp_path / "verl.jsonl", verl), "label_key": "reward_model.ground_truth"},
        {"path": write(tmp_path / "named.jsonl", named), "label_key": "answer"},
    ]
    args, tokenizer = parsed(train_ppo, {"dataset": entries}, tmp_path, *PPO), byte_tokenizer()
    samples, ledger = load(train_ppo, args, tokenizer)
    whole = [{"prompt": as_turns(q, a)[:1], "answer": a} for q, a in TEXTS]
    flags = {"dataset": write(tmp_path / "whole.jsonl", whole), "label_key": "answer"}
    wanted, _ = load(train_ppo, parsed(train_ppo, flags, tmp_path, *PPO), tokenizer)
    for name in wanted.column_names:
        assert list(samples[name]) == list(wanted[name]), name
    assert any("named.jsonl: rows: question -> user" in line for line in ledger.lines)
    del entries[0]["label_key"]
    with pytest.raises(UserError, match="--reward_func exact_match without --label_key"):
        parsed_and_checked = parsed(train_ppo, {"dataset": entries}, tmp_path, *PPO)
        check_flags("train_ppo", parsed_and_checked, ("eval_reward",), needs_labels=True)
    entries[0]["label_key"] = "reward_model.ground_truth"
    named[1]["answer"] = ""
    write(tmp_path / "named.jsonl", named)
    with pytest.raises(UserError, match=r"--dataset .*named.jsonl row 2: --label_key answer: an empty text"):
        load(train_ppo, parsed(train_ppo, {"dataset": entries}, tmp_path, *PPO), tokenizer)


def test_rewards_get_the_columns_of_each_set_as_they_are(tmp_path):
    """A column may have other types in other sets, and some sets lack it."""
    (tmp_path / "reward.py").write_text("def reward_func(prompts, responses, labels, **columns):\n    return [0.0]\n")
    first = [{"question": "a", "level": "easy", "seen": True}, {"question": "b", "level": "hard", "seen": False}]
    last = [{"problem": "c", "level": 3, "tags": ["x"]}]
    entries = [write(tmp_path / "first.jsonl", first), write(tmp_path / "last.jsonl", last)]
    flags = ["--reward_func", str(tmp_path / "reward.py")]
    samples, _ = load(train_ppo, parsed(train_ppo, {"dataset": entries}, tmp_path, *flags), byte_tokenizer())
    for sample, row in zip(samples, first + last, strict=True):
        assert {name: value for name, value in columns_of(sample).items() if value is not None} == row


def mixture(sizes: list[int], weights: list[float], seed: int) -> list[tuple[int, int]]:
    """(set, row) of each row of a mixture, by a plain loop: it ends when the first set is used up."""
    odds, found, taken = np.array(weights) / sum(weights), [], [0] * len(sizes)
    for chosen in np.random.default_rng(seed).choice(len(sizes), size=1000, p=odds):
        found.append((int(chosen), taken[chosen]))
        taken[chosen] += 1
        if taken[chosen] == sizes[chosen]:
            return found


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_weights_are_those_of_the_mixture(loss, tmp_path):
    first, last = pairs_of([(f"{n}?", f"{n}!") for n in range(30)]), [(f"q{n}?", f"a{n}!") for n in range(50)]
    other = [{"q": q, "chosen": a, "rejected": f"not {a}"} for q, a in last]
    paths = [write(tmp_path / "first.jsonl", first), write(tmp_path / "other.jsonl", other)]
    entries = [{"path": paths[0], "weight": 1}, {"path": paths[1], "weight": 2.5, "prompt_key": "q"}]
    entries[1]["apply_chat_template"] = True
    flags = ["--loss", loss, "--seed", "5"]
    args, tokenizer = parsed(train_dpo, {"dataset": entries}, tmp_path, *flags), byte_tokenizer()
    samples, _ = load(train_dpo, args, tokenizer)
    order = mixture([30, 50], [1, 2.5], 5)
    counts = collections.Counter(number for number, _ in order)
    assert len(samples) == len(order) * (2 if loss == "kto" else 1) and min(counts.values()) > 9
    # the same texts with the same columns, mixed by the plain flags
    same = write(tmp_path / "same.jsonl", pairs_of(last))
    plain = parsed(train_dpo, {"dataset": f"{paths[0]},{same}", "dataset_probs": "1,2.5"}, tmp_path, *flags)
    wanted, _ = load(train_dpo, plain, tokenizer)
    for name in wanted.column_names:
        assert list(samples[name]) == list(wanted[name]), name
    ids = "input_ids" if loss == "kto" else "chosen_ids"
    texts = [tokenizer.decode(ids) for ids in samples[ids]][:: 2 if loss == "kto" else 1]
    for text, (number, row) in zip(texts, order, strict=True):
        assert (f"a{row}!" if number else f"{row}!") in text


@pytest.mark.parametrize(("entries", "said"), [
    ([{"path": "a.jsonl", "ouput_key": "x"}], "dataset: set 1 (a.jsonl): a set has no key ouput_key; did you mean output_key?"),
    ([{"path": "a.jsonl", "wieght": 1}], "did you mean weight?"),
    ([{"path": "a.jsonl", "max_len": 9}], "a set has no key max_len; --max_len is for the whole run"),
    ([{"path": "a.jsonl", "chosen_key": "x"}], "a set has no key chosen_key; --chosen_key is a flag of "),
    ([{"path": "a.jsonl", "input_key": 5}], "set 1 (a.jsonl): input_key 5 (allowed: a text)"),
    ([{"path": "a.jsonl", "apply_chat_template": "yes"}], "apply_chat_template 'yes' (allowed: true or false)"),
    ([{"path": "a.jsonl", "train_on": "first"}], "train_on 'first' (allowed: last, all)"),
    ([{"path": "a.jsonl", "split": 5}], "split 5 (allowed: a text)"),
    ([{"path": "a.jsonl", "split": None}], "split None (allowed: a text)"),
    ([{"path": "a.jsonl", "max_samples": 0}], "max_samples 0 (allowed: a whole number above 0)"),
    ([{"path": "a.jsonl", "max_samples": True}], "max_samples True (allowed: a whole number above 0)"),
    ([{"path": "a.jsonl"}, {"input_key": "q"}], "dataset: set 2: no path"),
    ([{"path": "a.jsonl,b.jsonl"}], "path 'a.jsonl,b.jsonl' (allowed: one file"),
    ([{"path": "a.jsonl", "weight": 0}], "set 1 (a.jsonl): weight 0 (allowed: a number above 0)"),
    ([{"path": "a.jsonl", "weight": True}], "weight True (allowed: a number above 0)"),
    ([{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl"}], "1 of 2 sets have a weight (allowed: a weight for each, or none)"),
    ([["a.jsonl"]], "dataset: set 1: ['a.jsonl'] (allowed: a mapping with a path)"),
    ([], "dataset:: an empty list (allowed: mappings with a path)"),
])  # fmt: skip
def test_what_is_no_set_is_refused_by_name(entries, said, tmp_path):
    with pytest.raises(UserError) as error:
        parsed(train_sft, {"dataset": entries}, tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("config", "said"), [
    ({"dataset": ["a.jsonl"], "dataset_probs": "1"}, "--dataset_probs: with a list under dataset:"),
    ({"dataset": ["a.jsonl"], "dataset_flags": "[{}]"}, "--dataset_flags: with a list under dataset:"),
    ({"dataset": "a.jsonl", "dataset_flags": "[{}, {}]"}, "2 objects for 1 set"),
    ({"dataset": "a.jsonl", "dataset_flags": "{"}, "--dataset_flags: { (allowed: a JSON list of objects"),
    ({"dataset": "a.jsonl", "dataset_flags": '[{"no": 1}]'}, "--dataset_flags set 1 (a.jsonl): a set has no key no;"),
    ({"dataset": "a.jsonl", "eval_dataset": [{"path": "b.jsonl", "weight": 1}]}, "weight of a set that evaluates"),
    ({"dataset": 5}, "--dataset: 5 (allowed: a text, or in a file of --config a list of sets)"),
])  # fmt: skip
def test_flags_that_a_list_contradicts_are_refused(config, said, tmp_path):
    with pytest.raises(UserError) as error:
        parsed(train_sft, config, tmp_path)
    assert said in str(error.value)


def test_rules_of_flags_hold_for_the_flags_of_each_set(tmp_path):
    args = parsed(train_dpo, {"dataset": ["a.jsonl", {"path": "b.jsonl", "label_key": "good"}]}, tmp_path)
    with pytest.raises(
        UserError, match=r"--dataset b\.jsonl: --label_key good with --loss dpo: only kto has single answers"
    ):
        check_flags("train_dpo", args, ("eval_loss",))
    args = parsed(train_sft, {"dataset": ["a.jsonl"]}, tmp_path, "--streaming", "--max_steps", "2")
    with pytest.raises(UserError, match=r"--dataset_flags .* with --streaming"):
        check_flags("train_sft", args, ("eval_loss",))


def test_the_flags_of_a_list_repeat_the_run(tmp_path):
    """config.yaml holds plain flags, and a flag after the file replaces the list."""
    entries = [{"path": "a.jsonl#3", "weight": 0.1}, {"path": "org/name:config", "weight": 2, "input_key": "q"}]
    config = {"dataset": entries, "eval_dataset": [{"path": "c.jsonl", "output_key": "a"}]}
    args = parsed(train_sft, config, tmp_path)
    assert (args.data.dataset, args.data.dataset_probs) == ("a.jsonl#3,org/name:config", "0.1,2")
    again = parsed(train_sft, {k: v for k, v in flat(args).items() if v is not None}, tmp_path)
    assert flat(again) == flat(args)
    assert parsed(train_sft, config, tmp_path, "--dataset", "d.jsonl").data.dataset_flags is None
