// Every setting: its label, its bounds, and the requests that it goes into.
//
// v1: its key in POST /v1/completions; api: its key in PUT /api. A setting at its neutral value is not sent.
// kind: number (with `slide`, also a slider up to that), switch, lines, ids, biases, secret, text.

export const NUMBERS_OF_A_CHOICE = 5; // likeliest tokens that are asked for at each place

const SAMPLE = "sample";
const BEAMS = "beams";

export const GROUPS = [
  { name: "main", title: "" },
  { name: "penalties", title: "Repetition" },
  { name: "end", title: "Where it ends" },
  { name: "more", title: "More" },
  { name: "server", title: "Server" },
];

export const FIELDS = [
  { name: "max_tokens", v1: "max_tokens", api: "tokens_to_generate", group: "main", label: "Length", kind: "number",
    min: 1, max: 1024, slide: 256, step: 1, initial: 64, always: true, hint: "Tokens to write at most" },
  { name: "temperature", v1: "temperature", group: "main", mode: SAMPLE, label: "Temperature", kind: "number", min: 0,
    max: 100, slide: 2, step: 0.05, initial: 1, hint: "0 takes the likeliest token each time" },
  { name: "top_p", v1: "top_p", group: "main", mode: SAMPLE, label: "Top p", kind: "number", min: 0, max: 1, slide: 1,
    step: 0.01, initial: 1, hint: "Draw from the likeliest tokens up to this sum of probabilities" },
  { name: "top_k", v1: "top_k", group: "main", mode: SAMPLE, label: "Top k", kind: "number", min: 0, step: 1, initial: 0,
    hint: "Draw from this many likeliest tokens; 0 for all" },
  { name: "n", v1: "n", group: "main", mode: SAMPLE, label: "Answers", kind: "number", min: 1, max: 128, step: 1,
    initial: 1, hint: "Side by side" },
  { name: "beam_width", api: "beam_width", group: "main", mode: BEAMS, label: "Beams", kind: "number", min: 1, max: 128,
    step: 1, initial: 4, always: true, hint: "The likeliest texts that a search of this width finds" },
  { name: "length_penalty", api: "length_penalty", group: "main", mode: BEAMS, label: "Length penalty", kind: "number",
    step: 0.1, initial: 1, hint: "A score is the sum of log-probabilities / length to this power" },

  { name: "frequency_penalty", v1: "frequency_penalty", group: "penalties", mode: SAMPLE, label: "Frequency penalty",
    kind: "number", min: -2, max: 2, step: 0.1, initial: 0, hint: "For each time that a token was written" },
  { name: "presence_penalty", v1: "presence_penalty", group: "penalties", mode: SAMPLE, label: "Presence penalty",
    kind: "number", min: -2, max: 2, step: 0.1, initial: 0, hint: "Once, for a token that was written" },
  { name: "no_repeat_ngram_size", v1: "no_repeat_ngram_size", group: "penalties", mode: SAMPLE, label: "No n-gram twice",
    kind: "number", min: 0, step: 1, initial: 0, hint: "Tokens in a row that must not come again; 0 for no rule" },
  { name: "logit_bias", v1: "logit_bias", group: "penalties", mode: SAMPLE, label: "Logit bias", kind: "biases",
    initial: "", example: "50256: -100, 198: 2.5", hint: "Ids of tokens and what to add to their logits" },

  { name: "stop", v1: "stop", group: "end", mode: SAMPLE, label: "Stop at", kind: "lines", initial: "", example: "\\n\\n",
    hint: "A text a line; \\n is a line end. The answer ends before it" },
  { name: "stop_token_ids", v1: "stop_token_ids", group: "end", mode: SAMPLE, label: "Stop at ids", kind: "ids",
    initial: "", example: "50256, 198", hint: "Ids of tokens that end the answer" },
  { name: "stop_token", api: "stop_token", group: "end", mode: BEAMS, label: "Stop at id", kind: "number", min: 0, step: 1,
    initial: "", hint: "The token that ends a beam; else the end of text" },
  { name: "min_tokens", v1: "min_tokens", group: "end", mode: SAMPLE, label: "Length at least", kind: "number", min: 0,
    step: 1, initial: 0, hint: "What would end the answer cannot come before" },
  { name: "ignore_eos", v1: "ignore_eos", group: "end", mode: SAMPLE, label: "Go on after an end of text", kind: "switch",
    initial: false },
  { name: "stop_on_eol", v1: "stop_on_eol", group: "end", mode: SAMPLE, label: "Stop at a line end", kind: "switch",
    initial: false },
  { name: "stop_on_double_eol", v1: "stop_on_double_eol", group: "end", mode: SAMPLE, label: "Stop at an empty line",
    kind: "switch", initial: false },

  { name: "seed", v1: "seed", group: "more", mode: SAMPLE, label: "Seed", kind: "number", min: 0, step: 1, initial: "",
    hint: "Empty: a new one each time. The same seed gives the same answer" },
  { name: "top_p_decay", v1: "top_p_decay", group: "more", mode: SAMPLE, label: "Top p decay", kind: "number", min: 0,
    max: 1, step: 0.01, initial: 0, hint: "Factor of top p after each token; 0 for none" },
  { name: "top_p_bound", v1: "top_p_bound", group: "more", mode: SAMPLE, label: "Top p bound", kind: "number", min: 0,
    max: 1, step: 0.01, initial: 0, hint: "Top p does not decay below this" },
  { name: "prevent_newline_after_colon", v1: "prevent_newline_after_colon", api: "prevent_newline_after_colon",
    group: "more", label: "No line end after a colon", kind: "switch", initial: false },
  { name: "add_BOS", api: "add_BOS", group: "more", mode: BEAMS, label: "Begin with the end-of-text token", kind: "switch",
    initial: false },
  { name: "echo", v1: "echo", group: "more", mode: SAMPLE, label: "Probabilities of the prompt", kind: "switch",
    initial: false },

  { name: "key", group: "server", label: "API key", kind: "secret", initial: "", hint: "Kept until this tab is closed" },
];

// Return the value to send of what was typed, or throw a sentence.
export function parse(field, value) {
  switch (field.kind) {
    case "number":
      return number(field, value);
    case "lines":
      return value.split("\n").filter((line) => line !== "").map(unescape);
    case "ids":
      return value.split(/[\s,]+/).filter(Boolean).map((word) => whole(field, word));
    case "biases":
      return Object.fromEntries(value.split(",").filter((part) => part.trim()).map((part) => bias(field, part)));
    default:
      return value;
  }
}

function number(field, value) {
  if (String(value).trim() === "") return field.initial;
  const result = Number(String(value).replace(",", "."));
  const { min = -Infinity, max = Infinity, step, label } = field;
  const kind = step === 1 ? "a whole number" : "a number";
  if (!Number.isFinite(result) || (step === 1 && !Number.isSafeInteger(result)) || result < min || result > max) {
    const bounds = max < Infinity ? ` from ${min} to ${max}` : min > -Infinity ? ` from ${min}` : "";
    throw new RangeError(`${label} is ${value}, but must be ${kind}${bounds}.`);
  }
  return result;
}

function whole(field, word) {
  if (!/^\d{1,10}$/.test(word)) throw new RangeError(`${field.label} has ${word}, which is not the id of a token.`);
  return Number(word);
}

function bias(field, part) {
  const [, id, size] = /^\s*(\d{1,10})\s*:\s*([-+]?\d+(?:\.\d*)?)\s*$/.exec(part) ?? [];
  if (id === undefined) throw new RangeError(`${field.label} has ${part.trim()}; write an id and a number, as in 50256: -100.`);
  return [id, Number(size)];
}

function unescape(line) {
  const meanings = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  return line.replace(/\\([ntr\\])/g, (_, letter) => meanings[letter]);
}
