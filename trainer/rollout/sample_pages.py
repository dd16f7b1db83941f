"""--sample_pages N: an HTML page for each rollout, with advantages. It shows where the engine and training disagree."""

import html
import os
from dataclasses import dataclass

import torch

from trainer.rollout.samples import Sample

FOLDER = "samples"
FULL = 0.5  # a difference of log-probs that has the full colour
STYLE = """body{font:15px sans-serif;max-width:60em;margin:2em auto}pre{white-space:pre-wrap;font:13px monospace;
border:1px solid #ccc;padding:.6em}.p{color:#777}.e{color:#06c}table{border-collapse:collapse}td{padding:0 1em 0 0}"""
KEY = (
    "Grey is the prompt, blue is the environment. A line is where a new history begins. The rest was generated. The redder a "
    "token, the more the log-probs of the rollout engine and of training differ. Point at a token to see both, and its advantage."
)


@dataclass(frozen=True)
class SamplePages:
    """Writes the first `count` samples that this rank trains to `<output_dir>/samples/rollout_<number>.html`."""

    output_dir: str
    tokenizer: object
    count: int

    def write(
        self,
        rollout: int,
        samples: list[Sample],
        log_probs: torch.Tensor,
        advantages: torch.Tensor,
        groups: list[list[float]],
    ) -> dict[str, str]:
        """`log_probs` by training and `advantages` are of the generated tokens of all samples, sample after sample.

        `groups` are the scores of all samples of each sample's prompt. Returns a metric: the page's path.
        """
        parts, start = [], 0
        for sample, group in zip(samples[: self.count], groups):
            own = slice(start, start + len(sample.log_probs))
            parts.append(self._sample(sample, log_probs[own].tolist(), advantages[own].tolist(), group))
            start = own.stop
        title, name = f"Rollout {rollout}", f"rollout_{rollout}.html"
        page = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1><p>{KEY}</p>"
        os.makedirs(os.path.join(self.output_dir, FOLDER), exist_ok=True)
        with open(os.path.join(self.output_dir, FOLDER, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(page + "".join(parts) + "\n")
        return {"sample_page": f"{FOLDER}/{name}"}

    def _sample(self, sample: Sample, trained: list[float], advantages: list[float], group: list[float]) -> str:
        values = zip(sample.log_probs, trained, advantages, strict=True)
        of_token = dict(zip(sample.generated(), values, strict=True))
        spans = [f'<span class="p">{self._text(sample.prompt_ids)}</span>']
        for place, token in enumerate(sample.response_ids):
            if place in sample.starts:
                spans.append("<hr>")
            if place not in of_token:
                spans.append(f'<span class="e">{self._text([token])}</span>')
                continue
            rollout, training, advantage = of_token[place]
            share = min(abs(training - rollout) / FULL, 1.0)
            title = f"token {token}: rollout {rollout:.4f}, training {training:.4f}, advantage {advantage:.4g}"
            style = f"background:rgba(230,0,0,{share:.3f})"
            spans.append(f'<span style="{style}" title="{title}">{self._text([token])}</span>')
        facts = {"score": f"{sample.score:.4g}", "finished": sample.finished, "label": sample.label}
        facts |= {"advantage": f"{sum(advantages) / len(advantages):.4g}"} if advantages else {}
        facts |= {"scores of its prompt": ", ".join(f"{score:.4g}" for score in group)} if len(group) > 1 else {}
        facts |= {"failed": sample.failed or None, "end": sample.end or None}
        facts |= {"turns": len(sample.turns) or None, "version": sample.version, **sample.metrics}
        row = "".join(
            f"<td>{html.escape(str(name))}: <b>{html.escape(str(v))}</b></td>"
            for name, v in facts.items()
            if v is not None
        )
        return (
            f"<h2>Sample {html.escape(str(sample.number))}</h2><table><tr>{row}</tr></table><pre>{''.join(spans)}</pre>"
        )

    def _text(self, ids: list[int]) -> str:
        return html.escape(self.tokenizer.decode(ids))
