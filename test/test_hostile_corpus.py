"""Files, folders and requests of strangers, each read by what a run reads it with: right, or one line.

A row of the table CASES is a name, what makes the files, what reads them, and what is said. Each is read in a fork of
one process, which has the imports. Its memory, its CPU time and its time are measured. To see all endings:

    python test/test_hostile_corpus.py FOLDER [PART OF A NAME]
"""

import asyncio
import gzip
import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tarfile
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from launch import ROOT, run_process

MEMORY_MB, CPU_SECONDS, SECONDS = 700, 6, 30  # of one case, beyond what the imports have taken
LIMITS = {
    "unpacked_mb": 64,
    "pixels": 1_000_000,
    "template_s": 1,
    "template_mb": 256,
    "row_mb": 32,
    "json_mb": 32,
    "files": 300,
    "text_mb": 1,
}  # smaller ones, so that bombs are small here
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 400_000
ROW = '{"messages": [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "2 1"}]}'
GOOD = "-"  # in place of a text: it is read, and right


class Case(NamedTuple):
    make: Callable[[Path], object]  # puts its files into an empty folder
    read: Callable[[Path], object]  # as in production; a text that it returns is what it says
    said: str  # a regular expression of the line


# --- makers


def put(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def sparse(name: str, size: int) -> Callable[[Path], object]:
    """A file of zeros that takes no space."""

    def make(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return make


def hole(name: str, size: int) -> Callable[[Path], object]:
    """A row, a part that was never written, and a row."""

    def make(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.write(b"a,b\n1,2\n")
            file.seek(size)
            file.write(b"1,2\n")

    return make


def device(name: str) -> Callable[[Path], object]:
    return lambda folder: replaced(folder / name).symlink_to("/dev/zero")


def fifo(name: str) -> Callable[[Path], object]:
    return lambda folder: os.mkfifo(replaced(folder / name))


def many_files(folder: Path) -> None:
    for number in range(400):
        (folder / f"{number}.jsonl").touch()


def circle(folder: Path) -> None:
    put("rows.jsonl", ROW)(folder)
    for name in "xy":
        (folder / name).symlink_to(".")


def replaced(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def of_demo(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    """The demo's model folder with changes."""

    def make(folder: Path) -> None:
        shutil.copytree(folder.parent / "demo/model", folder, dirs_exist_ok=True)
        for change in changes:
            change(folder)

    return make


def more_templates(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A change in the folder of further chat templates."""

    def make(folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        change(folder / "additional_chat_templates")

    return make


def of_run(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    """A finished run with a certificate and a checkpoint, with changes."""

    def make(folder: Path) -> None:
        shutil.copytree(folder.parent / "run", folder, dirs_exist_ok=True, symlinks=True)
        for change in changes:
            change(folder)

    return make


def edited(name: str, **values) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def tensors(header: str | dict, body: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a safetensors file."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(shape: list[int], start: int = 0, end: int = 4, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def tar(*members: tuple[str, int | bytes], kind: str = "w") -> Callable[[Path], object]:
    """rows.tar with members (name, content or its size)."""

    def make(folder: Path) -> None:
        with tarfile.open(folder / "rows.tar", kind) as archive:
            for name, content in members:
                member = tarfile.TarInfo(name)
                data = bytes(content) if isinstance(content, int) else content
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))

    return make


def linked_tar(target: str, kind: bytes) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        with tarfile.open(folder / "rows.tar", "w") as archive:
            member = tarfile.TarInfo("0.png")
            member.type, member.linkname = kind, target
            archive.addfile(member)

    return make


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "rows.jsonl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(128 << 20))


def parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array(["a" * 100_000] * 4000)}), folder / "rows.parquet", compression="zstd")


def png(width: int, height: int, text: bytes = b"") -> bytes:
    """A PNG of one colour, with a compressed text of that many zeros."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(bytes((width // 8 + 1) * min(height, 20_000)))
    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    text = part(b"zTXt", text) if text else b""
    return b"\x89PNG\r\n\x1a\n" + head + text + part(b"IDAT", pixels) + part(b"IEND", b"")


def image(kind: str, size: tuple[int, int], frames: int = 1) -> bytes:
    from PIL import Image

    content, picture = io.BytesIO(), Image.new("L", size)
    picture.save(content, kind, **({"save_all": True, "append_images": [picture] * frames} if frames > 1 else {}))
    return content.getvalue()


def template(text: str) -> Callable[[Path], object]:
    return of_demo(put("chat_template.jinja", text))


# --- readers


def rows(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        from trainer.datasets.files.loading import load_rows

        _ = load_rows(str(folder / name), flag="--dataset", split="train")[:5]

    return read


def pixels(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        from trainer.datasets.files.image_files import decode

        decode(str(folder / name))

    return read


def trained(*more: str) -> Callable[[Path], object]:
    """One step of train_sft on the folder, as a rank. `more` has flags in place of the usual ones."""

    def read(folder: Path) -> None:
        from trainer.cli import train_sft

        demo = folder.parent / "demo"
        flags = ["--pretrain", str(folder), "--dataset", f"{demo}/sft.jsonl", "--apply_chat_template", "--no_save"]
        flags += ["--max_len", "64", "--max_samples", "8", "--train_batch_size", "2", "--micro_train_batch_size", "2"]
        flags += ["--max_steps", "1", "--output_dir", f"{folder.parent}/out_{folder.name}", "--param_dtype", "fp32"]
        flags += [flag.format(folder=folder, demo=demo) for flag in more]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        train_sft.run(flags)

    return read


RESUMED = trained("--pretrain", "{demo}/model", "--load_checkpoint", "{folder}/checkpoints/step_2", "--max_steps", "3")


RESUMED_THERE = trained(
    *["--pretrain", "{demo}/model", "--output_dir", "{folder}", "--load_checkpoint", "--max_steps", "3"]
)


STREAMED = trained(
    *["--pretrain", "{demo}/model", "--dataset", "{folder}/rows.tar", "--streaming", "--input_key", "json"]
)


STREAMED_LINES = trained("--pretrain", "{demo}/model", "--dataset", "{folder}/rows.jsonl", "--streaming")
CHATS = trained("--pretrain", "{demo}/model", "--dataset", "{folder}/rows.jsonl")


ENDLESS = f'{{"event": "start", "total_steps": {1 << 52}}}\n{{"step": 1, "loss": 1, "step_time": 1e299}}\n'


def chat(role: str, content: str, **more) -> str:
    """A line of a conversation, with an answer."""
    turns = [{"role": role, "content": content}, {"role": "assistant", "content": "1"}]
    return json.dumps({"messages": turns, **more}) + "\n"


def verified(folder: Path) -> str:
    """What `verify_run` finds."""
    from trainer.compare.certificates.verification import describe, verify

    lines = describe(verify(str(folder))).splitlines()
    return "; ".join(line.strip() for line in lines if not line.endswith((" ok", " not checked", " FAIL")))


def shown(folder: Path) -> str:
    """The page of a run, its live view and its last samples."""
    from rich.console import Console

    from trainer.reports import live_view, report_page, run_rows

    run = run_rows.read_rows(str(folder))
    page = report_page.page([run])
    Console(file=io.StringIO()).print(live_view.view(run, 100, 5.0))
    return "script runs" if "<script>alert" in page else ""


def facts(folder: Path) -> None:
    """Of a folder that prepare_data wrote."""
    from trainer.datasets.samples.prepared import _facts_of

    _facts_of(str(folder), "--dataset")


def exported(folder: Path) -> None:
    from trainer.runs.exported_models import export

    export(str(folder), f"{folder}_out")


def judged(folder: Path) -> None:
    """A run that goes on reads the scores that its judge gave."""
    from trainer.rollout.rewards.judge import Cache

    assert Cache(str(folder), 0, 10).get("a") == (0.5,)


def rollouts(folder: Path) -> None:
    from trainer.rollout.rollouts_file import read_rollouts

    read_rollouts(str(folder / "rollouts.jsonl"))


def adapter(folder: Path) -> None:
    from trainer.model_folders.adapter_tensors import read_tensors
    from trainer.models.model_loading import resolve_adapted_model

    resolve_adapted_model(str(folder), "--pretrain")
    read_tensors(str(folder), "--pretrain")


def served(body: bytes, status: int) -> Callable[[Path], object]:
    """A request to serve_rm gets its status, and the next good request its scores."""

    def read(_: Path) -> None:
        from serve_load import ask, message, request, serving

        def score(prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:
            return [float(len(text.encode())) for text in responses]

        with serving(score, read_timeout=1.0) as port:
            found = asyncio.run(ask(port, body))[0]
            good, answer = asyncio.run(ask(port, message(request(3), None)))
        assert found == status, f"status {found}"
        assert good == 200 and all(answer["rewards"]), answer

    return read


def posted(text: str) -> bytes:
    return f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def frame(data: bytes) -> Callable[[Path], object]:
    """A frame of a sandbox's process, as the trainer reads it."""

    def read(_: Path) -> str:
        from trainer.rollout import peers

        ours, theirs = socket.socketpair()
        theirs.sendall(data)
        try:
            peers.read_object(peers.read_frame(ours, time.monotonic() + 1))
        except peers.BadAnswer as error:
            return str(error)
        return "read"

    return read


def answer(text: str) -> Callable[[Path], object]:
    """The JSON of a server."""

    def read(_: Path) -> str:
        from trainer.rollout import peers

        try:
            peers.read_json(text.encode())
        except peers.BadAnswer as error:
            return str(error)
        return "read"

    return read


def framed(text: str) -> bytes:
    return struct.pack(">I", len(text.encode())) + text.encode()


def nothing(_: Path) -> None:
    pass


def code(folder: Path) -> None:
    """A module of a tokenizer that leaves a file when it is imported."""
    mark = f"open({str(folder.parent / 'executed')!r}, 'w').close()"
    (folder / "own.py").write_text(f"from transformers import PreTrainedTokenizerFast as Own\n{mark}\n")


def executed(read: Callable[[Path], object]) -> Callable[[Path], object]:
    """Whether code of the folder ran while it was read."""

    def look(folder: Path) -> str:
        mark = folder.parent / "executed"
        mark.unlink(missing_ok=True)
        try:
            read(folder)
        finally:
            ran = mark.exists()
        return "executed" if ran else ""

    return look


# --- the table

CODE = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
SINGLE, CARD = "model.safetensors", "tokenizer.json"


def add_token(number: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = json.loads((folder / CARD).read_text())
        entry = {"id": number, "content": "<bomb>", "special": False}
        entry |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append(entry)
        (folder / CARD).write_text(json.dumps(content))

    return change


def split_by(pattern: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = json.loads((folder / CARD).read_text())
        content["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        (folder / CARD).write_text(json.dumps(content))

    return change


def replacing(letter: str, text: str, times: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = json.loads((folder / CARD).read_text())
        step = {"type": "Replace", "pattern": {"String": letter}, "content": text}
        content["normalizer"] = {"type": "Sequence", "normalizers": [step] * times}
        (folder / CARD).write_text(json.dumps(content))

    return change


def index(**weight_map: str) -> Callable[[Path], object]:
    return put("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


STEP = "checkpoints/step_2"
CASES = {
    # data files
    "data: gzip bomb": Case(lambda f: (f / "rows.jsonl").write_bytes(gzip.compress(bytes(300 << 20))), rows("rows.jsonl"), "ratio"),
    "data: zip bomb": Case(zipped, rows("rows.jsonl"), "ratio"),
    "data: parquet bomb": Case(parquet, rows("rows.parquet"), "ratio"),
    "data: FIFO": Case(fifo("rows.jsonl"), rows("rows.jsonl"), "no regular file"),
    "data: device": Case(device("rows.jsonl"), rows("rows.jsonl"), "no regular file"),
    "data: device in a folder": Case(device("rows.jsonl"), rows(""), "no data files"),
    "data: deep JSON": Case(put("rows.jsonl", f'{{"a": {DEEP}}}\n'), rows("rows.jsonl"), "."),
    "data: huge whole number": Case(put("rows.jsonl", f'{{"a": {HUGE}, "b": []}}\n'), rows("rows.jsonl"), "."),
    "data: huge number in a list": Case(put("rows.jsonl", f'{{"a": [{HUGE}]}}\n'), rows("rows.jsonl"), "."),
    "data: number beyond 64 bits": Case(put("rows.jsonl", f'{{"a": {"9" * 30}}}\n'), rows("rows.jsonl"), GOOD),
    "data: NaN": Case(put("rows.jsonl", '{"a": NaN, "b": []}\n'), rows("rows.jsonl"), GOOD),
    "data: not UTF-8": Case(put("rows.jsonl", b'{"a": "\xff\xfe"}\n'), rows("rows.jsonl"), "."),
    "data: lone surrogate": Case(put("rows.jsonl", '{"a": "\\ud800", "b": []}\n'), rows("rows.jsonl"), "."),
    "data: NUL bytes": Case(sparse("rows.jsonl", 1 << 20), rows("rows.jsonl"), "."),
    "data: many files": Case(many_files, rows(""), "files"),
    "data: links in a circle": Case(circle, rows(""), "files"),  # each name of x and y is a path
    "data: hole of a TB": Case(sparse("rows.jsonl", 1 << 40), rows("rows.jsonl"), "never written"),
    "data: hole of a TB in a CSV": Case(hole("rows.csv", 1 << 40), rows("rows.csv"), "never written"),
    "data: many columns": Case(put("rows.jsonl", json.dumps({str(n): n for n in range(9000)})), rows("rows.jsonl"), "columns"),
    "data: many columns of CSV": Case(put("rows.csv", ",".join(map(str, range(9000))) + "\n"), rows("rows.csv"), "columns"),
    "data: half a parquet": Case(put("rows.parquet", b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"), rows("rows.parquet"), "."),
    "data: half an arrow": Case(put("rows.arrow", b"ARROW1\0\0" + b"\xff" * 400), rows("rows.arrow"), "."),
    "data: archive in a name": Case(put("rows.jsonl", ROW), rows("zip://a::rows.jsonl"), "."),
    "stream: line without an end": Case(put("rows.jsonl", b"1" * (34 << 20)), STREAMED_LINES, "row_mb"),
    "stream: deep": Case(put("rows.jsonl", f'{{"messages": {DEEP}}}\n'), STREAMED_LINES, "."),
    "chat: long text": Case(put("rows.jsonl", chat("user", "1 " * (2 << 20))), CHATS, "text_mb"),
    "chat: role with a line of its own": Case(put("rows.jsonl", chat("us\nerror: x\x1b[2J", "1")), CHATS, r"us\\nerror: x\\x1b"),
    "chat: deep schema of a tool": Case(put("rows.jsonl", chat("user", "1", tools=DEEP)), CHATS, "."),
    "tar: member outside": Case(tar(("../../out.json", b"{}")), STREAMED, "no key"),
    "tar: gzip bomb": Case(tar(("0.json", 300 << 20), kind="w:gz"), STREAMED, "."),
    "tar: large member": Case(tar(("0.json", 300 << 20)), STREAMED, "row_mb"),
    "tar: deep member": Case(tar(("0.json", DEEP.encode())), STREAMED, "."),
    "tar: symlink": Case(linked_tar("/etc/passwd", tarfile.SYMTYPE), pixels("rows.tar::0.png"), "has no file"),
    "tar: FIFO": Case(linked_tar("", tarfile.FIFOTYPE), pixels("rows.tar::0.png"), "has no file"),
    "tar: damaged": Case(put("rows.tar", b"0.json" + b"\xff" * 2000), pixels("rows.tar::0.png"), "no tar"),
    # images
    "image: many pixels": Case(put("a.png", png(60_000, 60_000)), pixels("a.png"), "no image|pixels"),
    "image: PNG text bomb": Case(put("a.png", png(8, 8, b"a\0\0" + zlib.compress(bytes(200 << 20)))), pixels("a.png"), "."),
    "image: WebP": Case(lambda f: (f / "a.webp").write_bytes(image("WEBP", (4000, 4000))), pixels("a.webp"), "pixels"),
    "image: GIF of frames": Case(lambda f: (f / "a.gif").write_bytes(image("GIF", (900, 900), 60)), pixels("a.gif"), GOOD),
    "image: TIFF of pages": Case(lambda f: (f / "a.tif").write_bytes(image("TIFF", (5000, 5000))), pixels("a.tif"), "pixels"),
    "image: EPS": Case(put("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"), pixels("a.eps"), "no image"),
    "image: half a WebP": Case(put("a.webp", b"RIFF\xff\xff\xff\x7fWEBPVP8L" + bytes(40)), pixels("a.webp"), "no image"),
    "image: FIFO": Case(fifo("a.png"), pixels("a.png"), "no regular file"),
    "image: device": Case(device("a.png"), pixels("a.png"), "no regular file"),
    "image: folder as a column": Case(put("rows.jsonl", '{"text": "a", "images": ["a.png"], "images_folder": "/"}\n'), rows("rows.jsonl"), "images_folder"),
    "image: sparse": Case(sparse("a.png", 1 << 40), pixels("a.png"), "image_mb"),
    # model folders
    "model: good": Case(of_demo(), trained(), GOOD),
    "model: weights as FIFO": Case(of_demo(fifo(SINGLE)), trained(), "no regular file"),
    "model: config as device": Case(of_demo(device("config.json")), trained(), "no regular file"),
    "model: sparse config": Case(of_demo(sparse("config.json", 1 << 40)), trained(), "json_mb"),
    "model: sparse vocabulary": Case(of_demo(sparse("vocab.txt", 1 << 40)), trained(), "json_mb"),
    "model: sparse merges": Case(of_demo(sparse("merges.txt", 1 << 40)), trained(), "json_mb"),
    "model: sparse sentences": Case(of_demo(sparse("tokenizer.model", 1 << 40)), trained(), "json_mb"),
    "model: sparse template": Case(of_demo(more_templates(sparse("x.jinja", 1 << 40))), trained(), "json_mb"),
    "model: FIFO as template": Case(of_demo(more_templates(fifo("x.jinja"))), trained(), "no regular file"),
    "model: zeros as config": Case(of_demo(sparse("config.json", 20 << 20)), trained(), "."),
    "model: deep config": Case(of_demo(put("config.json", DEEP)), trained(), "nested too deep"),
    "model: huge number in the config": Case(of_demo(put("config.json", f'{{"model_type": "llama", "a": {HUGE}}}')), trained(), "."),
    "model: huge width": Case(of_demo(edited("config.json", hidden_size=1 << 40)), trained(), "."),
    "model: many layers": Case(of_demo(edited("config.json", num_hidden_layers=1 << 40)), trained(), "."),
    "model: huge vocabulary": Case(of_demo(edited("config.json", vocab_size=1 << 40)), trained(), "."),
    "model: NaN in the config": Case(of_demo(edited("config.json", rms_norm_eps=float("nan"))), trained(), "."),
    "model: list as its type": Case(of_demo(edited("config.json", model_type=["llama"])), trained(), "no model_type"),
    "model: huge number of the padding token": Case(of_demo(edited("config.json", pad_token_id=10**30)), trained(), "adding_idx"),
    "model: NaN as dropout": Case(of_demo(edited("config.json", attention_dropout=float("nan"))), trained(), GOOD),
    "model: end token that is an object": Case(of_demo(edited("generation_config.json", eos_token_id={"a": 1})), trained(), GOOD),
    "model: negative heads": Case(of_demo(edited("config.json", num_attention_heads=-4)), trained(), "."),
    "model: no heads": Case(of_demo(edited("config.json", num_attention_heads=0)), trained(), "."),
    "model: index outside": Case(of_demo(index(a="../demo/model/model.safetensors")), trained(), "outside"),
    "model: index of a device": Case(of_demo(index(a="/dev/zero")), trained(), "outside"),
    "model: index of a list": Case(of_demo(put("model.safetensors.index.json", '{"weight_map": ["a"]}')), trained(), "."),
    "model: link out of the folder": Case(of_demo(lambda f: replaced(f / SINGLE).symlink_to("/etc/passwd")), trained(), "."),
    "model: folder as config": Case(of_demo(lambda f: replaced(f / "config.json").mkdir()), trained(), "no regular file"),
    "model: folder as tokenizer": Case(of_demo(lambda f: replaced(f / CARD).mkdir()), trained(), "no regular file"),
    "model: circle as tokenizer": Case(of_demo(lambda f: replaced(f / CARD).symlink_to(CARD)), trained(), "no regular file"),
    "model: number as text model": Case(of_demo(edited("config.json", text_config=5)), trained(), "text model"),
    "weights: header of 8 EB": Case(of_demo(put(SINGLE, tensors("{}", length=1 << 63))), trained(), "."),
    "weights: deep header": Case(of_demo(put(SINGLE, tensors(DEEP))), trained(), "."),
    "weights: huge shape": Case(of_demo(put(SINGLE, tensors({"a": tensor([1 << 40, 1 << 40])}, bytes(4)))), trained(), "."),
    "weights: parts that overlap": Case(
        of_demo(put(SINGLE, tensors({"a": tensor([1]), "b": tensor([1])}, bytes(4)))), trained(), "."),
    "weights: negative offset": Case(of_demo(put(SINGLE, tensors({"a": tensor([1], -4, 0)}, bytes(4)))), trained(), "."),
    "weights: unknown dtype": Case(of_demo(put(SINGLE, tensors({"a": tensor([1], dtype="X9")}, bytes(4)))), trained(), "."),
    "weights: name with escapes": Case(of_demo(put(SINGLE, tensors({"\x1b[2J\n": tensor([1])}, bytes(4)))), trained(), "."),
    # tokenizers and templates
    "tokenizer: deep": Case(of_demo(put(CARD, DEEP)), trained(), "nested too deep|tokenizer"),
    "tokenizer: huge number of a token": Case(of_demo(add_token(4_000_000_000)), trained(), GOOD),
    "tokenizer: negative number of a token": Case(of_demo(add_token(-1)), trained(), "."),
    "tokenizer: expression that backtracks": Case(of_demo(split_by("^(([0-9 ])+)+$x")), trained(), "."),
    "tokenizer: broken expression": Case(of_demo(split_by("(((")), trained(), "."),
    "tokenizer: many replacements": Case(of_demo(replacing("1", "<|one|>", times=40)), trained(), GOOD),
    "tokenizer: replacements that grow": Case(of_demo(replacing("1", "1" * 1000, times=4)), trained(), "replaces a letter"),
    "tokenizer: code": Case(of_demo(edited("tokenizer_config.json", **CODE), code), executed(trained()), GOOD),
    "tokenizer: code that is allowed": Case(
        of_demo(edited("tokenizer_config.json", **CODE), code), executed(trained("--trust_remote_code")), "^executed$"),
    "tokenizer: class that is no tokenizer": Case(of_demo(edited("tokenizer_config.json", tokenizer_class="Popen")), trained(), GOOD),
    "template: loops": Case(
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"), trained(), "did not end in time"),
    "template: long range": Case(template("{{ range(10**12) | list }}"), trained(), "."),
    "template: long text": Case(template("{{ 'a' * 9999999999 }}"), trained(), "."),
    "template: text that doubles": Case(
        template("{% set n = namespace(t='a') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}"), trained(), "."),
    "template: wide text": Case(template("{{ '%999999999999d' | format(1) }}"), trained(), "."),
    "template: large power": Case(template("{{ 9**9**9 }}"), trained(), "."),
    "template: calls itself": Case(template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), trained(), "."),
    "template: reaches Python": Case(template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), trained(), "."),
    "template: includes a file": Case(template("{% include '/etc/passwd' %}"), trained(), "."),
    "template: name that a text lacks": Case(template("{{ '{a}'.format() }}"), trained(), "KeyError"),
    "template: broken": Case(template("{% for %}"), trained(), "."),
    # adapters
    "adapter: device": Case(lambda f: (put("adapter_config.json", '{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')(f), device("adapter_model.safetensors")(f)), adapter, "no regular file"),
    "adapter: huge rank": Case(lambda f: (put("adapter_config.json", '{"peft_type": "LORA", "r": 1e400, "lora_alpha": 8}')(f), put("adapter_model.safetensors", tensors({}))(f)), adapter, "."),
    "adapter: deep": Case(lambda f: (put("adapter_config.json", DEEP)(f), put("adapter_model.safetensors", tensors({}))(f)), adapter, "."),
    "adapter: base outside": Case(lambda f: (put("adapter_config.json", '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "evil/name"}')(f), put("adapter_model.safetensors", tensors({}))(f)), adapter, "."),
    # checkpoints
    "adapter: deep, to export": Case(lambda f: (put("adapter_config.json", DEEP)(f), put("adapter_model.safetensors", tensors({}))(f)), exported, "no JSON object"),
    "prepared: deep facts": Case(put("prepared.json", DEEP), facts, "another form"),
    "prepared: facts as FIFO": Case(fifo("prepared.json"), facts, "no regular file"),
    "checkpoint: good": Case(of_run(), RESUMED, GOOD),
    "checkpoint: manifest as FIFO": Case(of_run(fifo(f"{STEP}/manifest.json")), RESUMED, "damaged"),
    "checkpoint: manifest as device": Case(of_run(device(f"{STEP}/manifest.json")), RESUMED, "damaged"),
    "checkpoint: deep manifest": Case(of_run(put(f"{STEP}/manifest.json", DEEP)), RESUMED, "damaged"),
    "checkpoint: sparse manifest": Case(of_run(sparse(f"{STEP}/manifest.json", 1 << 40)), RESUMED, "damaged"),
    "checkpoint: state as device": Case(of_run(device(f"{STEP}/state.json")), RESUMED, "damaged"),
    "checkpoint: state as FIFO": Case(of_run(fifo(f"{STEP}/state.json")), RESUMED, "damaged"),
    "checkpoint: link to itself": Case(of_run(lambda f: replaced(f / STEP / "state.json").symlink_to("state.json")), RESUMED, "damaged"),
    "checkpoint: lock as device": Case(of_run(device(".lock")), RESUMED_THERE, "no regular file"),
    "checkpoint: metrics as device": Case(of_run(device("metrics.jsonl")), RESUMED_THERE, "no regular file"),
    "checkpoint: config as FIFO": Case(of_run(fifo("config.yaml")), RESUMED_THERE, "no regular file"),
    "checkpoint: deep config": Case(of_run(put("config.yaml", DEEP)), RESUMED_THERE, GOOD),
    "checkpoint: metrics elsewhere": Case(
        of_run(lambda f: replaced(f / "metrics.jsonl").symlink_to("../run/metrics.jsonl")), RESUMED_THERE, "of this folder"),
    # certificates and runs
    "certificate: good": Case(of_run(), verified, GOOD),
    "certificate: FIFO": Case(of_run(fifo("certificate.json")), verified, "no regular file"),
    "certificate: device": Case(of_run(device("certificate.json")), verified, "no regular file"),
    "certificate: sparse": Case(of_run(sparse("certificate.json", 1 << 40)), verified, "json_mb"),
    "certificate: deep": Case(of_run(put("certificate.json", DEEP)), verified, "not JSON"),
    "certificate: huge number": Case(of_run(put("certificate.json", f'{{"format": {HUGE}}}')), verified, "not JSON"),
    "certificate: metrics as FIFO": Case(of_run(fifo("metrics.jsonl")), verified, "no regular file"),
    "certificate: metrics as device": Case(of_run(device("metrics.jsonl")), verified, "no regular file"),
    "certificate: sparse metrics": Case(of_run(sparse("metrics.jsonl", 1 << 40)), verified, "."),
    "certificate: rollouts as FIFO": Case(of_run(fifo("rollouts.jsonl")), verified, "rollouts"),
    "certificate: config as device": Case(of_run(device("config.yaml")), verified, "."),
    "certificate: config that grows": Case(
        of_run(put("config.yaml", "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)))),
        verified, "config.yaml"),
    "certificate: config that is code": Case(of_run(put("config.yaml", "a: !!python/object/apply:os.system [exit]\n")), verified, "config.yaml"),
    "certificate: data as FIFO": Case(of_run(edited("certificate.json", data={"files": {"/dev/zero": {"": {"size": 0, "blake2b": "0"}}}, "ledger": {}, "data": ""})), verified, "."),
    "certificate: model outside": Case(of_run(edited("certificate.json", saved_models={"../../etc": {}})), verified, "leaves the run folder"),
    "certificate: losses that never end": Case(of_run(edited("certificate.json", steps={"first": 1, "last": 10**18})), verified, "."),
    "certificate: number beyond all bounds": Case(of_run(edited("certificate.json", total_steps=10**400)), verified, "1329 bits"),
    "answer: millions of lists": Case(nothing, answer("[" + "[]," * 1_500_000 + "0]"), "more than 200000 values"),
    "certificate: name with a line": Case(
        of_run(edited("certificate.json", saved_models={"a\nPASS": {}})), verified, r"a\\nPASS"),
    "run: metrics as FIFO": Case(of_run(fifo("metrics.jsonl")), shown, "."),
    "run: sparse metrics": Case(of_run(sparse("metrics.jsonl", 1 << 40)), shown, "."),
    "run: deep metrics": Case(of_run(put("metrics.jsonl", DEEP + "\n")), shown, "no row"),
    "run: names that are code": Case(of_run(put("metrics.jsonl", '{"step": 1, "<script>alert(1)</script>": 1}\n')), shown, GOOD),
    "run: huge numbers": Case(of_run(put("metrics.jsonl", f'{{"step": 1, "loss": {"9" * 4000}}}\n{{"step": {"9" * 4000}, "loss": 1}}\n')), shown, "no row of a run"),
    "run: time without an end": Case(of_run(put("metrics.jsonl", ENDLESS)), shown, GOOD),
    "run: rollouts as FIFO": Case(of_run(fifo("rollouts.jsonl")), shown, GOOD),
    "rollouts: FIFO": Case(fifo("rollouts.jsonl"), rollouts, "no regular file"),
    "rollouts: device": Case(device("rollouts.jsonl"), rollouts, "no regular file"),
    "rollouts: deep": Case(put("rollouts.jsonl", DEEP + "\n"), rollouts, "line 1"),
    "rollouts: NaN": Case(put("rollouts.jsonl", '{"prompt_ids": [NaN], "score": NaN}\n'), rollouts, "line 1"),
    "rollouts: deep scores of a judge": Case(put("0.jsonl", DEEP + '\n["b", NaN]\n["a", 0.5]\n'), judged, GOOD),
    # requests and answers
    "request: deep": Case(nothing, served(posted("[" * 50_000), 400), GOOD),
    "request: huge number": Case(nothing, served(posted(f'{{"prompts": [{HUGE}], "responses": ["a"]}}'), 400), GOOD),
    "request: NaN": Case(nothing, served(posted('{"prompts": [NaN], "responses": ["a"]}'), 400), GOOD),
    "request: surrogate": Case(nothing, served(posted('{"prompts": ["a"], "responses": ["\\udfff"]}'), 400), GOOD),
    "request: negative length": Case(nothing, served(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400), GOOD),
    "request: length of 1 TB": Case(nothing, served(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n", 413), GOOD),
    "request: two lengths": Case(
        nothing, served(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 90\r\n\r\n{}", 400), GOOD),
    "request: chunks without end": Case(
        nothing, served(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b" " * 65536 + b"\r\n", 408), GOOD),
    "request: long head": Case(nothing, served(b"POST / HTTP/1.1\r\nX: " + b"a" * (1 << 17), 0), GOOD),
    "request: garbage": Case(nothing, served(bytes(range(256)) + b"\r\n\r\n", 400), GOOD),
    "answer: frame of 4 GB": Case(nothing, frame(b"\xff\xff\xff\xff"), "4294967295 bytes"),
    "answer: half a frame": Case(nothing, frame(b"\0\0\1\0x"), "in time"),
    "answer: deep": Case(nothing, frame(framed(DEEP)), "."),
    "answer: huge number": Case(nothing, frame(framed(f'{{"reward": {HUGE[:50_000]}}}')), "."),
    "answer: NaN": Case(nothing, frame(framed('{"reward": NaN}')), "."),
}  # fmt: skip


# --- the process that tries them


def resident_mb(kind: str) -> float:
    """Memory of this process in MB. `kind`: RssAnon, its own, or RssFile, pages of files."""
    return int(Path("/proc/self/status").read_text().split(f"{kind}:")[1].split()[0]) / 1024


def ending_of(case: Case, folder: Path) -> tuple[str, str]:
    """(right, said or traceback; the text)."""
    from trainer.errors import UserError

    try:
        text = case.read(folder)
        return ("said", text) if text else ("right", "")
    except UserError as error:
        return "said", str(error)
    except BaseException:
        return "traceback", traceback.format_exc()[-3000:]


def tried(case: Case, folder: Path) -> dict:
    """How the case ended in a fork, with its CPU seconds and the MB that its memory grew by.

    Pages of files do not count: a fork begins without them, and takes them again as it runs.
    """
    folder.mkdir()
    case.make(folder)
    started, result = time.monotonic(), folder.parent / f"{folder.name}.result"
    if pid := os.fork():
        while not (found := os.wait4(pid, os.WNOHANG))[0]:
            if time.monotonic() - started > SECONDS:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        _, status, used = found
        killed = ("killed", f"status {status}", 0)
        kind, text, other = json.loads(result.read_text()) if result.exists() else killed
        shutil.rmtree(folder, ignore_errors=True)
        return {"kind": kind, "text": text, "cpu": used.ru_utime + used.ru_stime, "mb": used.ru_maxrss / 1024 - other,
                "seconds": time.monotonic() - started}  # fmt: skip
    ending, before = ("killed", ""), resident_mb("RssAnon")
    try:
        handle = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for kind, most in ((resource.RLIMIT_AS, size + (2 << 30)), (resource.RLIMIT_CPU, CPU_SECONDS + 2)):
            resource.setrlimit(kind, (most, most))
        ending = ending_of(case, folder)
    finally:
        result.write_text(json.dumps([*ending, before + resident_mb("RssFile")]))
        os._exit(0)


def main(place: Path, part: str) -> None:
    from trainer import limits
    from trainer.cli import train_sft
    from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
    from trainer.datasets.demos.demo import make_demo

    import_libraries()
    make_demo(str(place / "demo"))
    os.environ["HF_DATASETS_CACHE"] = str(place / "cache")
    common = ["--pretrain", f"{place}/demo/model", "--dataset", f"{place}/demo/sft.jsonl", "--apply_chat_template"]
    common += ["--max_len", "64", "--max_samples", "8", "--train_batch_size", "2", "--micro_train_batch_size", "2"]
    common += ["--max_steps", "3", "--save_steps", "2", "--param_dtype", "fp32", "--certificate"]
    own = [*common, "--output_dir", f"{place}/run"]

    def trained() -> None:
        train_sft.run(own)
        (place / "modules").write_text("\n".join(name for name in sys.modules if name.startswith("transformers.")))

    ending = run_ranks(trained, 1, place / "run_log", 100)
    assert ending.kind == "done", (place / "run_log").read_text()
    for name in (place / "modules").read_text().splitlines():
        importlib.import_module(name)  # or every fork would
    limits._raised.update(LIMITS)
    from trainer.compare.runs.launch import free_port

    os.environ["MASTER_PORT"] = str(free_port())
    for number, (name, case) in enumerate((name, case) for name, case in CASES.items() if part in name):
        print(json.dumps({"name": name, **tried(case, place / f"case_{number}")}), flush=True)


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> dict[str, dict]:
    command = [sys.executable, str(ROOT / "test/test_hostile_corpus.py"), str(tmp_path_factory.mktemp("corpus"))]
    code, output = run_process(command, timeout=400)
    assert code == 0, output[-4000:]
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    return {ending["name"]: ending for ending in found}


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_or_one_line(endings, name):
    ending, said = endings[name], CASES[name].said
    assert ending["kind"] == ("right" if said == GOOD else "said"), ending
    assert len(ending["text"].splitlines()) <= 1 and len(ending["text"]) < 800, ending
    assert said == GOOD or re.search(said, ending["text"]), ending
    assert ending["mb"] < MEMORY_MB and ending["cpu"] < CPU_SECONDS, ending


if __name__ == "__main__":
    main(Path(sys.argv[1]), " ".join(sys.argv[2:]))
