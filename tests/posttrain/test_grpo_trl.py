"""The loss of GRPO, and its gradients, beside those of TRL's trainer on the same answers."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dtgpt.interop.hf.model import save_huggingface
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.setup import open_trainer
from tests.interop.test_interop_huggingface import InMemory
from tests.posttrain.test_lora import LLAMA, SIZES
from tests.support.bodies_grpo import Low
from tests.support.chats import write_tokenizer
from tests.support.runs import change

trl = pytest.importorskip("trl")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(4)

NEW, GROUP, BATCH = 6, 4, 16


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of transformers with a tokenizer, whose weights matter."""
    torch.manual_seed(0)
    sizes = SIZES | LLAMA | {"vocab_size": 320, "max_position_embeddings": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = write_tokenizer(tmp_path_factory.mktemp("base") / "base")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainer_of_trl(base, tmp_path_factory):
    """For one batch without accumulation."""
    import datasets

    args = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, report_to="none", bf16=False,
        per_device_train_batch_size=BATCH, num_generations=GROUP, max_completion_length=NEW, beta=0.0,
        gradient_checkpointing=False,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * BATCH}),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
    )


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and which of them are there, int64 `[B, T]`."""
    length = max(map(len, rows))
    ids, there = torch.zeros(2, len(rows), length, dtype=torch.int64)
    for row, own in enumerate(rows):
        place = slice(length - len(own), length) if left else slice(0, len(own))
        ids[row, place], there[row, place] = torch.tensor(own), 1
    return ids, there


def named_as_theirs(values: dict[str, torch.Tensor], config, folder) -> dict[str, torch.Tensor]:
    """Return what belongs to parameters by the names and in the layouts of transformers."""
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in unique_parameters(model).items():
            parameter.copy_(values[name])
    save_huggingface(InMemory(model), folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("loss, steps", [("dr_grpo", 2), ("grpo", 1), ("dapo", 1)])
def test_loss_and_gradients_are_those_of_trl(recipe, base, trainer_of_trl, loss, steps, tmp_path):
    run = change(
        recipe, model=open_config(base), init_from=str(base), seq_length=16, micro_batch_size=4,
        global_batch_size=BATCH, grpo=Low(group=GROUP, max_new_tokens=NEW, loss=loss, stop="a"),
        data=replace(recipe.data, tokenizer="auto"),
    )  # fmt: skip
    theirs = trainer_of_trl
    theirs.loss_type = loss
    theirs.model.load_state_dict(transformers.AutoModelForCausalLM.from_pretrained(base).state_dict())
    with open_trainer(run) as trainer:
        for step in range(steps):
            trainer.gradients()
            answers = trainer.objective.rollouts.draw(step)
            found = {shard.name: trainer.gradient(shard).clone() for shard in trainer.shards}
            weights = trainer.batch(step).loss_weights
            rewards = torch.tensor([answer.reward for answer in answers]).view(-1, GROUP)
            advantages = rewards - rewards.mean(1, keepdim=True)
            if loss != "dr_grpo":
                advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
            prompts, completions = (
                padded([answer.prompt_ids for answer in answers], left=True),
                padded([answer.ids for answer in answers], left=False),
            )
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            inputs = dict(zip(names, (*prompts, *completions), strict=True)) | {"advantages": advantages.flatten()}
            inputs["num_items_in_batch"] = completions[1].sum()
            theirs.model.train().zero_grad()
            theirs.current_gradient_accumulation_steps = 1
            value = theirs._compute_loss(theirs.model, inputs)
            assert -weights.mean().item() == pytest.approx(value.item(), abs=1e-5)
            value.backward()
            named = named_as_theirs(found, trainer.settings.model, tmp_path / f"gradients{step}")
            gradients = {name: p.grad for name, p in theirs.model.named_parameters()}
            assert json.dumps(sorted(named)) == json.dumps(sorted(gradients)) and len(named) > 10
            for name, wanted in gradients.items():
                largest = wanted.abs().max().item()
                torch.testing.assert_close(named[name], wanted, rtol=0, atol=1e-5 * largest + 1e-9, msg=name)
            trainer.train_step()
            with torch.no_grad():
                new = named_as_theirs(
                    dict(unique_parameters(trainer.stages[0])), trainer.settings.model, tmp_path / f"weights{step}"
                )
                for name, parameter in theirs.model.named_parameters():
                    parameter.copy_(new[name])
