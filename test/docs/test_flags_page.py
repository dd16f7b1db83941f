"""docs/flags.md is what scripts/docs/flags_page.py writes of the flags as they are."""

import importlib.util

from launch import ROOT

from trainer.flags.parse_flags import flags_of

SCRIPT = ROOT / "scripts" / "docs" / "flags_page.py"


def load_script():
    spec = importlib.util.spec_from_file_location("flags_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh():
    written = (ROOT / "docs" / "flags.md").read_text()
    assert written == load_script().page(), "docs/flags.md is stale: python scripts/docs/flags_page.py"


def test_every_flag_is_on_the_page_under_its_commands():
    script = load_script()
    sections = script.page().split("\n## ")[1:]
    for name, command in script.COMMANDS.items():
        own = "".join(s for s in sections if f"`{name}`" in s.splitlines()[2] or "all commands" in s.splitlines()[2])
        for field, _ in flags_of(command):
            assert f"- **`--{field.name}`**" in own, (name, field.name)


def test_every_rule_is_on_the_page():
    script = load_script()
    section = script.page().split("\n## Flags that do not go together\n")[1]
    for rules in (*script.RULES.values(), *script.BACKEND_RULES.values()):
        for rule in rules:
            assert script.refusals([rule]).strip() in section, rule.flags
    assert "{" not in section
    assert "- `--layout` auto with rollouts" in section and "- `--temperature` below 0.01 with" in section
    assert "- `--attn_implementation` eager or `flash_attention_3` with" in section


def test_help_texts_as_markdown():
    as_markdown = load_script().as_markdown
    text = as_markdown("under <output_dir>/x, of train_ppo (--max_len).")
    assert text == "under `<output_dir>/x`, of `train_ppo` (`--max_len`)."
    assert as_markdown("a * b of 1 - c") == r"a \* b of 1 - c"
