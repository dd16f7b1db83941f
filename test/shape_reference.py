"""The public shapes of rows, and the ids and masks of their conversations by a few lines over the tokenizer."""

import functools
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FOLDER = Path(__file__).parent / "datasets" / "public_shapes"
SHAPES = sorted(path.stem for path in FOLDER.glob("*.json"))
BODY = "{% for m in messages %}{{ HEAD + m.role + '\n' + m.content + END + '\n' }}{% endfor %}"
BODY += "{% if add_generation_prompt %}{{ HEAD + 'assistant\n' }}{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + c.function.arguments|tojson + '</call>' }}"
)
CALLS += "{% endfor %}{{ END + '\n' }}{% endfor %}"
WITH_TOOLS = "{% if tools %}{{ HEAD + 'tools\n' + tools|tojson + END + '\n' }}{% endif %}"
WITH_TOOLS += BODY.replace(" + END + '\n' }}{% endfor %}", " }}" + CALLS)
MARKS = {"BPE": ("<|im_start|>", "<|im_end|>"), "SentencePiece": ("# ", "</s>")}
MARKS["BPE with another eos"] = MARKS["BPE"]


@functools.cache
def tokenizer_of(kind: str, has_tools: bool = False):
    head, end = MARKS[kind]
    template = (WITH_TOOLS if has_tools else BODY).replace("HEAD", f"'{head}'").replace("END", f"'{end}'")
    if kind != "SentencePiece":
        file = DATA / "tokenizers" / "torchtune-tiny-bpe-2k" / "tokenizer.json"
        eos = "<|im_end|>" if kind == "BPE" else "<|endoftext|>"
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=eos)
    else:
        tokenizer = AutoTokenizer.from_pretrained(DATA / "models" / "stories260K-hf")
    tokenizer.chat_template = template
    return tokenizer


def expected(kind: str, turns: list, opened: bool = False) -> tuple[list[int], list[int]]:
    """Ids and mask of turns, from the whole text and the places of its tokens."""
    tokenizer, (head, end) = tokenizer_of(kind), MARKS[kind]
    if turns[0][0] == "text":
        ids = tokenizer(turns[0][1])["input_ids"]
        return [*ids, tokenizer.eos_token_id], [0] + [1] * len(ids)
    text, trained = "", []
    for role, content, has_loss in turns:
        text += f"{head}{role}\n"
        if has_loss:
            trained.append((len(text), len(text + content + end)))
        text += f"{content}{end}\n"
    text += f"{head}assistant\n" if opened else ""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = found["offset_mapping"]
    # a token that merges over the border belongs to the answer
    return found["input_ids"], [int(any(a < stop and b > start for start, stop in trained)) for a, b in places]
