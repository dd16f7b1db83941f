"""Rounding noise in a gradient is told and not judged; a fault in a small gradient, or in a weight, is still found."""

import json

import torch
from compare_files import START, step_row, write_dump, write_rows

from compare_backends import main
from trainer.reports.dump_files import NOISE

LR = 1e-3  # 2 steps: Adam's updates of noise explain differences of weights up to 4e-3
GLOBAL = 10.0  # the norm of all gradients


def gradients(key_bias: torch.Tensor, fused: torch.Tensor | None = None) -> dict:
    main_gradient = torch.zeros(16)
    main_gradient[0] = GLOBAL
    return {"q.weight": main_gradient, "k.bias": key_bias, "qkv.bias": torch.ones(4) if fused is None else fused}


def weights(key_bias: float = 0.5, fused=(1.0, 1.0, 1.0, 1.0)) -> dict:
    return {"q.weight": torch.ones(16), "k.bias": torch.full((4,), key_bias), "qkv.bias": torch.tensor(fused)}


def compare(tmp_path, reference: tuple[dict, dict], run: tuple[dict, dict], lr: float | None = LR) -> tuple[int, dict]:
    rows = [START, *(step_row(i, 2.0) | ({"lr": lr} if lr else {}) for i in (1, 2))]
    log = write_rows(tmp_path / "log.jsonl", rows)
    dumps = [write_dump(tmp_path / name, w, g) for name, (g, w) in (("a", reference), ("b", run))]
    out = tmp_path / "out.json"
    command = [
        "--logs",
        f"a={log}",
        f"b={log}",
        "--dumps",
        f"a={dumps[0]}",
        f"b={dumps[1]}",
        "--dump_threshold",
        "1e-4",
    ]
    return main([*command, "--json", str(out)]), json.loads(out.read_text())["comparisons"][0]


def test_noise_is_told_with_its_size_and_its_update_does_not_count(tmp_path, capsys):
    noise = 0.1 * NOISE * GLOBAL * torch.tensor([1.0, -1.0, 1.0, -1.0])
    code, entry = compare(tmp_path, (gradients(noise), weights()), (gradients(-noise), weights(0.5 + 3 * LR)))
    assert code == 0
    assert list(entry["noise"]) == ["k.bias"] and 0.1 * NOISE < entry["noise"]["k.bias"] < NOISE
    assert "noise, not judged: the gradient of k.bias" in capsys.readouterr().out


def test_a_small_gradient_above_the_noise_is_judged(tmp_path):
    small = 10 * NOISE * GLOBAL * torch.ones(4)
    code, entry = compare(tmp_path, (gradients(small), weights()), (gradients(1.001 * small), weights()))
    assert code == 1 and entry["worst_gradient"]["name"] == "k.bias" and not entry["noise"]


def test_noise_on_one_side_only_is_a_fault(tmp_path):
    noise = 0.1 * NOISE * GLOBAL * torch.ones(4)
    for one, other in ((noise, 1e3 * noise), (1e3 * noise, noise)):
        code, entry = compare(tmp_path, (gradients(one), weights()), (gradients(other), weights()))
        assert code == 1 and entry["worst_gradient"]["name"] == "k.bias"


def test_a_weight_that_no_update_explains_is_a_fault(tmp_path):
    """As when a layout loads zeros for a bias of keys: no loss and no gradient would show it."""
    noise = 0.1 * NOISE * GLOBAL * torch.ones(4)
    code, entry = compare(tmp_path, (gradients(noise), weights()), (gradients(-noise), weights(0.5 + 5 * LR)))
    assert code == 1 and entry["worst_weight"]["name"] == "k.bias"


def test_without_learning_rates_in_the_log_noise_explains_no_weight(tmp_path):
    noise = 0.1 * NOISE * GLOBAL * torch.ones(4)
    code, _ = compare(tmp_path, (gradients(noise), weights()), (gradients(-noise), weights(0.5 + LR)), lr=None)
    assert code == 1


def test_the_keys_part_of_a_fused_bias_is_noise_and_the_rest_is_not(tmp_path):
    fused = torch.tensor([1.0, 0.1 * NOISE * GLOBAL, 1.0, 0.0])
    mine = (gradients(torch.ones(4), fused), weights())
    for moved, expected in ((1, 0), (0, 1), (3, 1)):  # a real gradient, and exactly none, explain no difference
        values = [1.0] * 4
        values[moved] += LR
        code, _ = compare(tmp_path, mine, (mine[0], weights(0.5, values)))
        assert code == expected, moved


def test_an_element_that_the_gradients_do_not_establish_explains_an_update(tmp_path):
    """Below the threshold of 1e-4 of its tensor's root mean square, here 0.25."""
    for size, expected in ((0.5, 0), (2.0, 1)):
        fused = torch.full((1024,), 0.25)
        fused[7] = size * 1e-4 * 0.25
        moved = torch.ones(1024)
        moved[7] += LR * 4
        mine = {"q.weight": torch.ones(16), "k.bias": torch.ones(4), "qkv.bias": torch.ones(1024)}
        other = mine | {"qkv.bias": moved}
        grads = gradients(torch.ones(4), fused)
        assert compare(tmp_path, (grads, mine), (grads, other))[0] == expected


def test_no_gradient_is_the_same_as_zeros_and_not_as_anything_else(tmp_path):
    zeros, without = gradients(torch.zeros(4)), gradients(torch.zeros(4))
    del without["k.bias"]
    assert compare(tmp_path, (zeros, weights()), (without, weights()))[0] == 0
    assert compare(tmp_path, (without, weights()), (zeros, weights()))[0] == 0


def test_noise_in_the_first_update_of_b_explains_rows_of_a(tmp_path):
    """LoRA: A's first gradient is zero, since B is. The second one has B's first update as a factor, per column of B."""
    a, b = "q.lora_A.default.weight", "q.lora_B.default.weight"  # (rank, inputs), (outputs, rank)
    b_gradient = torch.tensor([[1.0, 0.1 * NOISE * GLOBAL]])  # only the second column is noise
    grads = {"q.weight": torch.full((4,), GLOBAL / 2), a: torch.zeros(2, 3), b: b_gradient}
    for row, expected in ((1, 0), (0, 1)):
        moved = torch.ones(2, 3)
        moved[row, 0] += LR
        mine, other = (
            {"q.weight": torch.ones(4), a: value, b: torch.ones(1, 2)} for value in (torch.ones(2, 3), moved)
        )
        code, _ = compare(tmp_path, (grads, mine), (grads, other))
        assert code == expected, row
