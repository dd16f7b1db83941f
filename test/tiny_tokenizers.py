"""Small tokenizers of both kinds, byte-level BPE and SentencePiece-like, with any chat template and control tokens."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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


def byte_tokenizer(template: str | None, *more: str) -> PreTrainedTokenizerFast:
    """One token per byte, the special tokens of all families, and `more`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    texts = (
        "<|im_start|> <|im_end|> <|eot_id|> <|eot|> <end_of_turn> <|return|> <|end|> <|call|> <|user|> <|observation|> "
        "<turn|> <|tool_response>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*texts.split(), "<｜end▁of▁sentence｜>", *more]})
    tokenizer.chat_template = template
    return tokenizer
