"""Facts in metrics.jsonl that no run on a CPU shows: the peak of a GPU, the size of a parameter that is not whole."""

import pytest
import torch
import transformers

from trainer.metrics import MetricSum, flops_per_token, full_size, peak_flops

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H200": 989e12,
    "NVIDIA H20": 148e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A10": 125e12, "NVIDIA A10G": 70e12, "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12, "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12, "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GH200 480GB": 989e12, "NVIDIA H800": 989e12, "Tesla T4": None,
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_device(name):
    assert peak_flops(name) == PEAKS[name]


def test_a_partitioned_parameter_has_its_whole_size():
    """ZeRO 3 leaves an empty tensor and says the size in ds_numel; bitsandbytes packs two weights into a byte."""
    partitioned, packed = (torch.nn.Parameter(torch.empty(size)) for size in (0, 6))
    partitioned.ds_numel = 12
    packed.quant_state = type("State", (), {"shape": torch.Size((3, 4))})()
    assert [full_size(p) for p in (partitioned, packed, torch.nn.Parameter(torch.empty(5)))] == [12, 12, 5]


def test_a_metric_says_what_it_is_a_mean_over():
    assert MetricSum(6.0).means("x", 3) == {"x": 2.0}
    assert MetricSum(6.0, count=2).means("x", 3) == {"x": 3.0} and MetricSum(0.0, count=0).means("x", 3) == {}
    both = MetricSum(1.0, squares=1.0) + MetricSum(3.0, squares=9.0)
    assert both.means("x", 2) == {"x": 2.0, "x_std": 1.0}


def test_a_model_without_attention_has_flops_of_its_parameters_alone():
    assert flops_per_token(transformers.FalconMambaConfig(num_hidden_layers=2), 10.0, 100.0) == 60.0
