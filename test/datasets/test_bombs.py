"""Files of strangers that grow without end, block, or start programs: one line, little memory, little time."""

import bz2
import gzip
import io
import json
import lzma
import os
import resource
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversations import byte_tokenizer
from PIL import Image
from tokenizers import normalizers

from trainer import limits
from trainer.datasets.conversations import shown_texts, templates, training_templates
from trainer.datasets.conversations.content_parts import shows_texts
from trainer.datasets.conversations.rendering import render
from trainer.datasets.conversations.tool_arguments import fit_arguments
from trainer.datasets.conversations.turn_ends import openings_of, turn_ends
from trainer.datasets.files import image_files, json_files
from trainer.datasets.files.input_checks import check_file
from trainer.datasets.files.loading import load_rows
from trainer.errors import UserError
from trainer.models.model_loading import resolve_model_folder

LARGE = 40 << 20  # bytes that a bomb unpacks to here; the limit is set to 16 MB


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    for name, value in (("unpacked_mb", 16), ("ratio", 4), ("columns", 50), ("pixels", 1_000_000), ("template_s", 1)):
        monkeypatch.setitem(limits._raised, name, value)


def test_a_line_without_an_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "CHUNK_BYTES", 1024)
    monkeypatch.setitem(limits._raised, "row_mb", 1)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": "x" * (3 << 20)}) + "\n")
    with pytest.raises(UserError, match="has more than 1 MB; --limits row_mb=N raises it"):
        load_rows(str(tmp_path / "rows.jsonl"), flag="--dataset", split="train")


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(LARGE))


def tarred(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("0.json")
        member.size = LARGE
        tar.addfile(member, io.BytesIO(bytes(LARGE)))


def repeated(path: Path) -> None:
    """One text of a dictionary, in every row."""
    pq.write_table(pa.table({"text": pa.array(["a" * 100_000] * 400)}), path, compression="zstd")


def numbers(path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([7] * 5_000_000)}), path, compression="zstd")


BOMBS = {
    "gzip": lambda path: path.write_bytes(gzip.compress(bytes(LARGE))),
    "bz2": lambda path: path.write_bytes(bz2.compress(bytes(LARGE))),
    "xz": lambda path: path.write_bytes(lzma.compress(bytes(LARGE), preset=0)),
    "zip": zipped,
    "tar.gz": tarred,
    "parquet of one text": repeated,
    "parquet of one number": numbers,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_that_grows_without_end_is_one_line(kind, tmp_path):
    path = tmp_path / ("rows.parquet" if "parquet" in kind else "rows.jsonl")
    BOMBS[kind](path)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match="--limits ratio=N raises it") as error:
        load_rows(str(path), flag="--dataset", split="train")
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    limits._raised["unpacked_mb"] = 64
    check_file(str(path), "--dataset")


def test_a_compressed_file_of_text_is_read(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(gzip.compress(b'{"a": "b"}\n' * 3))
    assert len(load_rows(str(tmp_path / "rows.jsonl"), flag="--dataset", split="train")) == 3


@pytest.mark.parametrize("kind", ["jsonl", "nested", "csv", "parquet"])
def test_the_number_of_columns_is_limited(kind, tmp_path):
    row = {f"c{number}": 1 for number in range(60)}
    path = tmp_path / f"rows.{'jsonl' if kind == 'nested' else kind}"
    if kind == "csv":
        path.write_text(",".join(row) + "\n" + ",".join("1" * 60) + "\n")
    elif kind == "parquet":
        pq.write_table(pa.table({name: [1] for name in row}), path)
    else:
        path.write_text(json.dumps(row | ({"list": [1]} if kind == "nested" else {})) + "\n")
    with pytest.raises(UserError, match=r"6[01] columns"):
        load_rows(str(path), flag="--dataset", split="train")


def test_an_image_of_many_pixels_is_not_decoded():
    content = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(content, "PNG")
    assert len(content.getvalue()) < 100_000
    with pytest.raises(UserError, match="column images: an image of 81000000 pixels"):
        image_files.decode(content.getvalue())


def test_no_format_that_starts_a_program_is_read():
    assert not {"EPS", "WMF", "PSD", "FPX", "MIC", "IM", "PCD"} & set(image_files.known_formats())
    with pytest.raises(UserError, match=r"column images: no image that can be read \(of no known format\)"):
        image_files.decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "PNG")
    assert image_files.decode(content.getvalue()).size == (4, 4)


def test_a_limit_of_memory_lets_addresses_be_reserved():
    """As CUDA reserves them: in any thread, at any time, more than the machine has.

    In a process of its own: one that holds much free memory from earlier tests needs no more for the large array.
    """
    code = """
import mmap, resource
from trainer import limits
limits._raised["template_mb"] = 64
before, private = resource.getrlimit(resource.RLIMIT_DATA), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

def reserve():
    mmap.mmap(-1, 1 << 38, flags=private, prot=mmap.PROT_READ).close()
    mmap.mmap(-1, 32 << 20, flags=private).close()

limits.within_memory("template_mb", "here", reserve)
try:
    limits.within_memory("template_mb", "here", bytearray, 128 << 20)
except limits.TooLarge as error:
    print(error)
assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "takes too much memory" in ended.stdout and not ended.stderr, ended.stdout + ended.stderr


def test_what_took_too_much_memory_is_freed(monkeypatch):
    """Else a second try of the same would begin with it, and the limit would be of each try. Jinja's errors hold frames."""
    monkeypatch.setitem(limits._raised, "template_mb", 256)
    tokenizer = byte_tokenizer("qwen3")
    doubles = "{% set n.t = n.t ~ n.t %}"
    tokenizer.chat_template = f"{{% set n = namespace(t='a') %}}{{% for i in range(99) %}}{doubles}{{% endfor %}}"
    errors, taken = [], [private_mb()]
    for _ in range(2):
        with pytest.raises(UserError, match="takes too much memory") as error:
            render(tokenizer, [{"role": "user", "content": "x"}])
        errors.append(error)
        taken.append(private_mb())
    assert max(taken) - taken[0] < 64, taken  # the text had 128 MB


def private_mb() -> float:
    """Memory that this process may write, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() / limits.MB


def test_a_large_image_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setitem(limits._raised, "image_mb", 1)
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="an image file of 1048576 MB"):
        image_files.content_of(str(tmp_path / "a.png"))


def test_a_fifo_or_a_device_blocks_nothing(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(UserError, match="is no regular file"):
        check_file(str(tmp_path / "rows.jsonl"), "--dataset")
    with pytest.raises(UserError, match="is no regular file"):
        image_files.content_of(str(tmp_path / "a.png"))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}") if name != "config.json" else None
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=f"--pretrain: .*{name} is no regular file"):
            resolve_model_folder(str(folder))
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")
        with pytest.raises(UserError, match=f"--pretrain: .*{name} is no regular file"):
            resolve_model_folder(str(folder))


@pytest.mark.parametrize("count", [99_999])
def test_a_template_that_does_not_end_is_one_line(count):
    tokenizer = byte_tokenizer("qwen3")
    tokenizer.chat_template = (
        f"{{% for i in range({count}) %}}{{% for j in range({count}) %}}{{% endfor %}}{{% endfor %}}"
    )
    with pytest.raises(UserError, match="the chat template: did not end in time"):
        render(tokenizer, [{"role": "user", "content": "x"}])


def test_the_probes_of_a_template_have_limits_too(monkeypatch):
    """Probes are conversations that tell templates apart. This template loops for them only."""
    monkeypatch.setitem(limits._raised, "template_s", 1)
    tokenizer = byte_tokenizer("qwen3")
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = f"{{% if messages[-1].role == 'assistant' %}}{loop}{{% endif %}}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for probe in (
        lambda: training_templates.training_version(tokenizer, template),
        lambda: fit_arguments(tokenizer, template, [{"role": "assistant", "content": "", "tool_calls": [call]}]),
    ):
        with pytest.raises(UserError, match="the chat template: did not end in time"):
            probe()


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "probe",
    [
        turn_ends,
        openings_of,
        templates._frame,
        templates.notes_of_template,
        lambda tokenizer: shows_texts(tokenizer.chat_template),
        lambda tokenizer: shown_texts._left_out_by_role(
            ["user"], lambda messages: render(tokenizer, messages, tokenize=False), ("a key of its own",)
        ),
    ],
)
def test_a_limit_in_a_probe_of_a_template_is_no_refusal(probe, monkeypatch):
    monkeypatch.setitem(limits._raised, "template_s", 1)
    tokenizer = byte_tokenizer("qwen3")
    tokenizer.chat_template = f"{LOOP}{{{{ messages }}}}"
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    with pytest.raises(limits.TooLarge, match="the chat template: did not end in time"):
        probe(tokenizer)


@pytest.mark.parametrize(
    "text", ["{{ '{a}'.format() }}", "{{ 'a'[5:].index('b') }}", "{{ 1 | dictsort }}", "{{ 1 // 0 }}"]
)
def test_what_a_template_raises_is_one_line(text):
    tokenizer = byte_tokenizer("qwen3")
    tokenizer.chat_template = text
    with pytest.raises(UserError, match="the chat template: cannot render this conversation"):
        render(tokenizer, [{"role": "user", "content": "x"}])
    assert training_templates.training_version(tokenizer, text) is None


def test_limits_are_raised_by_name():
    limits.raise_limits(["pixels=5", "columns=7"])
    assert (limits.limit("pixels"), limits.limit("columns")) == (5, 7)
    for wrong in ("pixel=5", "pixels", "pixels=", "pixels=-1", "pixels=0", "pixels=1e9", "=1"):
        with pytest.raises(UserError, match=f"--limits: {wrong} "):
            limits.raise_limits(["values=5", wrong])
    assert limits.limit("values") == limits.DEFAULTS["values"][0], "a refusal changes none"


def test_bombs_take_little_memory(tmp_path):
    """All of them in one process of 1.5 GB, which has room for the libraries and no bomb."""
    for kind, make in BOMBS.items():
        make(tmp_path / kind)
    code = f"""
import resource, sys
from trainer.datasets.files.input_checks import check_file
from trainer import limits
limits._raised.update(unpacked_mb=16, ratio=4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import os
for name in sorted(os.listdir({str(tmp_path)!r})):
    try:
        check_file(os.path.join({str(tmp_path)!r}, name), name)
        print("read", name)
    except Exception as error:
        assert isinstance(error, limits.UserError), error
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(ended.stdout) < 250 << 10, ended.stdout + ended.stderr  # KiB
