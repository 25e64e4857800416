// Every setting: its label, its bounds, and the keys of requests that it becomes.
//
// v1: its key in POST /v1/completions; api: its key in PUT /api. mode: where it counts; without one, in both modes.
// kind: number (with `slide`, also a slider up to that), switch, lines, ids, biases, secret. `initial`: the default of
// `dtgpt generate`, if it has one; that value is not sent, unless `always`, since the routes have defaults of their own.
// Here are the fields that are not options of generation, or not in /v1/completions.

import { OPTIONS } from "./options.js"; // the options that dtgpt declares, served by page.py

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
  ...OPTIONS,
  beams("main", "beam_width", {
    label: "Beams", ...number(4, 1, 1, 128), always: true,
    hint: "The likeliest texts that a search of this width finds",
  }),
  beams("main", "length_penalty", {
    label: "Length penalty", ...number(1, 0.1), hint: "A score is the sum of log-probabilities / length to this power",
  }),

  beams("end", "stop_token", {
    label: "Stop at id", ...number("", 1, 0), hint: "The token that ends a beam; else the end of text",
  }),
  sampling("end", "ignore_eos", { label: "Go on after an end of text", ...OFF }),
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
