"""What the values of a recipe may not be together, as tables of rules with the sentence of each.

A reader of `Recipe` wants to see what a run is, and a reader of a refusal why: as branches of one function the refusals
would hide each other, and the order in which they count.

Bounds of one value stand in its annotation, and rules within a section in the section. Here are those that concern
several sections, and the notes on values that are valid and yet not what a user may expect. `Recipe` asks the tables,
and those of capabilities on a recipe under a plan, or on what this machine makes of it (`Settings`); a plan checks by
itself what no recipe changes (`dtgpt.config.plan`).
"""

from dtgpt.config.plan_choice import AUTO
from dtgpt.config.schedule import schedules
from dtgpt.util.rules import Changed, Given, Is, Missing, Other, Rule, Rules

PRECISIONS = ("auto", "fp32", "bf16", "fp16")  # of the core; capabilities compute products of blocks in others
MOST_STEPS = 10_000_000  # the learning rate of each is held on the device


RULES: Rules = (
    Rule(
        "steps={steps} and train_samples={train_samples}: exactly one of them says how long to train; set the other to "
        "none",
        Given("steps"),
        Given("train_samples"),
    ),
    Rule(
        "steps={steps} and train_samples={train_samples}: exactly one of them says how long to train; give one",
        Missing("steps"),
        Missing("train_samples"),
    ),
    # Frozen weights are in no checkpoint, and where they came from may have moved.
    Rule(
        "resume={resume} and init_from={init_from} are both given; leave one out: a resumed run has weights already",
        Given("init_from"),
        Is("resume", "not in", (None, "auto")),
        Missing("freezes_weights"),
    ),
    Rule(
        "seq_length={seq_length} is more than the model's positions, model.seq_length={model.seq_length}; use "
        "--seq_length {model.seq_length} or less, or a larger --model.seq_length",
        Is("sample_length", ">", Other("model.seq_length")),
    ),
    Rule(
        "recompute_blocks={recompute_blocks}, but recompute=none computes nothing again; use --recompute full or "
        "around_attention, or leave recompute_blocks out",
        Given("recompute_blocks"),
        Is("recompute", "==", "none"),
        Is("plan", "!=", AUTO),  # which chooses both
    ),
    Rule(
        "compile=on, but precision={precision} has kernels of its own, which torch.compile cannot take; use --compile "
        "off or --precision bf16",
        Is("compile", "==", "on"),
        Is("precision", "not in", PRECISIONS),
    ),
    Rule(
        "global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size}; use "
        "--global_batch_size {remedy} or a micro_batch_size that divides it",
        Is("global_batch_size", "is no multiple of", Other("micro_batch_size")),
        Is("plan", "!=", AUTO),  # which chooses the micro-batch size, too
        remedy=lambda run: str(
            run.global_batch_size // run.micro_batch_size * run.micro_batch_size or run.micro_batch_size
        ),
    ),
    Rule(
        "train_samples={train_samples} does not fill one step; use {global_batch_size} or more",
        Given("train_samples"),
        Is("num_steps", "==", 0),
    ),
    Rule(
        "train_samples={train_samples} takes {num_steps} steps; use fewer samples or a larger global_batch_size, for "
        f"at most {MOST_STEPS} steps",
        Given("train_samples"),
        Is("num_steps", ">", MOST_STEPS),
    ),
    # No part of the schedule counts steps while another one counts samples.
    Rule(
        "optimizer.warmup_samples={optimizer.warmup_samples} counts samples, but the schedule counts steps; add "
        "optimizer.decay_samples, or use optimizer.warmup instead",
        Is("optimizer.warmup_samples", "!=", None),
        Missing("counts_samples"),
    ),
    Rule(
        "optimizer.warmup={optimizer.warmup:g} counts steps, but the schedule counts samples; use "
        "optimizer.warmup_samples, or a fraction below 1",
        Is("optimizer.warmup", ">=", 1),
        Is("optimizer.warmup_samples", "==", None),
        Given("counts_samples"),
    ),
    # The learning rate has no jumps. A constant one has no end. Each schedule has its own rules beside these.
    Rule(
        "the warmup of {schedule.warmup} {schedule.unit} is not shorter than the schedule, which ends at "
        "{schedule.end} (optimizer.decay_{schedule.unit}), so the learning rate would jump; warm up for fewer than "
        "{schedule.end}, or raise decay_{schedule.unit}",
        Given("schedule.decays"),
        Is("schedule.warmup", ">=", Other("schedule.end")),
        Missing("schedule_ends_with_run"),
    ),
)

# Of a recipe with a `choice` of a plan on a kind of `device`; length: that of the run, in the schedule's unit.
NOTES: Rules = (
    Rule(
        "the run ends within its warmup: {length} of {schedule.warmup} {schedule.unit}, so the learning rate never "
        "reaches optimizer.lr={optimizer.lr:g}",
        Is("schedule.warmup", ">", Other("length")),
    ),
    *(
        Rule(
            "{field}={value} has no effect with optimizer.schedule={optimizer.schedule}",
            Changed(*schedule.options),
            Is("optimizer.schedule", "!=", name),
        )
        for name, schedule in schedules().items()
    ),
    Rule(
        "{field}={value} has no effect with log.sample_tokens=0",
        Changed("log.sample_interval", "log.prompt", "log.temperature", "log.top_k"),
        Is("log.sample_tokens", "==", 0),
    ),
    Rule(
        "ZeRO-{choice.named.zero} shards over replicas, and there is only one: the plan is the same as without it",
        Given("choice.named.zero"),
        Is("choice.plan.data_ranks", "==", 1),
    ),
    Rule(
        "attention={attention} has no CPU kernel: the reference implementation runs instead",
        Is("attention", "in", ("flash", "fused_softmax")),
        Is("device", "==", "cpu"),
    ),
)
