"""A run from Python: services on resource pools, an algorithm of one's own, and `run`, which executes it.

A script, and a file of cells for editors that know `# %%`. It takes about two minutes on two CPU cores, half of them to
make a model that can barely add."""

# %% The names that a script needs are in one module; it imports no torch.
from pathlib import Path

import numpy as np

from controller.api import (
    ActorTable,
    Advantage,
    AlgorithmTable,
    DataTable,
    FutureBatch,
    OptimizerTable,
    ResourcePool,
    RewardTable,
    RolloutTable,
    Run,
    RunTable,
    algorithm,
    build_quickstart,
    make_config,
    run,
)

TASK = Path("runs/arithmetic")

# %% Two pools that share a device: calls of their services run one at a time, in call order.
both = ResourcePool("both", ["cpu:0", "cpu:1"])
second = ResourcePool("second", both.devices[1:])

actor = ActorTable(
    role="actor",
    address="127.0.0.1:7101",
    device="cpu",
    ranks=2,
    model=TASK / "model",
    optimizer=OptimizerTable(learning_rate=5e-4),
)
reward = RewardTable(role="reward", address="127.0.0.1:7104", function="exact_match")

config = make_config(
    both.place(actor=actor),
    second.place(reward=reward),
    run=RunTable(name="from_python", steps=20, evaluate_every=10),
    data=DataTable(train=TASK / "train.jsonl", heldout=TASK / "heldout.jsonl", prompts_per_step=64),
    rollout=RolloutTable(samples_per_prompt=8, max_response_tokens=4),
    algorithm=AlgorithmTable(mini_batch_size=128),
)
build_quickstart(config)


# %% An algorithm is a function of a run.
@algorithm(services=("actor", "reward"), compares_groups=True)
def above_the_others(run: Run) -> None:
    """Rewards what is better than the mean of its group; stops where the policy has forgotten a text."""
    actor, reward = run.actor(), run.reward()
    known = FutureBatch.of(text=["12+34=46", "5+5=10"])
    for step in run.steps():
        batch = step.prompts | step.groups | actor.generate_sequences(step.prompts)
        batch |= actor.compute_log_prob(batch)
        batch = reward.score(batch)
        rewards, group = run.fetch(batch, "rewards", "group").values()
        batch |= step.compute(compute_advantage, rewards, group)
        texts = actor.compute_loss(known)
        step.finish(batch, actor.update_actor(batch), texts)
        if texts.metrics()["pretrain_loss"] > 8:
            step.stop()


def compute_advantage(rewards: np.ndarray, group: np.ndarray) -> Advantage:
    _, number = np.unique(group, return_inverse=True)
    mean = np.bincount(number, rewards) / np.bincount(number)
    return Advantage(rewards - mean[number], {"score/mean": float(rewards.mean())})


# %% Start the services, train, stop them. `algorithm` may also be a name, as in run(config, "grpo", launch=True).
done = run(config, above_the_others, launch=True)

# %% Figures, and the numbers of every step.
print(done.summary["accuracy_before"], "->", done.summary["accuracy_after"], "in", done.directory)
print([round(line["actor/pretrain_loss"], 2) for line in done.metrics[1:]])
