"""The first two steps of RLHF on real services: updates equal plain torch whatever the ranks, and what comes of a run
is a model that the next step loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from controller import job
from controller.algorithms import find_algorithm
from controller.config.config import Config
from controller.data.prompts import load_data
from controller.tracking.metrics import read_metrics
from deploy.quickstart import Recipe
from deploy.quickstart.build import EOS, build, make_tokenizer
from integration.harness import Processes, Service, free_ports, jagged, take_rows, write_config
from nccl_transfer.refs.batch import Batch
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import actor_pb2
from services.models.sequence_scorer import SequenceScorer

pytestmark = pytest.mark.timeout(180)

LEARNING_RATE = 1e-3
ONE_STEP = actor_pb2.Schedule(epochs=1, mini_batches=1)
MOST = 4
PROMPTS = ["1+1=", "12+30=", "7+8=", "40+2=", "5+5="]
GOOD = ["2", "42", "15", "42", "10"]
BAD = ["3", "4", "1234567", "42.", "55555"]
SIGNS = {"chosen_sign": np.array([-1.0, -1, 1, -1, 1]), "rejected_sign": np.array([1.0, -1, 1, 1, 1])}


@dataclass(frozen=True)
class Up:
    """Services that are up: `actor` and `reward` on two ranks each, `scorer`, which does not learn."""

    config: Config
    model: Path
    processes: Processes


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("steps")
    build(directory / "task", Recipe(max_steps=5))
    model = directory / "task" / "model"
    rows = [dict(zip(("prompt", "response", "chosen", "rejected"), row, strict=True)) for row in
            zip(PROMPTS, GOOD, GOOD, BAD, strict=True)]  # fmt: skip
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learner = {
        "model": model,
        "ranks": 2,
        "optimizer": {"learning_rate": LEARNING_RATE},
        "micro_batch_tokens": 64,
        "output_roots": [tmp_path_factory.getbasetemp()],
    }
    tables: dict[str, dict[str, Any]] = {
        "actor": {"role": "actor", **learner},
        "reward": {"role": "reward", "kind": "model", "input": "tensor", **learner},
        "reference": {"role": "reference", "model": model},
        "scorer": {"role": "reward"},
    }
    ports = iter(free_ports(len(tables)))
    config = Config.model_validate(
        {
            "run": {"name": "test", "directory": directory / "runs", "steps": 4, "evaluate_every": 0},
            "data": dict.fromkeys(("train", "heldout"), directory / "rows.jsonl") | {"prompts_per_step": 4},
            "rollout": {"max_response_tokens": MOST},
            "algorithm": {"mini_batch_size": 2},
            "services": {
                name: {"address": f"127.0.0.1:{next(ports)}", **table} for name, table in tables.items()
            },
        }
    )
    path = write_config(config, directory / "services.toml")
    processes = Processes()
    try:
        launcher = processes.serve(path, directory / "logs")
        yield Up(config, model, processes)
        launcher.terminate()
        assert launcher.wait(40) == 0
    finally:
        processes.kill()


def service(up: Up, name: str, tmp_path: Path) -> Service:
    """A session with a service; what it weighs now is in `tmp_path / "before"`."""
    opened = Service(name, up.config.services[name].address)
    opened.export(tmp_path / "before")
    return opened


def adamw_steps(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], steps: int) -> None:
    """The first steps of a service's optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def assert_same_weights(model: torch.nn.Module, directory: Path, kind: Any, atol: float = 3e-5) -> None:
    exported = kind.from_pretrained(directory).state_dict()
    for name, tensor in model.state_dict().items():
        # A first AdamW step is the learning rate times the sign of the gradient, near zero a matter of rounding.
        torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=atol)


def ids(text: str) -> list[int]:
    return make_tokenizer()(text)["input_ids"]


def answer_ids(text: str) -> list[int]:
    """With its end, where that is among the first tokens."""
    return [*ids(text), make_tokenizer().eos_token_id][:MOST]


def test_supervised_updates_equal_plain_torch(up: Up, tmp_path: Path) -> None:
    actor = service(up, "actor", tmp_path)
    batch = actor.rows("tokenize", Batch.of(prompt=PROMPTS, response=BAD), max_response_tokens=MOST)
    tokens = {name: actor.values(batch, name) for name in ("prompt_ids", "response_ids")}
    assert [row.tolist() for row in take_rows(tokens["prompt_ids"])] == [ids(text) for text in PROMPTS]
    assert [row.tolist() for row in take_rows(tokens["response_ids"])] == [answer_ids(text) for text in BAD]

    (answer, _) = actor.call("update_supervised", batch, schedule=ONE_STEP)
    actor.export(tmp_path / "after")
    actor.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    total, count = torch.zeros(()), 0
    for prompt, response in zip(PROMPTS, BAD, strict=True):
        row = torch.tensor([ids(prompt) + answer_ids(response)])
        log_probs = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        mine = log_probs[len(ids(prompt)) - 1 :]
        total, count = total - mine.sum(), count + len(mine)
    loss = total / count
    assert answer.outcome.metrics["loss"].sum == pytest.approx(loss.item(), rel=1e-5)
    adamw_steps(model, lambda: loss, 1)
    assert_same_weights(model, tmp_path / "after", AutoModelForCausalLM)


@pytest.mark.parametrize("loss_name", ["bradley_terry", "cost"])
def test_reward_updates_equal_plain_torch(up: Up, tmp_path: Path, loss_name: str) -> None:
    reward = service(up, "reward", tmp_path)
    reward.save(tmp_path / "sharded")
    first = AutoModelForSequenceClassification.from_pretrained(tmp_path / "before")
    columns = Batch.of(prompt=PROMPTS, chosen=GOOD, rejected=BAD, **(SIGNS if loss_name == "cost" else {}))
    options = {"loss": loss_name, "epochs": 2, "mini_batches": 1, "max_response_tokens": MOST}
    reward.call("update_reward", columns, **options)
    reward.export(tmp_path / "after")
    reward.load(tmp_path / "sharded")
    reward.close()

    def score(prompt: str, response: str) -> torch.Tensor:
        return first(torch.tensor([ids(prompt) + answer_ids(response)])).logits[0, 0]

    def mean_loss() -> torch.Tensor:
        losses = []
        for row, prompt in enumerate(PROMPTS):
            chosen, rejected = score(prompt, GOOD[row]), score(prompt, BAD[row])
            if loss_name == "bradley_terry":
                margins = [chosen - rejected]
            else:
                signed = SIGNS["chosen_sign"][row] * chosen, SIGNS["rejected_sign"][row] * rejected
                margins = [rejected - chosen, *signed]
            losses.append(sum(torch.log1p(torch.exp(-margin)) for margin in margins))
        return torch.stack(losses).mean()

    # The first step moves the head alone, which begins at zero; the second moves all weights.
    adamw_steps(first, mean_loss, 2)
    assert_same_weights(first, tmp_path / "after", AutoModelForSequenceClassification)


def test_a_run_of_sft_lowers_the_heldout_loss(up: Up) -> None:
    path, summary = run(up, "sft")
    assert summary["loss_after"] < summary["loss_before"]
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3, 4]
    AutoModelForCausalLM.from_pretrained(path / "actor")


@pytest.mark.parametrize(
    ("algorithm", "name"), [("sft", "loss"), ("dpo", "margin"), ("reward_model", "margin")]
)
def test_each_source_has_held_out_metrics_of_its_own(
    up: Up, tmp_path: Path, algorithm: str, name: str
) -> None:
    """They are those of a run whose held-out rows are of this source alone."""
    rows = up.config.data.train.read_text().splitlines(keepends=True)
    sources = {"first": rows[:2], "second": rows[2:]}
    paths = {source: tmp_path / f"{source}.jsonl" for source in sources}
    for source, path in paths.items():
        path.write_text("".join(sources[source]))

    def measured(data: dict[str, Any]) -> Mapping[str, Any]:
        tables = up.config.model_dump(exclude_unset=True)
        tables |= {"data": data | {"prompts_per_step": 4}, "algorithm": {"mini_batch_size": 4}}
        tables["run"] |= {"steps": 1}
        return job.run(Config.model_validate(tables), algorithm).summary

    found = measured(
        {"sources": [{"name": each, "path": path, "heldout": path} for each, path in paths.items()]}
    )
    assert f"{name}_before" in found
    for source, path in paths.items():
        alone = measured({"train": path, "heldout": path})
        assert found[f"{name}_{source}_before"] == pytest.approx(alone[f"{name}_before"], abs=1e-5)


def test_a_run_without_a_better_evaluation_ends_early_and_goes_on_with_more_patience(up: Up) -> None:
    """The loss falls, and so is never better where the highest one is."""
    tables = up.config.model_dump(exclude_unset=True)
    tables["run"] |= {"steps": 9, "evaluate_every": 1, "patience": 2}
    tables["checkpoint"] = {"every": 2, "best": "evaluation/loss", "best_is": "highest"}
    done = job.run(Config.model_validate(tables), "sft")
    assert done.summary["steps"] == 2
    assert [line["step"] for line in read_metrics(done.directory)] == [0, 1, 2]
    AutoModelForCausalLM.from_pretrained(done.directory / "actor")
    with pytest.raises(ConfigError, match=r"run\.patience, 2, has ended the run after step 2"):
        job.resume(done.directory)
    assert job.resume(done.directory, settings=("run.patience=4",)).summary["steps"] == 4


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_run_of_dpo_equals_plain_torch(up: Up, tmp_path: Path, loss: str) -> None:
    """Two optimizer steps on the same four pairs; at the first the policy is the reference."""
    rows = [
        dict(zip(("prompt", "chosen", "rejected"), row, strict=True))
        for row in zip(PROMPTS, GOOD, BAD, strict=True)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    data = dict.fromkeys(("train", "heldout"), tmp_path / "pairs.jsonl") | {"prompts_per_step": 4}
    tables = up.config.model_dump(exclude_unset=True) | {"data": data}
    tables["run"] |= {"steps": 2}
    tables["algorithm"] = {"mini_batch_size": 4, "options": {"beta": 0.5, "loss": loss}}
    done = job.run(Config.model_validate(tables), "dpo")

    policy, reference = (AutoModelForCausalLM.from_pretrained(up.model) for _ in range(2))
    losses = []

    def mean_loss() -> torch.Tensor:
        h_P = torch.stack(
            [
                log_ratio(policy, reference, prompt, chosen) - log_ratio(policy, reference, prompt, rejected)
                for prompt, chosen, rejected in list(zip(PROMPTS, GOOD, BAD, strict=True))[:4]
            ]
        )
        losses_P = (h_P - 1) ** 2 if loss == "ipo" else torch.log1p(torch.exp(-0.5 * h_P))
        losses.append(losses_P.mean().item())
        return losses_P.mean()

    adamw_steps(policy, mean_loss, 2)
    # A tenth of what a step moves a weight by.
    assert_same_weights(policy, done.directory / "actor", AutoModelForCausalLM, atol=1e-4)
    lines = [line for line in read_metrics(done.directory) if line["step"]]
    assert [line["dpo/loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert done.summary["accuracy_after"] == 1
    assert done.summary["margin_after"] > done.summary["margin_before"] == pytest.approx(0, abs=1e-5)


def log_ratio(
    policy: torch.nn.Module, reference: torch.nn.Module, prompt: str, response: str
) -> torch.Tensor:
    """log(pi(y|x) / pi_ref(y|x)), in nats."""
    row = torch.tensor([ids(prompt) + answer_ids(response)])

    def log_prob(model: torch.nn.Module) -> torch.Tensor:
        log_probs = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        return log_probs[len(ids(prompt)) - 1 :].sum()

    with torch.no_grad():
        constant = log_prob(reference)
    return log_prob(policy) - constant


def test_a_run_of_reward_model_leaves_a_reward_that_scores_the_same(up: Up) -> None:
    path, summary = run(up, "reward_model")
    assert summary["accuracy_low_after"] <= summary["accuracy_after"] <= summary["accuracy_high_after"]
    assert summary["margin_after"] > summary["margin_before"] == 0
    sequences = [ids(prompt) + answer_ids(answer) for prompt, answer in zip(PROMPTS, BAD, strict=True)]
    rows = Batch.of(
        prompt_ids=jagged([ids(prompt) for prompt in PROMPTS], np.int64),
        response_ids=jagged([answer_ids(answer) for answer in BAD], np.int64),
    )
    reward = Service("reward", up.config.services["reward"].address)
    served = [score.score for answer in reward.call("compute_reward", rows) for score in answer.scores]
    reward.close()
    loaded = SequenceScorer(path / "reward", token_budget=1000).score_tokens(sequences)
    assert served == pytest.approx(loaded.tolist(), abs=1e-5)


def test_transcripts_in_one_file_train_the_same_weights_as_prompts_and_responses_in_two(
    up: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A JSON array of conversations, of which one is held out, with a template, for three epochs; against the rows as
    the chat template makes them, in as many steps."""
    talks = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}]
        for prompt, good in zip(PROMPTS, GOOD, strict=True)
    ]
    (tmp_path / "talks.json").write_text(json.dumps([{"messages": talk} for talk in talks], indent=1))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    form = {"heldout_rows": 1, "template": "0+{prompt}", "tokenizer": tmp_path / "tokenizer"}
    epochs = {"name": "test", "directory": tmp_path / "runs", "evaluate_every": 0, "epochs": 3}
    made = run_on(up, {"train": tmp_path / "talks.json", **form}, epochs, max_response_tokens=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "run.epochs 3: 6 steps of 2 prompts, from 4 training rows" in said
    assert "responses are cut to rollout.max_response_tokens, 2: 3 of 4 training rows" in said

    train, heldout = load_data(find_algorithm("sft").configure(made.config), ("response",))
    for name, rows in (("train", train), ("heldout", heldout)):
        plain = [
            {"prompt": row.text, "response": row.texts["response"]}
            for row in (rows[i] for i in range(len(rows)))
        ]
        assert all(row["prompt"].startswith("0+") for row in plain)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("train", "heldout")}
    steps = {"name": "test", "directory": tmp_path / "runs", "evaluate_every": 0, "steps": 6}
    again = run_on(up, paths, steps, max_response_tokens=2)
    assert made.summary["actor_sha256"] == again.summary["actor_sha256"]
    assert made.summary["loss_after"] < made.summary["loss_before"] == again.summary["loss_before"]


def test_all_turns_of_transcripts_train_the_weights_of_a_row_for_each(
    up: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against rows that are made by hand, in the order of the turns."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    talks, rows = [], []
    for first, second in zip(range(5), [1, 2, 3, 4, 0], strict=True):
        pairs = [(PROMPTS[i], GOOD[i]) for i in ((first, second) if first % 2 else (first,))]
        talks.append([{"role": role, "content": text} for pair in pairs
                      for role, text in zip(("user", "assistant"), pair, strict=True)])  # fmt: skip
        for number, (prompt, good) in enumerate(pairs):
            before = "".join(text + EOS for pair in pairs[:number] for text in pair)
            rows.append({"prompt": before + prompt + EOS, "response": good})
    (tmp_path / "talks.json").write_text(json.dumps([{"messages": talk} for talk in talks]))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    length = {"name": "test", "directory": tmp_path / "runs", "evaluate_every": 0, "epochs": 2}
    form = {"heldout": tmp_path / "rows.json", "tokenizer": tmp_path / "tokenizer"}
    made = run_on(up, {"train": tmp_path / "talks.json", "turns": "all", **form}, length, MOST)
    assert "7 steps of 2 prompts, from 7 training rows" in " ".join(capsys.readouterr().out.split())
    again = run_on(up, {"train": tmp_path / "rows.json", **form}, length, MOST)
    assert made.summary["actor_sha256"] == again.summary["actor_sha256"]
    assert made.summary["loss_after"] == again.summary["loss_after"] < again.summary["loss_before"]


def test_a_reward_without_an_optimizer_does_not_learn(up: Up) -> None:
    scorer = Service("scorer", up.config.services["scorer"].address)
    with pytest.raises(InvalidRequest, match="this reward does not learn"):
        scorer.call("compare_pairs", Batch.of(prompt=["p"], chosen=["c"], rejected=["r"]))
    scorer.close()


@dataclass(frozen=True)
class Ran:
    """A run of sft: its configuration and the figures of its summary."""

    config: Config
    summary: Mapping[str, Any]


def run_on(up: Up, data: dict[str, Any], length: dict[str, Any], max_response_tokens: int) -> Ran:
    """Runs sft on other data, in steps of two rows."""
    tables = up.config.model_dump(exclude_unset=True)
    tables |= {"data": data | {"prompts_per_step": 2}, "run": length}
    tables["rollout"] = {"max_response_tokens": max_response_tokens}
    config = Config.model_validate(tables)
    return Ran(config, job.run(config, "sft").summary)


def run(up: Up, name: str) -> tuple[Path, dict[str, Any]]:
    done = job.run(up.config, name)
    return done.directory, dict(done.summary)
