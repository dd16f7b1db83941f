"""Small tokenizers of both kinds, byte-level BPE and SentencePiece-like, with any chat template and control tokens."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
BPE = DATA / "tokenizers" / "torchtune-tiny-bpe-2k" / "tokenizer.json"
LLAMA = DATA / "models" / "stories260K-hf"


def template(end: str, behind: str = "\\n", opening: str = "<|im_start|>assistant\\n") -> str:
    turns = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '" + end + behind + "' }}{% endfor %}"
    )
    return turns + "{% if add_generation_prompt %}{{ '" + opening + "' }}{% endif %}"


def bpe(eos: str, chat: str | None, *more: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(BPE), eos_token=eos, pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"extra_special_tokens": list(more)})
    tokenizer.chat_template = chat
    return tokenizer


def stories(chat: str | None, *more: str):
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", *more]})
    tokenizer.chat_template = chat
    return tokenizer
