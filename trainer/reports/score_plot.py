"""Plot the scores of a reward model on the evaluation set."""

import torch
from matplotlib.figure import Figure


def plot_scores(chosen: torch.Tensor, rejected: torch.Tensor, path: str) -> None:
    """Write a PNG file with histograms of both sides' scores (n,) over the same bins, and with their means."""
    figure = Figure(figsize=(7, 4))  # not by pyplot: no global state, no display
    axes = figure.add_subplot()
    low, high = torch.cat([chosen, rejected]).aminmax()
    bins = torch.linspace(low.item(), max(high.item(), low.item() + 1e-6), 41).tolist()
    for name, scores, color in (("chosen", chosen, "tab:green"), ("rejected", rejected, "tab:red")):
        axes.hist(scores.tolist(), bins=bins, alpha=0.5, color=color, label=f"{name}, mean {scores.mean().item():.3g}")
        axes.axvline(scores.mean().item(), color=color, linewidth=1)
    accuracy = (chosen > rejected).double().mean().item()
    axes.set(xlabel="reward", ylabel="answers", title=f"{len(chosen)} evaluation pairs, accuracy {accuracy:.3f}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
