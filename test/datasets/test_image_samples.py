"""Rows with images become token samples: the processor's own tokens, no loss on images, and one line for a bad row."""

import base64
import gzip
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import vision_models
import vision_reference

from trainer.cli import train_dpo, train_sft
from trainer.datasets.batches.packing import shifted_labels
from trainer.datasets.images.image_batches import ImageCollate
from trainer.datasets.images.image_processor import PixelLimits, load_processor
from trainer.datasets.images.image_samples import ImageSamples
from trainer.datasets.images.pixel_cache import PixelCache
from trainer.datasets.samples.bounds import Bounds, check_bounds
from trainer.datasets.samples.preference import SIDES, collate_pairs
from trainer.datasets.samples.sft_samples import render_sample
from trainer.errors import UserError
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.rl_flags import PPOArguments
from trainer.model_folders.model_writer import copy_processor, save_source_config
from trainer.models.model_bounds import bounds_of
from trainer.runs.features.image_runs import ImageRun
from trainer.runs.preference_runs import load_dpo
from trainer.runs.rl.rl_run import load_data as load_prompts
from trainer.runs.run_data import load_sft

SHAPES = sorted((Path(__file__).parent / "public_shapes" / "images").glob("*.json"))


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    vision_models.write_rows(folder)
    for kind in vision_models.KINDS:
        vision_models.make_folder(kind, folder / kind)
    return folder


def load(here: Path, rows, *flags: str, kind: str = "qwen3_vl", data: str | None = None):
    """(samples, ledger) of rows, or of the file `data`."""
    if data is None:
        data = str(here / "own.jsonl")
        Path(data).write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = str(here / kind)
    args, _ = train_sft.parse(["--pretrain", folder, "--dataset", data, *flags])
    return load_sft(args, AutoTokenizer.from_pretrained(folder), data, "train", "--dataset")


def talk(question, answer="Yes.", images=None) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images}


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_tokens_and_tensors_are_those_of_the_processor(here, kind):
    """Of no, one and several images, as parts and as marks. Only the answer and its stop token carry loss."""
    rows = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    samples, ledger = load(here, None, kind=kind, data=str(here / "rows.jsonl"))
    assert isinstance(samples, ImageSamples) and len(samples) == len(rows) == 8
    assert (ledger["num_images"], ledger["num_samples_with_images"], ledger["num_unfit"]) == (8, 5, 0)
    pad, num_image_tokens, shown = 1, 0, set(samples.processor.image_token_ids)
    collate = ImageCollate(samples.processor)
    for row, sample in zip(rows, samples, strict=True):
        inputs, labels = vision_reference.inputs_of(row, here, samples.processor)
        assert sample["input_ids"] == inputs["input_ids"][0].tolist()
        expected = [token if token != -100 else -100 for token in labels[1:].tolist()] + [-100]
        assert shifted_labels(sample["input_ids"], sample["loss_mask"]) == expected
        num_image_tokens += sum(token in shown for token in sample["input_ids"])
        if sample["images"]:
            tensors = collate([sample], pad)["images"]
            for name in set(inputs) - {"input_ids", "mm_token_type_ids", "token_type_ids"}:
                assert torch.equal(tensors[name], inputs[name]), name
    assert ledger["num_image_tokens"] == num_image_tokens


def test_a_sample_is_shown_with_short_images(here):
    samples, _ = load(here, None, data=str(here / "rows.jsonl"))
    text = render_sample(samples[0], samples.processor.tokenizer)
    assert "<|vision_start|><|image_pad|>...<|vision_end|>What is it?" in text and "[[A cloud.<|im_end|>]]" in text


def test_images_come_from_paths_data_uris_and_bytes(here):
    """A relative path begins at the folder of the data file. All forms give the same sample."""
    path = here / "pictures" / "0.png"
    uri = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    tar_of(here, path.read_bytes(), b"no image")
    shown = ("pictures/0.png", str(path), uri, "shards/0.tar::a/7.png", f"{here}/shards/0.tar::a/7.png")
    rows = [talk("<image>?", images=[source]) for source in shown]
    samples, _ = load(here, rows)
    both = [talk("<image>?", images=[{"bytes": path.read_bytes(), "path": None}])]
    Dataset.from_list(both).to_parquet(here / "own.parquet")
    from_bytes, _ = load(here, None, data=str(here / "own.parquet"))
    found = [*samples, *from_bytes]
    assert len({sample["digest"] for sample in found}) == 1
    assert len({sample["images"][0].tobytes() for sample in found}) == 1


def tar_of(here: Path, *contents: bytes) -> None:
    """Write shards/0.tar with the files a/7.png, a/8.png and so on."""
    (here / "shards").mkdir(exist_ok=True)
    with tarfile.open(here / "shards" / "0.tar", "w") as tar:
        for number, content in enumerate(contents, 7):
            member = tarfile.TarInfo(f"./a/{number}.png")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_the_digest_knows_the_image(here):
    """Two images of one size give the same tokens. A changed file is read again, and a changed tar."""
    shutil.copy(here / "pictures" / "1.png", here / "changes.png")
    vision_models.drawn(77, (16, 16)).save(here / "other.png")
    rows = [talk("<image>?", images=[name]) for name in ("changes.png", "other.png")]
    first, other = load(here, rows)[0]
    assert first["input_ids"] == other["input_ids"] and first["digest"] != other["digest"]
    shutil.copy(here / "other.png", here / "changes.png")
    assert load(here, rows)[0][0]["digest"] == other["digest"]
    in_tar = [talk("<image>?", images=["shards/0.tar::a/7.png"])]
    for name, expected in (("pictures/1.png", first), ("other.png", other)):
        tar_of(here, (here / name).read_bytes())
        assert load(here, in_tar)[0][0]["digest"] == expected["digest"]


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_limits_of_pixels_are_those_of_the_image_processor_called_directly(here, kind, tmp_path):
    """In samples of SFT and prompts of RL. A saved folder has them. A processor without such limits is refused."""
    data, limits = str(here / "rows.jsonl"), ["--image_max_pixels", "160", "--image_min_pixels", "128"]
    if not kind.startswith("qwen"):
        with pytest.raises(UserError, match=r"_pixels: the \w+Processor\w* of .* has no limit of pixels\. Remove"):
            load(here, None, *limits, kind=kind, data=data)
        return
    samples, _ = load(here, None, *limits, kind=kind, data=data)
    direct = AutoImageProcessor.from_pretrained(here / kind, max_pixels=160, min_pixels=128)
    free = AutoImageProcessor.from_pretrained(here / kind)
    rows = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    asked = here / "asked.jsonl"
    asked.write_text("".join(json.dumps({**row, "messages": row["messages"][:-1]}) + "\n" for row in rows))
    flags = ["--pretrain", str(here / kind), "--dataset", str(asked), *limits]
    args, tokenizer = parse_arguments(PPOArguments, "train_ppo", flags), AutoTokenizer.from_pretrained(here / kind)
    prompts, _ = load_prompts(args, tokenizer, str(asked), "train", "--dataset", functions={})
    [token], counts, others = samples.processor.image_token_ids[:1], [], []
    for row in rows:
        pictures = [Image.open(here / name).convert("RGB") for name in row["images"] or []]
        counts.append(tokens_of(direct, pictures))
        others.append(tokens_of(free, pictures))
    assert [sample["input_ids"].count(token) for sample in samples] == counts != others
    assert [prompt["prompt_ids"].count(token) for prompt in prompts] == counts
    run = object.__new__(ImageRun)
    run.collate, run._pixels = SimpleNamespace(use=lambda model: None), PixelLimits(max_pixels=160, min_pixels=128)
    run.is_packed, run.sp, run.tp = False, 1, 1
    model = AutoModelForImageTextToText.from_pretrained(here / kind)
    run.fit(model)
    save_source_config(model, torch.float32, str(tmp_path))
    saved = AutoImageProcessor.from_pretrained(tmp_path)
    assert (saved.size["shortest_edge"], saved.size["longest_edge"]) == (128, 160)
    assert tokens_of(saved, pictures_of(here)) == tokens_of(direct, pictures_of(here))


def pictures_of(here: Path) -> list:
    return [Image.open(path).convert("RGB") for path in sorted((here / "pictures").iterdir())]


def tokens_of(images, pictures: list) -> int:
    """The number of image tokens, from the grids of patches that the image processor makes."""
    grids = images(pictures, return_tensors="pt")["image_grid_thw"] if pictures else []
    return sum(int(grid.prod()) for grid in grids) // images.merge_size**2


def test_a_saved_processor_with_other_files_keeps_their_values(tmp_path):
    """A limit goes into both forms: names of their own, and edges. A folder may hold its image processor in one file."""
    (tmp_path / "new").mkdir()
    nested = {"image_processor": {"image_processor_type": "A", "size": {"shortest_edge": 4, "longest_edge": 9}}, "b": 1}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "A", "min_pixels": 4}))
    (tmp_path / "video_preprocessor_config.json").write_text("{}")
    copy_processor(str(tmp_path), str(tmp_path / "new"), {"max_pixels": 8})
    read = {path.name: json.loads(path.read_text()) for path in (tmp_path / "new").iterdir()}
    own = {"image_processor_type": "A", "size": {"shortest_edge": 4, "longest_edge": 8}, "max_pixels": 8}
    assert read["processor_config.json"] == {"image_processor": own, "b": 1}
    assert read["preprocessor_config.json"] == {"image_processor_type": "A", "min_pixels": 4, "max_pixels": 8}
    assert read["video_preprocessor_config.json"] == {}


def test_limits_of_pixels_that_exclude_each_other_are_refused(here):
    found = r"--image_max_pixels: images of at least 64 and at most 32 pixels \(allowed: --image_min_pixels below"
    with pytest.raises(UserError, match=found):
        load(here, None, "--image_max_pixels", "32", data=str(here / "rows.jsonl"))


KEPT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4")


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_kept_tensors_give_the_same_batches_bit_for_bit(here, kind, monkeypatch):
    """The second time from the files of the first. Kinds that pad an image to others of its micro-batch are refused."""
    samples, _ = load(here, None, kind=kind, data=str(here / "rows.jsonl"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(here / "cache"))
    if kind not in KEPT:
        with pytest.raises(UserError, match=r"--cache_pixels: with .*, whose tensors of an image depend on the images"):
            PixelCache(samples.processor)
        return
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=-1), forward=lambda mm_token_type_ids: None)
    collate = ImageCollate(samples.processor)
    collate.use(model)
    batches = [range(8), (3, 0, 3), (1, 4)]  # the last has no image
    expected = [collate([samples[row] for row in rows], 1) for rows in batches]
    collate.tensors_of, samples.decode = PixelCache(samples.processor).tensors, lambda source: source
    for again in (False, True):
        if again:  # no image is read into pixels any more
            monkeypatch.setattr("trainer.datasets.images.pixel_cache.decode", None)
        for rows, plain in zip(batches, expected, strict=True):
            found = collate([samples[row] for row in rows], 1)
            for one, other in ((found.pop("images"), plain["images"]), (found, plain)):
                assert one.keys() == other.keys() - {"images"}
                assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not list((here / "cache").rglob("*.tmp"))


def test_an_image_is_never_cut(here):
    """A row whose images exceed --max_len is left out and counted. Text after the images is cut as in a set of texts."""
    rows = [talk("<image>" * 6, images=["pictures/3.png"] * 6), talk("<image>Hi?", "A" * 100, ["pictures/1.png"])]
    samples, ledger = load(here, rows, "--max_len", "60")
    assert (len(samples), ledger["num_unfit"], ledger["num_excluded"], ledger["num_truncated"]) == (1, 1, 1, 2)
    assert samples[0]["row"] == 1 and len(samples[0]["images"]) == 1 and len(samples[0]["input_ids"]) == 60
    with pytest.raises(UserError, match="--max_len: the images of no row fit into 20 tokens"):
        load(here, rows[:1], "--max_len", "20")


def test_ids_and_lengths_of_rows_with_images_are_bounded(here):
    """The tokens of an image need no embedding. With M-RoPE, they have fewer positions than tokens."""
    samples, _ = load(here, [talk("Hi?"), talk("<image>Hi?", images=["pictures/1.png"]), talk("Ho?")])
    tokenizer, lists = AutoTokenizer.from_pretrained(here / "qwen3_vl"), [row["input_ids"] for row in samples]
    own = set(samples.processor.image_token_ids) - {None}
    top, longest = max(token for ids in lists for token in ids if token not in own), max(map(len, lists))
    place = next(number for number, ids in enumerate(lists) if len(ids) == longest)
    first = next(number for number, ids in enumerate(lists) if top in ids)
    assert own & set(lists[1]) and longest == len(lists[1])
    assert check_bounds(samples, tokenizer, "--dataset", Bounds(top + 1, longest, True)) == []
    [warning] = check_bounds(samples, tokenizer, "--dataset", Bounds(top + 1, longest - 1))
    assert warning.startswith(f"WARNING: --dataset row {place + 1} has {longest} tokens, more than the model's")
    num_text = max(sum(token not in own for token in ids) for ids in lists)
    mrope = {"learned": False, "of_images": True}
    assert check_bounds(samples, tokenizer, "--dataset", Bounds(top + 1, num_text, **mrope)) == []
    [warning] = check_bounds(samples, tokenizer, "--dataset", Bounds(top + 1, num_text - 1, **mrope))
    assert f"{num_text} tokens of text, more than the model's {num_text - 1} positions" in warning
    assert bounds_of(str(here / "qwen3_vl"), False).of_images
    with pytest.raises(UserError, match=f"--dataset row {first + 1}: token {top} is beyond the {top} rows"):
        check_bounds(samples, tokenizer, "--dataset", Bounds(top, None))
    with pytest.raises(UserError, match=f"--dataset row {place + 1}: {longest} tokens, more than the model's"):
        check_bounds(samples, tokenizer, "--dataset", Bounds(top + 1, longest - 1, True))
    samples.image_ids |= {top}
    assert check_bounds(samples, tokenizer, "--dataset", Bounds(top, None)) == []


def test_images_after_the_last_trained_answer_are_left_out(here):
    row = talk("<image>?", images=["pictures/0.png", "pictures/1.png"])
    row["messages"].append({"role": "user", "content": "<image> and this?"})
    samples, ledger = load(here, [row])
    assert len(samples[0]["images"]) == ledger["num_images"] == 1


def test_rows_of_texts_with_an_empty_column_of_images_are_texts(here):
    samples, ledger = load(here, [talk("Hi?", images=[]), talk("Ho?")])
    assert not isinstance(samples, ImageSamples) and "images" not in ledger.summary()


def broken(here: Path) -> str:
    content = (here / "pictures" / "0.png").read_bytes()
    (here / "broken.png").write_bytes(content[: len(content) // 2])
    return "broken.png"


def in_tar(name: str):
    def source(here: Path) -> str:
        tar_of(here, (here / "pictures" / "0.png").read_bytes(), b"no image")
        return f"shards/0.tar::{name}"

    return source


def no_tar(here: Path) -> str:
    (here / "no.tar").write_bytes(gzip.compress(b"a tar with compression " * 99))
    return "no.tar::a.png"


BAD = {
    "a missing file": (["none.png"], "<image>", "row 2: .*none.png: No such file or directory"),
    "a broken file": (broken, "<image>", "row 2: .*broken.png: no image that can be read"),
    "a file that a tar has not": (in_tar("a/9.png"), "<image>", "row 2: .*0.tar::a/9.png: the tar has no file a/9.png"),
    "a broken file in a tar": (in_tar("a/8.png"), "<image>", "row 2: .*0.tar::a/8.png: no image that can be read"),
    "no tar": (no_tar, "<image>", "row 2: .*no.tar::a.png: no tar that can be read"),
    "a mark without an image": ([], "<image>", "row 2: column images: 1 mark for 0 images"),
    "too few marks": (["pictures/0.png"] * 2, "<image>", "row 2: column images: 1 mark for 2 images"),
    "a URL": (["https://example.com/a.png"], "<image>", "row 2: column images: https://.* is on the network"),
    "a broken data URI": (["data:image/png;base64,@"], "<image>", "row 2: column images: a data URI that cannot be"),
    "a number": ([7], "<image>", "row 2: column images: an image that is a int"),
    "an image in a part": (
        ["pictures/0.png"],
        [{"type": "image", "path": "pictures/0.png"}],
        r"row 2: column messages: an image inside a message \(allowed: its path in the column images\)",
    ),
    "a video": ([], [{"type": "video"}], "row 2: column messages: a part of type 'video'"),
    "the processor's own mark": ([], "<|image_pad|>", "row 2: the chat template: shows 1 mark"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_one_line_with_its_number(here, name):
    images, question, message = BAD[name]
    images = [images(here)] if callable(images) else images
    rows = [talk("<image>?", images=["pictures/0.png"]), talk(question, images=images)]
    with pytest.raises(UserError, match=message) as found:
        load(here, rows)
    assert "\n" not in str(found.value)


def test_an_image_in_an_answer_and_images_without_a_template_are_refused(here):
    with pytest.raises(UserError, match="row 1: column messages: an image in an answer"):
        load(here, [talk("Draw!", "<image> here", ["pictures/0.png"])])
    rows = [{"question": "<image>?", "answer": "Yes.", "images": ["pictures/0.png"]}]
    with pytest.raises(UserError, match="--dataset: rows have images, and their texts no template"):
        load(here, rows, "--input_key", "question", "--output_key", "answer")
    keys = ["--input_key", "question", "--output_key", "answer", "--apply_chat_template"]
    assert len(load(here, rows, *keys)[0][0]["images"]) == 1

    with pytest.raises(UserError, match="row 1: column answer: an image in an answer"):
        load(here, [{**rows[0], "question": "Draw!", "answer": "<image>"}], *keys)


def test_sets_with_images_and_without_are_one_run(here):
    """A list of sets is the rows of one file: ids, masks, images, and the rows whose images exceed --max_len."""
    talks = [talk("<image>Hi?", images=["pictures/0.png"]), talk("<image>" * 40 + "!", images=["pictures/1.png"] * 40)]
    texts, more = [{"question": "Why?", "answer": "So."}], [talk("A <image>?", images=["pictures/1.png"])]
    for name, rows in {"talks": talks, "texts": texts, "more": more}.items():
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ",".join(str(here / f"{name}.jsonl") for name in ("talks", "texts", "more"))
    own = '[{}, {"input_key": "question", "output_key": "answer", "apply_chat_template": true}, {}]'
    found, counts = load(here, None, "--dataset_flags", own, "--max_len", "200", data=names)
    wanted, known = load(here, [*talks, talk("Why?", "So."), *more], "--max_len", "200")
    assert counts.counts == known.counts and counts["num_unfit"] == 1
    for one, other in zip(found, wanted, strict=True):
        pictures = [[image.tobytes() for image in sample.pop("images")] for sample in (one, other)]
        assert pictures[0] == pictures[1] and one == other
    assert [len(sample["images"]) for sample in found] == [1, 0, 1]


def load_pairs(here: Path, rows, *flags: str):
    path, folder = here / "pairs.jsonl", str(here / "qwen3_vl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args, _ = train_dpo.parse(["--pretrain", folder, "--dataset", str(path), "--apply_chat_template", *flags])
    return load_dpo(args, AutoTokenizer.from_pretrained(folder), str(path), "train", "--dataset")


def test_images_without_marks_stand_before_the_first_message_of_the_user(here):
    """Rows as TRL takes them. Also in pairs, where both sides have them."""
    two = ["pictures/0.png", "pictures/1.png"]
    marked, bare = (load(here, [talk(f"{marks}Hi?", images=two)])[0][0] for marks in ("<image><image>", ""))
    assert marked["input_ids"] == bare["input_ids"] and len(bare["images"]) == 2
    pair = {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No!", "images": two}
    [bare], ledger = load_pairs(here, [pair])
    [marked], _ = load_pairs(here, [{**pair, "prompt": "<image><image>Hi?"}])
    assert marked["chosen_ids"] == bare["chosen_ids"] and marked["rejected_ids"] == bare["rejected_ids"]
    assert "images of rows without <image>" in "".join(ledger.lines)


@pytest.mark.parametrize("path", SHAPES, ids=[path.stem for path in SHAPES])
def test_a_public_shape_with_images_is_its_conversation(here, path):
    """`want` is the row with its marks, of which the processor's own call gives ids and labels."""
    shape = json.loads(path.read_text())
    samples, _ = load(here, shape["rows"])
    processor = load_processor(str(here / "qwen3_vl"), AutoTokenizer.from_pretrained(here / "qwen3_vl"), False)
    for sample, want in zip(samples, shape["want"], strict=True):
        inputs, labels = vision_reference.inputs_of(want, here, processor)
        assert sample["input_ids"] == inputs["input_ids"][0].tolist()
        trained = [token if has_loss else -100 for token, has_loss in zip(sample["input_ids"], sample["loss_mask"])]
        assert trained == labels.tolist()


def test_a_column_image_has_one_image_for_each_row(here):
    """As path, and as the datasets library keeps an image. `--ignore_columns image` leaves it out."""
    two = [talk("<image>Hi?", images=[f"pictures/{number}.png"]) for number in range(2)]
    expected = list(load(here, two)[0])
    single = [{"messages": row["messages"], "image": row["images"][0]} for row in two]
    Dataset.from_list(
        [{**row, "image": {"path": str(here / row["image"]), "bytes": None}} for row in single]
    ).cast_column("image", datasets.Image()).to_parquet(here / "single.parquet")
    for found in (load(here, single)[0], load(here, None, data=str(here / "single.parquet"))[0]):
        assert [sample["digest"] for sample in found] == [sample["digest"] for sample in expected]
        assert [len(sample["images"]) for sample in found] == [1, 1]
    plain, _ = load(here, single, "--ignore_columns", "image")
    assert "images" not in plain.column_names


def test_both_answers_of_a_pair_have_the_images_of_its_prompt(here):
    """As a prompt and two answers, as two conversations, and as single answers for KTO. Images are processed once."""
    pair = {"prompt": "<image>?", "chosen": "Yes.", "rejected": "No!", "images": ["pictures/0.png"]}
    talks = [[{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": pair[side]}] for side in SIDES]
    [one], ledger = load_pairs(here, [pair])
    [other], _ = load_pairs(here, [{**dict(zip(SIDES, talks, strict=True)), "images": pair["images"]}])
    (good, bad), counts = load_pairs(here, [pair], "--loss", "kto")
    assert one["digest"] == other["digest"] and one["images"][0].tobytes() == good["images"][0].tobytes()
    assert (good["input_ids"], bad["input_ids"]) == (one["chosen_ids"], one["rejected_ids"])
    assert (ledger["num_images"], ledger["num_image_tokens"]) == (
        1,
        2 * counts["num_image_tokens"] // counts["num_images"],
    )
    processor = load_pairs(here, [pair])[0].processor
    for side, sample in (("chosen", good), ("rejected", bad)):
        row = {"messages": talks[SIDES.index(side)], "images": pair["images"]}
        inputs, _ = vision_reference.inputs_of(row, here, processor)
        assert sample["input_ids"] == inputs["input_ids"][0].tolist()
    tensors = collate_pairs([one], 1, False, ImageCollate(processor))["images"]
    assert torch.equal(tensors["pixel_values"], torch.cat([inputs["pixel_values"]] * 2))


def test_a_bad_pair_is_one_line_with_its_number(here):
    good = {"prompt": "<image>?", "chosen": "Yes.", "rejected": "No!", "images": ["pictures/0.png"]}
    bad = {
        "row 2: column images: 1 mark for 2 images": {"images": ["pictures/0.png"] * 2},
        "row 2: column rejected: an image in an answer": {"rejected": "<image>"},
        "row 2: .*none.png: No such file": {"images": ["none.png"]},
    }
    for message, change in bad.items():
        with pytest.raises(UserError, match=message):
            load_pairs(here, [good, {**good, **change}])
    long = {**good, "prompt": "<image>" * 6, "images": ["pictures/3.png"] * 6}
    pairs, ledger = load_pairs(here, [good, long], "--max_len", "60")
    assert len(pairs) == ledger["num_unfit"] == ledger["num_cut_away"] == 1


def test_images_for_a_model_of_text_are_refused(here):
    from trainer.datasets.demos.demo import make_demo

    make_demo(str(here / "demo"))
    with pytest.raises(UserError, match=r"--pretrain: .* is a model of text \(qwen3\), and rows have images"):
        load(here, [talk("<image>?", images=["pictures/0.png"])], kind="demo/model")


def test_an_upright_image(here):
    """A camera turns pictures by a note in the file (EXIF)."""
    image, exif, file = vision_models.drawn(3, (24, 16)), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    image.save(file, "JPEG", exif=exif)
    uri = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    assert load(here, [talk("<image>", images=[uri])])[0][0]["images"][0].size == (16, 24)
