"""The table of peers in docs/algorithms.md is that of scripts/formulas_of_peers.py, whose measure sees a wrong formula."""

import re
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT, run_process

sys.path.insert(0, str(ROOT / "scripts"))

import formulas_of_peers
from formulas import rollouts

PAGE = Path(ROOT, "docs/algorithms.md").read_text()
ROW = re.compile(r"^\| (.+) \| ((?:\w+ \de[+-]\d\d(?:, )?)+) \|$", re.M)
NEW = """`--bypass_mode` with `ppo`; LUSPO: `gspo`, mean over responses of sums; `dppo_tv`; `dppo_kl`; `clip_cov`; `kl_cov`; `gdpo`; `maxrl`;
`gae` with `--policy_lambd`; `gae` with `--policy_lambd_alpha`; `--teacher`; `--off_policy_mask_threshold`; `--entropy_target`;
`--top_entropy_quantile`; `--kd_loss kl`; `--kd_loss reverse_kl`; `--kd_loss jsd`"""


def in_script() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for peer, (_, rows) in formulas_of_peers.PEERS.items():
        for formula in rows:
            found.setdefault(formula, []).append(peer)
    return found


def test_the_page_has_the_rows_of_the_script():
    on_page = {name: re.findall(r"(\w+) \de", cell) for name, cell in ROW.findall(PAGE)}
    assert on_page == in_script()


def test_the_differences_on_the_page_are_within_the_limit():
    found = [float(value) for _, cell in ROW.findall(PAGE) for value in re.findall(r"\de[+-]\d\d", cell)]
    assert max(found) <= rollouts.LIMIT


@pytest.mark.parametrize("formula", re.split(r";\s", NEW))
def test_a_new_formula_has_two_peers(formula):
    assert len(in_script()[formula]) >= 2


@pytest.mark.parametrize("factor, fits", [(1.0, True), (1 + 1e-5, False)], ids=["right", "wrong"])
def test_the_measure_sees_a_wrong_value(factor, fits):
    case = rollouts.loss_case(lambda _, rollout: factor * rollouts.our_loss(rollout, "sapo", "token"), "sapo", "token")
    found = rollouts.measure(lambda _: None, {"`sapo`": case}, "")
    assert (found["`sapo`"] <= rollouts.LIMIT) == fits


def test_the_measure_sees_a_wrong_gradient():
    def theirs(_, rollout):
        loss = rollouts.our_loss(rollout, "sapo", "token")
        return loss.detach() + 0.99 * (loss - loss.detach())

    assert rollouts.largest(None, rollouts.loss_case(theirs, "sapo", "token")) > 1e-3


def test_the_measure_sees_a_value_that_is_not_finite():
    assert rollouts.difference(torch.ones(2), torch.tensor([1.0, torch.nan])) == torch.inf


def test_an_unknown_peer_is_named():
    code, output = run_process([sys.executable, "scripts/formulas_of_peers.py", "verk=there"])
    assert code == 2 and "verk: no such peer (allowed: verl" in output
