"""Conversations with a tool as three models write them, and what episodes need to play them without a model."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.datasets.conversations.templates import load_chat_template
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.envs.environments import Caller
from trainer.rollout.envs.one_episode import Environments

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
ASKED = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "How much is 2 + 3?"}]
ARGUMENTS = {"a": 2, "b": 3}
# as the three models write a call and then an answer, with the stop token of each
QWEN_TURNS = [
    '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
    "<think>\n\n</think>\n\nIt is 5.<|im_end|>",
]
LLAMA_TURNS = ['{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>', "It is 5.<|eot_id|>"]
HARMONY_TURNS = [
    ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
    "<|channel|>final<|message|>It is 5.<|return|>",
]
STOPS = {"qwen3": ["<|im_end|>"], "llama3_1": ["<|eot_id|>"], "gpt_oss": ["<|return|>", "<|call|>"]}
TURNS = {"qwen3": QWEN_TURNS, "llama3_1": LLAMA_TURNS, "gpt_oss": HARMONY_TURNS}
SPECIAL = (
    "<|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|start|> <|end|> "
)
SPECIAL += "<|message|> <|channel|> <|constrain|> <|return|> <|call|> <pad>"


def byte_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """One token per byte and a few merges, so that a text has several tokenizations; and all special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ċ", "Ċ"), ("i", "n"), ("a", "d"), ("ad", "d")]
    vocabulary = [*alphabet, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    eos = STOPS[name][0]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token=eos, pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL.split()})
    load_chat_template(name, tokenizer)
    return tokenizer


class Script:
    """An engine that writes given turns."""

    ranks_per_engine = 1

    def __init__(self, turns: list[list[int]]):
        self.turns, self.asked = turns, []

    def generate(self, prompts, sampling, seeds, limits):
        ids = self.turns[len(self.asked)]
        self.asked.append((prompts, seeds, limits))
        return [Completion(list(ids), [-1.0] * len(ids), True) for _ in prompts]


def environments(make, tokenizer, max_turns=4, timeout=20.0) -> Environments:
    return Environments(lambda task: make(), Caller("--env x.py", timeout, 4), "--env x.py", tokenizer, max_turns, 4096)


def sampling_of(tokenizer, name: str, most: int = 400, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature, most, tuple(tokenizer.convert_tokens_to_ids(STOPS[name])))
