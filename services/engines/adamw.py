"""Creates torch's AdamW with all state tensors in place from the start, and clips gradients over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from services.engines.base import NonFiniteGradient, OptimizerOptions
from services.engines.collectives import texts_of_ranks
from services.runtime.ranks import known_to_all
from services.storage.checkpoint import PART, WeightShard


def new_adamw(parameters: Iterable[Tensor], options: OptimizerOptions) -> torch.optim.AdamW:
    """Returns torch's fused AdamW for the parameters, without state. Unless weight decay applies to all of them, the
    optimizer has none; see `decay`."""
    return torch.optim.AdamW(
        parameters,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay if options.weight_decay_on == "all" else 0.0,
        fused=True,
    )


def make_adamw(parameters: Iterable[Tensor], options: OptimizerOptions) -> torch.optim.AdamW:
    """Returns torch's fused AdamW for the parameters, with zero moments for each, which torch would create in the
    first step only."""
    parameters = list(parameters)
    adamw = new_adamw(parameters, options)
    # Created here and not in the first step, so that snapshots and checkpoints always have the same tensors.
    for x in parameters:
        add_moments(adamw, x)
    return adamw


def add_moments(adamw: torch.optim.AdamW, parameter: Tensor) -> None:
    """Sets a parameter's optimizer state to that before the first step: step 0 and zero moments."""
    adamw.state[parameter] = {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


@torch.no_grad()
def decay(weights: Iterable[tuple[str, WeightShard]], options: OptimizerOptions, lr: float) -> None:
    """Applies the weight decay of a step, in place, where AdamW does not: to those weights for which `options.decays`
    is True, unless these are all. (Parameter groups of AdamW would do, but DeepSpeed makes one tensor of each.)

    Args:
        weights: Names and this rank's shards of the weights that are trained. Not read if AdamW applies weight decay.
        options: Options of AdamW.
        lr: Learning rate of the step.
    """
    if options.weight_decay_on == "all":
        return
    for name, shard in weights:
        if options.decays(name.partition(PART)[0], shard.whole):
            shard.tensor.mul_(1 - lr * options.weight_decay)


def clip_gradients(
    gradients: Mapping[str, Tensor],
    primary: Iterable[str],
    max_norm: float,
    device: torch.device,
    num_steps: int,
) -> float:
    """Scales gradients to a 2-norm of at most `max_norm` over all ranks; returns the norm before, summed in float64.
    Collective.

    Args:
        gradients: This rank's gradients, by name; scaled in place.
        primary: Names of the gradients that this rank counts in the norm. Replicas are counted on one rank alone.
        max_norm: Largest norm; inf for no clipping.
        device: Device of this rank, on which the norm is reduced.
        num_steps: Number of optimizer steps done, for the error message.

    Raises:
        NonFiniteGradient: The norm is inf or nan; raised on every rank alike.
    """
    # A gradient may be in host memory: DeepSpeed's offloaded optimizer keeps it there.
    counted = list(primary)
    norms = [torch.linalg.vector_norm(gradients[name], dtype=torch.float64).to(device) for name in counted]
    squares = torch.stack([*norms, torch.zeros((), dtype=torch.float64, device=device)]).square().sum()
    dist.all_reduce(squares)
    norm = float(squares.sqrt())
    if not norm < float("inf"):
        bad = [name for name, each in zip(counted, norms, strict=True) if not each < float("inf")]
        found = "; ".join(text for text in texts_of_ranks(_listed(bad)) if text)
        # The squares of finite norms may overflow.
        which = f": not finite are {found}" if found else ""
        raise known_to_all(NonFiniteGradient(f"gradient norm is {norm} at optimizer step {num_steps}{which}"))
    if norm > max_norm:
        for gradient in gradients.values():
            gradient.mul_(max_norm / norm)
    return norm


def _listed(names: list[str]) -> str:
    """Returns a text that names the gradients of this rank that are not finite; empty if there are none."""
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"those of {names[0]}{more} on rank {dist.get_rank()}"
