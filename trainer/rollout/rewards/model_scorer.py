"""Scores of texts under a reward model, as `serve_rm` gives them. No strategy: one process and one device."""

import math
import re
from typing import Optional

import torch
from transformers import AutoModelForSequenceClassification

from trainer.datasets.conversations.control_tokens import control_pattern, encode
from trainer.datasets.conversations.turn_ends import scored_ends
from trainer.datasets.samples.answers import scored_position
from trainer.distributed.mesh import resolve_device
from trainer.errors import UserError
from trainer.limits import positions_of
from trainer.metrics import counted
from trainer.models.cpu_matmul import choose_cpu_matmul
from trainer.models.model_loading import load_tokenizer, resolve_model_folder
from trainer.models.reward import check_head, scoring_pad

FLAG, DEFAULT_MAX_LEN = "--reward_pretrain", 4096


class ModelScorer:
    """Scores responses to prompts, batch by batch."""

    def __init__(
        self,
        folder: str,
        *,
        dtype: torch.dtype,
        device: str = "auto",
        batch_size: int = 16,
        max_len: Optional[int] = None,
        trust_remote_code: bool = False,
    ):
        """Load the reward model of `folder`, a folder or hub name. Longer texts lose their beginning at `max_len` tokens,
        which are 4096 by default, or the positions of the model if they are fewer.

        Raises UserError if there is no such model, if it has more than one score, or fewer positions than `max_len`.
        """
        folder = resolve_model_folder(folder, FLAG)
        check_head(folder, FLAG)
        positions = positions_of(folder) or math.inf
        if max_len and max_len > positions:
            raise UserError(
                "--max_len", f"{max_len}, more than the model's {counted(positions, 'position')}", f"up to {positions}"
            )
        self.max_len = max_len or min(DEFAULT_MAX_LEN, positions)
        self.batch_size, self.tokenizer = batch_size, load_tokenizer(folder, trust_remote_code)
        options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
        if model.config.num_labels != 1:
            raise UserError(FLAG, f"{folder} has {counted(model.config.num_labels, 'label')}", "1")
        self.model = model.to(resolve_device(device)).eval()
        if self.model.device.type == "cpu":
            choose_cpu_matmul("auto")
        self.ends, self.pad_token_id = scored_ends(self.tokenizer), scoring_pad(model, self.tokenizer)

    def input_ids(self, prompt: str, response: str, finished: bool = True) -> list[int]:
        """Return the tokens of a prompt and a response as `train_rm` trained them: those of the whole text, however long.

        A finished response gets the end of a turn in a chat, else eos, if it does not spell it out. An unfinished
        response gets neither.
        """
        prompt, opening = self._as_written(prompt), self.ends.opening_text
        if opening and prompt.endswith(opening):
            if finished:
                response = self.ends.closed_text(self.ends.without_end(response, self.tokenizer.eos_token))
            return encode(self.tokenizer, prompt + response)[0]
        eos = [self.tokenizer.eos_token_id]
        return encode(self.tokenizer, prompt + response, opens=True)[0] + eos * finished

    def _as_written(self, prompt: str) -> str:
        """The text whose tokens were decoded to `prompt`: SentencePiece decodes a space behind each control token."""
        controls = control_pattern(self.tokenizer)
        without = re.sub(f"({controls.pattern}) ", r"\1", prompt) if controls else prompt
        if without == prompt or self._decoded(prompt) == prompt or self._decoded(without) != prompt:
            return prompt
        return without

    def _decoded(self, text: str) -> str:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def score(self, prompts: list[str], responses: list[str], finished: Optional[list[bool]] = None) -> list[float]:
        """One score per response. Raises ValueError if the lists have different lengths."""
        return self.score_and_cuts(prompts, responses, finished)[0]

    def score_and_cuts(
        self, prompts: list[str], responses: list[str], finished: Optional[list[bool]] = None
    ) -> tuple[list[float], list[bool]]:
        """The scores, and for each text whether it lost its beginning: the model read its last `max_len` tokens."""
        finished = [True] * len(responses) if finished is None else finished
        if not len(prompts) == len(responses) == len(finished):
            raise ValueError(
                f"{counted(len(prompts), 'prompt')}, {counted(len(responses), 'response')}, {len(finished)} finished"
            )
        whole = [self.input_ids(*texts) for texts in zip(prompts, responses, finished)]
        ids, scores = [tokens[-self.max_len :] for tokens in whole], []
        for start in range(0, len(ids), self.batch_size):
            part = {"input_ids": ids[start : start + self.batch_size]}
            batch = self.tokenizer.pad(part, padding_side="right", return_tensors="pt").to(self.model.device)
            last = [scored_position(sequence, self.pad_token_id) for sequence in part["input_ids"]]
            with torch.no_grad():
                hidden = getattr(self.model, self.model.base_model_prefix)(**batch).last_hidden_state
                token_scores = self.model.score(hidden[torch.arange(len(last)), last])
            scores += token_scores[:, 0].float().tolist()
        return scores, [len(tokens) > self.max_len for tokens in whole]
