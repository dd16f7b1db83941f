"""AdamW: its parameter groups, and the state that an optimizer keeps for each parameter."""

import torch


def decay_groups(named_parameters, weight_decay: float, num_dims=lambda parameter: parameter.ndim) -> list[dict]:
    """Group the trainable parameters: weight decay on matrices and embeddings, none on norms and biases.

    `num_dims` returns the number of dimensions of a parameter, in case sharding hides it.
    """
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if num_dims(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if num_dims(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def use_parameters(optimizer: torch.optim.Optimizer, new_parameters: dict[torch.Tensor, torch.Tensor]) -> None:
    """Point an optimizer that has no state yet at new parameters. A model gets new parameters when it is sharded."""
    assert not optimizer.state, "an optimizer with states would lose them"
    for group in optimizer.param_groups:
        group["params"] = [new_parameters[parameter] for parameter in group["params"]]


def states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state that an optimizer keeps for a tensor. Create it if no step has created it yet."""
    state = optimizer.state[parameter]
    if not state:
        new_state = adam_state if isinstance(optimizer, torch.optim.AdamW) else optimizer.new_state
        state.update(new_state(parameter))
    return dict(state)


def adam_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of torch's fused AdamW before its first step."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all states of an optimizer except the step counts. There are none before the first step."""
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim]
