"""A step of GRPO by TRL, which generates with transformers, at the sizes of `benchmarks/grpo.py`. Needs trl.

    python benchmarks/grpo_trl.py --model llama32_1b
    python benchmarks/grpo_trl.py --model tiny_llama --prompts 4 --group 4 --new 16 --micro_batch_size 8

Random weights, tokens are characters, and answers do not end early. On a GPU weights, gradients and moments are bf16,
which is less work than dtgpt's fp32 masters. There is no reference model. What is printed is the time of each step, and
that of its generation.
"""

import argparse
import statistics
import tempfile
import time

import torch
import transformers
from decode_models import MODELS
from figures import note
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers_model import transformers_model


def characters() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the characters of ASCII."""
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="\0", eos_token="\1", unk_token="?"
    )


class Times(transformers.TrainerCallback):
    """The seconds of each step."""

    def __init__(self) -> None:
        self.begin, self.steps = 0.0, []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.begin = self.now()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.steps.append(self.now() - self.begin)

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama32_1b")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    import trl  # not installed by an extra
    from datasets import Dataset

    batch, on_gpu, times, generated = args.prompts * args.group, torch.cuda.is_available(), Times(), []
    model = transformers_model(MODELS[args.model], dtype=torch.bfloat16 if on_gpu else torch.float32)
    prompts = [f"{index} {'and so on ' * args.prompt}"[: args.prompt] for index in range(args.prompts * args.steps)]

    def rewards(completions: list[str], **_: object) -> list[float]:
        return [sum(map(ord, answer)) % 101 / 100 for answer in completions]

    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder, use_cpu=not on_gpu, bf16=on_gpu, report_to="none", save_strategy="no", logging_steps=1,
            per_device_train_batch_size=args.micro_batch_size, max_steps=args.steps, learning_rate=1e-6,
            gradient_accumulation_steps=batch // args.micro_batch_size, gradient_checkpointing=False,
            num_generations=args.group, max_completion_length=args.new, beta=0.0, loss_type="dr_grpo",
            scale_rewards="none", temperature=1.0, generation_kwargs={"min_new_tokens": args.new},
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=rewards, args=settings, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=characters(), callbacks=[times],
        )  # fmt: skip
        generate = trainer.model.generate

        def timed(*inputs: object, **options: object) -> object:
            begin = times.now()
            made = generate(*inputs, **options)
            generated.append((times.now() - begin, tuple(made.shape)))
            return made

        trainer.model.generate = timed
        trainer.train()
    for step, seconds in enumerate(times.steps):
        print(f"step {step + 1}: {seconds:.2f} s", flush=True)
    print(f"generate: {[(round(seconds, 2), shape) for seconds, shape in generated]}")
    kept = times.steps[1:] or times.steps
    drawn = [seconds for seconds, _ in generated][1:] or [seconds for seconds, _ in generated]
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    note("step", {"s": statistics.median(kept), "drawn s": statistics.median(drawn), "GiB": memory}, kept)
    if on_gpu:
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
