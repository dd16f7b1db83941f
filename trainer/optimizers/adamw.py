"""AdamW: its parameter groups, and what an optimizer remembers of each parameter."""

import torch


def decay_groups(named_parameters, weight_decay: float, num_dims=lambda parameter: parameter.ndim) -> list[dict]:
    """Groups of the trainable parameters: weight decay on matrices and embeddings, none on norms and biases.

    `num_dims` tells how many dimensions a parameter has where sharding hides it.
    """
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if num_dims(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if num_dims(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def use_parameters(optimizer: torch.optim.Optimizer, new_parameters: dict[torch.Tensor, torch.Tensor]) -> None:
    """Point an optimizer that has no state yet at other parameters: those that a model got when it was sharded."""
    assert not optimizer.state, "an optimizer with states would lose them"
    for group in optimizer.param_groups:
        group["params"] = [new_parameters[parameter] for parameter in group["params"]]


def states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimizer remembers of a tensor that it steps. It is made here where no step has made it yet."""
    state = optimizer.state[parameter]
    if not state:
        new_state = adam_state if isinstance(optimizer, torch.optim.AdamW) else optimizer.new_state
        state.update(new_state(parameter))
    return dict(state)


def adam_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of torch's fused AdamW before its first step."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All states of an optimizer but the step counts; none before the first step."""
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim]
