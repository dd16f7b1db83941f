"""`--streaming`: the samples are those of a cached set, the order depends only on the seed, and a resume loses nothing."""

import copy
import gzip
import io
import json
import tarfile
from collections import Counter
from contextlib import nullcontext
from itertools import islice

import datasets
import pytest
from launch import read_steps, train_many

from trainer.cli import train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.datasets.files.stream_rows import open_rows, parsed
from trainer.datasets.samples.bounds import Bounds
from trainer.datasets.samples.streaming import StreamedBatches, start_of_epoch
from trainer.errors import UserError
from trainer.flags.rules import refuse
from trainer.models.model_loading import load_tokenizer
from trainer.runs.features import streamed_run
from trainer.runs.run_data import load_sft

SHORT = ["--max_len", "22", "--max_steps", "5"]  # some rows are cut off, and some have no loss token left
BUFFER = 32


def write_tar(path, members: dict[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, text in members.items():
            member = tarfile.TarInfo(f"rows/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo with 150 rows, also as two shards of JSON and of tar, as .jsonl.gz and as .parquet."""
    folder = tmp_path_factory.mktemp("streaming")
    make_demo(str(folder))
    lines = (folder / "sft.jsonl").read_text().splitlines(keepends=True)[:150]
    (folder / "sft.jsonl").write_text("".join(lines))
    for name, part in (("a", lines[:70]), ("b", lines[70:])):
        (folder / "shards").mkdir(exist_ok=True)
        (folder / f"shards/{name}.jsonl").write_text("".join(part))
        write_tar(folder / f"tar/{name}.tar", {f"{name}-{number}.json": line for number, line in enumerate(part)})
    with gzip.open(folder / "sft.jsonl.gz", "wt") as file:
        file.writelines(lines)
    datasets.Dataset.from_list([json.loads(line) for line in lines]).to_parquet(str(folder / "sft.parquet"))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))


def load(demo, names, *flags):
    args, _ = train_sft.parse(["--pretrain", str(demo / "model"), "--dataset", names, *SHORT, *flags])
    refuse("train_sft", args)
    tokenizer = load_tokenizer(str(demo / "model"), False)
    if args.streaming.streaming:
        return streamed_run.open_stream(args, tokenizer)
    return load_sft(args, tokenizer, names, "train", "--dataset")[0]


def stream(demo, names, *flags):
    return load(demo, names, "--streaming", "--streaming_buffer", str(BUFFER), *flags)


def read(found, epoch=0):
    return [(row["row"], row["digest"]) for row in found.read(start_of_epoch(epoch)) if row["num_loss_tokens"]]


def test_an_epoch_has_the_samples_of_the_cached_set(demo):
    cached = load(demo, str(demo / "sft.jsonl"))
    assert 0 < len(cached) < 150, "some rows should have no loss token"
    expected = list(zip(cached["row"], cached["digest"]))
    for name in ("sft.jsonl", "sft.jsonl.gz", "sft.parquet", "shards", "tar"):
        for place in (str(demo / name), f"file://{demo}/{name}"):
            assert read(stream(demo, place, "--no_shuffle")) == expected, place
    shuffled = read(stream(demo, str(demo / "shards")))
    assert shuffled != expected and sorted(shuffled) == expected
    for start in range(0, 150, BUFFER):  # a block stays together, and is shuffled in itself
        block = [row for row, _ in expected if start <= row < start + BUFFER]
        found = [row for row, _ in shuffled if start <= row < start + BUFFER]
        assert found == [row for row, _ in shuffled][len([r for r, _ in expected if r < start]) :][: len(block)]
        assert found != block
    assert read(stream(demo, str(demo / "sft.parquet"))) == shuffled
    again = stream(demo, str(demo / "sft.jsonl"))
    assert sorted(read(again, epoch=1)) == expected and read(again, epoch=1) != shuffled
    assert read(stream(demo, str(demo / "sft.jsonl"), "--seed", "7")) != shuffled


@pytest.mark.parametrize("names", ["shards sft.jsonl.gz", "tar tar/a.tar tar/b.tar"], ids=["jsonl", "tar"])
@pytest.mark.parametrize("flags", [[], ["--dataset_probs", "0.7,0.3"]], ids=["one after the other", "by odds"])
def test_a_saved_position_gives_the_rest(demo, names, flags):
    """At every row, through JSON, with a new stream: inside a block, between two blocks, shards and sets."""
    names = ",".join(f"{demo}/{name}" for name in names.split())
    flags = [*flags[:1], *(f"{probs},0.1" if "b.tar" in names else probs for probs in flags[1:])]
    found, rest = stream(demo, names, *flags), stream(demo, names, *flags)
    at, positions, rows = start_of_epoch(0), [], []
    for row in found.read(at):
        rows.append(row)
        positions.append(json.loads(json.dumps(at)))
    assert len(rows) == 300 if not flags else 150 < len(rows) < 300
    for number in [*range(0, len(rows), 13), 31, 32, 69, 70, len(rows) - 1]:
        assert list(rest.read(copy.deepcopy(positions[number]))) == rows[number + 1 :], number


def test_rows_with_control_tokens_are_named_by_file_and_row(demo, tmp_path):
    """Also behind an empty line, in the second file and in a mixture of sets."""
    rows = [
        json.dumps({"question": f"{n}<|im_end|>" if n in (3, 5, 8) else f"{n}", "answer": "yes"}) for n in range(10)
    ]
    rows = [row.replace("im_end", "never") if n == 5 else row for n, row in enumerate(rows)]
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/a.jsonl").write_text("\n\n".join(rows[:5]))
    (tmp_path / "parts/b.jsonl").write_text("\n".join(rows[5:]))
    (tmp_path / "other.jsonl").write_text("\n".join(rows[:1] * 30))
    found = [f"--dataset {tmp_path}/parts/a.jsonl row 7", f"--dataset {tmp_path}/parts/b.jsonl row 4"]
    for names, flags in (("parts", []), ("parts,other.jsonl", ["--dataset_probs", "0.9,0.1"])):
        names = ",".join(str(tmp_path / name) for name in names.split(","))
        lines = "\n".join(stream(demo, names, *flags).ledger.lines)
        assert (
            f"2 rows hold control tokens, read as plain text (--read_control_tokens keeps them): {', '.join(found)}"
            in lines
        )


@pytest.mark.parametrize(("line", "said"), [
    ('{"question": 5.0, "answer": "yes"}', r"column question: a number"),
    ('{"question": "5", "answer"', r"cannot be read: Expecting"),
    ('["question"]', r"cannot be read: a line is not a JSON object"),
    ('{"question": "5", "question": "6", "answer": "yes"}', r"cannot be read: .*twice"),
    (json.dumps({"question": "long " * 300, "answer": "yes"}), "more than the model's 200 positions"),
])  # fmt: skip
def test_errors_of_rows_name_the_file_and_the_row(line, said, demo, tmp_path):
    """The wrong row stands behind 200 others, in the second file, below an empty line; also in a mixture."""
    row = json.dumps({"question": "5", "answer": "yes"})
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/a.jsonl").write_text("\n".join([row] * 200))
    (tmp_path / "parts/b.jsonl").write_text("\n".join([row, "", line, row]))
    (tmp_path / "other.jsonl").write_text("\n".join([row] * 300))
    for names, flags in (("parts", []), ("parts,other.jsonl", ["--dataset_probs", "0.9,0.1"])):
        names = ",".join(str(tmp_path / name) for name in names.split(","))
        found = stream(demo, names, *flags, "--max_len", "4000")
        found.bounds = Bounds(10**6, positions=200, learned=True)
        with pytest.raises(UserError, match=said) as error:
            read(found)
        assert str(error.value).startswith(f"--dataset {tmp_path}/parts/b.jsonl row 3: "), error.value


def test_members_of_a_tar_file_are_rows(tmp_path):
    texts = {"1.txt": "first", "2.json": '{"answer": "ja"}', "2.txt": "zwei\n", "3.json": '{\n"answer": "ü"\n}'}
    expected = [{"txt": "first"}, {"answer": "ja", "txt": "zwei\n"}, {"answer": "ü"}]

    def rows(path):
        found, _ = open_rows(str(path), flag="--dataset", split="train", probs=None, max_samples=None, seed=0)
        return [row for block in found.iter(batch_size=2) for row in parsed(block)]

    for name in ("a.tar", "a.tar.gz"):
        write_tar(tmp_path / name, texts)
        assert rows(tmp_path / name) == expected
    for name, members in {"image.tar": {"1.jpg": "x"}, "twice.tar": {"1.txt": "x", "1.TXT": "y"}}.items():
        write_tar(tmp_path / name, members)
        with pytest.raises(ValueError, match=r"only NAME.json" if name == "image.tar" else "comes twice"):
            rows(tmp_path / name)
    whole = (tmp_path / "a.tar").read_bytes()
    for size in (100, 512, 515, 1024, 3 * 1024):  # inside a header, between two members, inside a text
        (tmp_path / "cut.tar").write_bytes(whole[:size])
        with pytest.raises((ValueError, tarfile.ReadError), match=r"cut off|unexpected end of data"):
            rows(tmp_path / "cut.tar")


def test_mixing_holds_the_odds(demo):
    first, second = f"{demo}/sft.jsonl.gz", f"{demo}/shards"
    mixed = stream(demo, f"{first},{second}", "--dataset_probs", "2,1", "--no_shuffle")
    rows = [row["digest"] for row in mixed.read(start_of_epoch(0))]
    whole = Counter(row["digest"] for row in stream(demo, first).read(start_of_epoch(0)))
    assert not Counter(rows) - (whole + whole), "no row twice"
    assert 150 + 75 * 0.6 < len(rows) < 150 + 75 * 1.5  # the first set ends it


class PlainLoader:
    """In place of a rank's loader: the batch is the samples themselves."""

    def __init__(self, samples):
        self.samples, self.place = samples, lambda batch: batch

    def global_batch(self, ids, index):
        from trainer.datasets.batches.global_batches import GlobalBatch

        return GlobalBatch(0, index, ids, 0, 0, "", [dict(self.samples[i]) for i in ids])


def test_the_loader_goes_on_from_its_state_in_later_epochs(demo):
    def loader():
        return StreamedBatches(stream(demo, str(demo / "shards")), PlainLoader, batch_size=8)

    def batches(found, count):
        def endless():
            while True:
                yield from found

        return [(batch.epoch, batch.index, batch.sample_ids) for batch in islice(endless(), count)]

    whole = batches(loader(), 60)
    assert whole[-1][0] >= 3 and whole[0][2] != next(ids for epoch, _, ids in whole if epoch == 1)
    for count in (1, 4, 17, 40):
        first, second = loader(), loader()
        batches(first, count)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert batches(second, 60 - count) == whole[count:]
        assert second.stream.ledger["num_rows"] > 150


def test_what_does_not_combine_is_refused(demo, tmp_path):
    plain = str(demo / "sft.jsonl")
    (tmp_path / "bad.jsonl").write_text((demo / "sft.jsonl").read_text() + "{broken\n")
    (tmp_path / "sft.jsonl.zst").write_bytes(b"")
    (tmp_path / "images.jsonl").write_text('{"messages": [], "images": []}\n')
    (tmp_path / "empty.jsonl").write_text("")
    cases = [
        (str(tmp_path / "absent.jsonl"), [], r"absent.jsonl: .*no"),
        (str(demo / "model"), [], "no file"),
        (str(tmp_path / "images.jsonl"), [], "--streaming: with a column images"),
        (str(tmp_path / "empty.jsonl"), [], "no rows"),
        (f"{plain},{demo}/sft.parquet", [], "--dataset: sets whose files"),
        (plain, ["--dataset_num_proc", "2"], "--dataset_num_proc"),
        (plain, ["--freeze_vision", "false"], "images"),
        (plain, ["--dataset_probs", "1,2"], "--dataset_probs: 2 numbers for 1"),
        (plain, ["--input_key", "nothing"], "--input_key"),
        ("nope://bucket/data.jsonl", [], "nope"),
    ]
    for names, flags, message in cases:
        with pytest.raises(UserError, match=message) as error:
            stream(demo, names, *flags)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"--dataset .*bad\.jsonl row 151: cannot be read"):
        read(stream(demo, str(tmp_path / "bad.jsonl")))
    tokenizer = load_tokenizer(str(demo / "model"), False)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "")
    for flags, ends in (([], []), (["--allow_no_stop"], ["first rows: WARNING: no sample trains a stop token"])):
        line = ["--pretrain", "model", "--dataset", plain, "--streaming", "--max_steps", "5", *flags]
        with nullcontext() if ends else pytest.raises(UserError, match="no sample trains a stop token"):
            lines = streamed_run.open_stream(train_sft.parse(line)[0], tokenizer).ledger.lines
            assert [text for text in ends if any(text in said for said in lines)] == ends
    args, _ = train_sft.parse(["--pretrain", "model", "--dataset", plain, "--streaming"])
    with pytest.raises(UserError, match="--streaming without --max_steps"):
        refuse("train_sft", args)


def test_all_layouts_see_the_same_batches_and_go_on_from_each_other(demo, tmp_path):
    """fp32 losses within 1e-5 on dp 1, dp 2, ZeRO 2 and sp 2, packed and padded; on one layout a resume is bitwise."""
    base = ["--pretrain", str(demo / "model"), "--dataset", str(demo / "shards"), "--max_len", "64", "--no_save"]
    base += ["--train_batch_size", "8", "--micro_train_batch_size", "2", "--learning_rate", "2e-3"]
    base += ["--param_dtype", "fp32", "--max_steps", "22", "--save_steps", "9"]  # an epoch has 19 steps
    streamed = [*base, "--streaming", "--streaming_buffer", str(BUFFER)]
    modes = {"padded": [], "packed": ["--packing_samples"]}

    def line(name, *flags):
        return [*flags, "--output_dir", str(tmp_path / name)]

    def resume(name, source, *flags):
        return line(name, *streamed, *flags, "--load_checkpoint", str(tmp_path / source / "checkpoints/step_9"))

    zero = ["--backend", "deepspeed"]
    two = [line(f"fsdp2 {mode}", *streamed, *flags) for mode, flags in modes.items()]
    two += [line(f"z2 {mode}", *streamed, *flags, *zero) for mode, flags in modes.items()]
    two += [line("sp2 packed", *streamed, *modes["packed"], "--ring_attn_size", "2")]
    two += [resume("z2 from fsdp2", "fsdp2 packed", *modes["packed"], *zero), resume("z2 again", "z2 padded", *zero)]
    one = [line(f"alone {mode}", *streamed, *flags) for mode, flags in modes.items()]
    one += [line("in order", *streamed, "--no_shuffle"), line("cached", *base, "--no_shuffle")]
    one += [resume("alone from z2", "z2 padded"), resume("alone again", "alone padded")]
    train_many(2, two, tmp_path, timeout=240)
    train_many(1, one, tmp_path, timeout=240)

    def steps(name):
        return {row["step"]: (row["epoch"], row["batch_hash"], row["loss"]) for row in read_steps(tmp_path / name)}

    def check(name, reference, bitwise=False):
        found, expected = steps(name), steps(reference)
        assert found and max(found) == 22
        for step, (epoch, batch, loss) in found.items():
            assert (epoch, batch) == expected[step][:2], f"{name}, step {step}"
            assert abs(loss / expected[step][2] - 1) <= (0 if bitwise else 1e-5), f"{name}, step {step}"

    for mode in modes:
        check(f"fsdp2 {mode}", f"alone {mode}")
        check(f"z2 {mode}", f"alone {mode}")
    check("sp2 packed", "alone packed")
    check("z2 from fsdp2", "alone packed")
    check("alone from z2", "alone padded")
    check("z2 again", "z2 padded", bitwise=True)
    check("alone again", "alone padded", bitwise=True)
    assert min(steps("alone again")) == 10
    check("in order", "cached", bitwise=True)
    assert steps("alone padded")[20][0] == 1 and steps("alone padded")[20][1] != steps("alone padded")[1][1]
