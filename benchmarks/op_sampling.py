"""Choosing tokens: the kernels against the reference in eager torch, by batch size and by what is asked for."""

import torch
from cases import Case, run_cases

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.options import Options
from dtgpt.inference.request import variant_of
from dtgpt.ops.sampling.sample import sample, sample_reference

CUDA = torch.device("cuda")
VOCABULARY, PADDED, POSITIONS = 50257, 50304, 1024
OPTIONS = {
    "greedy": Options(temperature=0),
    "temperature": Options(temperature=0.8),
    "top_k 40": Options(top_k=40),
    "top_k 40, temperature 0.2": Options(top_k=40, temperature=0.2),
    "top_p 0.9": Options(top_p=0.9),
    "top_k 200, top_p 0.9": Options(top_k=200, top_p=0.9),
    "penalties": Options(frequency_penalty=0.5, presence_penalty=0.5),
    "n-grams": Options(no_repeat_ngram_size=4),
}


def sampling_case(name: str, rows: int, alternatives: int = 0, spread: float = 3.0) -> Case:
    """spread: standard deviation of the logits; about 3 as of a trained model, and 0.5 where nearly all stay."""
    sampling = OPTIONS[name]
    state, slots = SlotState(rows, POSITIONS, CUDA), torch.arange(rows, device=CUDA)
    prompt = torch.randint(VOCABULARY, (512,)).tolist()
    for slot in range(rows):
        state.set(slot, SlotState.encode(prompt, sampling, SpecialIds(), slot, 0))
    logits = (spread * torch.randn(rows, PADDED, device=CUDA)).bfloat16()
    variant = variant_of([sampling], alternatives)

    def work(function):
        return lambda: function(logits, state.sequences, slots, VOCABULARY, variant)

    title = f"{name}, {rows} rows, {alternatives} alternatives, spread {spread}"
    return Case(title, {"ours": work(sample), "eager": work(sample_reference)}, bytes=logits.nbytes)


def cases() -> list[Case]:
    found = [sampling_case(name, rows) for name in OPTIONS for rows in (1, 64, 256)]
    found += [sampling_case("greedy", 1, 8), sampling_case("greedy", 64, 16)]
    return [*found, sampling_case("top_p 0.9", 1, spread=0.5), sampling_case("top_p 0.9", 64, spread=0.5)]


if __name__ == "__main__":
    run_cases(cases())
