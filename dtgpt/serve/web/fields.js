// Every setting: its label, its bounds, and the keys of requests that it becomes.
//
// v1: its key in POST /v1/completions; api: its key in PUT /api. mode: where it counts; without one, in both modes.
// kind: number (with `slide`, also a slider up to that), switch, lines, ids, biases, secret. `initial`: the default of
// `dtgpt generate`, if it has one; that value is not sent, unless `always`, since the routes have defaults of their own.

export const NUMBERS_OF_A_CHOICE = 5; // likeliest tokens that are asked for at each place

export const GROUPS = [
  { name: "main", title: "" },
  { name: "penalties", title: "Repetition" },
  { name: "end", title: "Where it ends" },
  { name: "more", title: "More" },
  { name: "server", title: "Server" },
];

const sampling = (group, name, rest) => ({ name, v1: name, group, mode: "sample", ...rest });
const beams = (group, name, rest) => ({ name, api: name, group, mode: "beams", ...rest });
const number = (initial, step, min, max) => ({ kind: "number", initial, step, min, max });
const OFF = { kind: "switch", initial: false };

export const FIELDS = [
  {
    name: "max_tokens", v1: "max_tokens", api: "tokens_to_generate", group: "main", label: "Length",
    ...number(200, 1, 1, 2 ** 31 - 1), slide: 1024, always: true,
    hint: "Tokens to write at most; fewer where the model has no more positions",
  },
  sampling("main", "temperature", {
    label: "Temperature", ...number(0.8, 0.05, 0, 100), slide: 2, always: true,
    hint: "0 takes the likeliest token each time",
  }),
  sampling("main", "top_p", {
    label: "Top p", ...number(1, 0.01, 0, 1), slide: 1,
    hint: "Draw from the likeliest tokens up to this sum of probabilities",
  }),
  sampling("main", "top_k", {
    label: "Top k", ...number(50, 1, 0), always: true, hint: "Draw from this many likeliest tokens; 0 for all",
  }),
  sampling("main", "n", { label: "Answers", ...number(1, 1, 1, 128), hint: "Side by side" }),
  beams("main", "beam_width", {
    label: "Beams", ...number(4, 1, 1, 128), always: true,
    hint: "The likeliest texts that a search of this width finds",
  }),
  beams("main", "length_penalty", {
    label: "Length penalty", ...number(1, 0.1), hint: "A score is the sum of log-probabilities / length to this power",
  }),

  sampling("penalties", "frequency_penalty", {
    label: "Frequency penalty", ...number(0, 0.1, -2, 2), hint: "Makes a token rarer each time that it comes",
  }),
  sampling("penalties", "presence_penalty", {
    label: "Presence penalty", ...number(0, 0.1, -2, 2), hint: "Makes a token rarer once it has come",
  }),
  sampling("penalties", "no_repeat_ngram_size", {
    label: "No n-gram twice", ...number(0, 1, 0), hint: "Tokens in a row that must not come again; 0 for no rule",
  }),
  sampling("penalties", "logit_bias", {
    label: "Logit bias", kind: "biases", initial: "", example: "50256: -100, 198: 2.5",
    hint: "Ids of tokens and what to add to their logits",
  }),

  sampling("end", "stop", {
    label: "Stop at", kind: "lines", initial: "", example: "\\n\\n",
    hint: "A text a line; \\n is a line end. The answer ends before it",
  }),
  sampling("end", "stop_token_ids", {
    label: "Stop at ids", kind: "ids", initial: "", example: "50256, 198", hint: "Ids of tokens that end the answer",
  }),
  beams("end", "stop_token", {
    label: "Stop at id", ...number("", 1, 0), hint: "The token that ends a beam; else the end of text",
  }),
  sampling("end", "min_tokens", {
    label: "Length at least", ...number(0, 1, 0), hint: "What would end the answer cannot come before",
  }),
  sampling("end", "ignore_eos", { label: "Go on after an end of text", ...OFF }),
  sampling("end", "stop_on_eol", { label: "Stop at a line end", ...OFF }),
  sampling("end", "stop_on_double_eol", { label: "Stop at an empty line", ...OFF }),

  sampling("more", "seed", {
    label: "Seed", ...number("", 1, 0), hint: "Empty: a new one each time. The same seed gives the same answer",
  }),
  sampling("more", "top_p_decay", {
    label: "Top p decay", ...number(0, 0.01, 0, 1), hint: "Factor of top p after each token; 0 for none",
  }),
  sampling("more", "top_p_bound", {
    label: "Top p bound", ...number(0, 0.01, 0, 1), hint: "Top p does not decay below this",
  }),
  {
    name: "prevent_newline_after_colon", v1: "prevent_newline_after_colon", api: "prevent_newline_after_colon",
    group: "more", label: "No line end after a colon", ...OFF,
  },
  beams("more", "add_BOS", { label: "Begin with the end-of-text token", ...OFF }),
  sampling("more", "echo", { label: "Probabilities of the prompt", ...OFF }),

  {
    name: "key", group: "server", label: "API key", kind: "secret", initial: "",
    hint: "Kept until this tab is closed",
  },
];

// Return the value to send of what was typed, or throw a RangeError whose message is a sentence.
export function parse(field, value) {
  switch (field.kind) {
    case "number":
      return parseNumber(field, value);
    case "lines":
      return value.split("\n").filter((line) => line !== "").map(unescape);
    case "ids":
      return value.split(/[\s,]+/).filter(Boolean).map((word) => parseId(field, word));
    case "biases":
      return Object.fromEntries(value.split(",").filter((part) => part.trim()).map((part) => parseBias(field, part)));
    default:
      return value;
  }
}

function parseNumber({ label, initial, step, min = -Infinity, max = Infinity }, value) {
  if (value.trim() === "") return initial;
  const result = Number(value.replace(",", "."));
  const fits = step === 1 ? Number.isSafeInteger(result) : Number.isFinite(result);
  if (fits && result >= min && result <= max) return result;
  const bounds = max < Infinity ? ` from ${min} to ${max}` : min > -Infinity ? ` from ${min}` : "";
  throw new RangeError(`${label} is ${value}, but must be ${step === 1 ? "a whole number" : "a number"}${bounds}.`);
}

function parseId({ label }, word) {
  if (!/^\d{1,10}$/.test(word)) throw new RangeError(`${label} has ${word}, which is not the id of a token.`);
  return Number(word);
}

function parseBias({ label }, part) {
  const [, id, size] = /^\s*(\d{1,10})\s*:\s*([-+]?\d+(?:\.\d*)?)\s*$/.exec(part) ?? [];
  if (id) return [id, Number(size)];
  throw new RangeError(`${label} has ${part.trim()}; write an id and a number, as in 50256: -100.`);
}

function unescape(line) {
  const meanings = { n: "\n", t: "\t", r: "\r", "\\": "\\" };
  return line.replace(/\\([ntr\\])/g, (_, letter) => meanings[letter]);
}
