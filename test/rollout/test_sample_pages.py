"""--sample_pages: the page names both log-probs of every generated token, and the colour follows their difference."""

import re
from html import unescape

import torch
from conversations import byte_tokenizer

from trainer.rollout.sample_pages import SamplePages
from trainer.rollout.samples import Sample


def test_every_generated_token_with_both_log_probs(tmp_path):
    tokenizer = byte_tokenizer("qwen3")
    a, b, less, amp = (tokenizer(text)["input_ids"][0] for text in "ab<&")
    chat = Sample(0, 0, [a], [b, less, amp, b], [-1.0, -2.0, -3.0], True, "<x>", score=0.5, turns=[[0, 2], [3, 4]])
    plain = Sample(1, 0, [a, a], [b], [-0.5], False, None, score=1.0, metrics={"words": 2.0}, versions=[[0, 3]])
    left_out = Sample(2, 0, [a], [a, a], [-9.0, -9.0], True, None, score=1.0)
    trained = torch.tensor([-1.0, -2.25, -9.0, -0.5, -7.0, -7.0], dtype=torch.float64)
    told = SamplePages(str(tmp_path), tokenizer, 2).write(
        4, [chat, plain, left_out], trained, trained / 2, [[0.5, 1.0], [1.0], []]
    )
    page = (tmp_path / told["sample_page"]).read_text()
    tokens = re.findall(
        r'rgba\(230,0,0,([\d.]+)\)" title="token (\d+): rollout (\S+), training (\S+), advantage (\S+)">(.*?)</span>',
        page,
    )
    found = [
        (float(share), int(token), float(drawn), float(now), unescape(text))
        for share, token, drawn, now, advantage, text in tokens
        if float(advantage) == float(now) / 2
    ]
    assert found == [
        (0.0, b, -1.0, -1.0, "b"),
        (0.5, less, -2.0, -2.25, "<"),
        (1.0, b, -3.0, -9.0, "b"),
        (0.0, b, -0.5, -0.5, "b"),
    ]
    assert '<span class="e">&amp;</span>' in page and '<span class="p">aa</span>' in page
    assert "label: <b>&lt;x&gt;</b>" in page and "version: <b>3</b>" in page and "words: <b>2.0</b>" in page
    assert "Sample 2" not in page
    assert re.findall(r"scores of its prompt: <b>(.*?)<", page) == ["0.5, 1"] and "advantage: <b>-2.042<" in page


def test_no_name_and_no_text_is_markup(tmp_path):
    """Names of metrics come from environments, labels from data, texts from the model."""
    tokenizer, evil = byte_tokenizer("qwen3"), "</td><script>alert(1)</script>\"'&"
    ids = tokenizer(evil)["input_ids"]
    metrics = {evil: 1.0, "<img src=x onerror=y>": 2.0}
    sample = Sample(0, 0, ids, ids, [-1.0] * len(ids), True, evil + "\ud800", score=0.5, metrics=metrics)
    told = SamplePages(str(tmp_path), tokenizer, 1).write(0, [sample], *torch.zeros(2, len(ids)), [[]])
    page = (tmp_path / told["sample_page"]).read_text()
    tags = {tag.lower() for tag in re.findall(r"</?([a-zA-Z]+)", page)}
    assert tags <= {"meta", "title", "style", "h", "p", "table", "tr", "td", "b", "pre", "span"}, tags
    assert evil in unescape(page)
