"""Activations of the sparse layers of a mixture of experts, beside the output of the norm that they read.

Counted from transformers' routers and its experts "grouped_mm" (`transformers.integrations.moe`): the hidden states of
each token are copied once for each expert that computes it, sorted by experts, and each product is one operator for
all experts. w is the size of an element where the outputs of experts are weighed.
"""

from __future__ import annotations

from settings.memory.shape import ExpertSizes
from settings.memory.use import FLOAT32, ModelUse

INT64 = 8


def saved_per_token(use: ModelUse) -> int:
    """Returns the bytes that autograd saves of a token: probabilities of the router in float32; of each expert that
    computes the token its input, gate and up, the activated gate, their product and the output, the weight of the
    output, and four numbers for sorting; the same of the shared expert, without its input, and the gate of its
    output."""
    sizes, e, h = _experts(use), use.itemsize, use.shape.hidden
    # Inputs of products are there for the gradients of weights.
    trained = 1 if use.learns and use.adapters is None else 0
    of_expert = e * (h + trained * h + (3 + trained) * sizes.units)
    routed = sizes.per_token * (of_expert + 4 * INT64 + FLOAT32 + _weighed(use))
    shared = e * (4 * sizes.shared_units + h) if sizes.shared_units else 0
    return sizes.count * FLOAT32 + routed + shared


def in_backward(use: ModelUse, tokens: int) -> int:
    """Returns the bytes of temporaries at the largest moment of the backward pass: when outputs were weighed, their
    gradients and both products with them; or, when gate and up get gradients, these, apart and together, and the
    gradient of the down projections of all experts, without what is no longer saved. Beside them there is the gradient
    of the layer's output."""
    sizes, e, h = _experts(use), use.itemsize, use.shape.hidden
    routed = tokens * sizes.per_token
    trains = use.learns and use.adapters is None
    of_weight = e * sizes.count * h * sizes.units if trains else 0
    weighing = routed * 3 * h * _weighed(use)
    multiplying = routed * e * sizes.units + of_weight
    activating = routed * e * (2 * sizes.units - h) + of_weight
    return tokens * h * use.stream_itemsize + max(weighing, multiplying, activating)


def in_forward(use: ModelUse, tokens: int) -> int:
    """Returns the bytes of the tensors at the largest moment of a forward pass without gradients: logits of the router,
    sorted tokens, the output of the shared expert, and inputs of experts with gate and up, the activated gate and the
    product, or with their outputs, as they are, weighed, and in the order of tokens."""
    sizes, e, h = _experts(use), use.itemsize, use.shape.hidden
    routed = tokens * sizes.per_token
    sorting = routed * (3 * INT64 + FLOAT32 + _weighed(use)) + tokens * sizes.count * e
    shared = tokens * e * h if sizes.shared_units else 0
    units = routed * e * (h + 4 * sizes.units)
    outputs = routed * (2 * e * h + 2 * h * _weighed(use))
    return sorting + shared + max(units, outputs)


def _weighed(use: ModelUse) -> int:
    """Returns w."""
    return FLOAT32 if _experts(use).weighs_in_float32 else use.itemsize


def _experts(use: ModelUse) -> ExpertSizes:
    assert use.shape.experts is not None, "the layer is sparse"
    return use.shape.experts
