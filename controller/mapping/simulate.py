"""Three simulators of a model on the ranks of a mesh, after HybridFlow (section 6, appendix C): training and inference,
bound by computation, and generation, bound by memory. And the transition between the meshes of training and generation.

Seconds of one step. Every term is counted from the model, the mesh and the table of devices; none is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.mapping.devices import GB, DeviceGroup
from controller.mapping.work import decoded_weights, forward_flops, kernels, row_means
from controller.mapping.workload import Workload
from settings.memory.generation import cache_bytes_per_token
from settings.memory.shards import adapter_weights
from settings.memory.use import FLOAT32, ModelUse

OPTIMIZER_BYTES = 28
"""Bytes that AdamW reads and writes per parameter: weight, gradient and both moments are read, all but the gradient
written, in float32."""
OPTIMIZER_KERNELS = 4
"""Kernels for each weight tensor in an optimizer step: norm and scaling of its gradient, AdamW, freeing."""
AGREEMENTS_OF_CALL, AGREEMENTS_OF_STEP = 3, 4
"""Small collectives by which ranks agree that they begin a call, whether to stop, and that it has succeeded; and in an
optimizer step on the number of micro-batches, on the loss, on the norm of the gradients and on metrics."""
SNAPSHOT_BYTES = 12
"""Bytes per parameter of the copy of weights and moments in float32."""


@dataclass(frozen=True)
class Site:
    """The devices of a pool.

    Attributes:
        group: Devices of its kind.
        alignment: See `DeviceGroup.alignment`.
    """

    group: DeviceGroup
    alignment: int

    def all_reduce(self, nbytes: float, parts: int, span: int, beside: int = 1) -> float:
        """Returns the seconds of a ring all-reduce of `nbytes` over `parts` ranks, out of `span` consecutive ones; see
        `DeviceGroup.link` on `beside`."""
        return 2 * self.all_gather(nbytes, parts, span, beside) - self.start(parts)

    def all_gather(self, nbytes: float, parts: int, span: int, beside: int = 1, pieces: float = 1) -> float:
        """Returns the seconds of a ring all-gather, or reduce-scatter, of `nbytes` in all, in `pieces` collectives."""
        if parts == 1:
            return 0.0
        bandwidth, latency = self.group.link(span, beside, self.alignment)
        return pieces * self.start(parts) + (parts - 1) * (pieces * latency + nbytes / parts / bandwidth)

    def overlapped(self, computing: float, moving: float) -> float:
        """Returns the seconds of computation and of collectives that do not depend on each other. On a CPU they add up:
        the device is a core, which also moves the messages."""
        return max(computing, moving) if self.group.on_gpu else computing + moving

    def starting(self, kernels: float) -> float:
        """Returns the seconds to start kernels."""
        return kernels * self.group.table.launch_us * 1e-6

    def send(self, nbytes: float, span: int, beside: int = 1) -> float:
        """Returns the seconds to send `nbytes` to a rank at most `span` away."""
        bandwidth, latency = self.group.link(span, beside, self.alignment)
        return latency + nbytes / bandwidth

    def start(self, parts: int) -> float:
        """Returns the fixed overhead, in seconds, of a collective of `parts` ranks, without its messages."""
        return self.group.table.collective_us * 1e-6 if parts > 1 else 0.0


@dataclass(frozen=True)
class MicroBatchTimes:
    """Seconds of one micro-batch on a pipeline stage, forward.

    Attributes:
        compute: Matrix products.
        tensor: All-reduces over the tensor-parallel ranks, and all-to-alls of sequence parallelism.
        gather: All-gather of sharded weights, which overlaps with computation.
        hand_over: Sending hidden states to the next stage.
        launches: Starting kernels.
        site: Devices.
    """

    compute: float
    tensor: float
    gather: float
    hand_over: float
    launches: float
    site: Site

    @property
    def forward(self) -> float:
        """Seconds of a forward pass."""
        return self.site.overlapped(self.compute, self.gather) + self.tensor + self.hand_over + self.launches

    def backward(self, *, recomputes: bool, reduce_s: float) -> float:
        """Returns the seconds of a backward pass: twice the products and kernels of the forward pass, or three times if
        activations are recomputed. The reduction of sharded gradients, `reduce_s`, overlaps with it."""
        times = 3 if recomputes else 2
        tensor = (2 if recomputes else 1) * self.tensor
        computing = self.site.overlapped(times * self.compute, self.gather + reduce_s)
        return computing + tensor + self.hand_over + times * self.launches


def is_sharded_over_data(use: ModelUse) -> bool:
    """Returns whether data ranks share the weights."""
    return use.mesh[2] > 1 and (use.shards_over_data or use.engine in ("fsdp", "zero"))


def micro_batch(use: ModelUse, site: Site, rows: float, workload: Workload) -> MicroBatchTimes:
    """Returns the seconds of a micro-batch of `rows` rows on one pipeline stage of a model."""
    pipeline, tensor, data = use.mesh
    means, shape, group = row_means(workload), use.shape, site.group
    flops = forward_flops(shape, rows * means.tokens, rows * means.pairs, rows * means.scored)
    weights = shape.num_parameters * use.itemsize / (pipeline * tensor)
    sharing = pipeline * tensor * use.sequence_parallel
    compute = max(flops / sharing / group.flops(use.dtype), weights / group.bandwidth)
    hidden = rows * means.tokens * shape.hidden * use.itemsize
    reduces = 2 * shape.layers / pipeline * site.all_reduce(hidden, tensor, tensor)
    reduces += shape.layers * _exchange_s(use, site, rows * means.tokens)
    gather = 0.0
    if is_sharded_over_data(use):
        gather = site.all_gather(weights, data, use.ranks, pipeline * tensor, _units(use))
    hand_over = site.send(hidden, pipeline * tensor, tensor) if pipeline > 1 else 0.0
    launches = site.starting(kernels(shape) / pipeline)
    return MicroBatchTimes(compute, reduces, gather, hand_over, launches, site)


def _exchange_s(use: ModelUse, site: Site, tokens: float) -> float:
    """Returns the seconds of the two all-to-alls of a layer with sequence parallelism, of queries, keys and values and
    of the attention's output, for `tokens` tokens of a group; 0 without it."""
    parts, shape = use.sequence_parallel, use.shape
    nbytes = tokens / parts * 2 * (shape.query + shape.key) * use.itemsize
    return site.all_gather(nbytes, parts, parts, pieces=2) if parts > 1 else 0.0


def inference_s(use: ModelUse, site: Site, rows: int, workload: Workload) -> float:
    """Returns the seconds of a forward pass over the rows of a step, in micro-batches."""
    each, count = _cut(use, rows, workload)
    return (count + use.mesh[0] - 1) * micro_batch(use, site, each, workload).forward


def training_s(use: ModelUse, site: Site, rows: int, workload: Workload, *, is_critic: bool = False) -> float:
    """Returns the seconds of an update: all epochs and mini-batches with their pipelines' bubbles, reductions of
    gradients, optimizer steps, and the snapshot before them."""
    pipeline, tensor, data = use.mesh
    steps = workload.mini_batches * (workload.critic_epochs if is_critic else workload.epochs)
    each, count = _cut(use, -(-rows // workload.mini_batches), workload)
    batch = micro_batch(use, site, each, workload)
    trained = _trained(use)
    gradients = FLOAT32 * trained / (pipeline * tensor)
    span, beside = use.ranks, pipeline * tensor
    is_sharded = is_sharded_over_data(use)
    reduce_s = site.all_gather(gradients, data, span, beside, _units(use)) if is_sharded else 0.0
    backward = batch.backward(recomputes=use.activation_checkpointing, reduce_s=reduce_s)
    passes = (count + pipeline - 1) * (batch.forward + backward)
    replicas = 0.0 if is_sharded else site.all_reduce(gradients, data, span, beside)
    kept = trained / (pipeline * tensor) / (data if is_sharded else 1)
    optimizer = OPTIMIZER_BYTES * kept / site.group.bandwidth
    optimizer += site.starting(OPTIMIZER_KERNELS * _tensors(use)) + AGREEMENTS_OF_STEP * site.start(use.ranks)
    snapshot = SNAPSHOT_BYTES * kept / (site.group.table.host_gb * GB)
    return steps * (passes + replicas + optimizer) + (snapshot if workload.snapshots and steps > 1 else 0.0)


def _units(use: ModelUse) -> float:
    """Returns the number of collectives that gather the sharded weights of a stage: one for each layer, and one for
    embedding, last norm and head."""
    return use.shape.layers / use.mesh[0] + 1


def _tensors(use: ModelUse) -> float:
    """Returns the number of weight tensors of a stage: those of its layers, and embedding, last norm and head."""
    return sum(len(kind.numbers) * len(kind.weights) for kind in use.shape.layer_kinds) / use.mesh[0] + 3


def _cut(use: ModelUse, rows: int, workload: Workload) -> tuple[float, int]:
    """Returns the mean rows of a micro-batch, and the number of micro-batches of a data rank, of `rows` rows over all
    data ranks."""
    per_rank = -(-rows // use.row_parts)
    means = row_means(workload)
    # Micro-batches are filled by tokens where rows are packed, and padded to the longest otherwise.
    tokens = means.tokens if use.packs else workload.prompts.longest + workload.responses.longest
    most = max(1, min(int(use.token_budget // tokens), per_rank))
    count = -(-per_rank // most)
    return per_rank / count, count


def _trained(use: ModelUse) -> int:
    """Returns the parameters that are trained."""
    if use.adapters is None:
        return use.shape.num_parameters
    return sum(
        len(kind.numbers) * weight.numel
        for kind in use.shape.layer_kinds
        for weight in adapter_weights(kind, use.adapters)
    )


def generation_s(use: ModelUse, site: Site, rows: int, workload: Workload, *, together: int) -> float:
    """Returns the seconds in which an actor generates the responses of a step.

    Args:
        use: Use of the model.
        site: Devices.
        rows: Rows over all ranks.
        workload: Lengths of prompts and responses.
        together: Most rows that a generation replica has in its KV cache; it generates the others after these.
    """
    per_replica = -(-rows // use.generation_replicas)
    full, rest = divmod(per_replica, together)
    total = full * _wave_s(use, site, together, workload)
    return total + (_wave_s(use, site, rest, workload) if rest else 0.0)


def _wave_s(use: ModelUse, site: Site, rows: int, workload: Workload) -> float:
    """Returns the seconds in which a replica generates rows that fit into its KV cache: a pass over the prompts, and
    decoding steps, each of which reads the weights, and the cache of the rows that go on."""
    rollout = use.rollout_engine
    parts = rollout.pipeline * rollout.tensor
    shape, group, prompt = use.shape, site.group, workload.prompts.mean
    rate = group.flops(use.dtype)
    pairs = sum(share * tokens * (tokens + 1) / 2 for tokens, share in workload.prompts.shares)
    prefill = forward_flops(shape, rows * prompt, rows * pairs, rows) / rollout.tensor / rate
    prefill += _layers_s(use, site, rows * prompt)
    per_position = cache_bytes_per_token(shape, 1, use.itemsize) / parts
    flops = 2 * decoded_weights(shape, 1) / parts
    total = prefill
    for first, last, share in workload.responses.segments():
        live = rows * share
        # Expected steps in which at least one row goes on.
        steps = (last - first) * (1 - (1 - share) ** rows if share < 1 else 1)
        position = prompt + (first + last - 1) / 2
        weights = decoded_weights(shape, live) * use.itemsize / parts
        memory = (weights + live * per_position * position) / group.bandwidth
        compute = live * flops / rate
        total += steps * (rollout.pipeline * max(memory, compute) + _layers_s(use, site, live))
    return total


def _layers_s(use: ModelUse, site: Site, tokens: float) -> float:
    """Returns the seconds of a pass over all layers without computation: all-reduces, sends between stages, and kernel
    launches."""
    rollout = use.rollout_engine
    hidden = tokens * use.shape.hidden * use.itemsize
    reduces = 2 * use.shape.layers * site.all_reduce(hidden, rollout.tensor, use.mesh[1])
    sends = (rollout.pipeline - 1) * site.send(hidden, use.mesh[0] * use.mesh[1], rollout.tensor)
    return reduces + sends + site.starting(kernels(use.shape))


def transition_s(use: ModelUse, site: Site) -> float:
    """Returns the seconds of the gathering of generation weights: each rank receives what its generation shard has
    beyond its training shard (HybridFlow, table 2)."""
    rollout = use.rollout_engine
    if use.engine == "none":
        return 0.0
    pipeline, tensor, data = use.mesh
    model = use.shape.num_parameters * use.itemsize
    held = 1 / (pipeline * tensor * (data if is_sharded_over_data(use) else 1))
    wanted = 1.0 if rollout.gathers_all or use.engine != "3d" else 1 / (rollout.pipeline * rollout.tensor)
    if wanted <= held:
        return 0.0
    span = use.ranks if is_sharded_over_data(use) else pipeline * tensor
    moved = site.send((wanted - held) * model, span, site.group.per_machine)
    return moved + _tensors(use) * site.start(2)


def overhead_s(use: ModelUse, site: Site) -> float:
    """Returns the overhead of a call in seconds: request, fetch and store of rows, and agreements of its ranks."""
    return site.group.table.call_us * 1e-6 + AGREEMENTS_OF_CALL * site.start(use.ranks)


def sync_s(use: ModelUse, site: Site) -> float:
    """Returns the seconds in which a rank takes its part in the transfer of weights after an update, as if the other
    service were on other machines. A receiver lacks all weights that it computes with, since each update changes all;
    the ranks of a source send one copy of the model together."""
    model = use.shape.num_parameters * use.itemsize
    if use.learns:
        parts = use.ranks
    else:
        pipeline, tensor, data = use.mesh
        parts = pipeline * tensor * (data if is_sharded_over_data(use) else 1)
    return site.send(model / parts, site.group.count + 1, site.group.per_machine)


def rows_together(use: ModelUse, rows: int, waves: int) -> int:
    """Returns the rows that a generation replica has in its KV cache where it generates its share in `waves` waves."""
    per_replica = -(-rows // use.generation_replicas)
    return -(-per_replica // waves)
