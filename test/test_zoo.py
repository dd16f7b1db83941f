"""The zoo: tiny models have every layer kind of their architecture, a few of them train, and results are kept by rows."""

import json
import runpy
import sys

import pytest
from launch import FULL, ROOT, run_process
from unusual_configs import UNUSUAL

from scripts.zoo_models import SETTINGS, SKIPPED, tiny_config, zoo_names
from trainer.compare.zoo.tiny import shrink

# One of each kind: gated linear attention, sliding, biased and fused; with `PARITY=full` sparse with latent attention and
# state space, which test_expert_parallel.py has as well. The command `python -m scripts.zoo` runs all models.
MODELS = ("qwen3_5_text", "gemma3_text", "gpt2", *["deepseek_v3", "granitemoehybrid"] * FULL)
PAGE = ROOT / "scripts/docs/zoo_page.py"
CONFIGURATIONS = ("fsdp2-2r", "zero3", "ring2-packed", "save")
REFUSED = {"ring2-packed": {"qwen3_5_text", "deepseek_v3", "granitemoehybrid"}}  # or trained, and right


def layer_kinds(config) -> set:
    return set(getattr(config, "layer_types", None) or ())


def test_tiny_models_have_every_kind_of_layer():
    from transformers import CONFIG_MAPPING

    assert len(zoo_names()) >= 100 and not set(zoo_names()) & set(SKIPPED)
    for name in zoo_names():
        whole, tiny = CONFIG_MAPPING[name](**SETTINGS.get(name, {})), tiny_config(name)
        assert layer_kinds(tiny) == layer_kinds(whole), name
        for kinds in ("mlp_layer_types", "layers_block_type", "block_types"):
            assert set(getattr(tiny, kinds, None) or ()) == set(getattr(whole, kinds, None) or ()), (name, kinds)


def test_a_tiny_model_with_shared_keys_is_shrunk_again_to_the_same_layers():
    for config in (tiny_config("gemma4_text"), tiny_config("gemma3n_text")):
        again = shrink(config)
        assert again.num_kv_shared_layers == 2 and again.layer_types == config.layer_types


def test_every_model_of_the_zoo_is_found_by_a_published_name():
    published = runpy.run_path(str(PAGE))["published"]
    assert "Qwen3.5-27B" in published("qwen3_5_text")
    assert [name for name in zoo_names() if not published(name)] == []


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    results, page = str(folder / "models.json"), str(folder / "models.md")
    command = [sys.executable, "-m", "scripts.zoo", "--output", results, "--jobs", "2"]
    command += ["--models", *MODELS, "--configurations", *CONFIGURATIONS]
    code, output = run_process(command, timeout=600)
    assert code == 0, output[-6000:]
    code, output = run_process([sys.executable, str(PAGE), "--results", results, "--page", page])
    assert code == 0, output[-6000:]
    return json.loads((folder / "models.json").read_text())["models"], (folder / "models.md").read_text()


@pytest.mark.parametrize("model", MODELS)
def test_cells_that_pass(results, model):
    row = results[0][model]
    assert not row["problem"] and set(row["cells"]) == set(CONFIGURATIONS)
    for name, cell in row["cells"].items():
        allowed = ("pass", "refused") if model in REFUSED.get(name, ()) else ("pass",)
        assert cell["verdict"] in allowed, (name, cell)


def test_the_page_names_the_models_and_the_reasons(results):
    rows, page = results
    assert "| `gpt2`: gpt2, gpt2-medium" in page and f"{len(MODELS)} architectures, {4 * len(MODELS)} cells" in page
    for row in rows.values():
        for cell in row["cells"].values():
            assert cell["verdict"] != "refused" or cell["note"].split(":")[0] in page


def test_the_committed_page_is_what_its_results_say(tmp_path):
    page = tmp_path / "models.md"
    code, output = run_process([sys.executable, str(PAGE), "--page", str(page)])
    assert code == 0, output[-6000:]
    assert page.read_text() == (ROOT / "docs/models.md").read_text()


def test_committed_results_of_unusual_configs_say_what_is_unusual():
    rows = json.loads((ROOT / "docs/models.json").read_text())["models"]
    assert {name: row["about"] for name, row in rows.items() if "about" in row} == {n: u[0] for n, u in UNUSUAL.items()}
