"""`trainer eval` against a plain loop of transformers: `python test/eval_by_hand.py MODEL ROWS.jsonl FOLDER [COUNT] [TOKENS]`.

ROWS has the columns question and answer of GSM8K. Both answer the first COUNT rows greedily in fp32, through the chat template,
in up to TOKENS tokens. The loop takes one question at a time, and its score is a few lines of its own: the last number of an
answer must be the number after #### in the solution. The command fails if an answer or a score differs.
"""

import json
import re
import sys
from pathlib import Path

import torch
from launch import run_process
from transformers import AutoModelForCausalLM, AutoTokenizer

FLAGS = (
    "--input_key question --label_key answer --apply_chat_template --reward_func math --param_dtype fp32 --device cpu "
    "--eval_samples 1 --eval_temperature 0 --prompt_max_len 512"
)


def number(text: str) -> float:
    """The last number, after the last #### if there is one."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.split("####")[-1])
    return float(found[-1].replace(",", "")) if found else float("nan")


def plain_answers(model_folder: str, rows: list[dict], tokens: int) -> list[tuple[list[int], str]]:
    """(token ids, text without special tokens) of each answer."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    found = []
    for row in rows:
        chat = [{"role": "user", "content": row["question"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**ids, do_sample=False, max_new_tokens=tokens)
        own = out[0, ids["input_ids"].shape[1] :].tolist()
        found.append((own, tokenizer.decode(own, skip_special_tokens=True)))
    return found


def main(model: str, rows: str, folder: str, count: str = "16", tokens: str = "96") -> None:
    given = [json.loads(line) for line in Path(rows).read_text().splitlines()[: int(count)]]
    Path(folder).mkdir(parents=True)
    (Path(folder) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    line = ["--pretrain", model, "--eval_dataset", f"{folder}/rows.jsonl", *FLAGS.split()]
    line += ["--generate_max_len", tokens, "--output_dir", f"{folder}/run"]
    code, output = run_process([sys.executable, "-m", "trainer.cli.evaluate", *line], timeout=3000)
    assert code == 0, output[-3000:]
    answers = [json.loads(line) for line in (Path(folder) / "run/answers.jsonl").read_text().splitlines()]
    plain = plain_answers(model, given, int(tokens))
    scores = [float(number(text) == number(row["answer"])) for (_, text), row in zip(plain, given, strict=True)]
    same = [mine["response_ids"] == own for mine, (own, _) in zip(answers, plain, strict=True)]
    agree = [mine["score"] == score for mine, score in zip(answers, scores, strict=True)]
    print(
        f"{sum(same)} of {len(same)} answers have equal tokens, {sum(agree)} of {len(agree)} scores, {sum(scores):g} are right"
    )
    assert all(same) and all(agree)


if __name__ == "__main__":
    main(*sys.argv[1:])
