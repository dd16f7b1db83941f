"""Checkpoint folders without ranks: shards of any layout, damage of any kind, rotation, and a full disk."""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT, in_fork

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints import shards as shards_module
from trainer.checkpoints.piece_index import INDEX, PieceIndex
from trainer.checkpoints.shards import (
    ShardReader,
    TensorShard,
    boxes_of_stretch,
    flat_shard,
    full_shards,
    whole_shard,
    write_shards,
)
from trainer.errors import UserError


def write_checkpoint(folder, value: float = 0.0) -> str:
    """A small checkpoint of two ranks: a matrix cut by rows, a vector cut flat, a scalar, and state."""
    temporary = f"{folder}.tmp"
    os.makedirs(temporary)
    matrix, vector = torch.arange(12.0).view(4, 3) + value, torch.arange(5.0)
    entries, pieces = {}, []
    for rank in range(2):
        rows = matrix[2 * rank : 2 * rank + 2]
        shards = [TensorShard("weight/matrix", (4, 3), (2 * rank, 0), (2, 3), None, rows)]
        shards.append(flat_shard("weight/vector", (5,), 3 * rank, vector[3 * rank : 3 * rank + 3]))
        shards.append(whole_shard("step/matrix", torch.tensor(7.0), is_written=rank == 0))
        own, parts = write_shards(shards, temporary, f"pieces-{rank:05d}")
        entries |= own
        pieces += parts
    entries[INDEX] = PieceIndex.of_pieces(pieces).write(temporary)
    store.write_json(f"{temporary}/state.json", {"step": 7})
    store.commit(temporary, str(folder), entries)
    return str(folder)


# --- shards


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_boxes_of_a_stretch_hold_its_elements_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    full = torch.arange(size).view(shape)
    boxes = boxes_of_stretch(tuple(shape), start, stop)
    parts = [full[tuple(slice(o, o + n) for o, n in zip(*box))].flatten() for box in boxes]
    assert [int(i) for part in parts for i in part] == list(range(start, stop))


def cut(kind: str, key: str, tensor: torch.Tensor, num_parts: int) -> list[TensorShard]:
    """The shards of a tensor as `num_parts` ranks hold them."""
    if kind == "flat":
        size = -(-tensor.numel() // num_parts)
        flat = tensor.flatten()
        starts = range(0, tensor.numel(), size)
        return [flat_shard(key, tuple(tensor.shape), start, flat[start : start + size]) for start in starts]
    dim = min({"rows": 0, "columns": 1}[kind], tensor.ndim - 1)
    shards, at = [], 0
    for part in tensor.tensor_split(num_parts, dim):
        offset = tuple(at if d == dim else 0 for d in range(tensor.ndim))
        shards.append(TensorShard(key, tuple(tensor.shape), offset, tuple(part.shape), None, part.contiguous()))
        at += part.shape[dim]
    return shards


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5)])
@pytest.mark.parametrize("written", ["flat", "rows", "columns"])
@pytest.mark.parametrize("read", ["flat", "rows", "columns"])
@pytest.mark.parametrize("indexed", [True, False])
def test_pieces_of_one_layout_are_read_by_another(tmp_path, shape, written, read, indexed):
    """With an index, and without one, as older checkpoints are."""
    tensor, indexes = torch.randn(shape), []
    for rank, shard in enumerate(cut(written, "weight/x", tensor, 3)):
        other = whole_shard(f"weight/{rank}", torch.zeros(2, 2, 2, 2), True)
        indexes.append(PieceIndex.of_pieces(write_shards([other, shard], str(tmp_path), f"pieces-{rank}")[1]))
    if indexed:
        PieceIndex.merged(indexes).write(str(tmp_path))
    reader = ShardReader(str(tmp_path))
    for num_parts in (1, 2, 4):
        for shard in cut(read, "weight/x", tensor, num_parts):
            assert torch.equal(reader.read(shard), shard.tensor)
    assert torch.equal(reader.read_full("weight/x"), tensor)


@pytest.mark.parametrize("kind", ["flat", "rows", "columns"])
def test_of_512_files_a_rank_opens_only_its_own(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # 512 flushes take the disk ten seconds
    tensors = {"weight/matrix": torch.randn(1024, 512), "exp_avg/vector": torch.randn(2048)}
    shards = [[cut(kind, key, tensor, 512)[rank] for key, tensor in tensors.items()] for rank in range(512)]
    indexes = []
    for rank in range(512):
        written = write_shards(shards[rank], str(tmp_path), f"pieces-{rank:05d}")[1]
        indexes.append(PieceIndex.of_pieces(written))
    PieceIndex.merged(indexes).write(str(tmp_path))
    opened, count = [], shards_module.safe_open
    monkeypatch.setattr(shards_module, "safe_open", lambda path, **kw: opened.append(path) or count(path, **kw))
    for rank in (0, 300, 511):
        opened.clear()
        reader = ShardReader(str(tmp_path))
        assert all(torch.equal(reader.read(shard), shard.tensor) for shard in shards[rank])
        assert [os.path.basename(path) for path in opened] == [f"pieces-{rank:05d}-00000.safetensors"]


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """{(layout, ranks): (files written, files opened, bytes read by each rank, bytes of the checkpoint)}"""
    script, folder = ROOT / "test/checkpoints/opened_files.py", tmp_path_factory.mktemp("opened")
    code, output = in_fork(str(script), str(folder), timeout=300)
    assert code == 0, output[-4000:]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    return {(layout, num_ranks): found for layout, num_ranks, *found in lines}


def test_the_number_of_opened_files_does_not_grow_with_the_ranks(counts):
    """Real ranks save and load. Also, replicas share the writing."""
    for layout in ("fsdp2", "zero"):
        most = [max(counts[layout, num_ranks][1]) for num_ranks in (2, 4, 8)]
        assert most == sorted(most, reverse=True), counts
        for num_ranks in (2, 4, 8):
            written, opened, *_ = counts[layout, num_ranks]
            # its own, and those of rank 0, which writes what is whole on every rank
            assert all(count <= own + written[0] for own, count in zip(written, opened)), counts
    written = counts["hsdp", 4][0]
    assert max(written) < 2 * min(written), written


def test_a_resume_reads_a_checkpoint_once(counts):
    """It is checked, too. Replicas read the same parts; what is whole on every rank is small."""
    for (layout, _), (_, _, read, size) in counts.items():
        assert size <= sum(read) <= 1.1 * size * (2 if layout == "hsdp" else 1), counts


def test_full_tensors_that_other_ranks_still_write_are_not_read(tmp_path):
    """At the end of a portable save, each rank reads shards while other ranks write full tensors."""
    tensor, pieces = torch.randn(6, 4), []
    for rank, shard in enumerate(cut("rows", "weight/x", tensor, 3)):
        pieces += write_shards([shard], str(tmp_path), f"pieces-{rank}")[1]
    PieceIndex.of_pieces(pieces).write(str(tmp_path))
    write_shards([whole_shard("weight/x", tensor, True)], str(tmp_path), "full-00001")
    (tmp_path / "full-00002-00000.safetensors").write_bytes(b"torn")
    assert torch.equal(ShardReader(str(tmp_path)).read_full("weight/x"), tensor)


def test_a_hole_and_another_shape_are_errors(tmp_path):
    tensor = torch.randn(6, 4)
    write_shards(cut("rows", "weight/x", tensor, 3)[1:], str(tmp_path), "pieces")
    reader = ShardReader(str(tmp_path))
    with pytest.raises(UserError, match=r"holds 8 of 24 elements of weight/x|holds 16 of 24"):
        reader.read_full("weight/x")
    for shard in (whole_shard("weight/x", torch.zeros(6, 5), True), whole_shard("weight/y", tensor, True)):
        with pytest.raises(UserError, match="weight/"):
            reader.read(shard)


def test_torch_distributed_checkpoint_reads_boxes_and_the_portable_form(tmp_path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    tensor = torch.randn(6, 4)
    native, portable = tmp_path / "native", tmp_path / "portable"
    native.mkdir()
    portable.mkdir()
    for rank, shard in enumerate(cut("rows", "weight/x", tensor, 3)):
        write_shards([shard], str(native), f"pieces-{rank}")
    write_shards(full_shards(ShardReader(str(native))), str(portable), "full")
    for folder in (native, portable):
        state = {"weight/x": torch.zeros(6, 4)}
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
        assert torch.equal(state["weight/x"], tensor)


# --- damage


def test_a_file_that_the_disk_cuts_or_changes_at_an_end_is_an_error(tmp_path, monkeypatch):
    data, fsync = random.Random(0).randbytes(3 * store.CHUNK_BYTES + 5), os.fsync
    faults = {"cut": lambda f: os.ftruncate(f, 100), "start": lambda f: os.pwrite(f, b"?!", 0)}
    faults["end"] = lambda f: os.pwrite(f, b"?!", len(data) - 2)
    assert store.write_file(str(tmp_path / "file"), data) == store.hash_file(str(tmp_path / "file"))
    for number, fault in enumerate(faults.values()):
        monkeypatch.setattr(os, "fsync", lambda handle, fault=fault: (fsync(handle), fault(handle)))
        with pytest.raises(OSError, match="reads back other bytes"):
            store.write_file(str(tmp_path / f"file{number}"), data)


def test_an_intact_checkpoint_has_no_damage(tmp_path):
    folder = write_checkpoint(tmp_path / "step_1")
    assert store.find_damage(folder) is None
    assert all(store.find_damage(folder, part, 3) is None for part in range(3))


def test_every_file_truncated_flipped_or_deleted_is_noticed(tmp_path):
    folder = write_checkpoint(tmp_path / "step_1")
    names = store.files_below(folder)
    assert len(names) == 5 and INDEX in names
    generator = random.Random(0)
    for name in names:
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            content = file.read()
        damaged = [content[:-1], content[: len(content) // 2], b"", content + b" "]
        for at in {0, len(content) - 1, *(generator.randrange(len(content)) for _ in range(40))}:
            damaged.append(content[:at] + bytes([content[at] ^ (1 << generator.randrange(8))]) + content[at + 1 :])
        for wrong in damaged:
            with open(path, "wb") as file:
                file.write(wrong)
            found = store.find_damage(folder)
            assert found and name in found, (name, found)
            if name != store.MANIFEST:
                assert bool(store.find_damage(folder, by_size=True)) == (len(wrong) != len(content))
        os.remove(path)
        assert name in store.find_damage(folder)
        with open(path, "wb") as file:
            file.write(content)
    assert store.find_damage(folder) is None


# --- rotation


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    root = str(tmp_path)
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path / f"step_{step}")
    store.set_best(root, f"{root}/step_1")
    removed = store.rotate(root, max_num=2, max_bytes=None)
    assert [os.path.basename(path) for path in removed] == ["step_2", "step_3"]
    assert sorted(os.listdir(root)) == ["best", "step_1", "step_4"]
    assert os.path.samefile(f"{root}/best", f"{root}/step_1")
    store.rotate(root, max_num=1, max_bytes=1)
    assert sorted(os.listdir(root)) == ["best", "step_1", "step_4"], "the best and the newest must stay"


def test_rotation_keeps_what_was_written_although_it_cannot_be_read_for_a_moment(tmp_path):
    root = str(tmp_path)
    _, written = write_checkpoint(tmp_path / "step_1"), write_checkpoint(tmp_path / "step_2")
    (tmp_path / "step_2/manifest.json").rename(tmp_path / "manifest")
    store.rotate(root, max_num=1, max_bytes=None, written=written)
    assert (tmp_path / "step_2").exists() and (tmp_path / "step_1").exists()
    (tmp_path / "manifest").rename(tmp_path / "step_2/manifest.json")
    assert [os.path.basename(path) for path in store.rotate(root, 1, None, written)] == ["step_1"]


def test_the_order_is_that_of_writing_although_the_clock_jumps_back(tmp_path, monkeypatch):
    """A checkpoint of an older version has no number, and a time. A damaged one never counts as the newest to keep."""
    root, hour, clock = str(tmp_path), 3600.0, store.time.time
    old = store.read_manifest(write_checkpoint(tmp_path / "step_2"))
    content = {"files": old, "written_at": clock() + hour}
    (tmp_path / "step_2/manifest.json").write_bytes(store._manifest_bytes(content))
    assert store.find_damage(f"{root}/step_2") is None
    for step, jump in ((4, 0), (6, -hour), (8, -2 * hour), (5, -3 * hour)):  # the run went back to 4 after 8
        monkeypatch.setattr(store.time, "time", lambda jump=jump: clock() + jump)
        write_checkpoint(tmp_path / f"step_{step}")
    steps = [os.path.basename(path)[5:] for path in store.list_checkpoints(root)]
    assert steps == ["2", "4", "6", "8", "5"]
    assert store.checkpoints_to_load(root, store.LATEST)[0].endswith("step_5")
    (tmp_path / "step_8/manifest.json").write_bytes(b"{")
    assert [os.path.basename(path)[5:] for path in store.list_checkpoints(root)] == ["2", "4", "6", "5", "8"]
    store.rotate(root, max_num=1, max_bytes=None)
    assert sorted(os.listdir(root)) == ["step_5"], "the newest intact one stays"
    write_checkpoint(tmp_path / "step_5")
    write_checkpoint(tmp_path / "step_1")
    assert store.checkpoints_to_load(root, store.LATEST)[0].endswith("step_1")


def test_rotation_by_size_and_by_order_of_writing(tmp_path):
    root = str(tmp_path)
    for step in (30, 40, 20):  # the run went back, so 20 is the newest
        write_checkpoint(tmp_path / f"step_{step}")
    assert [os.path.basename(path) for path in store.list_checkpoints(root)] == ["step_30", "step_40", "step_20"]
    size = store.folder_bytes(f"{root}/step_20")
    store.rotate(root, max_num=None, max_bytes=2.5 * size)
    assert sorted(os.listdir(root)) == ["step_20", "step_40"]


def test_unfinished_folders_are_no_checkpoints_and_are_removed(tmp_path):
    root = str(tmp_path)
    write_checkpoint(tmp_path / "step_1")
    write_checkpoint(tmp_path / "step_2")
    os.replace(f"{root}/step_2", f"{root}/step_2.old.tmp")  # killed while a new step_2 replaced it
    (tmp_path / "step_3.tmp").mkdir()
    (tmp_path / "file.tmp").write_text("x")
    assert len(store.list_checkpoints(root)) == 1
    store.remove_temporaries(root)
    assert sorted(os.listdir(root)) == ["step_1", "step_2"]
    assert store.find_damage(f"{root}/step_2") is None


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write_checkpoint(tmp_path / "step_1", value=0.0)
    folder = write_checkpoint(tmp_path / "step_1", value=5.0)
    assert store.find_damage(folder) is None
    assert ShardReader(folder).read_full("weight/matrix")[0, 0] == 5.0
    assert os.listdir(tmp_path) == ["step_1"]


# --- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB. The test is skipped if mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_raises_and_leaves_the_older_checkpoint_intact(small_disk):
    old = write_checkpoint(small_disk / "step_1")
    temporary = small_disk / "step_2.tmp"
    temporary.mkdir()
    with pytest.raises(OSError, match="No space left on device"):
        write_shards([whole_shard("weight/x", torch.zeros(1 << 20), True)], str(temporary), "pieces")
    assert store.find_damage(old) is None
    store.remove_temporaries(str(small_disk))
    assert os.listdir(small_disk) == ["step_1"]


def test_a_file_size_limit_raises(tmp_path):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shards([whole_shard("weight/x", torch.zeros(1 << 20), True)], str(tmp_path), "pieces")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_manifest_is_plain_json_that_names_every_file(tmp_path):
    folder = write_checkpoint(tmp_path / "step_1")
    with open(f"{folder}/manifest.json") as file:
        manifest = json.load(file)
    assert manifest["files"].keys() == set(store.files_below(folder)) - {"manifest.json"}
    shutil.rmtree(folder)


def test_the_best_of_an_older_checkpoint_is_what_the_link_names(tmp_path):
    root = str(tmp_path)
    assert store.linked_step(root, 50) is None
    (tmp_path / "step_40").mkdir()
    store.set_best(root, str(tmp_path / "step_40"))
    assert store.linked_step(root, 50) == 40 and store.linked_step(root, 39) is None
