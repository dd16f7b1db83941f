"""Scores of texts under a reward model, as `serve_rm` gives them. No strategy: one process and one device."""

from typing import Optional

import torch
from transformers import AutoModelForSequenceClassification

from trainer.datasets.samples.answers import scored_position
from trainer.datasets.samples.prompts import as_conversation, chat_ends
from trainer.distributed.mesh import resolve_device
from trainer.errors import UserError
from trainer.models.cpu_matmul import choose_cpu_matmul
from trainer.models.model_loading import load_tokenizer, resolve_model_folder
from trainer.models.reward import scoring_pad

FLAG = "--reward_pretrain"


class ModelScorer:
    """Scores responses to prompts, batch by batch."""

    def __init__(
        self,
        folder: str,
        *,
        dtype: torch.dtype,
        device: str = "auto",
        batch_size: int = 16,
        max_len: int = 4096,
        trust_remote_code: bool = False,
    ):
        """Load the reward model of `folder`, a folder or hub name. Longer texts lose their beginning at `max_len` tokens.

        Raises UserError if there is no such model, or if it has more than one score.
        """
        folder = resolve_model_folder(folder, FLAG)
        self.batch_size, self.max_len, self.tokenizer = batch_size, max_len, load_tokenizer(folder, trust_remote_code)
        options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
        if model.config.num_labels != 1:
            raise UserError(FLAG, f"{folder} has {model.config.num_labels} labels", "1")
        self.model = model.to(resolve_device(device)).eval()
        if self.model.device.type == "cpu":
            choose_cpu_matmul("auto")
        self.ends, self.pad_token_id = chat_ends(self.tokenizer), scoring_pad(model, self.tokenizer)

    def input_ids(self, prompt: str, response: str, finished: bool = True) -> list[int]:
        """Return the tokens of a prompt and a response in the form of the training data.

        A finished response gets the end token and, in a chat, what the template adds after it. An unfinished response
        gets neither.
        """
        return self._rows([prompt], [response], [finished])[0]

    def _rows(self, prompts: list[str], responses: list[str], finished: list[bool]) -> list[list[int]]:
        """The `input_ids` of several texts. The tokenizer reads all of them in one call, which is faster."""
        eos = self.tokenizer.eos_token_id
        ids = iter(self.tokenizer([*prompts, *responses], add_special_tokens=False)["input_ids"])
        prompt_ids, rows = [next(ids) for _ in prompts], []
        for before, response_ids, ended in zip(prompt_ids, ids, finished):
            rows.append(before + as_conversation(before, response_ids + [eos] * ended, self.ends, eos))
        return [row[-self.max_len :] for row in rows]

    def score(self, prompts: list[str], responses: list[str], finished: Optional[list[bool]] = None) -> list[float]:
        """One score per response. Raises ValueError if the lists have different lengths."""
        finished = [True] * len(responses) if finished is None else finished
        if not len(prompts) == len(responses) == len(finished):
            raise ValueError(f"{len(prompts)} prompts, {len(responses)} responses, {len(finished)} finished")
        ids = self._rows(prompts, responses, finished) if prompts else []
        scores = []
        for start in range(0, len(ids), self.batch_size):
            part = {"input_ids": ids[start : start + self.batch_size]}
            batch = self.tokenizer.pad(part, padding_side="right", return_tensors="pt").to(self.model.device)
            last = [scored_position(sequence, self.pad_token_id) for sequence in part["input_ids"]]
            with torch.no_grad():
                hidden = getattr(self.model, self.model.base_model_prefix)(**batch).last_hidden_state
                token_scores = self.model.score(hidden[torch.arange(len(last)), last])
            scores += token_scores[:, 0].float().tolist()
        return scores
