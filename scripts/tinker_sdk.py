"""Train and sample with the real SDK of Tinker against `serve_train`, and print a table of what was found.

Run it in an environment with `pip install tinker`: `python scripts/tinker_sdk.py http://127.0.0.1:8002 demo/model`.
"""

import sys
import warnings

import tinker
from tinker import types

TEXTS = [[5 + (n * k) % 50 for k in range(1, 9 + n)] for n in range(8)]


def datum(tokens: list[int], **columns: list[float]) -> types.Datum:
    """A row whose labels are the next tokens."""
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    own = {name: types.TensorData(data=v, dtype="float32", shape=[len(v)]) for name, v in columns.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets, **own}
    )


def train(client, rows: list, loss_fn: str, steps: int, **config: float) -> tuple[float, float]:
    """(first loss, last loss), each divided by the number of rows."""
    adam, losses = types.AdamParams(learning_rate=2e-3, eps=1e-8), []
    for _ in range(steps):
        done, step = client.forward_backward(rows, loss_fn, config or None), client.optim_step(adam)
        losses.append(done.result().metrics["loss:sum"] / len(rows))
        step.result()
    return losses[0], losses[-1]


def main(url: str, base: str) -> None:
    warnings.simplefilter("ignore")
    found: list[tuple[str, str]] = [("version of tinker", tinker.__version__)]
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    client = service.create_lora_training_client(base, rank=8, seed=0).result()
    rows = [datum(tokens, weights=[1 / (len(tokens) - 1)] * (len(tokens) - 1)) for tokens in TEXTS]
    found.append(("cross_entropy, 20 steps", "{:.4f} -> {:.4f}".format(*train(client, rows, "cross_entropy", 20))))
    state = client.save_state("state").result().path
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(TEXTS[0][:4]), types.SamplingParams(max_tokens=8, seed=1)
    answer = sampler.sample(prompt, 4, params, include_prompt_logprobs=True).result()
    found.append(("4 samples", f"{sum(len(one.tokens) for one in answer.sequences)} tokens"))
    scored = [datum([*TEXTS[0][:4], *one.tokens], weights=[0.0] * (3 + len(one.tokens))) for one in answer.sequences]
    outputs = client.forward(scored, "cross_entropy").result().loss_fn_outputs
    pairs = []
    for one, out in zip(answer.sequences, outputs):
        pairs += zip(one.logprobs, out["logprobs"].data[3:])
    found.append(("log-probs of forward against sampling", f"{max(abs(a - b) for a, b in pairs):.1e}"))
    for loss_fn, config in (("importance_sampling", {}), ("ppo", {"clip_high_threshold": 1.3}), ("cispo", {})):
        own = [
            datum([*TEXTS[0][:4], *one.tokens], logprobs=[0.0] * 3 + list(one.logprobs), advantages=[0.0] * 3 + [gain] * len(one.tokens))
            for one, gain in zip(answer.sequences, (1.0, -1.0, 0.5, -0.5))
        ]  # fmt: skip
        found.append((f"{loss_fn}, 3 steps", "{:.4f} -> {:.4f}".format(*train(client, own, loss_fn, 3, **config))))
    before = service.create_training_client_from_state_with_optimizer(state).result()
    again = service.create_training_client_from_state_with_optimizer(state).result()
    same = train(before, rows, "cross_entropy", 3) == train(again, rows, "cross_entropy", 3)
    found.append(("two clients from one saved state", "equal losses" if same else "other losses"))
    path = before.save_weights_for_sampler("final").result().path
    greedy = types.SamplingParams(max_tokens=8, temperature=0)
    saved = service.create_sampling_client(model_path=path).result().sample(prompt, 1, greedy).result()
    found.append(("samples of saved weights", f"{len(saved.sequences[0].tokens)} tokens"))
    try:
        client.forward_backward(rows, "dro").result()
    except tinker.APIStatusError as error:
        found.append(("loss_fn dro", f"{error.status_code}: refused by name"))
    print("| What | Found |\n|---|---|")
    print("\n".join(f"| {what} | {value} |" for what, value in found))


if __name__ == "__main__":
    main(*sys.argv[1:])
