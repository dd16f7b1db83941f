"""What can the trainer do with a model? Shrink its architecture, run it in every layout, and print what works."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.compare.zoo import zoo
from trainer.compare.zoo.check_flags import build_parser
from trainer.compare.zoo.tiny import shrink
from trainer.entry import quiet_libraries
from trainer.errors import UserError
from trainer.flags.rules import BACKEND_RULES
from trainer.metrics import counted

LEFT_OUT = ("tp2-ring2", "exact", "exact-split")  # 4 ranks, and runs of another flag; --only can name them
TEMPLATES, WEIGHTS = "templates", "weights"
LAYOUTS = [configuration.name for configuration in zoo.CONFIGURATIONS]
WORDS = {"pass": "works", "refused": "refused", "wrong": "WRONG", "crash": "CRASH", "unchecked": "works?"}


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    work_dir = Path(options.keep or tempfile.mkdtemp(prefix="check-")).resolve()
    bad = True
    try:
        unknown = next((name for name in options.only or () if name not in [*LAYOUTS, TEMPLATES, WEIGHTS]), None)
        if unknown:
            raise UserError("--only", unknown, ", ".join([*LAYOUTS, TEMPLATES, WEIGHTS]))
        work_dir.mkdir(parents=True, exist_ok=True)
        rows, is_trainable = check(options.model, options.only, work_dir, options.timeout)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
        bad = any(zoo.is_bad(row) for row in rows)
        print(summary(rows, work_dir))
    except UserError as error:
        bad = False
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if not options.keep and not bad:
            shutil.rmtree(work_dir, ignore_errors=True)
    return int(bad) or (0 if is_trainable else 2)


def check(model: str, only: list[str] | None, work_dir: Path, timeout: float) -> tuple[list[dict], bool]:
    """Print and return the rows of the table: {"name", "flags", "verdict", "note"}. False: no command trains such a model.

    Raises UserError if there is no such model, or no tiny model of its kind.
    """
    rows: list[dict] = []

    def add_row(name: str, verdict: str, note: str, flags: str = "") -> None:
        rows.append({"name": name, "flags": flags, "verdict": verdict, "note": note})
        shown = flags if verdict == "pass" and flags else f"{flags}: {note}" if verdict == "unchecked" else note
        print(f"{name:<14} {WORDS[verdict]:<8} {shown}", flush=True)

    wanted = only or [name for name in [WEIGHTS, TEMPLATES, *LAYOUTS] if name not in LEFT_OUT]
    folder = _in_own_process(lambda: find_folder(model), work_dir / "folder.json", timeout)
    print(f"{model}: imports, then a tiny model of its kind in each layout", flush=True)
    import_libraries()
    quiet_libraries()
    config = read_config(folder)
    configs = [config] if _has_causal_model(config) else []
    text = config.get_text_config()
    if text is not config and _has_causal_model(text):
        configs.append(text)
    if configs:
        try:
            print(_in_own_process(lambda: heading(folder, configs[0]), work_dir / "heading.json", timeout), flush=True)
        except (UserError, RuntimeError) as error:
            add_row("heading", "refused" if isinstance(error, UserError) else "crash", str(error))
    print(f"\n{'run':<14} {'result':<8} flags, or the reason")
    if WEIGHTS in wanted:
        _add_rows(add_row, lambda: weight_rows(folder, configs), WEIGHTS, work_dir, timeout)
    if TEMPLATES in wanted:
        size = getattr(text, "vocab_size", None)
        _add_rows(add_row, lambda: template_rows(folder, size), TEMPLATES, work_dir, timeout)
    if config not in configs:
        rest = f"; below is its text part, {text.model_type}" if configs else ""
        add_row("model", "refused", f"transformers has no CausalLM for {config.model_type}{rest}")
    if configs:
        run_layouts(configs, [name for name in LAYOUTS if name in wanted], work_dir, timeout, add_row)
    return rows, bool(configs)


def _in_own_process(function: Callable, answer: Path, timeout: float):
    """Return what `function` returns in another process. Raises UserError if it refuses, RuntimeError if it fails."""
    ending = run_ranks(lambda: answer.write_text(json.dumps(function())), 1, answer.with_suffix(".log"), timeout)
    if ending.kind == "refused":
        where, _, found = ending.text.partition(": ")
        raise UserError(where, found)
    if ending.kind != "done":
        raise RuntimeError(ending.text)
    return json.loads(answer.read_text())


def _add_rows(add_row: Callable, function: Callable, name: str, work_dir: Path, timeout: float) -> None:
    """Add the rows that `function` returns. If it refuses or fails, that is a row too."""
    try:
        for row in _in_own_process(function, work_dir / f"{name}.json", timeout):
            add_row(*row)
    except UserError as error:
        add_row(name, "refused", str(error))
    except RuntimeError as error:
        add_row(name, "crash", str(error))


def summary(rows: list[dict], work_dir: Path) -> str:
    bad = [row["name"] for row in rows if zoo.is_bad(row)]
    counts = {word: sum(WORDS[row["verdict"]] == word for row in rows) for word in dict.fromkeys(WORDS.values())}
    text = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    if not bad:
        return f"\n{text}"
    return f"\n{text}\nan error of the trainer: {', '.join(bad)}. Please report it with this table and {work_dir}/model/*.log"


# --- the folder as it is


def find_folder(model: str) -> str:
    """The folder of a model. From the hub come the config, the tokenizer and the chat template, and no weights."""
    if Path(model).is_dir():
        if not (Path(model) / "config.json").exists():
            raise UserError("MODEL", f"{model} contains no config.json", "a Hugging Face model folder")
        return str(Path(model).resolve())
    if Path(model).exists() or model.startswith((".", "/", "~")):
        raise UserError("MODEL", f"{model} is not a folder", "a Hugging Face model folder or hub name")
    from huggingface_hub import snapshot_download  # not at the top: --help does not need it

    patterns = ["*.json", "*.jinja", "*.model", "*.txt"]
    try:
        return snapshot_download(model, allow_patterns=patterns, ignore_patterns=["*.index.json"])
    except Exception as error:  # the hub raises a dozen error types: not found, gated, offline, bad name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError("MODEL", f"{model} is not a folder, and the hub does not give it ({reason})") from None


def read_config(folder: str):
    """The config of a folder, without its quantization. Raises UserError for a broken one, and for remote code."""
    # not at the top: `import_libraries` sets the environment first
    from transformers import CONFIG_MAPPING, AutoConfig

    from trainer.models.model_loading import unreadable

    try:
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8-sig"))
        is_remote = "auto_map" in values and values.get("model_type") not in CONFIG_MAPPING
        if not is_remote:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many types: each class checks its values in its own way
        raise unreadable(folder, "MODEL", error) from None
    if is_remote:
        found = f"{folder} comes with its own code, which check does not run"
        raise UserError("MODEL", found, "an architecture of transformers")
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def _has_causal_model(config) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # not at the top: the environment is set first

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def heading(folder: str, config) -> str:
    """The page of --print_model for the model in its full size, on the meta device."""
    # not at the top: `import_libraries` sets the environment first
    from transformers import AutoModelForCausalLM

    from trainer.models.model_loading import has_sdpa
    from trainer.planning.model_page import format_facts, model_facts, refusals
    from trainer.strategies.options import StrategyOptions, excluded_flags

    attention = "sdpa" if has_sdpa(folder, AutoModelForCausalLM, False) else "eager"
    model = _on_meta(config, attention)
    facts = model_facts(model, folder)
    facts += [("refused", line) for line in refusals(model, folder)]
    excluded = [line for backend in BACKEND_RULES for line in excluded_flags(backend, StrategyOptions())]
    return format_facts([*facts, *(("excluded", line) for line in dict.fromkeys(excluded))])


def _on_meta(config, attention: str = "eager"):
    # not at the top: `import_libraries` sets the environment first
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def weight_rows(folder: str, configs: list) -> list[tuple]:
    """(name, verdict, note) of the weights of the folder: their form, and whether they fit the config."""
    # not at the top: `import_libraries` sets the environment first
    from trainer.model_folders.folder_names import find_weights
    from trainer.model_folders.model_folder import check_weights, quantization
    from trainer.model_folders.quantized_folder import block_size
    from trainer.models.model_loading import resolve_model_folder

    quantized = quantization(folder)
    if quantized:
        block_size(folder, quantized, "--pretrain")
    form = (
        f"{quantized.get('quant_method')}: dequantized on loading" if quantized else "not quantized: read as they are"
    )
    try:
        find_weights(folder)
    except UserError:
        return [(WEIGHTS, "pass", f"{form} (none here: only the config was read)")]
    resolve_model_folder(folder)
    unread = check_weights(_on_meta(configs[0]), folder, "--pretrain") if configs else []
    note = (
        f"{counted(len(unread), 'tensor is', 'tensors are')} not part of the trained model, such as {unread[0]}"
        if unread
        else "complete"
    )
    return [(WEIGHTS, "pass", f"{form}; {note}")]


def template_rows(folder: str, vocab_size: int | None) -> list[tuple]:
    """(name, verdict, note, flags) of the tokenizer and of each kind of conversation."""
    # not at the top: `import_libraries` sets the environment first
    from trainer.datasets.conversations import training_templates
    from trainer.datasets.conversations.rendering import chat_template
    from trainer.datasets.conversations.templates import GENERATION_TAG, render_chat
    from trainer.datasets.conversations.tokens import trains_stop
    from trainer.datasets.samples.stops import NO_END, NO_STOP, NO_STOP_CURE
    from trainer.models.model_loading import check_tokens, load_tokenizer

    tokenizer = load_tokenizer(folder)
    if vocab_size and len(tokenizer) > vocab_size:
        check_tokens(tokenizer, vocab_size, folder, "--pretrain")
    template = chat_template(tokenizer)
    version = training_templates.training_version(tokenizer, template)
    known = next((name for name in training_templates.names() if training_templates.read(name) == version), None)
    source = f"the training template {known}" if known else "its generation marks"
    rows = []
    for name, flags, multiturn, messages, tools in CONVERSATIONS:
        try:
            ids, mask = render_chat(tokenizer, messages, multiturn=multiturn, tools=tools)
            if not trains_stop(tokenizer, ids, mask):
                raise UserError("--dataset", f"{NO_STOP}: {NO_END}", NO_STOP_CURE)
            marked = known or GENERATION_TAG.search(template)
            note = f"{flags} (masked by {source if marked else 'comparing texts'}: {sum(mask)} of {counted(len(ids), 'token')})"
            if name == "thoughts":
                learned = tokenizer.decode([token for token, trained in zip(ids, mask) if trained])
                note += (
                    ": the thoughts are trained"
                    if THOUGHT["reasoning_content"] in learned
                    else ": the template drops the thoughts"
                )
            rows.append((name, "pass", note))
        except UserError as error:
            rows.append((name, "refused", str(error)))
    return rows


QUESTION, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}
MORE, THOUGHT = {"role": "user", "content": "And 2 + 2?"}, {"reasoning_content": "2 and 2 are 4."}
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
TOOL = {
    "name": "add",
    "description": "Add numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
CHAT, LAST = "--apply_chat_template", {"role": "assistant", "content": "It is 4."}
CONVERSATIONS = (
    ("chat", CHAT, False, [QUESTION, ANSWER], None),
    ("multiturn", f"{CHAT} --multiturn", True, [QUESTION, ANSWER, MORE, LAST], None),
    ("thoughts", f"{CHAT}, with reasoning_content", False, [QUESTION, ANSWER, MORE, {**LAST, **THOUGHT}], None),
    (
        "tools",
        f"{CHAT} --multiturn, with tools",
        True,
        [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "2"},
            ANSWER,
        ],
        [{"type": "function", "function": TOOL}],
    ),
)


# --- the tiny model


def run_layouts(configs: list, names: list[str], work_dir: Path, timeout: float, add_row: Callable) -> None:
    """Run a tiny model of the first of `configs` that can be built and trained by the plain loop."""

    def add_cell(configuration, cell) -> None:
        ranks = f"{' '.join(configuration.args)} ({counted(configuration.nproc, 'rank')})"
        add_row(configuration.name, cell["verdict"], cell["note"], ranks)

    zoo.write_demo(work_dir, timeout)
    problems = []
    for config in configs:
        try:
            tiny = shrink(config)
        except Exception as error:  # of many types: each class checks its sizes in its own way
            problems.append(f"{config.model_type}: {' '.join(str(error).split())[:200]}")
            continue
        row = zoo.run_model("model", names, work_dir, timeout, tiny, add_cell)
        if row["problem"] is None:
            return
        problems.append(f"{config.model_type}: {row['problem']}")
    raise UserError("MODEL", f"its architecture cannot be shrunk ({'; '.join(problems)})", "another model")


if __name__ == "__main__":
    sys.exit(main())
