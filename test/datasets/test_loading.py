"""load_rows: every kind of set gives its rows unchanged, mixes are exact, and a fault is told by file and line."""

import gzip
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.datasets.conversations.messages import messages_of
from trainer.datasets.files.loading import load_rows, local_paths, place_of_row
from trainer.datasets.files.read_faults import find_json_fault
from trainer.datasets.files.stream_rows import open_rows, parsed
from trainer.datasets.rows import lookup, text_value
from trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="real data absent: ../shared/data")
ROWS = [{"q": "one", "a": "1"}, {"q": 'two, "too"\nlines', "a": ""}, {"q": "ünï – 三", "a": "NA"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))


def load(names, **options):
    return load_rows(str(names), flag="--dataset", **{"split": "train", **options})


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def error_of(names, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        load(names, **options)
    assert "\n" not in str(caught.value)
    error = caught.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)  # no chained traceback
    return error


def write_set(kind: str, folder: Path) -> Path:
    table = datasets.Dataset.from_list(ROWS)
    if kind in ("jsonl", "folder of jsonl"):
        path = write_jsonl(folder / "rows.jsonl", ROWS)
    elif kind == "json":
        path = folder / "rows.json"
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif kind in ("csv", "folder of csv"):
        path = folder / "rows.csv"
        table.to_csv(str(path))
    elif kind == "parquet":
        path = folder / "rows.parquet"
        table.to_parquet(str(path))
    elif kind == "arrow":
        path = folder / "rows.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.data.table.schema) as writer:
            writer.write_table(table.data.table)
    elif kind == "save_to_disk":
        path = folder / "saved"
        table.save_to_disk(str(path))
    else:
        path = folder / "splits"
        datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(path))
    return folder if kind.startswith("folder") else path


KINDS = ["jsonl", "json", "csv", "parquet", "arrow", "folder of jsonl", "folder of csv", "save_to_disk", "DatasetDict"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_set_gives_the_rows_as_written(kind, tmp_path, capfd):
    path = write_set(kind, tmp_path)
    capfd.readouterr()
    assert load(path).to_list() == ROWS
    assert capfd.readouterr() == ("", "")


def test_an_edited_file_is_read_anew(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"a": "old"}])
    old = load(path)
    new = load(write_jsonl(path, [{"a": "new"}]))
    assert (old["a"][:], new["a"][:]) == (["old"], ["new"])
    assert old._fingerprint != new._fingerprint  # so no sample tokenized from the old rows is found again


def test_csv_values_stay_texts(tmp_path):
    (tmp_path / "x.csv").write_text("q,a\n007,1.50\n,None\n")
    assert load(tmp_path / "x.csv").to_list() == [{"q": "007", "a": "1.50"}, {"q": "", "a": "None"}]


CSV = {
    "rows end with a comma": ("q,a\nhi,yes,\nho,no,\n", [("hi", "yes"), ("ho", "no")]),
    "one row does": ("q,a\nhi,yes\nho,no,,\n", [("hi", "yes"), ("ho", "no")]),
    "a blank first line": ("\n \nq,a\n007,1.50\n", [("007", "1.50")]),
    "newlines in quotes": ('q,a\n"x\n\ny",1\n', [("x\n\ny", "1")]),
}


@pytest.mark.parametrize("content, rows", CSV.values(), ids=CSV)
def test_csv_rows_keep_their_columns(content, rows, tmp_path):
    (tmp_path / "x.csv").write_text(content)
    assert load(tmp_path / "x.csv").to_list() == [{"q": q, "a": a} for q, a in rows]


CSV_FAULTS = {
    "a field too many": ("q,a\nhi,yes,more\nho,no,\n", "line 2", "3 fields"),
    "after a quoted newline": ('q,a\n"x\ny",1,\nho,no,more\n', "line 4", "3 fields"),
    "in a later chunk": ("q,a\n" + "x,y\n" * 10_000 + "x,y,z\n", "line 10002", "3 fields"),
    "a field too few": ("q,a,b\nx,y,\nx,q2\n", "line 3", "2 fields where the header has 3"),
    "a name twice": ("\nq,q\n1,2\n", "line 2", "'q'"),
    "no name": ("q,\n1,2\n", "line 1", "column 2"),
    "semicolons": ("q;a\nhi;yes\n", "line 1", "one column, whose name has ';': q;a"),
    "tabs": ("q\ta\nhi\tyes\n", "line 1", "one column"),
}


@pytest.mark.parametrize("content, place, found", CSV_FAULTS.values(), ids=CSV_FAULTS)
def test_a_csv_row_or_header_that_does_not_fit_is_named(content, place, found, tmp_path):
    (tmp_path / "x.csv").write_text(content)
    error = error_of(tmp_path / "x.csv")
    assert error.where == f"--dataset {tmp_path / 'x.csv'} {place}" and found in error.found


def test_csv_files_of_a_folder_have_the_same_columns(tmp_path):
    (tmp_path / "a.csv").write_text("q,a\n1,2\n")
    (tmp_path / "b.csv").write_text("a,q\n4,3\n")
    assert load(tmp_path).to_list() == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]
    (tmp_path / "b.csv").write_text("q,b\n3,4\n")
    assert error_of(tmp_path).where.endswith("b.csv line 1")


@needs_data
def test_real_file_has_the_rows_that_json_reads():
    path = DATA / "gsm8k" / "test.jsonl"
    assert load(path).to_list() == [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_splits_of_a_folder(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"a": "train"}])
    write_jsonl(tmp_path / "test.jsonl", [{"a": "test"}])
    assert load(tmp_path, split="test")["a"][:] == ["test"]
    error = error_of(tmp_path, split="dev")
    assert error.where == f"--dataset {tmp_path}" and "'dev'" in error.found
    assert sorted(error.allowed.split(", ")) == ["test", "train"]


@pytest.mark.parametrize(
    "names", [("a.jsonl", "b.csv"), ("train-00000.jsonl", "extra.jsonl"), ("train.jsonl", "d/x.jsonl")]
)
def test_a_file_of_a_folder_that_belongs_to_no_split_is_refused(names, tmp_path):
    for name in (*names, ".hidden.jsonl", ".git/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": "x"}\n' if name.endswith("jsonl") else "a\nx\n")
    error = error_of(tmp_path)
    assert error.where == f"--dataset {tmp_path}" and error.found == f"{names[1]} would not be read"
    (tmp_path / names[1]).unlink()
    assert load(tmp_path)["a"][:] == ["x"]


@pytest.mark.parametrize("name", ["d[1].jsonl", "d?.jsonl", "d*.jsonl", "d].jsonl", "d[a-z].csv"])
def test_a_name_is_no_pattern(name, tmp_path, monkeypatch):
    for other in ("d1.jsonl", "dd.jsonl", "da.csv"):
        (tmp_path / other).write_text('{"a": "other"}\n' if other.endswith("jsonl") else "a\nother\n")
    (tmp_path / name).write_text('{"a": "own"}\n' if name.endswith("jsonl") else "a\nown\n")
    assert load(tmp_path / name)["a"][:] == ["own"]
    folder = tmp_path / "f[1]"
    folder.mkdir()
    (tmp_path / name).rename(folder / name)
    monkeypatch.chdir(folder)
    assert load(name)["a"][:] == ["own"]
    assert "patterns" in error_of(folder).found  # and not the files of a folder f1
    (folder / "a::b.csv").write_text("a\nx\n")
    assert "'::'" in error_of("a::b.csv").found


def test_unknown_split_of_a_file_and_of_a_saved_dict(tmp_path):
    assert error_of(write_set("jsonl", tmp_path), split="test").allowed == "train"
    assert error_of(write_set("DatasetDict", tmp_path), split="dev").allowed == "train, test"


def test_max_samples_takes_the_first_rows_of_each_set(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"x": f"a{i}"} for i in range(5)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"x": f"b{i}"} for i in range(2)])
    assert load(f"{a},{b}", max_samples=3)["x"][:] == ["a0", "a1", "a2", "b0", "b1"]
    assert error_of(a, max_samples=0).where == "--max_samples"


def test_sets_without_probs_follow_each_other_and_lack_nothing_but_columns(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"x": "1"}])
    b = write_jsonl(tmp_path / "b.jsonl", [{"x": "2", "y": "3"}])
    assert load(f"{a}, {b}").to_list() == [{"x": "1", "y": None}, {"x": "2", "y": "3"}]


def test_mix_keeps_its_proportions_until_a_set_is_used_up(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"x": f"a{i:03}"} for i in range(300)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"x": f"b{i:03}"} for i in range(100)])
    mix = load(f"{a},{b}", probs="9,1", seed=1)["x"][:]
    for letter in "ab":  # each set in its order, no row twice
        drawn = [x for x in mix if x[0] == letter]
        assert drawn == [f"{letter}{i:03}" for i in range(len(drawn))]
    assert sum(x[0] == "a" for x in mix) == 300
    # 300 rows of a at 9 : 1 come with 33 of b on average, standard deviation 6.1
    assert 12 <= sum(x[0] == "b" for x in mix) <= 54
    assert mix == load(f"{a},{b}", probs="0.9,0.1", seed=1)["x"][:]
    assert mix != load(f"{a},{b}", probs="9,1", seed=2)["x"][:]


@pytest.mark.parametrize("probs", ["0.5", "0.5,0.3,0.2", "0.5,0", "0.5,-1", "0.5,nan", "0.5,inf", "0.5,half", "0.5,"])
def test_probs_that_do_not_fit(probs, tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"x": "1"}])
    assert error_of(f"{a},{a}", probs=probs).where == "--dataset_probs"


def test_sets_whose_columns_have_other_types(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"x": "1"}])
    b = write_jsonl(tmp_path / "b.jsonl", [{"x": 1}])
    text = str(error_of(f"{a},{b}"))
    assert "'x'" in text and f"string in {a}" in text and f"int64 in {b}" in text


def test_conversations_with_other_keys_and_wide_texts_are_mixed_unchanged(tmp_path):
    plain = [{"m": [{"role": "user", "content": "5"}]}]
    named = [{"m": [{"content": '{"a": 1}', "role": "user", "name": "n"}]}]
    a, b = write_jsonl(tmp_path / "a.jsonl", plain), write_jsonl(tmp_path / "b.jsonl", named)
    assert load(f"{a},{b}").to_list() == plain + named
    datasets.Dataset(pa.table({"x": pa.array(["wide"], pa.large_string())})).to_parquet(str(tmp_path / "w.parquet"))
    c = write_jsonl(tmp_path / "c.jsonl", [{"x": "narrow"}])
    assert load(f"{tmp_path / 'w.parquet'},{c}")["x"][:] == ["wide", "narrow"]


def test_a_key_that_first_appears_after_megabytes_is_read(tmp_path):
    path = write_jsonl(tmp_path / "late.jsonl", [{"a": "x" * 10_000}] * 1200 + [{"a": "y", "b": "late"}])
    rows = load(path)
    assert rows[1200] == {"a": "y", "b": "late"} and rows[0]["b"] is None


ARGUMENTS = [
    {"n": 1},
    {"n": 1.5, "f": 0.12345678901234566},
    {"n": 12345678901234567890, "big": 10**30, "opt": None},
    {"date": "2024-05-01"},
    {"date": "5", "n": "text", "list": [1, "x", None, {"y": None}]},
]


@pytest.mark.parametrize("kind", ["jsonl", "json", "over several lines"])
def test_lists_and_objects_come_back_as_written(kind, tmp_path):
    call = [{"m": [{"role": "user", "calls": None}, {"role": "a", "calls": [{"arguments": a}]}]} for a in ARGUMENTS]
    rows = [{"o": a, **row, "t": "x", "l": ["2024-05-01"]} for a, row in zip(ARGUMENTS, call, strict=True)]
    lines = "\n".join(json.dumps(row, indent=1 if kind == "over several lines" else None) for row in rows)
    path = tmp_path / ("x.json" if kind == "json" else "x.jsonl")
    path.write_text(json.dumps(rows) if kind == "json" else lines)
    assert [json.dumps(row) for row in load(path)] == [json.dumps(row) for row in rows]  # 1.0 is not 1 here


@pytest.mark.parametrize("dates", [["2024-05-01", "2024-05-02"], [None, "2024-05-01T10:00:00"], ["2024-05-01", "text"]])
def test_dates_are_texts(dates, tmp_path):
    assert load(write_jsonl(tmp_path / "x.jsonl", [{"a": date} for date in dates]))["a"][:] == dates


LATE = {
    "list": (None, ["x"]),
    "text": (None, "x"),
    "date": ("x", "2024-05-01"),
    "date first": ("2024-05-01", "x"),
    "fraction": (1, 1.5),
    "whole": (1.5, 1),
    "null": ({"n": 1}, None),
}


@pytest.mark.parametrize("first, second", LATE.values(), ids=LATE)
def test_columns_hold_what_comes_megabytes_or_a_file_later(first, second, tmp_path, monkeypatch):
    from trainer.datasets.files import json_files

    monkeypatch.setattr(json_files, "CHUNK_BYTES", 64)
    rows = [{"k": "x" * 40, "a": first}] * 5 + [{"k": "x" * 40, "a": second, "b": "late"}] * 5
    expected = [{"b": None, **row} for row in rows]
    assert list(load(write_jsonl(tmp_path / "x.jsonl", rows))) == expected
    (tmp_path / "f").mkdir()
    write_jsonl(tmp_path / "f" / "a.jsonl", rows[:5])
    write_jsonl(tmp_path / "f" / "b.jsonl", rows[5:])
    assert list(load(tmp_path / "f")) == expected


def test_columns_of_other_types_in_two_files_of_a_folder(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"a": "x"}])
    write_jsonl(tmp_path / "b.jsonl", [{"a": 5}])
    assert "'a' is int64" in error_of(tmp_path).found and "b.jsonl" in error_of(tmp_path).found


def test_arguments_of_other_tools_are_no_arguments(tmp_path):
    """Arrow's objects have all keys of all rows; as messages, or in a mix with a JSON file, they show only a row's own."""
    messages = [[{"role": "a", "tool_calls": [{"name": "f", "arguments": {key: 1}}]}] for key in "xy"]
    datasets.Dataset(pa.table({"m": messages})).to_parquet(str(tmp_path / "x.parquet"))
    found = [messages_of(row["m"], "m") for row in load(tmp_path / "x.parquet")]
    assert found == [[{**message, "content": ""} for message in row] for row in messages]
    path = write_jsonl(
        tmp_path / "y.jsonl", [{"m": [{"role": "a", "tool_calls": [{"name": "f", "arguments": {"z": None}}]}]}]
    )
    mixed = [row["m"] for row in load(f"{tmp_path / 'x.parquet'},{path}")]
    assert mixed == [*messages, json.loads(path.read_text())["m"]]
    assert messages_of(mixed[2], "m")[0]["tool_calls"] == [{"name": "f", "arguments": {"z": None}}]  # which was written
    call = datasets.Features({"role": datasets.Value("string"), "tool_calls": datasets.List(datasets.Json())})
    saved = datasets.Dataset.from_dict({"m": [mixed[2]]}, features=datasets.Features({"m": datasets.List(call)}))
    saved.save_to_disk(str(tmp_path / "saved"))
    assert [row["m"] for row in load(f"{tmp_path / 'saved'},{path}")] == [mixed[2], mixed[2]]


FAULTS = {
    "broken": ('{"a": "x"}\n\n{"a": "y"\n{"a": "z"}\n', "line 3", ["broken JSON"]),
    "cut off": ('{"a": "x"}\n{"a": "y', "line 2", ["broken JSON"]),
    "a list": ('{"a": "x"}\n["x"]\n', "line 2", ["list", "object"]),
    "a number": ('{"a": "x"}\n5\n', "line 2", ["number", "object"]),
    "number for text": ('{"a": "x"}\n{"a": null}\n{"a": 5}\n', "line 3", ["'a'", "number", "string in line 1"]),
    "text for number": ('{"b": "x", "a": 5}\n{"a": "x"}\n', "line 2", ["'a'", "string", "number in line 1"]),
    "object for list": ('{"a": ["x"]}\n{"a": {"b": 1}}\n', "line 2", ["'a'", "object", "list in line 1"]),
    "list for text": ('{"a": "x"}\n{"a": ["x"]}\n', "line 2", ["'a'", "list", "string in line 1"]),
    "flag for text": ('{"a": "x"}\n{"a": true}\n', "line 2", ["'a'", "boolean", "string in line 1"]),
}


@pytest.mark.parametrize("content, place, words", FAULTS.values(), ids=FAULTS)
def test_a_faulty_line_is_named(content, place, words, tmp_path, capfd):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    error = error_of(path)
    assert error.where == f"--dataset {path} {place}"
    assert all(word in error.found for word in words), error.found
    assert capfd.readouterr() == ("", "")


def test_a_faulty_item_of_a_json_array(tmp_path):
    (tmp_path / "x.json").write_text('[{"a": "x"},\n {"a": 5}]')
    assert error_of(tmp_path / "x.json").where.endswith("x.json item 2")
    (tmp_path / "x.json").write_text('[{"a": "x"},\n {"a": "y"]')
    assert error_of(tmp_path / "x.json").where.endswith("x.json line 2")


def test_a_faulty_line_in_a_folder_names_the_file(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.jsonl").write_text('{"q": "x", "a": "y"}\n{"q"}\n')
    assert str(tmp_path / "b.jsonl") + " line 2" in error_of(tmp_path).where


def test_a_line_that_is_not_utf8(tmp_path):
    lines = {"x.jsonl": (b'{"a": "x"}', b'{"a": "\xe9"}'), "x.csv": (b"a", b"\xe9"), "x.txt": (b"x", b"\xe9")}
    for name, (first, second) in lines.items():
        (tmp_path / name).write_bytes(first + b"\n" + second + b"\n")
        error = error_of(tmp_path / name)
        assert error.where == f"--dataset {tmp_path / name} line 2" and error.found == "not UTF-8 text"
        assert "iconv" in error.allowed


def test_half_of_a_character_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": "x"}\n{"a": ["\\ud83d\\ude00", "x\\ud83d"]}\n')
    error = error_of(tmp_path / "x.jsonl")
    assert error.where.endswith("line 2") and error.found == "\\ud83d is one half of a character"


def test_a_column_of_images_that_is_empty_in_every_row_is_left_out(tmp_path):
    for empty in ([], None, "[]", ""):
        path = write_jsonl(tmp_path / "x.jsonl", [{"a": "x", "images": empty}, {"a": "y", "images": empty}])
        assert load(path).column_names == ["a"]
    for filled in (["a.png"], "a.png"):
        path = write_jsonl(tmp_path / "x.jsonl", [{"a": "x", "images": filled}, {"a": "y", "images": None}])
        assert "images" in load(path).column_names
    pq.write_table(pa.table({"a": ["x"], "images": pa.array([[]], pa.list_(pa.string()))}), tmp_path / "x.parquet")
    assert load(tmp_path / "x.parquet").column_names == ["a"]


EMPTY = [("x.jsonl", ""), ("x.jsonl", "\n\n"), ("x.json", "[]"), ("x.csv", "a,b\n"), ("x.csv", "")]


@pytest.mark.parametrize("name, content", EMPTY)
def test_an_empty_set(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    error = error_of(tmp_path / name)
    assert error.where == f"--dataset {tmp_path / name}" and error.found == "no rows"


CURED = {
    "FILE.tsv": "q\ta\nx\t007\n",
    "FILE.parquet": [[("role", "user"), ("content", "x")], [("role", "assistant"), ("content", "007")]],
    "FILE.arrow": [[("role", "user"), ("content", "x")], [("role", "assistant"), ("content", "007")]],
}


@pytest.mark.parametrize("name", CURED)
def test_a_kind_that_is_not_read_comes_with_a_command_that_writes_one_that_is(name, tmp_path):
    if isinstance(CURED[name], str):
        (tmp_path / name).write_text(CURED[name])
    else:
        table = pa.table({"messages": pa.array([CURED[name]], pa.list_(pa.map_(pa.string(), pa.string())))})
        if name.endswith("parquet"):
            pq.write_table(table, tmp_path / name)
        else:
            with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    error = error_of(tmp_path / name)
    assert "\n" not in str(error)
    command = error.instead.removeprefix("Write its rows as .jsonl: ")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, cwd=tmp_path, check=True)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "007"}]
    expected = {"q": "x", "a": "007"} if name.endswith("tsv") else {"messages": messages}
    assert load(tmp_path / "FILE.jsonl").to_list() == [expected]
    for other, word in (("x.json5", "json5.load"), ("x.xlsx", "read_excel"), ("x.csv.gz", "Unpack it first")):
        (tmp_path / other).write_text("x")
        assert word in error_of(tmp_path / other).instead


def test_what_is_not_there(tmp_path):
    for name in (tmp_path / "no.jsonl", "./no.csv", "data/no.parquet", "a/b/c/d"):
        error = error_of(name)
        assert error.where == f"--dataset {name}" and error.found == "file not found"
    assert error_of(tmp_path).found == "no data files in this folder"
    assert error_of(" , ").where == "--dataset"


def test_files_of_the_wrong_kind(tmp_path):
    (tmp_path / "x.doc").write_text("text")
    assert ".jsonl" in error_of(tmp_path / "x.doc").allowed
    (tmp_path / "x.parquet").write_text("no parquet")
    error = error_of(tmp_path / "x.parquet")
    assert error.where.endswith("x.parquet") and "cannot be read" in error.found
    (tmp_path / "x.csv").write_text("a,b\n1,2\n1,2,3\n")
    assert error_of(tmp_path / "x.csv").where.endswith("x.csv line 3")


TWO_FAULTS = """
import sys
from trainer.datasets.files.loading import load_rows
from trainer.errors import UserError
for name in sys.argv[1:]:
    try:
        load_rows(name, flag="--dataset", split="train")
    except UserError as error:
        print(error)
"""


def test_faults_are_one_line_each_and_a_name_unknown_to_the_hub_says_both(tmp_path):
    broken = tmp_path / "x.jsonl"
    broken.write_text('{"a": "x"}\n{"a"\n')
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TWO_FAULTS, str(broken), "no/such-set"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    assert first.startswith(f"--dataset {broken} line 2: broken JSON")
    assert second.startswith("--dataset no/such-set: no such file or folder, and the hub does not give it: ")
    assert "Failed" not in run.stderr and "Generating" not in run.stderr  # no log line, no bar of the library


json_values = st.dictionaries(st.sampled_from("abc"), st.text(max_size=8), min_size=1, max_size=3)


@settings(max_examples=50, deadline=None)
@given(st.lists(json_values, min_size=1, max_size=6), st.data())
def test_the_first_broken_line_is_found_wherever_it_is(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines))
    assert find_json_fault(str(path)) is None
    broken = data.draw(st.integers(0, len(lines) - 1))
    lines[broken:] = [line[:-1] for line in lines[broken:]]
    path.write_text("\n".join(lines))
    place, found = find_json_fault(str(path))
    assert place == f"line {broken + 1}" and "broken JSON" in found


def test_a_mix_ends_with_the_first_set_that_is_used_up_and_repeats_no_row(tmp_path):
    sizes = {"a": 30, "b": 300, "c": 3000}
    paths = [write_jsonl(tmp_path / f"{k}.jsonl", [{"x": f"{k}{i}"} for i in range(n)]) for k, n in sizes.items()]
    mix = load(",".join(map(str, paths)), probs="0.2,0.5,0.3")["x"][:]
    counts = Counter(name[0] for name in mix)
    assert len(set(mix)) == len(mix) and counts["a"] == 30  # the smallest for its odds
    assert 40 < counts["b"] < 120 and 20 < counts["c"] < 80  # 75 and 45 expected


def test_a_number_that_is_none_stops_no_file(tmp_path):
    """Python writes NaN and Infinity; they may stand in columns that no flag names."""
    for rows in ([{"s": math.nan}, {"s": 3.0}], [{"s": 1.0, "l": []}, {"s": math.inf, "l": [math.nan]}]):
        found = list(load(write_jsonl(tmp_path / "x.jsonl", rows)))
        assert json.dumps(found) == json.dumps(rows)


def test_a_card_says_which_files_of_a_folder_are_read(tmp_path):
    card = "---\nconfigs:\n- config_name: default\n  data_files: main/*.jsonl\n---\n"
    (tmp_path / "README.md").write_text(card)
    for name in ("main", "other"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train.jsonl", [{"a": name}])
    assert load(tmp_path)["a"][:] == ["main"]
    (tmp_path / "README.md").write_text("# A set without a card\n")
    (tmp_path / "other/train.jsonl").rename(tmp_path / "extra.jsonl")
    assert "extra.jsonl would not be read" in error_of(tmp_path).found


def test_compressed_files_are_read(tmp_path):
    with gzip.open(tmp_path / "x.jsonl", "wt") as file:
        file.write('{"a": "x", "l": [1]}\n')
    assert load(tmp_path / "x.jsonl").to_list() == [{"a": "x", "l": [1]}]


def test_lines_of_a_text_are_rows(tmp_path):
    (tmp_path / "x.txt").write_text("first\n\nthird, with a comma\n")
    assert load(tmp_path / "x.txt").to_list() == [{"text": t} for t in ("first", "", "third, with a comma")]


def test_compressed_names_patterns_and_first_rows(tmp_path):
    for name, text in (("a", "1"), ("b", "2"), ("c", "3")):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.write(f'{{"x": "{text}"}}\n' * 3)
    write_jsonl(tmp_path / "d.jsonl", [{"x": "4"}, {"x": "5"}])
    assert load(tmp_path / "b.jsonl.gz")["x"][:] == ["2"] * 3
    assert load(tmp_path / "[ac].*.gz")["x"][:] == ["1"] * 3 + ["3"] * 3
    assert load(f"{tmp_path}/*.jsonl#1,{tmp_path}/a.jsonl.gz#2")["x"][:] == ["4", "1", "1"]
    assert load(tmp_path / "d.jsonl#9")["x"][:] == ["4", "5"]
    assert local_paths(f"{tmp_path}/*.jsonl#1") == ([f"{tmp_path}/d.jsonl"], 1)
    (tmp_path / "set#1").mkdir()
    write_jsonl(tmp_path / "set#1" / "train.jsonl", [{"x": "6"}, {"x": "7"}])  # a name that exists is that name
    assert load(tmp_path / "set#1")["x"][:] == ["6", "7"]
    (tmp_path / "d.csv").write_text("x\n1\n")
    assert "several kinds: csv, json" in error_of(tmp_path / "d.*").found
    assert error_of(tmp_path / "no*.jsonl").found == "file not found"
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    assert "broken.jsonl.gz" in error_of(tmp_path / "broken.jsonl.gz").where


def test_a_configuration_of_a_hub_set(monkeypatch):
    asked = []
    rows = {"train": datasets.Dataset.from_dict({"x": ["1", "2"]})}
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or rows)
    assert load("org/name:main#1")["x"][:] == ["1"] and load("org/name")["x"][:] == ["1", "2"]
    assert asked == [("org/name", "main"), ("org/name", None)]


def test_columns_that_grow_are_found_once(tmp_path, monkeypatch):
    from trainer.datasets.files import json_files

    monkeypatch.setattr(json_files, "CHUNK_BYTES", 64)
    path = write_jsonl(tmp_path / "x.jsonl", [{"k": "x" * 60}] * 5 + [{"k": "x" * 60, "b": "late"}])
    first = load(path).to_list()
    monkeypatch.setattr(json_files, "_tables", None)  # nothing is read again
    assert load(path).to_list() == first and first[-1]["b"] == "late"


@pytest.mark.parametrize("probs", [None, "3,1,2"])
def test_a_row_of_several_files_is_found_in_its_file(tmp_path, probs):
    """Every row says itself where it is. Sets are a file, a pattern, and a folder of files."""
    (tmp_path / "folder").mkdir()
    sizes = {"a.jsonl": 4, "part-1.jsonl": 3, "part-2.jsonl": 5, "folder/x.jsonl": 2, "folder/y.jsonl": 6}
    for name, size in sizes.items():
        write_jsonl(tmp_path / name, [{"text": f"{tmp_path / name} row {row + 1}"} for row in range(size)])
    names = ",".join(str(tmp_path / name) for name in ("a.jsonl#3", "part-*.jsonl", "folder"))
    options = {"probs": probs, "max_samples": 7, "seed": 5}
    rows = load(names, **options)
    assert len(rows) == 3 + 7 + 7 if probs is None else 3 < len(rows) < 17
    for index, row in enumerate(rows):
        assert place_of_row(index, names, flag="--dataset", split="train", **options) == row["text"]
    assert place_of_row(1, str(tmp_path / "a.jsonl"), flag="--dataset", split="train") is None


# --- keys twice, and rows inside one object


TWICE = {
    "flat.jsonl": ('{"a": "1"}\n{"a": "1", "a": "2"}\n', "line 2: the key 'a' twice"),
    "nested.jsonl": ('{"m": [{"c": "x"}]}\n\n{"m": [{"c": "x", "c": "y"}]}\n', "line 3: the key 'c' twice"),
    "array.json": ('[{"a": "1"},\n{"a": "1", "b": [{"c": 1, "c": 2}]}]', "item 2: the key 'c' twice"),
    "rows.json": ('{"version": "1", "data": [{"q": "a"}]}', "rows under its key 'data'. .*jq -c '.data"),
    "indented.json": ('{\n "rows": [\n  {"q": "a"}\n ]\n}', "rows under its key 'rows'"),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_key_twice_and_rows_inside_one_object_are_refused(name, tmp_path):
    """json and pyarrow would take the last value in silence."""
    (tmp_path / name).write_text(TWICE[name][0])
    with pytest.raises(UserError, match=f"{name}.*{TWICE[name][1]}"):
        load_rows(str(tmp_path / name), flag="--dataset", split="train")


def test_a_name_twice_in_parquet_is_refused(tmp_path):
    message = pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["content", "content"])
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1], message)}), tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 1
    with pytest.raises(UserError, match=r"a\.parquet: two columns or keys are named 'content'"):
        load_rows(str(tmp_path / "a.parquet"), flag="--dataset", split="train")


def test_the_mark_of_utf8_is_no_text_and_a_carriage_return_parts_no_line(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"\xef\xbb\xbfone \r\n\ttwo\x0b\x0c\x00\xe2\x80\xa8\n")
    second.write_bytes(b"\xef\xbb\xbfthree")
    texts = [row["text"] for row in load(tmp_path / "*.txt")]
    assert texts == ["one ", "\ttwo\x0b\x0c\x00\u2028", "three"]
    second.write_bytes(b"one\n50%\r100%\n")
    with pytest.raises(UserError, match=r"b.txt line 2: a carriage return inside the line .*jsonl"):
        load(second)
    stream = tmp_path / "a.jsonl"
    stream.write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\n"}\n')
    rows, _ = open_rows(str(stream), flag="--dataset", split="train", probs=None, max_samples=None, seed=1)
    assert [row for block in rows.iter(10) for row in parsed(block)] == [{"text": "a\r\n"}]


def test_a_csv_field_with_text_behind_its_closing_quote_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('q,a\n1,2\n"one" two,3\n')
    with pytest.raises(UserError, match=r"a.csv line 3: text behind the closing quote"):
        load(path)
    path.write_text('q,a\n"say ""hi""\r\nnow",it is "so"\n')
    assert load(path)[0]["a"] == 'it is "so"'


NUMBER_TEXTS = ["1.50", "1.0", "1e5", "100", "-0.10", "1e-07", "0.1000000000000000055", "2.5", "-0.0", "1E+2"]


@pytest.mark.parametrize("kind", ["lines", "array", "nested", "lines with a list", "two files", "stream"])
def test_a_number_of_json_keeps_its_text_as_an_answer(kind, tmp_path):
    key = "of.a" if kind == "nested" else "a"
    rows = [f'{{"q": "x", "a": {text}}}' for text in NUMBER_TEXTS]
    if kind == "nested":
        rows = [f'{{"q": "x", "of": {{"a": {text}, "b": [1.50, "\\u00e9"]}}}}' for text in NUMBER_TEXTS]
    if kind == "lines with a list":
        rows = [row.replace('"x"', '["x"]') for row in rows]
    path = tmp_path / "a.jsonl"
    path.write_text("[" + ",".join(rows) + "]" if kind == "array" else "\n".join(rows))
    names = str(path)
    if kind == "two files":
        (tmp_path / "b.jsonl").write_text('{"q": "x", "a": 2.5}\n{"q": "x", "a": 7.25}\n{"a": null}\n')
        names = f"{tmp_path}/b.jsonl,{path}"
    if kind == "stream":
        stream, _ = open_rows(names, flag="--dataset", split="train", probs=None, max_samples=None, seed=1)
        found = [row for block in stream.iter(100) for row in parsed(block)]
    else:
        found = [row for row in load(names) if lookup(row, key) is not None]
    texts = [text_value(lookup(row, key), "a", numbers=True) for row in found]
    assert texts == ["2.5", "7.25"] * (kind == "two files") + NUMBER_TEXTS
    assert [lookup(row, key) for row in found][-1] == 100.0  # still numbers


@pytest.mark.parametrize("texts", [["1.0"], ["1.0", "2.0"], ["1", "2.5"], ["1", "2.0"], ["3.5", "7"]])
@pytest.mark.parametrize("kind", ["lines", "array", "two files"])
def test_numbers_beside_each_other_keep_their_texts(kind, texts, tmp_path):
    rows = [f'{{"q": "x", "a": {text}}}' for text in texts]
    parts = [rows] if kind != "two files" else [[row] for row in rows]
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.jsonl").write_text("[" + ",".join(part) + "]" if kind == "array" else "\n".join(part))
    found = load(f"{tmp_path}/*.jsonl")
    assert [text_value(row["a"], "a", numbers=True) for row in found] == texts
    assert [row["a"] for row in found] == [float(text) for text in texts]


def test_columns_of_plain_numbers_stay_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "\\"a\\": 1.50", "a": 1.5, "b": 1}\n{"q": "x", "a": 2.25, "b": 2}\n')
    assert [str(load(path).features[name].dtype) for name in "qab"] == ["string", "float64", "int64"]
    path.write_text('{"a": 1.5}\n{"a": "x"}\n{"a": 1.50}\n')
    with pytest.raises(UserError, match=r"line 2: 'a' is a string here but a number in line 1"):
        load(path)
    path.write_text('{"a": 1.50}\n{"a": true}\n')
    with pytest.raises(UserError, match=r"line 2: 'a' is a boolean here but a number in line 1"):
        load(path)
